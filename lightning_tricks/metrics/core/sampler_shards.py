"""Which of the samples that a rank's loader gives are its own, and which only fill up the last batch of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset


@dataclass(frozen=True)
class SamplerShard:
    """A rank's share of a data set that a `DistributedSampler` divides.

    The sampler gives position p of rank r the sample p * world + r, and starts again at the first ones where there
    are no more of them: those are samples that other ranks have counted already.

    Attributes:
        own: How many samples of the rank are its own; they come first.
        given: How many samples the sampler gives the rank, at least `own`.
        batch_size: Of the loader; 1 where it does not batch.
    """

    own: int
    given: int
    batch_size: int

    def batch_sizes(self, batch_idx: int) -> tuple[int, int]:
        """Return how many samples a batch has, and how many of them, from the first on, are the rank's own."""
        start = batch_idx * self.batch_size
        size = max(0, min(self.batch_size, self.given - start))
        return size, max(0, min(size, self.own - start))


def get_sampler_shard(loader: Any) -> SamplerShard | str:
    """Return the share of a loader's rank, or the reason why it is not known.

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
    if getattr(loader, "drop_last", False) or sampler.drop_last:
        return "drop_last leaves out other samples on several ranks than on one"
    length = len(sampler.dataset)  # type: ignore[arg-type]
    own = len(range(sampler.rank, length, sampler.num_replicas))
    return SamplerShard(own, sampler.num_samples, loader.batch_size or 1)
