"""What is measured of all dataloaders in the epoch that runs: on this rank, merged from all ranks, in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_tricks._shared.mean_loss import MeanLoss
from lightning_tricks.metrics.core.suite import MetricSuite
from lightning_tricks.metrics.dataloader_metrics import DataloaderMetrics
from lightning_tricks.metrics.key_conflicts import merge_logged_keys
from lightning_tricks.metrics.rank_merging import PartialEpoch, gather_parts


class EpochMetrics:
    """The metrics of each dataloader in the epoch that runs.

    Args:
        metrics: As in `MetricSuite`.
        class_names: As in `MetricSuite`.
        curves: Whether to keep what the plots of an evaluation need.
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
        own = {index: dataloader.state_dict() for index, dataloader in self.of_stage(stage).items()}
        gathered = gather_parts(trainer, (own, other_keys))
        parts = [part for part, _ in gathered]
        for index in sorted({index for part in parts for index in part}):
            dataloader = self.of_dataloader(trainer, pl_module, stage, index, resumes=False)
            dataloader.load([part[index] for part in parts if index in part], pl_module.device)
        return merge_logged_keys([keys for _, keys in gathered])

    def load_partial_state(self, state: Mapping[str, Any]) -> None:
        """Take what a checkpoint within an epoch holds of that epoch; an empty mapping for none."""
        self._resumed_epoch = PartialEpoch(state)

    def add_resumed(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the dataloaders that had no batch since the fit was resumed."""
        for dataloader_idx in self._resumed_epoch.dataloaders_of(trainer, stage):
            self.of_dataloader(trainer, pl_module, stage, dataloader_idx, resumes=True)

    def partial_state(self, trainer: Trainer, *, alone: bool) -> dict[str, Any]:
        """Return what each rank has measured of the epoch so far, or nothing; all ranks call it, unless `alone`."""
        own = {
            f"{stage}/{index}": dataloader.state_dict()
            for (stage, index), dataloader in self._dataloaders.items()
            if dataloader.suite.updates
        }
        ranks = [own] if alone else gather_parts(trainer, own)
        if not any(ranks) and self._resumed_epoch.is_of(trainer):
            ranks = self._resumed_epoch.ranks  # the fit was just resumed
        return {"epoch": trainer.current_epoch, "ranks": ranks} if any(ranks) else {}
