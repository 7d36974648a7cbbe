"""The samples that a rank counts where several evaluate, so that each one counts once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import rank_zero_warn
from lightning_tricks._lightning_compat.loaders import evaluation_loaders
from lightning_tricks._shared.sampler_shards import SamplerShard, get_sampler_shard, take_first_rows

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import Trainer


class OwnSamples:
    """The samples of each batch that no other rank counts; a DistributedSampler repeats some on several ranks.

    Args:
        counted: What counts them, for warnings; None for no warnings.
    """

    def __init__(self, counted: str | None) -> None:
        self._counted = counted
        self._warned: dict[tuple[str, int], str] = {}

    def shard(self, trainer: Trainer, stage: str, dataloader_idx: int) -> SamplerShard | str:
        """Return which samples the sampler of a loader gives this rank, or the reason why they are not known."""
        loader = trainer.train_dataloader if stage == "train" else evaluation_loaders(trainer)[dataloader_idx]
        return get_sampler_shard(loader)

    def take(
        self, trainer: Trainer | None, stage: str, dataloader_idx: int, batch_idx: int, values: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], int | None]:
        """Drop the samples of a batch that other ranks count, as far as they are known.

        Args:
            trainer: The Trainer; None where a step is called without one.
            stage: "train", "val" or "test".
            dataloader_idx: The index of the loader.
            batch_idx: The index of the batch.
            values: Values with a row for each sample of the batch, by name.

        Returns:
            The values without these samples, and the number of those left; None for all.
        """
        if trainer is None or trainer.world_size == 1:
            return values, None
        shard = self.shard(trainer, stage, dataloader_idx)
        if isinstance(shard, str):
            if self._counted is not None and self._warned.get((stage, dataloader_idx)) != shard:
                self._warned[stage, dataloader_idx] = shard
                rank_zero_warn(
                    f"{self._counted}: {stage} over {trainer.world_size} ranks may not be what one process would "
                    f"measure: {shard}."
                )
            return values, None
        size, num_own = shard.batch_sizes(batch_idx)
        if num_own == size:
            return values, None
        own = take_first_rows(values, size, num_own)
        if not isinstance(own, str):
            return own, num_own
        if self._counted is not None:
            warnings.warn(  # not on rank zero alone: the last batch of one rank may differ from those of the others
                f"{self._counted}: {size - num_own} of the {size} samples of the last batch of {stage} are repeated "
                f"ones, and it is unknown which rows belong to them ({own}), so they count twice.",
                stacklevel=2,
            )
        return values, None
