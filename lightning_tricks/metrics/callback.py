"""The Lightning shell of the metrics room."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_tricks._callback import StepsCallback
from lightning_tricks._lightning_compat.loaders import evaluation_loaders
from lightning_tricks._lightning_compat.logged_values import log_epoch_value
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.checks import check_choice, check_count, did_you_mean
from lightning_tricks._shared.logger_images import log_image
from lightning_tricks._shared.mean_loss import MeanLoss
from lightning_tricks._shared.ranks import gather_objects
from lightning_tricks._shared.tensors import tensors_in, to_double
from lightning_tricks.metrics.core.expected_names import expected_names
from lightning_tricks.metrics.core.history import EpochRecord, History
from lightning_tricks.metrics.core.logged_keys import STAGES, LoggedKeys, check_prefix
from lightning_tricks.metrics.core.metric_values import is_number
from lightning_tricks.metrics.core.plots import PlotData, as_array, history_figure, make_figures
from lightning_tricks.metrics.core.sampler_shards import SamplerShard, get_sampler_shard
from lightning_tricks.metrics.core.suite import MetricSuite
from lightning_tricks.metrics.core.value_names import find_name_conflict, per_class_names
from lightning_tricks.metrics.key_conflicts import STEPS, KeyConflicts, MetricsError, merge_logged_keys

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class _Loader:
    """What is gathered of one loader in an epoch."""

    suite: MetricSuite
    loss: MeanLoss
    share: SamplerShard | str = ""  # or the reason why it is not known
    passed_over: int = 0  # batches of which the step returned nothing to measure
    new: bool = True

    def state_dict(self) -> dict[str, Any]:
        return {"suite": self.suite.state_dict(), "loss": self.loss.state_dict(), "passed_over": self.passed_over}

    def load(self, states: Sequence[Mapping[str, Any]], device: torch.device | None = None) -> None:
        self.suite.load([state["suite"] for state in states], device)
        self.loss.load([state["loss"] for state in states], device)
        self.passed_over = sum(state.get("passed_over", 0) for state in states)


class MetricsMonitor(StepsCallback):
    """Measure what the steps return, for train, val and test, each loader and each class, at almost no cost.

    The steps return `{"loss": ..., "preds": ..., "target": ...}`, and further arguments of metrics, such as `indexes`,
    by name. At the end of each epoch each metric is logged once, as `val/acc`, with `class_names` also as
    `val/f1_<class>`, with several loaders as `val/0/acc`, `val/1/acc`; and so is `val/loss`, the mean over the samples
    (exact under DDP where the step returns the loss of each sample), unless the module logs it. ModelCheckpoint,
    EarlyStopping and schedulers see them wherever this callback stands. Each stage and loader has metrics of its own;
    sanity checking is not counted, nor is any metric in the module's `state_dict`.

    On several ranks, the states of all of them are merged. In validation and testing, the samples that Lightning's
    DistributedSampler repeats to make all ranks equally long do not count, so that the values are those of one process.
    Where the samples are divided in another way that is not known, which is said.

    Several monitors have a `prefix` each. No key is logged twice: where the module or another callback logs one of
    this callback's (the loss aside), that is an error which names both. A step that returns nothing that can be
    measured, such as a loss alone, is passed over with a warning; its loss is averaged.

    Args:
        metrics: A preset such as `multiclass_metrics(10)`, its plain values (`{"task": "multiclass", "num_classes":
            10}`), a torchmetrics Metric or MetricCollection, or a dict of them. They are copied.
        class_names: The names of the classes, labels or outputs. With them, averages over classes come for each class.
        plots: Whether loggers that can take pictures (TensorBoard, W&B, MLflow, Comet; PNG files beside a CSVLogger)
            get confusion matrix, curves and bars by class: True, at the end of a fit, validation or test; a number n,
            after each n-th epoch as well. It needs the extra `reports`.
        best: What to keep the best value of: logged key -> "min" or "max".
        exact: Whether to leave out samples that are repeated for the sake of equal ranks.
        stages: Which of "train", "val" and "test" to measure.
        output_transform: A function of a step's outputs, the batch and the stage that returns the dict, for modules
            whose steps return something else.
        prefix: What stands before the keys, as in "ema/val/acc", so that several monitors keep apart: None for
            nothing. A checkpoint holds the state of each prefix by itself.

    The metrics themselves: `lightning_tricks.metrics.MetricSuite`, for loops of your own.

    Attributes:
        results: The last value of each key, those included that are no numbers, such as a confusion matrix.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If there is no metric, no such stage or mode, there are more or fewer classes than names, two values
            would have one name, or `best` has a key that no fit logs.
        MetricsError: In `setup`, if `best` has a key of a stage that does not run, or another monitor logs the same
            keys; in the first batch, if the metrics would misunderstand it; where another logs one of the keys, as
            soon as that shows; and if a loader has no batches.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tricks import multiclass_metrics
        >>> monitor = MetricsMonitor(multiclass_metrics(10), best={"val/f1": "max"})
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", logger=False)
    """

    allows_several = True

    def __init__(
        self,
        metrics: Metric | dict[str, str | int | float | bool | None] | dict[str, Metric] | MetricCollection,
        *,
        class_names: Sequence[str] | None = None,
        plots: bool | int = True,
        best: dict[str, str] | None = None,
        exact: bool = True,
        stages: Sequence[str] = STAGES,
        output_transform: Callable[[Any, Any, str], Mapping[str, Any]] | None = None,
        prefix: str | None = None,
    ) -> None:
        self.metrics = metrics
        self.class_names = class_names
        self.plots = plots
        self.exact = exact
        self.stages = stages
        self.output_transform = output_transform
        self.prefix = prefix
        self._best = best
        if isinstance(stages, str):
            raise TypeError(f"stages must be a list of names, got {stages!r}.")
        for stage in stages:
            check_choice("stages", stage, STAGES)
        check_prefix(prefix)
        if not isinstance(plots, bool):
            check_count("plots", plots)
        if output_transform is not None and not callable(output_transform):
            raise TypeError(
                f"output_transform must be a function of (outputs, batch, stage), got {output_transform!r}."
            )
        self._keys = LoggedKeys(expected_names(metrics, class_names), prefix, tuple(stages))
        self._keys.check_best(best or {})
        self.results: dict[str, Tensor] = {}
        self._history = History()
        self._outer_exception = id(None)
        self._draws = False
        self._forget()

    def _forget(self) -> None:
        self._loaders: dict[tuple[str, int], _Loader] = {}
        self._saved: dict[str, Any] = {}
        self._to_draw: dict[str, PlotData] = {}
        self._shared = KeyConflicts(self._name)
        self._told: set[str] = set()

    @property
    def state_key(self) -> str:
        """Under which a checkpoint holds the state: a monitor with a prefix has its own."""
        return super().state_key if self.prefix is None else self._generate_state_key(prefix=self.prefix)

    @property
    def _name(self) -> str:
        own = "" if self.prefix is None else f"(prefix={self.prefix!r})"
        return f"{type(self).__name__}{own}"

    @property
    def best(self) -> dict[str, tuple[float, int]]:
        """The best value of each key of `best=` in a fit, and the optimizer steps done by then."""
        start = "" if self.prefix is None else f"{self.prefix}/"
        found = self._history.best({key.removeprefix(start): mode for key, mode in (self._best or {}).items()})
        return {start + key: value for key, value in found.items()}

    def logged_keys(self, stage: str, loaders: int = 1) -> set[str]:
        """Return the keys that a stage is sure to log, its loss aside."""
        return self._keys.known(stage, loaders) if stage in self.stages else set()

    def history(self) -> list[dict[str, Any]]:
        """Return one row for each value so far: stage, loader, epoch, step, metric and value."""
        return self._history.rows()

    def plot(self, metrics: Sequence[str] | None = None) -> Figure:
        """Draw the values over the steps.

        Args:
            metrics: Which ones, such as `["f1", "loss"]`; None for all but those of single classes.

        Raises:
            ModuleNotFoundError: If matplotlib is missing.
            ValueError: If there are no values of that name.
        """
        rows = self.history()
        known = dict.fromkeys(row["metric"] for row in rows)
        parts = per_class_names(known, self.class_names or ())
        wanted = [name for name in known if name not in parts] if metrics is None else list(metrics)
        for name in wanted:
            if name not in known:
                raise ValueError(
                    f"There are no values of {name!r}, but of {', '.join(known)}.{did_you_mean(name, known)}"
                )
        return history_figure([row for row in rows if row["metric"] in wanted])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start anew, and refuse what cannot be measured or would be logged twice."""
        super().setup(trainer, pl_module, stage)
        self._forget()
        self._refuse_same_keys(trainer)
        if stage == "fit":
            if not _validates(trainer) and (keys := self._keys.wanted(self._best or (), "val")):
                raise MetricsError(
                    f"{self._name}: best has the key {keys[0]!r}, and this fit does not validate: give it validation "
                    "data and a validation_step, let it validate within max_epochs, or ask for a key of train."
                )
            self._history, self.results = History(), {}
        self._outer_exception = id(sys.exc_info()[1])
        self._draws = self.plots is not False and self.has_image_logger(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a loader without batches, and keys of loaders that there are not."""
        self._refuse_no_batches(trainer)
        self._check_loaders(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse keys of loaders that there are not."""
        super().on_sanity_check_end(trainer, pl_module)
        self._check_loaders(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare keys with what the module has logged last in the epoch before."""
        self._compare_afterwards(trainer, pl_module, "train")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare keys with what the module has logged last."""
        self._compare_afterwards(trainer, pl_module, "train")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare keys with what the module has logged last."""
        self._compare_afterwards(trainer, pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare keys with what the module has logged last."""
        self._compare_afterwards(trainer, pl_module, "test")

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
        """Count a batch; in sanity checking only look at it."""
        place = (stage, dataloader_idx)
        if stage not in self.stages:
            return
        loader = self._loaders.get(place) or self._new_loader(trainer, pl_module, place, batch_idx)
        if loader.new:
            loader.new = False
            known = self._keys.known(stage, 1 if stage == "train" else len(_batches_of(trainer, stage)))
            self._shared.compare_in_first_batch(trainer, pl_module, stage, known)
        inputs = outputs if self.output_transform is None else self.output_transform(outputs, batch, stage)
        if self.output_transform is None and isinstance(outputs, Tensor) and not outputs.ndim:
            inputs = {"loss": outputs}  # as Lightning takes it
        measured = self._is_measured(loader, inputs, stage, batch_idx)
        if self._is_sanity_checking:
            return
        inputs = inputs if isinstance(inputs, Mapping) else {}
        rows = None
        if stage != "train" and trainer.world_size > 1 and self.exact and (batch_idx == 0 or not loader.share):
            self._divide(trainer, loader, place)
        if isinstance(loader.share, SamplerShard):
            size, own = loader.share.batch_sizes(batch_idx)
            if own < size:
                inputs, rows = self._own_rows(inputs, size, own, stage), own
        if not measured:
            loader.passed_over += 1
        elif rows != 0:
            loader.suite.update(**inputs)
        loss = inputs.get("loss")
        if isinstance(loss, Tensor):
            lightnings = stage == "train" and pl_module.automatic_optimization  # it has divided and copied the loss
            factor = trainer.accumulate_grad_batches if lightnings else 1
            loader.loss.update(loss, _rows_of(inputs, batch) if rows is None else rows, factor, own=lightnings)

    def on_stage_end(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the metrics of an epoch."""
        self._refuse_no_batches(trainer)
        if stage not in self.stages:
            return
        batches = [trainer.num_training_batches] if stage == "train" else _batches_of(trainer, stage)
        for place in self._places_to_restore(trainer, stage):
            self._new_loader(trainer, pl_module, place, None)
        others = self._shared.others(trainer)
        if trainer.world_size > 1:
            others = self._merge_ranks(trainer, pl_module, stage, others)
        numbers = sorted(number for of_stage, number in self._loaders if of_stage == stage)
        passed_over = sum(self._loaders[stage, number].passed_over for number in numbers)
        self._say_how_many(stage, passed_over, numbers)
        for number in numbers:
            loader = self._loaders[stage, number]
            if loader.suite.updates or loader.loss.samples:
                self._log(trainer, pl_module, loader, (stage, number if len(batches) > 1 else None), others)
            loader.load([])
        self._saved = {} if stage == "train" else self._saved
        self._check_best(stage, bool(passed_over))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw what was not drawn yet, and print the table."""
        self._draw(trainer)
        if self._history.records() and trainer.is_global_zero:
            from rich.console import Console

            Console().print(self._history.table(self.best, self.class_names or ()))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the data."""
        self._refuse_no_batches(trainer)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the history."""
        return {"history": self._history.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the history, and what a checkpoint within an epoch has gathered of it."""
        if self._function == "fit":
            self._history.load_state_dict(state_dict["history"])
            self._saved = state_dict.get("partial", {})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what each rank has gathered of the epoch so far."""
        own = {
            f"{stage}/{loader}": of_loader.state_dict()
            for (stage, loader), of_loader in self._loaders.items()
            if of_loader.suite.updates
        }
        in_exception = id(sys.exc_info()[1]) != self._outer_exception  # other ranks may not be here
        ranks = [own] if in_exception else _gathered(trainer, own)
        if not any(ranks) and self._saved.get("epoch") == trainer.current_epoch:
            ranks = self._saved["ranks"]  # of a fit that was just resumed
        if any(ranks) and self.state_key in checkpoint.get("callbacks", {}):
            partial = {"epoch": trainer.current_epoch, "ranks": ranks}
            checkpoint["callbacks"][self.state_key] = {**checkpoint["callbacks"][self.state_key], "partial": partial}

    def _is_measured(self, loader: _Loader, inputs: Any, stage: str, batch_idx: int) -> bool:
        """Whether a step returned what the metrics need; the first time that it did, it is looked at."""
        suite = loader.suite
        names = inputs.keys() if isinstance(inputs, Mapping) else frozenset()
        whole = isinstance(inputs, Mapping) and suite.required_inputs <= names
        if not suite.checked and (whole or not suite.required_inputs.isdisjoint(names)):
            try:
                suite.check(**inputs)
            except ValueError as error:
                raise MetricsError(f"{self._name}, first batch of {stage}: {error}") from error
        if not whole:
            self._say_unmeasured(suite, inputs, stage, batch_idx)
        return whole

    def _say_unmeasured(self, suite: MetricSuite, inputs: Any, stage: str, batch_idx: int) -> None:
        if stage in self._told:
            return
        self._told.add(stage)
        source = "output_transform()" if self.output_transform is not None else STEPS[stage]
        what = f"a {type(inputs).__name__}"
        if inputs is None or (isinstance(inputs, Mapping) and not inputs):
            what = "nothing"
        elif isinstance(inputs, Mapping):
            what = f"{', '.join(map(str, inputs))} alone"
        needed = ", ".join(sorted(suite.required_inputs))
        rest = [name for name in self.stages if name != stage]
        words = (
            f"{self._name}: {source} returned {what} in batch {batch_idx} of {stage}, and the metrics need {needed}. "
            "Return a dict with them (a step of training beside its loss), give "
            f"output_transform=(outputs, batch, stage) -> dict, or leave {stage!r} out: stages={rest!r}."
        )
        wanted = [key for key in self._keys.wanted(self._best or (), stage) if not key.endswith("/loss")]
        if what != "nothing" and not suite.checked and wanted:
            raise MetricsError(f"{words} best has the key {wanted[0]!r}.")
        rank_zero_warn(f"{words} Until then such batches are not measured, but for a loss.")

    def _say_how_many(self, stage: str, passed_over: int, numbers: Sequence[int]) -> None:
        """Say how many batches of an epoch were passed over, where others were not; once."""
        updates = sum(self._loaders[stage, number].suite.updates for number in numbers)
        if passed_over and updates and f"{stage} in part" not in self._told:
            self._told.add(f"{stage} in part")
            rank_zero_warn(
                f"{self._name}: {passed_over} of {passed_over + updates} batches of {stage} returned nothing to "
                "measure and do not count."
            )

    def _refuse_same_keys(self, trainer: Trainer) -> None:
        """Refuse other monitors that would log under the same keys."""
        for other in callbacks_of(trainer):
            if other is self or not isinstance(other, MetricsMonitor):
                continue
            for stage in {*self.stages} & {*other.stages}:
                shared = find_name_conflict([*self._keys.known(stage), *other._keys.known(stage)])
                if self.prefix == other.prefix or shared:
                    key = shared[0] if shared else self._keys.of(stage, "loss")
                    raise MetricsError(
                        f"{self._name} and {other._name} would both log {key!r}: give one of them a prefix of its "
                        "own, such as prefix='ema', or different stages."
                    )

    def _compare_afterwards(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare keys with what the module or another callback has logged after this one."""
        if stage in self.stages:
            known = self._keys.known(stage, len(_batches_of(trainer, stage))) if self._is_sanity_checking else None
            self._shared.compare_afterwards(trainer, pl_module, stage, known)

    def _new_loader(
        self, trainer: Trainer, pl_module: LightningModule, place: tuple[str, int], batch_idx: int | None
    ) -> _Loader:
        stage, number = place
        suite = MetricSuite(self.metrics, self.class_names, curves=self._draws and stage != "train")
        loader = self._loaders[place] = _Loader(suite, MeanLoss())
        if batch_idx != 0 and self._saved.get("epoch") == trainer.current_epoch:
            part, parts = _data_part(trainer)
            states = [rank[key] for rank in self._saved["ranks"][part::parts] if (key := f"{stage}/{number}") in rank]
            loader.load(states, pl_module.device)
        return loader

    def _divide(self, trainer: Trainer, loader: _Loader, place: tuple[str, int]) -> None:
        """Ask, at the start of each epoch, which samples are this rank's own; say once where that is not known."""
        stage, number = place
        before, loader.share = loader.share, get_sampler_shard(evaluation_loaders(trainer)[number])
        if isinstance(loader.share, str) and loader.share != before:
            rank_zero_warn(
                f"{self._name}: {stage} over {trainer.world_size} ranks may not be what one process would measure: "
                f"{loader.share}."
            )

    def _own_rows(self, inputs: Mapping[str, Any], size: int, own: int, stage: str) -> Mapping[str, Any]:
        """Return the first `own` of the `size` samples of a batch."""
        rows = {name: value for name, value in inputs.items() if _has_rows(value)}
        if own and any(len(value) != size for name, value in rows.items() if name != "loss"):
            shapes = ", ".join(f"{name} {tuple(getattr(v, 'shape', [len(v)]))}" for name, v in rows.items())
            warnings.warn(  # of this rank alone
                f"{self._name}: {size - own} of the {size} samples of the last batch of {stage} are repeated ones, "
                f"and it cannot be told which rows are theirs ({shapes}): they count twice.",
                stacklevel=2,
            )
            return inputs
        return {name: value[:own] if name in rows else value for name, value in inputs.items()}

    def _places_to_restore(self, trainer: Trainer, stage: str) -> list[tuple[str, int]]:
        if self._saved.get("epoch") != trainer.current_epoch:
            return []
        keys = {key for states in self._saved["ranks"] for key in states}
        places = [(key.partition("/")[0], int(key.partition("/")[2])) for key in sorted(keys)]
        return [place for place in places if place[0] == stage and place not in self._loaders]

    def _merge_ranks(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, others: dict[str, str]
    ) -> dict[str, str]:
        """Give each rank what all have gathered, and return which keys others log on any of them."""
        own = {number: loader.state_dict() for (of, number), loader in self._loaders.items() if of == stage}
        gathered = _gathered(trainer, (own, others))
        parts = [part for part, _ in gathered]
        for number in sorted({number for part in parts for number in part}):
            loader = self._loaders.get((stage, number)) or self._new_loader(trainer, pl_module, (stage, number), 0)
            loader.load([part[number] for part in parts if number in part], pl_module.device)
        return merge_logged_keys([logged for _, logged in gathered])

    def _log(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        loader: _Loader,
        place: tuple[str, int | None],
        others: dict[str, str],
    ) -> None:
        stage, number = place
        try:
            values = loader.suite.compute_all() if loader.suite.updates else {}
        except ValueError as error:
            raise MetricsError(f"{self._name}, {stage}: {error}") from error
        mean_loss = loader.loss.compute()
        asked = "loss" in values
        if mean_loss is not None and not asked:
            values["loss"] = mean_loss
        numbers = {name: value for name, value in values.items() if is_number(value)}
        record = EpochRecord(
            stage,
            number,
            trainer.current_epoch,
            trainer.global_step,
            self._function == "fit",
            list(numbers),
            torch.stack(list(map(to_double, numbers.values()))) if numbers else torch.empty(0),
            loader.suite.num_invalid(),
        )
        self._history.add(record)
        self.results |= {self._keys.of(record.prefix, name): value for name, value in values.items()}
        to_log = {self._keys.of(record.prefix, name): value for name, value in numbers.items()}
        loss = self._keys.of(record.prefix, "loss")
        own = to_log.keys() - (set() if asked else {loss})  # a loss that nobody asked for gives way to the module's
        self._shared.refuse(pl_module, own, others)
        self._shared.note_logged(trainer, stage, own)
        for key, value in to_log.items():
            if key in own or key not in others:
                log_epoch_value(trainer, self._name, key, value)
        if self._draws and trainer.is_global_zero and stage != "train":
            kind = loader.suite.task.kind if loader.suite.task is not None else ""
            self._to_draw[record.prefix] = PlotData(
                record, kind, loader.suite.confusion_matrix(), loader.suite.score_histogram()
            )
            every = self.plots if not isinstance(self.plots, bool) else 0
            if self._function != "fit" or (every and (trainer.current_epoch + 1) % every == 0):
                self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        to_draw, self._to_draw = self._to_draw, {}
        self._history.records()
        for prefix, seen in to_draw.items():
            try:
                figures = make_figures(seen, tuple(self.class_names or ()))
            except ModuleNotFoundError as error:
                rank_zero_info(f"MetricsMonitor draws nothing: {error}")
                return
            for name, figure in figures.items():
                log_image(trainer.loggers, self._keys.of(prefix, name), as_array(figure), seen.record.step)

    def _check_best(self, stage: str, passed_over: bool) -> None:
        """Refuse a key that was not logged at the end of its stage: only that shows what some metrics return."""
        start = self._keys.of(stage, "")
        there = [key for key in self.results if key.startswith(start)]
        for key in self._keys.wanted(self._best or (), stage):
            if (there or passed_over) and key not in there:
                raise MetricsError(f"{self._name}: best has the key {key!r}, {self._keys.others(key, stage, there)}")

    def _check_loaders(self, trainer: Trainer) -> None:
        """Refuse keys of `best` that fit one loader where there are several, or several where there is one."""
        try:
            self._keys.check_loaders(self._best or (), "train", 1)
            self._keys.check_loaders(self._best or (), "val", len(_batches_of(trainer, "val")))
        except ValueError as error:
            raise MetricsError(f"{self._name}: {error}") from error

    def _refuse_no_batches(self, trainer: Trainer) -> None:
        """Refuse loaders that give nothing, unless the Trainer was told to take nothing."""
        found: list[tuple[str, int, int | float]] = []
        if self._function == "fit" and trainer.limit_train_batches != 0:
            found += [("train", 0, trainer.num_training_batches)]
        if self._function in ("fit", "validate") and trainer.limit_val_batches != 0:
            found += [("val", number, count) for number, count in enumerate(_batches_of(trainer, "val"))]
        if self._function == "test" and trainer.limit_test_batches != 0:
            found += [("test", number, count) for number, count in enumerate(_batches_of(trainer, "test"))]
        for stage, number, count in found:
            if count == 0 and stage in self.stages:
                raise MetricsError(
                    f"{self._name}: loader {number} of {stage} has no batches, so there is nothing to measure: give "
                    "it data (or a smaller batch where it drops the last one), or leave the stage out of stages."
                )


def _batches_of(trainer: Trainer, stage: str) -> list[int | float]:
    counts = trainer.num_val_batches if stage == "val" else trainer.num_test_batches
    return list(counts) if isinstance(counts, Sequence) else [counts]


def _validates(trainer: Trainer) -> bool:
    """Whether a fit comes to validate, as far as can be seen at its start."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    too_seldom = every is not None and epochs is not None and 0 < epochs < every
    return trainer.enable_validation and not too_seldom


def _data_part(trainer: Trainer) -> tuple[int, int]:
    """Return which part of the data this rank sees, and of how many; ranks that share a model's layers see the same."""
    if trainer.world_size == 1:
        return 0, 1
    division = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    return int(division["rank"]), int(division["num_replicas"])


def _gathered(trainer: Trainer, own: Any) -> list[Any]:
    """Return the values of all parts of the data, one of each."""
    ranks = gather_objects((_data_part(trainer)[0], own))
    return [value for _, value in sorted(dict(ranks[::-1]).items())]


def _rows_of(inputs: Mapping[str, Any], batch: Any) -> int:
    target = inputs.get("target")
    if isinstance(target, Tensor) and target.ndim:
        return target.shape[0]
    rows = (len(value) for name, value in inputs.items() if name != "loss" and _has_rows(value))
    return next(rows, None) or next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 1)


def _has_rows(value: Any) -> bool:
    return bool(value.ndim) if isinstance(value, Tensor) else isinstance(value, list | tuple)
