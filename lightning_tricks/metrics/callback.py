"""The Lightning shell of the metrics room."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_tricks._callback import StepsCallback
from lightning_tricks._lightning_compat import evaluation_loaders, log_epoch_value, names_logged_by_module
from lightning_tricks._shared.checks import check_choice, check_count, nearest
from lightning_tricks._shared.pictures import log_picture
from lightning_tricks._shared.ranks import gather_objects
from lightning_tricks.metrics.functional import in_doubles
from lightning_tricks.metrics.history import History, Record
from lightning_tricks.metrics.losses import MeanLoss
from lightning_tricks.metrics.pictures import Snapshot, as_array, figures_of, history_figure
from lightning_tricks.metrics.shares import Share, share_of
from lightning_tricks.metrics.suite import MetricSuite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STAGES = ("train", "val", "test")
_STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}


class MetricsError(MisconfigurationException, ValueError):
    """What a step returned cannot be measured, or a loader has no batches."""


@dataclass
class _Loader:
    """What is gathered of one loader in an epoch."""

    suite: MetricSuite
    loss: MeanLoss
    share: Share | str = ""  # or the reason why it is not known

    def state_dict(self) -> dict[str, Any]:
        return {"suite": self.suite.state_dict(), "loss": self.loss.state_dict()}

    def load(self, states: Sequence[Mapping[str, Any]], device: torch.device | None = None) -> None:
        self.suite.load([state["suite"] for state in states], device)
        self.loss.load([state["loss"] for state in states], device)


class MetricsMonitor(StepsCallback):
    """Measure what the steps return, for train, val and test, each loader and each class, at almost no cost.

    The steps return `{"loss": ..., "preds": ..., "target": ...}`, and further arguments of metrics, such as `indexes`,
    by name. At the end of each epoch each metric is logged once, as `val/acc`, with `class_names` also as
    `val/f1/<class>`, with several loaders as `val/0/acc`, `val/1/acc`; and so is `val/loss`, the mean over the samples
    (exact under DDP where the step returns the loss of each sample), unless the module logs it. ModelCheckpoint,
    EarlyStopping and schedulers see them wherever this callback stands. Each stage and loader has metrics of its own;
    sanity checking is not counted, nor is any metric in the module's `state_dict`.

    On several ranks, the states of all of them are merged. In validation and testing, the samples that Lightning's
    DistributedSampler repeats to make all ranks equally long do not count, so that the values are those of one process.
    Where the samples are divided in another way that is not known, which is said. What the module logs itself stays as
    it is.

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
        inputs: A function of a step's outputs, the batch and the stage that returns the dict, for modules whose steps
            return something else.

    The metrics themselves: `lightning_tricks.metrics.MetricSuite`, for loops of your own.

    Attributes:
        results: The last value of each key, those included that are no numbers, such as a confusion matrix.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If there is no metric, no such stage or mode, or there are more or fewer classes than names.
        MetricsError: In the first batch, if the metrics would misunderstand it; and if a loader has no batches.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_tricks import multiclass_metrics
        >>> monitor = MetricsMonitor(multiclass_metrics(10), best={"val/f1": "max"})
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        metrics: Metric | dict[str, str | int | float | bool | None] | dict[str, Metric] | MetricCollection,
        *,
        class_names: Sequence[str] | None = None,
        plots: bool | int = True,
        best: dict[str, str] | None = None,
        exact: bool = True,
        stages: Sequence[str] = _STAGES,
        inputs: Callable[[Any, Any, str], Mapping[str, Any]] | None = None,
    ) -> None:
        self.metrics = metrics
        self.class_names = class_names
        self.plots = plots
        self.exact = exact
        self.stages = stages
        self.inputs = inputs
        self._best = best
        if isinstance(stages, str):
            raise TypeError(f"stages must be a list of names, got {stages!r}.")
        for stage in stages:
            check_choice("stages", stage, _STAGES)
        for key, mode in (best or {}).items():
            check_choice(f"best[{key!r}]", mode, ("min", "max"))
            if key.partition("/")[0] not in stages:
                raise ValueError(f"best has the key {key!r}, which must start with one of {', '.join(stages)} and '/'.")
        if not isinstance(plots, bool):
            check_count("plots", plots)
        if inputs is not None and not callable(inputs):
            raise TypeError(f"inputs must be a function of (outputs, batch, stage), got {inputs!r}.")
        MetricSuite(metrics, class_names)  # raises where an argument is wrong
        self.results: dict[str, Tensor] = {}
        self._history = History()
        self._outer_exception = id(None)
        self._draws = False
        self._forget()

    def _forget(self) -> None:
        self._loaders: dict[tuple[str, int], _Loader] = {}
        self._saved: dict[str, Any] = {}
        self._to_draw: dict[str, Snapshot] = {}

    @property
    def best(self) -> dict[str, tuple[float, int]]:
        """The best value of each key of `best=` in a fit, and the optimizer steps done by then."""
        return self._history.best(self._best or {})

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
        parts = tuple(f"/{name}" for name in self.class_names or ())
        known = dict.fromkeys(row["metric"] for row in rows)
        wanted = [name for name in known if not name.endswith(parts)] if metrics is None else list(metrics)
        for name in wanted:
            if name not in known:
                raise ValueError(f"There are no values of {name!r}, but of {', '.join(known)}.{nearest(name, known)}")
        return history_figure([row for row in rows if row["metric"] in wanted])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start anew."""
        super().setup(trainer, pl_module, stage)
        self._forget()
        if stage == "fit":
            self._history, self.results = History(), {}
        self._outer_exception = id(sys.exc_info()[1])
        self._draws = self.plots is not False and self.takes_pictures(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a loader without batches."""
        self._refuse_no_batches(trainer)

    def on_step_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        place: tuple[str, int],
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count a batch; in sanity checking only look at it."""
        stage = place[0]
        if stage not in self.stages:
            return
        loader = self._loaders.get(place) or self._new_loader(trainer, pl_module, place, batch_idx)
        inputs = outputs if self.inputs is None else self.inputs(outputs, batch, stage)
        if not loader.suite.checked:
            self._check(loader, inputs, stage)
        if self._only_looks:
            return
        rows = None
        if stage != "train" and trainer.world_size > 1 and self.exact and (batch_idx == 0 or not loader.share):
            self._divide(trainer, loader, place)
        if isinstance(loader.share, Share):
            size, own = loader.share.of_batch(batch_idx)
            if own < size:
                inputs, rows = self._own_rows(inputs, size, own, stage), own
        if rows != 0:
            loader.suite.update(**inputs)
        loss = inputs.get("loss")
        if isinstance(loss, Tensor):
            lightnings = stage == "train" and pl_module.automatic_optimization  # it has divided and copied the loss
            factor = trainer.accumulate_grad_batches if lightnings else 1
            loader.loss.update(loss, _rows_of(inputs) if rows is None else rows, factor, own=lightnings)

    def on_stage_end(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the metrics of an epoch."""
        self._refuse_no_batches(trainer)
        if stage not in self.stages:
            return
        batches = [trainer.num_training_batches] if stage == "train" else _batches_of(trainer, stage)
        for place in self._places_to_restore(trainer, stage):
            self._new_loader(trainer, pl_module, place, None)
        if trainer.world_size > 1:
            self._merge_ranks(trainer, pl_module, stage)
        for number in sorted(number for of_stage, number in self._loaders if of_stage == stage):
            loader = self._loaders[stage, number]
            if loader.suite.updates:
                self._log(trainer, loader, stage, number if len(batches) > 1 else None)
            loader.load([])
        self._saved = {} if stage == "train" else self._saved
        self._check_best(stage)

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
        if any(ranks) and self.state_key in checkpoint.get("callbacks", {}):
            partial = {"epoch": trainer.current_epoch, "ranks": ranks}
            checkpoint["callbacks"][self.state_key] = {**checkpoint["callbacks"][self.state_key], "partial": partial}

    def _check(self, loader: _Loader, inputs: Any, stage: str) -> None:
        """Refuse the first batch of a loader where the metrics would misunderstand it."""
        self._check_mapping(inputs, stage)
        try:
            loader.suite.check(**inputs)
        except ValueError as error:
            raise MetricsError(f"MetricsMonitor, first batch of {stage}: {error}") from error

    def _check_mapping(self, inputs: Any, stage: str) -> None:
        if isinstance(inputs, Mapping):
            return
        source = f"{_STEPS[stage]} returned" if self.inputs is None else "inputs() returned"
        raise MetricsError(
            f"MetricsMonitor: {source} {'None' if inputs is None else 'a ' + type(inputs).__name__}, and not a dict "
            'with what the metrics take, such as {"loss": ..., "preds": ..., "target": ...}. Return one, give '
            f"inputs=(outputs, batch, stage) -> dict, or leave {stage!r} out of stages."
        )

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
        before, loader.share = loader.share, share_of(evaluation_loaders(trainer)[number])
        if isinstance(loader.share, str) and loader.share != before:
            rank_zero_warn(
                f"MetricsMonitor: {stage} over {trainer.world_size} ranks may not be what one process would measure: "
                f"{loader.share}."
            )

    def _own_rows(self, inputs: Mapping[str, Any], size: int, own: int, stage: str) -> Mapping[str, Any]:
        """Return the first `own` of the `size` samples of a batch."""
        rows = {name: value for name, value in inputs.items() if _has_rows(value)}
        if own and any(len(value) != size for name, value in rows.items() if name != "loss"):
            shapes = ", ".join(f"{name} {tuple(getattr(v, 'shape', [len(v)]))}" for name, v in rows.items())
            warnings.warn(  # of this rank alone
                f"MetricsMonitor: {size - own} of the {size} samples of the last batch of {stage} are repeated ones, "
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

    def _merge_ranks(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        own = {number: loader.state_dict() for (of, number), loader in self._loaders.items() if of == stage}
        parts = _gathered(trainer, own)
        for number in sorted({number for part in parts for number in part}):
            loader = self._loaders.get((stage, number)) or self._new_loader(trainer, pl_module, (stage, number), 0)
            loader.load([part[number] for part in parts if number in part], pl_module.device)

    def _log(self, trainer: Trainer, loader: _Loader, stage: str, number: int | None) -> None:
        values = loader.suite.compute_all()
        mean_loss = loader.loss.compute()
        if mean_loss is not None and "loss" not in values:
            values["loss"] = mean_loss
        numbers = {name: value for name, value in values.items() if value.ndim == 0}
        record = Record(
            stage,
            number,
            trainer.current_epoch,
            trainer.global_step,
            self._function == "fit",
            list(numbers),
            torch.stack([in_doubles(value) for value in numbers.values()]),
            loader.suite.misfits(),
        )
        self._history.add(record)
        self.results |= {f"{record.prefix}/{name}": value for name, value in values.items()}
        by_module = names_logged_by_module(trainer, type(self).__name__)
        for name, value in numbers.items():
            if name != "loss" or f"{record.prefix}/loss" not in by_module:
                log_epoch_value(trainer, type(self).__name__, f"{record.prefix}/{name}", value)
        if self._draws and trainer.is_global_zero and stage != "train":
            kind = loader.suite.task.kind if loader.suite.task is not None else ""
            self._to_draw[record.prefix] = Snapshot(record, kind, loader.suite.confusion(), loader.suite.scores())
            every = self.plots if not isinstance(self.plots, bool) else 0
            if self._function != "fit" or (every and (trainer.current_epoch + 1) % every == 0):
                self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        to_draw, self._to_draw = self._to_draw, {}
        self._history.records()
        for prefix, seen in to_draw.items():
            try:
                figures = figures_of(seen, tuple(self.class_names or ()))
            except ModuleNotFoundError as error:
                rank_zero_info(f"MetricsMonitor draws nothing: {error}")
                return
            for name, figure in figures.items():
                log_picture(trainer.loggers, f"{prefix}/{name}", as_array(figure), seen.record.step)

    def _check_best(self, stage: str) -> None:
        known = [key for key in self.results if key.startswith(f"{stage}/")]
        for key in self._best or {}:
            if known and key.startswith(f"{stage}/") and key not in known:
                raise MetricsError(f"best has the key {key!r}, and there is {', '.join(known)}.{nearest(key, known)}")

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
                    f"MetricsMonitor: loader {number} of {stage} has no batches, so there is nothing to measure: give "
                    "it data (or a smaller batch where it drops the last one), or leave the stage out of stages."
                )


def _batches_of(trainer: Trainer, stage: str) -> list[int | float]:
    counts = trainer.num_val_batches if stage == "val" else trainer.num_test_batches
    return list(counts) if isinstance(counts, Sequence) else [counts]


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


def _rows_of(inputs: Mapping[str, Any]) -> int:
    target = inputs.get("target")
    if isinstance(target, Tensor) and target.ndim:
        return target.shape[0]
    return next((len(value) for name, value in inputs.items() if name != "loss" and _has_rows(value)), 1)


def _has_rows(value: Any) -> bool:
    return bool(value.ndim) if isinstance(value, Tensor) else isinstance(value, list | tuple)
