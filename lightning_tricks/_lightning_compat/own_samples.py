"""The samples that a rank counts where several evaluate, so that each one counts once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from lightning_tricks._lightning_compat.flavor import rank_zero_warn
from lightning_tricks._lightning_compat.loaders import evaluation_loaders

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import Trainer


# Lightning's subclasses share samples out as torch's does; another class may do anything.
_OF_LIBRARIES = ("torch.", "lightning.", "lightning_fabric.", "pytorch_lightning.")


@dataclass(frozen=True)
class SamplerShard:
    """The shard of a data set that a `DistributedSampler` gives to one rank.

    At position p, rank r gets the sample p * world_size + r. When there are no more samples, the sampler starts again
    with the first ones, which other ranks have counted already.

    Attributes:
        num_own: The number of samples that no other rank has counted; they come first.
        num_samples: The number of samples that the sampler gives to the rank, at least `num_own`.
        batch_size: The batch size of the loader; 1 if it does not batch.
    """

    num_own: int
    num_samples: int
    batch_size: int

    def batch_sizes(self, batch_idx: int) -> tuple[int, int]:
        """Return the number of samples in a batch, and how many of them, from the first on, are the rank's own."""
        start = batch_idx * self.batch_size
        size = max(0, min(self.batch_size, self.num_samples - start))
        return size, max(0, min(size, self.num_own - start))


def get_sampler_shard(loader: Any) -> SamplerShard | str:
    """Return the shard of a loader's rank, or the reason why it is not known.

    Args:
        loader: A DataLoader, on one of several ranks.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return "an IterableDataset divides its samples itself"
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return f"{type(batch_sampler).__name__} makes the batches itself"
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return f"{type(loader).__name__} has no DistributedSampler, so each rank may read every sample"
    if not f"{type(sampler).__iter__.__module__}.".startswith(_OF_LIBRARIES):
        return f"{type(sampler).__name__} chooses its own order"
    # The one drops the end of each rank's samples, the other that of the data set.
    if getattr(loader, "drop_last", False) or sampler.drop_last:
        return "drop_last leaves out different samples on multiple ranks than on one"
    length = len(sampler.dataset)  # type: ignore[arg-type]
    # torch's sampler begins again where the samples do not come out even, so that all ranks have as many (pytorch
    # #25162): these samples count twice, and the result depends on the number of ranks.
    num_own = len(range(sampler.rank, length, sampler.num_replicas))
    return SamplerShard(num_own, sampler.num_samples, loader.batch_size or 1)


def take_first_rows(values: Mapping[str, Any], size: int, count: int) -> Mapping[str, Any] | str:
    """Return values with the first `count` of the `size` samples of a batch, or the shapes for which that is unclear.

    Args:
        values: Tensors and lists with a row for each sample, and values without rows, which are left as they are. A
            `loss` may have rows of its own.
        size: The number of samples in the batch.
        count: How many of them to take.
    """
    # A batch may hold a value for all of it, such as a mean; what is neither that nor has its rows is unclear.
    rows = {name: value for name, value in values.items() if has_rows(value)}
    if count and any(len(value) != size for name, value in rows.items() if name != "loss"):
        return ", ".join(f"{name} {tuple(getattr(v, 'shape', [len(v)]))}" for name, v in rows.items())
    return {name: value[:count] if name in rows else value for name, value in values.items()}


def has_rows(value: Any) -> bool:
    """Whether a value is a tensor with dimensions, or a list."""
    return bool(value.ndim) if isinstance(value, Tensor) else isinstance(value, list | tuple)


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
        # The Trainer's, in which Lightning has put the sampler, not those that the user gave.
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
                f"{self._counted}: {size - num_own} of the {size} samples of the last batch of {stage} are repeated, "
                f"and it is unknown which rows belong to them ({own}), so they count twice.",
                stacklevel=2,
            )
        return values, None
