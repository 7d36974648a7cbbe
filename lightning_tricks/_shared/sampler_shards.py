"""Which samples of a rank's DataLoader are its own, and which the DistributedSampler repeats to fill the last batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

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
        return f"{type(loader).__name__} has no DistributedSampler, so that each rank may see each sample"
    if not f"{type(sampler).__iter__.__module__}.".startswith(_OF_LIBRARIES):
        return f"{type(sampler).__name__} has an order of its own"
    if getattr(loader, "drop_last", False) or sampler.drop_last:
        return "drop_last leaves out other samples on several ranks than on one"
    length = len(sampler.dataset)  # type: ignore[arg-type]
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
    rows = {name: value for name, value in values.items() if has_rows(value)}
    if count and any(len(value) != size for name, value in rows.items() if name != "loss"):
        return ", ".join(f"{name} {tuple(getattr(v, 'shape', [len(v)]))}" for name, v in rows.items())
    return {name: value[:count] if name in rows else value for name, value in values.items()}


def has_rows(value: Any) -> bool:
    """Whether a value is a tensor with dimensions, or a list."""
    return bool(value.ndim) if isinstance(value, Tensor) else isinstance(value, list | tuple)


def turns_of(sizes: Sequence[int]) -> list[int] | None:
    """Return the order in which a `DistributedSampler` has given out the samples of ranks that lie one after another.

    Args:
        sizes: The number of samples of each rank.

    Returns:
        The places of the samples, or None where ranks have not taken turns.

    Examples:
        >>> turns_of([3, 2]), turns_of([1, 3])
        ([0, 3, 1, 4, 2], None)
    """
    if list(sizes) != sorted(sizes, reverse=True) or sizes[0] - sizes[-1] > 1:
        return None
    positions = [torch.arange(size) * len(sizes) + rank for rank, size in enumerate(sizes)]
    return torch.cat(positions).argsort().tolist()
