"""`DataloaderMetrics`: what is measured of one dataloader in an epoch, and which samples of a batch count."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_tricks._lightning_compat.loaders import evaluation_loaders
from lightning_tricks._shared.mean_loss import MeanLoss
from lightning_tricks._shared.tensors import tensors_in
from lightning_tricks.metrics.core.sampler_shards import SamplerShard, get_sampler_shard
from lightning_tricks.metrics.core.suite import MetricSuite


@dataclass
class DataloaderMetrics:
    """The metrics and the mean loss of one dataloader in an epoch.

    Attributes:
        suite: The metrics.
        loss: The mean loss.
        shard: The samples that the sampler gives this rank, or the reason why they are not known.
        num_unmeasured: The number of batches for which the step returned nothing to measure.
        has_seen_batch: Whether there was a batch, in sanity checking or after it.
    """

    suite: MetricSuite
    loss: MeanLoss
    shard: SamplerShard | str = ""
    num_unmeasured: int = 0
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
        if not is_complete:
            self.num_unmeasured += 1
        elif num_rows != 0:
            self.suite.update(**inputs)
        loss = inputs.get("loss")
        if isinstance(loss, Tensor):
            samples = _count_rows(inputs, batch) if num_rows is None else num_rows
            self.loss.update(loss, samples, loss_factor, own=owns_loss)

    def find_shard(self, monitor: str, trainer: Trainer, stage: str, dataloader_idx: int) -> None:
        """Find which samples the sampler of an evaluation gives this rank; warn where that is not known."""
        before, self.shard = self.shard, get_sampler_shard(evaluation_loaders(trainer)[dataloader_idx])
        if isinstance(self.shard, str) and self.shard != before:
            rank_zero_warn(
                f"{monitor}: {stage} over {trainer.world_size} ranks may not be what one process would measure: "
                f"{self.shard}."
            )

    def drop_repeated(
        self, monitor: str, inputs: Mapping[str, Any], stage: str, batch_idx: int
    ) -> tuple[Mapping[str, Any], int | None]:
        """Return the inputs without the samples that other ranks count, and the number of those left; None for all."""
        if not isinstance(self.shard, SamplerShard):
            return inputs, None
        size, num_own = self.shard.batch_sizes(batch_idx)
        if num_own == size:
            return inputs, None
        return _take_first_rows(monitor, inputs, size, num_own, stage), num_own

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured so far, as tensors and plain values on the CPU."""
        return {"suite": self.suite.state_dict(), "loss": self.loss.state_dict(), "passed_over": self.num_unmeasured}

    def load(self, states: Sequence[Mapping[str, Any]], device: torch.device | None = None) -> None:
        """Replace what was measured so far by the merged states of several ranks; reset it if there are none."""
        self.suite.load([state["suite"] for state in states], device)
        self.loss.load([state["loss"] for state in states], device)
        self.num_unmeasured = sum(state.get("passed_over", 0) for state in states)


def _take_first_rows(monitor: str, inputs: Mapping[str, Any], size: int, count: int, stage: str) -> Mapping[str, Any]:
    """Return the first `count` of the `size` samples of a batch; all of them, with a warning, where that is not clear.

    Args:
        monitor: The name of the monitor, for the warning.
        inputs: The inputs of the metrics, by name.
        size: The number of samples in the batch.
        count: How many of them to take.
        stage: "val" or "test".
    """
    rows = {name: value for name, value in inputs.items() if _has_rows(value)}
    if count and any(len(value) != size for name, value in rows.items() if name != "loss"):
        shapes = ", ".join(f"{name} {tuple(getattr(v, 'shape', [len(v)]))}" for name, v in rows.items())
        warnings.warn(  # not on rank zero alone: the last batch of one rank may differ from those of the others
            f"{monitor}: {size - count} of the {size} samples of the last batch of {stage} are repeated ones, "
            f"and it is unknown which rows belong to them ({shapes}), so they count twice.",
            stacklevel=2,
        )
        return inputs
    return {name: value[:count] if name in rows else value for name, value in inputs.items()}


def _count_rows(inputs: Mapping[str, Any], batch: Any) -> int:
    target = inputs.get("target")
    if isinstance(target, Tensor) and target.ndim:
        return target.shape[0]
    rows = (len(value) for name, value in inputs.items() if name != "loss" and _has_rows(value))
    return next(rows, None) or next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 1)


def _has_rows(value: Any) -> bool:
    return bool(value.ndim) if isinstance(value, Tensor) else isinstance(value, list | tuple)
