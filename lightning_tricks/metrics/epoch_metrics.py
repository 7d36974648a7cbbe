"""The metrics of all dataloaders in the current epoch, on this rank and merged from all ranks, and plots of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.flavor import LightningModule, ParallelStrategy, Trainer, rank_zero_info
from lightning_tricks._lightning_compat.own_samples import has_rows
from lightning_tricks._shared.mean_loss import MeanLoss
from lightning_tricks._shared.pictures import log_image
from lightning_tricks._shared.report_parts import ReportPart
from lightning_tricks._shared.tensors import gather_objects, tensors_in
from lightning_tricks.metrics.core.history import EpochRecord, EvaluationData, History, make_parts
from lightning_tricks.metrics.core.plots import as_array, make_figures
from lightning_tricks.metrics.core.suite import MetricSuite
from lightning_tricks.metrics.key_checks import LoggedKeys


class EpochMetrics:
    """The metrics of each dataloader in the current epoch.

    Args:
        metrics: As in `MetricSuite`.
        class_names: As in `MetricSuite`.
        curves: Whether to keep the data of plots in evaluations.
    """

    def __init__(self, metrics: Any, class_names: Sequence[str] | None, *, curves: bool) -> None:
        self._metrics, self._class_names, self._curves = metrics, class_names, curves
        self._dataloaders: dict[tuple[str, int], DataloaderMetrics] = {}
        self._resumed_epoch = PartialEpoch({})

    def of_stage(self, stage: str) -> dict[int, DataloaderMetrics]:
        """Return the metrics of a stage's dataloaders by their indices."""
        return {index: self._dataloaders[of, index] for of, index in sorted(self._dataloaders) if of == stage}

    def of_dataloader(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, dataloader_idx: int, *, resumes: bool
    ) -> DataloaderMetrics:
        """Return the metrics of a dataloader; with `resumes`, new ones start where the checkpoint was saved."""
        known = self._dataloaders.get((stage, dataloader_idx))
        if known is not None:
            return known
        suite = MetricSuite(self._metrics, self._class_names, curves=self._curves and stage != "train")
        dataloader = self._dataloaders[stage, dataloader_idx] = DataloaderMetrics(suite, MeanLoss())
        if resumes and self._resumed_epoch.is_of(trainer):
            dataloader.load(self._resumed_epoch.states_of(trainer, stage, dataloader_idx), pl_module.device)
        return dataloader

    def merge_ranks(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, other_keys: dict[str, str]
    ) -> dict[str, str]:
        """Give each rank the states of all, and return which keys others log on any of them."""
        own = {}
        for index, dataloader in self.of_stage(stage).items():
            dataloader.flush()
            own[index] = dataloader.state_dict()
        gathered = gather_parts(trainer, (own, other_keys))
        parts = [part for part, _ in gathered]
        for index in sorted({index for part in parts for index in part}):
            dataloader = self.of_dataloader(trainer, pl_module, stage, index, resumes=False)
            dataloader.load([part[index] for part in parts if index in part], pl_module.device)
        return {key: hook for _, keys in gathered for key, hook in keys.items()}

    def load_partial_state(self, state: Mapping[str, Any]) -> None:
        """Take the metrics of the epoch in which a checkpoint was saved; an empty mapping for none."""
        self._resumed_epoch = PartialEpoch(state)

    def add_resumed(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the dataloaders that had no batch since the fit was resumed."""
        for dataloader_idx in self._resumed_epoch.dataloaders_of(trainer, stage):
            self.of_dataloader(trainer, pl_module, stage, dataloader_idx, resumes=True)

    def training_states(self) -> dict[str, Any]:
        """Return the states of the training metrics of this rank, by the dataloader's index."""
        return {str(index): dataloader.state_dict() for index, dataloader in self.of_stage("train").items()}

    def load_training_states(self, states: Mapping[str, Any], device: torch.device) -> None:
        """Go back to what `training_states` returned; dataloaders that were new since then are new again."""
        for index, dataloader in self.of_stage("train").items():
            if str(index) in states:
                dataloader.load([states[str(index)]], device)
            else:
                del self._dataloaders["train", index]

    def partial_state(self, trainer: Trainer, *, alone: bool) -> dict[str, Any]:
        """Return the metrics of each rank in the epoch so far, or nothing; all ranks call it, unless `alone`."""
        own = {
            f"{stage}/{index}": dataloader.state_dict()
            for (stage, index), dataloader in self._dataloaders.items()
            if dataloader.suite.updates
        }
        ranks = [own] if alone else gather_parts(trainer, own)
        if not any(ranks) and self._resumed_epoch.is_of(trainer):
            ranks = self._resumed_epoch.ranks  # the fit was just resumed
        return {"epoch": trainer.current_epoch, "ranks": ranks} if any(ranks) else {}


def data_part(trainer: Trainer) -> tuple[int, int]:
    """Return which part of the data this rank sees, and the number of parts.

    Ranks that share the layers of a model see the same part.
    """
    if trainer.world_size == 1:
        return 0, 1
    arguments = cast(ParallelStrategy, trainer.strategy).distributed_sampler_kwargs
    return int(arguments["rank"]), int(arguments["num_replicas"])


def gather_parts(trainer: Trainer, value: Any) -> list[Any]:
    """Return the values of all parts of the data, one of each; every rank has to call it."""
    ranks = gather_objects((data_part(trainer)[0], value))
    return [of_part for _, of_part in sorted(dict(ranks[::-1]).items())]


class PartialEpoch:
    """The metrics in a checkpoint that was saved within an epoch: the states of each rank's dataloaders.

    The states of a rank are named "<stage>/<index of the dataloader>".

    Args:
        state: The state in the checkpoint; an empty one for none.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.epoch: int | None = state.get("epoch")
        self.ranks: list[dict[str, Any]] = state.get("ranks", [])

    def is_of(self, trainer: Trainer) -> bool:
        """Whether it is of the current epoch."""
        return self.epoch == trainer.current_epoch

    def states_of(self, trainer: Trainer, stage: str, dataloader_idx: int) -> list[Any]:
        """Return the states of one dataloader that this rank has to merge; the number of ranks may have changed."""
        part, parts = data_part(trainer)
        key = f"{stage}/{dataloader_idx}"
        return [rank[key] for rank in self.ranks[part::parts] if key in rank]

    def dataloaders_of(self, trainer: Trainer, stage: str) -> list[int]:
        """Return the indices of a stage's dataloaders of which there are states, in the current epoch."""
        if not self.is_of(trainer):
            return []
        keys = sorted({key for states in self.ranks for key in states})
        pairs = (key.partition("/") for key in keys)
        return [int(dataloader_idx) for of_stage, _, dataloader_idx in pairs if of_stage == stage]


@dataclass
class DataloaderMetrics:
    """The metrics and the mean loss of one dataloader in an epoch.

    Attributes:
        suite: The metrics.
        loss: The mean loss.
        num_unmeasured: The number of batches for which the step returned nothing to measure.
        num_samples: The number of samples that the metrics have seen.
        has_seen_batch: Whether there was a batch, in sanity checking or after it.
    """

    suite: MetricSuite
    loss: MeanLoss
    num_unmeasured: int = 0
    num_samples: int = 0
    has_seen_batch: bool = False

    def update(
        self,
        inputs: Mapping[str, Any],
        batch: Any,
        *,
        is_complete: bool,
        num_rows: int | None,
        loss_factor: int,
        owns_loss: bool,
    ) -> None:
        """Add a batch.

        Args:
            inputs: The inputs of the metrics, and perhaps a loss, by name.
            batch: The batch.
            is_complete: Whether all inputs are there that the metrics need.
            num_rows: How many samples count; None for all.
            loss_factor: What the loss is multiplied with.
            owns_loss: Whether nobody else will write to the loss.
        """
        samples = _count_rows(inputs, batch) if num_rows is None else num_rows
        if not is_complete:
            self.num_unmeasured += 1
        elif num_rows != 0:
            self.suite.update(**inputs)
            self.num_samples += samples
        loss = inputs.get("loss")
        if isinstance(loss, Tensor):
            self.loss.update(loss, samples, loss_factor, own=owns_loss)

    def flush(self) -> None:
        """Count the batches that wait, of which there are more bytes than of what they are counted in."""
        self.suite.flush()
        self.loss.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics and the loss so far, as tensors and plain values on the CPU."""
        counts = {"passed_over": self.num_unmeasured, "samples": self.num_samples}
        return {"suite": self.suite.state_dict(), "loss": self.loss.state_dict(), **counts}

    def load(self, states: Sequence[Mapping[str, Any]], device: torch.device | None = None) -> None:
        """Replace metrics and loss by the merged states of several ranks; reset them if there are none."""
        self.num_unmeasured = sum(state.get("passed_over", 0) for state in states)
        samples = [state.get("samples", 0) for state in states]
        self.num_samples = sum(samples)
        self.suite.load([state["suite"] for state in states], device, () if self.num_unmeasured else samples)
        self.loss.load([state["loss"] for state in states], device)


def _count_rows(inputs: Mapping[str, Any], batch: Any) -> int:
    target = inputs.get("target")
    if isinstance(target, Tensor) and target.ndim:
        return target.shape[0]
    rows = (len(value) for name, value in inputs.items() if name != "loss" and has_rows(value))
    return next(rows, None) or next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 1)


class EvaluationPlots:
    """The data of the last evaluation of each dataloader.

    Args:
        history: The values of the run.
        keys: The keys under which they are logged.
        class_names: The names of the classes.
        every_n_epochs: After which epochs of a fit to plot as well as at its end; 0 for none of them.
        are_logged: Whether plots are sent to the loggers, not only to a run report.
    """

    def __init__(
        self, history: History, keys: LoggedKeys, class_names: Sequence[str], every_n_epochs: int, *, are_logged: bool
    ) -> None:
        self._history, self._keys, self._class_names = history, keys, class_names
        self._every_n_epochs, self._are_logged = every_n_epochs, are_logged
        self._to_log: dict[str, EvaluationData] = {}  # that were not plotted yet, by prefix
        self._to_report: dict[str, EvaluationData] = {}

    def add(self, trainer: Trainer, record: EpochRecord, suite: MetricSuite) -> None:
        """Keep the data of an evaluation in place of those before; plot them now in every n-th epoch, or outside a fit.

        It reads from the device.
        """
        kind = suite.task.kind if suite.task is not None else ""
        scores = suite.score_histogram(), suite.reliability()
        data = EvaluationData(record, kind, suite.confusion_matrix(), *scores)
        self._to_report[record.prefix] = data
        if self._are_logged:
            self._to_log[record.prefix] = data
            every = self._every_n_epochs
            if not record.fit or (every and (trainer.current_epoch + 1) % every == 0):
                self.log(trainer)

    def log(self, trainer: Trainer) -> None:
        """Plot the evaluations that were not plotted yet, and send the images to the loggers."""
        pending, self._to_log = self._to_log, {}
        self._history.records()  # reads the values of the records from the device
        for prefix, data in pending.items():
            try:
                figures = make_figures(data, tuple(self._class_names))
            except ModuleNotFoundError as error:
                rank_zero_info(f"MetricsMonitor logs no plots: {error}")
                return
            for name, figure in figures.items():
                log_image(trainer.loggers, self._keys.key(prefix, name), as_array(figure), data.record.step)

    def report_parts(self) -> list[ReportPart]:
        """Return confusion matrix, reliability and single classes of the last evaluation."""
        self._history.records()  # reads the values of the records from the device
        evaluations = self._to_report.values()
        return [part for data in evaluations for part in make_parts(data, self._class_names, self._keys.key)]
