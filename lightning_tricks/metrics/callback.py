"""The callback `MetricsMonitor`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_tricks._callback import StepsCallback, is_reported
from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer
from lightning_tricks._lightning_compat.logged_values import drop_reset_values, keys_logged_by_others, log_epoch_value
from lightning_tricks._lightning_compat.own_samples import OwnSamples
from lightning_tricks._shared.checks import check_choices, check_count, check_output_transform
from lightning_tricks._shared.report_parts import Facts, ReportPart
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks.metrics import key_checks
from lightning_tricks.metrics.core.history import EpochRecord, History
from lightning_tricks.metrics.core.metric_table import (
    is_number,
    output_numbers,
    per_class_names,
    seldom_plotted_keys,
    stack_numbers,
)
from lightning_tricks.metrics.core.plots import history_figure
from lightning_tricks.metrics.core.suite import MetricSuite
from lightning_tricks.metrics.epoch_metrics import DataloaderMetrics, EpochMetrics, EvaluationPlots

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure


class MetricsMonitor(StepsCallback):
    """Compute metrics of the outputs of steps, for train, val and test, each dataloader and each class.

    Steps return `{"loss": ..., "preds": ..., "target": ...}`, and other arguments of metrics, such as `indexes`, by
    name. Each metric is logged once per epoch, as `val/acc`; with `class_names` also as `val/f1_<class>`; with several
    loaders as `val/0/acc`, or as `val/<name>/acc` if they are in a dict. `val/loss` is the mean over the samples (exact
    under DDP if the step returns the loss of each sample). ModelCheckpoint, EarlyStopping and schedulers see these
    values wherever this callback stands in the list. Loggers get the main metrics of a preset, averaged over classes or
    outputs, and the loss unless the module logs a key with "loss" in it; the table and a `RunReport` have the others.
    Each stage and loader has its own metrics. The sanity check does not count, and the module's `state_dict` contains
    no metric.

    On multiple ranks, their states are merged. In validation and testing, samples that Lightning's DistributedSampler
    repeats do not count, so the values are those of one process. If samples are distributed in another way, a warning
    explains why the values may differ.

    Several monitors need different prefixes. If the module or another callback logs one of this callback's keys,
    loggers and callbacks get the other value, and a warning names both (except for the loss). If a step returns nothing
    to measure, such as only a loss, the batch is skipped with a warning; its loss is averaged.

    Args:
        metrics: A preset such as `multiclass_metrics(10)`, its plain values (`{"task": "multiclass", "num_classes":
            10}`), a torchmetrics Metric or MetricCollection, or a dict of them. They are copied.
        class_names: Names of the classes, labels or outputs. With them, averages over classes are logged per class too.
        log_plots: Whether to plot the confusion matrix, curves and bars by class for loggers that accept images
            (TensorBoard, W&B, MLflow, Comet; PNG files with a CSVLogger): True plots at the end of a fit, validation or
            test; a number n also plots after every n-th epoch. Needs the extra `reports`.
        best: The keys to keep the best value of: logged key -> "min" or "max".
        stages: Which of "train", "val" and "test" to measure.
        output_transform: A function of the outputs of a step, the batch and the stage that returns the dict, for steps
            that return something else.
        prefix: The first part of every logged key, such as "ema" in `ema/val/acc`; several monitors need different
            ones. None adds nothing. A checkpoint contains the state of each prefix separately.
        log_all: Whether loggers get all metrics of a preset in a fit, not only the main ones.
        log_classes: Whether loggers also get the values of single classes or outputs. Callbacks, the table and a
            `RunReport` always have all values.
        verbose: Whether to print the table. None leaves that to the variable `LIGHTNING_TRICKS_VERBOSE` (1 or 0).

    In your own loop, use `lightning_tricks.metrics.MetricSuite`.

    Attributes:
        results: The last value of each key, including values that are not numbers, such as a confusion matrix.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If there is no metric, a stage or mode is unknown, the number of names is not that of the classes,
            two values would have the same name, or `best` has a key that no fit logs.
        MetricsError: In the first batch, if the metrics would misread it, or `best` does not name one of several
            loaders; at the end of an epoch, if `best` has a key that was not logged; and if a loader has no batches.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tricks.metrics import multiclass_metrics
        >>> monitor = MetricsMonitor(multiclass_metrics(10), best={"val/f1": "max"})
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", logger=False)
    """

    allows_several = True

    def __init__(
        self,
        metrics: Metric | dict[str, str | int | float | bool | None] | dict[str, Metric] | MetricCollection,
        *,
        class_names: Sequence[str] | None = None,
        log_plots: bool | int = True,
        best: dict[str, str] | None = None,
        stages: Sequence[str] = key_checks.STAGES,
        output_transform: Callable[[Any, Any, str], Mapping[str, Any]] | None = None,
        prefix: str | None = None,
        log_all: bool = False,
        log_classes: bool = False,
        verbose: bool | None = None,
    ) -> None:
        self.metrics = metrics
        self.class_names = class_names
        self.log_plots = log_plots
        self.stages = check_choices("stages", stages, key_checks.STAGES)
        self.output_transform = output_transform
        self.prefix = prefix
        self.log_all = log_all
        self.log_classes = log_classes
        self.verbose = verbose
        self._best = best
        key_checks.check_prefix(prefix)
        if not isinstance(log_plots, bool):
            check_count("log_plots", log_plots)
        check_output_transform(output_transform)
        self._seldom_plotted = seldom_plotted_keys(metrics)
        self._parts = class_names or output_numbers(metrics)  # classes, or outputs, that have values of their own
        self._keys = key_checks.LoggedKeys(
            key_checks.value_names(metrics, class_names), prefix, tuple(stages), key_checks.unsure_names(metrics)
        )
        self._best_keys = key_checks.BestKeys(self._keys, best or {})
        self.results: dict[str, Tensor] = {}
        self._history = History()
        self._outer_exception = id(None)
        self._are_plotted = self._are_shown = False  # evaluations, by loggers; and by these or a run report
        self._reset()

    def _reset(self) -> None:
        self._epoch = EpochMetrics(self.metrics, self.class_names, curves=self._are_shown)
        every = 0 if isinstance(self.log_plots, bool) else self.log_plots
        self._plots = EvaluationPlots(self._history, self._keys, self._parts, every, are_logged=self._are_plotted)
        self._collisions = key_checks.Collisions(self._name)
        self._own_samples = OwnSamples(self._name)
        self._unmeasured = key_checks.UnmeasuredBatches(
            self._name, self.stages, has_transform=self.output_transform is not None
        )

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint; each prefix has its own."""
        return super().state_key if self.prefix is None else self._generate_state_key(prefix=self.prefix)

    @property
    def _name(self) -> str:
        suffix = "" if self.prefix is None else f"(prefix={self.prefix!r})"
        return f"{type(self).__name__}{suffix}"

    @property
    def best(self) -> dict[str, tuple[float, int]]:
        """The best value of each key of `best=` in a fit, with the optimizer steps done before it."""
        return self._best_keys.values(self._history)

    def logged_keys(self, stage: str, loaders: int = 1) -> set[str]:
        """Return the keys that a stage is sure to log, except that of its loss."""
        return self._keys.expected(stage, list(map(str, range(loaders)))) if stage in self.stages else set()

    def history(self) -> list[dict[str, Any]]:
        """Return one row per value so far: stage, loader, epoch, step, metric and value."""
        return self._history.rows()

    def plot(self, metrics: Sequence[str] | None = None) -> Figure:
        """Plot the values over the optimizer steps.

        Args:
            metrics: Which metrics, such as `["f1", "loss"]`; None plots all except those of single classes.

        Raises:
            ModuleNotFoundError: If matplotlib is missing.
            ValueError: If there are no values of that name.
        """
        return history_figure(self.history(), metrics, self._parts)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start without data."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            key_checks.warn_of_no_validation(trainer, self._name, self._best_keys.of_stage("val"))
            self._history, self.results = History(), {}
        self._are_plotted = self.log_plots is not False and self.has_image_logger(trainer)
        self._are_shown = self._are_plotted or is_reported(trainer)
        self._reset()
        self._outer_exception = id(sys.exc_info()[1])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a dataloader without batches."""
        key_checks.check_not_empty(trainer, self._function, self.stages, self._name)
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of keys that others have logged after this callback, in the epoch that has ended."""
        others = keys_logged_by_others(trainer, self._name, include_reset=True)
        self._collisions.check_ranks(gather_objects(others))
        self._collisions.warn(pl_module, (), others)

    on_train_end = on_validation_end = on_test_end = on_train_epoch_start

    def on_step_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        stage: str,
        dataloader_idx: int,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Measure a batch; in sanity checking, only check it."""
        if stage not in self.stages:
            return
        dataloader = self._epoch.of_dataloader(trainer, pl_module, stage, dataloader_idx, resumes=batch_idx != 0)
        if not dataloader.has_seen_batch:
            dataloader.has_seen_batch = True
            if self._function == "fit":
                with self._errors(""):
                    self._best_keys.check_loaders(stage, key_checks.loader_names(trainer, stage))
            if trainer.world_size > 1:
                key_checks.refuse_unordered(self._name, stage, dataloader.suite.ordered_keys)
        if self.output_transform is not None:
            outputs = self.output_transform(outputs, batch, stage)
        elif isinstance(outputs, Tensor) and not outputs.ndim:  # Lightning takes it for the loss
            outputs = {"loss": outputs}
        is_complete = self._check_inputs(dataloader.suite, outputs, stage, batch_idx)
        if self._is_sanity_checking:
            return
        inputs, num_rows = outputs if isinstance(outputs, Mapping) else {}, None
        if stage != "train":
            inputs, num_rows = self._own_samples.take(trainer, stage, dataloader_idx, batch_idx, inputs)
        # with automatic optimization, Lightning has divided the loss of training and made a copy of it
        is_divided = stage == "train" and pl_module.automatic_optimization
        dataloader.update(
            inputs,
            batch,
            is_complete=is_complete,
            num_rows=num_rows,
            loss_factor=trainer.accumulate_grad_batches if is_divided else 1,
            owns_loss=is_divided,
        )

    def on_stage_end(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the metrics of an epoch."""
        key_checks.check_not_empty(trainer, self._function, self.stages, self._name)
        if stage not in self.stages:
            return
        self._epoch.add_resumed(trainer, pl_module, stage)
        other_keys = keys_logged_by_others(trainer, self._name)
        if trainer.world_size > 1:
            other_keys = self._epoch.merge_ranks(trainer, pl_module, stage, other_keys)
        dataloaders = self._epoch.of_stage(stage)
        num_unmeasured = sum(dataloader.num_unmeasured for dataloader in dataloaders.values())
        num_measured = sum(dataloader.suite.updates for dataloader in dataloaders.values())
        self._unmeasured.report_epoch(stage, num_unmeasured, num_measured)
        names = key_checks.loader_names(trainer, stage)
        for index, dataloader in dataloaders.items():
            if dataloader.suite.updates or dataloader.loss.samples:
                place = (index, names[index]) if len(names) > 1 else (None, None)
                self._log(trainer, pl_module, dataloader, stage, place, other_keys)
            dataloader.load([])
        if stage == "train":
            self._epoch.load_partial_state({})
        if dataloaders and self._function == "fit":
            with self._errors(""):
                self._best_keys.check_logged(stage, self.results)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plot what was not plotted yet, and say the last values, or print them as a table."""
        self._plots.log(trainer)
        if self._history.records() and trainer.is_global_zero:
            self.show_table(self._history.table(self.best, self._parts))
            line = self._history.line(self.best, lambda names: self._not_for_loggers(names) | self._of_parts(names))
            self.say(line if self.prefix is None else f"{self.prefix}: {line}")
        super().on_fit_end(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the data."""
        key_checks.check_not_empty(trainer, self._function, self.stages, self._name)
        self._reset()
        super().teardown(trainer, pl_module, stage)

    def report_parts(self, trainer: Trainer) -> list[ReportPart]:
        """Return what loggers do not get of the last values, and the data of the plots of the last evaluation."""
        parts: list[ReportPart] = []
        for prefix, values in ({} if self.log_all else self._history.last_values()).items():
            names = self._seldom_plotted_of(values) - self._of_parts(values)
            facts = [(name, f"{value:.4g}") for name, value in values.items() if name in names]
            if facts:
                title = f"Other metrics, {self._keys.key(prefix, '')[:-1]}"
                parts.append(Facts(title=title, facts=facts, section="metrics"))
        return parts + self._plots.report_parts()

    def state_dict(self) -> dict[str, Any]:
        """Return the history."""
        return {"history": self._history.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history, and the metrics of the epoch in which the checkpoint was saved."""
        if self._function == "fit":
            self._history.load_state_dict(state_dict["history"])
            if "partial" in state_dict:  # `AutoResume` then loads each rank's own state dict, which has none
                self._epoch.load_partial_state(state_dict["partial"])

    def epoch_counts(self) -> dict[str, Any]:
        """Return the metrics of training in the epoch so far."""
        return self._epoch.training_states()

    def load_epoch_counts(self, counts: dict[str, Any], device: torch.device) -> None:
        """Go back to what `epoch_counts` returned."""
        self._epoch.load_training_states(counts, device)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the metrics of each rank in the epoch so far."""
        in_exception = id(sys.exc_info()[1]) != self._outer_exception  # other ranks may not be here
        partial = self._epoch.partial_state(trainer, alone=in_exception)
        if partial and self.state_key in checkpoint.get("callbacks", {}):
            checkpoint["callbacks"][self.state_key] = {**checkpoint["callbacks"][self.state_key], "partial": partial}

    @contextmanager
    def _errors(self, where: str) -> Iterator[None]:
        """Let a ValueError name this callback and a place."""
        try:
            yield
        except ValueError as error:
            raise key_checks.MetricsError(f"{self._name}{where}: {error}") from error

    def _check_inputs(self, suite: MetricSuite, inputs: Any, stage: str, batch_idx: int) -> bool:
        """Return whether a step returned what the metrics need; the first time that it did, check the values."""
        names = inputs.keys() if isinstance(inputs, Mapping) else frozenset()
        is_complete = isinstance(inputs, Mapping) and suite.required_inputs <= names
        if not suite.checked and (is_complete or not suite.required_inputs.isdisjoint(names)):
            with self._errors(f", first batch of {stage}"):
                suite.check(**inputs)
        if not is_complete:
            self._unmeasured.report_batch(suite, inputs, stage, batch_idx, self._best_keys.of_stage(stage))
        return is_complete

    def _log(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        dataloader: DataloaderMetrics,
        stage: str,
        place: tuple[int, str] | tuple[None, None],
        other_keys: dict[str, str],
    ) -> None:
        with self._errors(f", {stage}"):
            values = dataloader.suite.compute_all() if dataloader.suite.updates else {}
        mean_loss = dataloader.loss.compute()
        has_loss_metric = "loss" in values
        if mean_loss is not None and not has_loss_metric:
            values["loss"] = mean_loss
        numbers = {name: value for name, value in values.items() if is_number(value)}
        found = list(numbers), stack_numbers(numbers.values()), dataloader.suite.num_invalid()
        when = trainer.current_epoch, trainer.global_step, self._function == "fit"
        record = EpochRecord(stage, place[0], *when, *found, loader_name=place[1])
        self._history.add(record)
        self.results |= {self._keys.key(record.prefix, name): value for name, value in values.items()}
        to_log = {self._keys.key(record.prefix, name): value for name, value in numbers.items()}
        # nobody asked for the mean loss, which gives way without a warning; a metric that is called "loss" does not
        asked_for = to_log.keys() - (set() if has_loss_metric else {self._keys.key(record.prefix, "loss")})
        self._collisions.warn(pl_module, asked_for, other_keys)
        drop_reset_values(trainer, self._name, to_log.keys())  # others who log them later have the last word
        for_callbacks = self._not_for_loggers(numbers)
        from_hooks = [key for key, hook in other_keys.items() if key_checks.is_hook(hook)]
        if not has_loss_metric and any("loss" in key.lower() for key in from_hooks):
            for_callbacks.add("loss")  # one of the module's, which other callbacks do not log in a hook
        for (key, value), name in zip(to_log.items(), numbers, strict=True):
            if key not in other_keys:
                log_epoch_value(trainer, self._name, key, value, to_loggers=name not in for_callbacks)
        if self._are_shown and trainer.is_global_zero and stage != "train":
            self._plots.add(trainer, record, dataloader.suite)

    def _not_for_loggers(self, names: Iterable[str]) -> set[str]:
        """Return the names of values that callbacks see, and loggers do not."""
        of_parts = set() if self.log_classes else self._of_parts(names)
        show_all = self.log_all or self._function != "fit"
        return of_parts | (set() if show_all else self._seldom_plotted_of(names))

    def _of_parts(self, names: Iterable[str]) -> set[str]:
        return {*per_class_names(names, self._parts)}

    def _seldom_plotted_of(self, names: Iterable[str]) -> set[str]:
        keys = self._seldom_plotted
        return {name for name in names if name in keys or name.startswith(tuple(f"{key}_" for key in keys))}
