"""What ranks tell each other to end an iteration together, in any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks._shared.text import list_names

T = TypeVar("T")
_MAX_LISTED = 8  # ranks in a message


def has_certain_length(loader: Any) -> bool:
    """Whether a loader gives as many batches as its length says: one of a map-style data set and torch's samplers.

    Args:
        loader: Any iterable.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    own, batches = type(loader), loader.batch_sampler
    if own.__iter__ is not DataLoader.__iter__ or own.__len__ is not DataLoader.__len__:
        return False
    if batches is not None and type(batches) is not BatchSampler:
        return False
    kind = type(loader.sampler if batches is None else batches.sampler)
    return issubclass(kind, Sampler) and kind.__module__ in (Sampler.__module__, DistributedSampler.__module__)


def least_and_furthest(position: int, group: Any = None) -> tuple[int, int]:
    """Return the smallest and the largest position of all ranks; each has to call it, with a number on the CPU.

    Args:
        position: The position of this rank.
        group: The process group, which has to communicate on the CPU; None for the default one.
    """
    both = torch.tensor([-position, position])
    distributed.all_reduce(both, distributed.ReduceOp.MAX, group)
    least, furthest = both.tolist()
    return -least, furthest


def until_a_rank_ends(batches: Iterable[T], group: Any = None) -> Iterator[T]:
    """Yield batches as long as each rank has one.

    Args:
        batches: The batches of this rank, such as a DataLoader. A batch that is fetched where another rank has no more
            is discarded.
        group: The process group, which has to communicate on the CPU; None for the default one. Without one, all
            batches are yielded.

    Yields:
        The batches, the same number on each rank.

    Examples:
        >>> list(until_a_rank_ends([1, 2]))
        [1, 2]
    """
    iterator = iter(batches)
    several = distributed.is_available() and distributed.is_initialized()
    for batch in iterator:
        if several and least_and_furthest(0, group)[1]:
            return
        yield batch
    if several:
        least_and_furthest(1, group)


class SharedEnd:
    """Where the iterations over a loader of several parts end on all ranks.

    Args:
        name: What is iterated over, for messages.
        group: The process group, which has to communicate on the CPU; None for the default one.
        say: Is given a message that ranks have more batches than others, once for the same numbers.

    Attributes:
        asks: Whether the ranks have to ask each other at each batch, as the length of a part is not certain.
    """

    def __init__(self, name: str, group: Any, say: Callable[[str], object]) -> None:
        self._name, self._group, self._say = name, group, say
        self._said = set[str]()
        self._given = 0  # batches since the iteration began
        self.asks = True

    def shortest(self, lengths: Sequence[float], is_certain: bool) -> list[float]:
        """Return the smallest length of each part over all ranks, each of which has to call it.

        Args:
            lengths: The numbers of batches of the parts on this rank; infinity if unknown.
            is_certain: Whether all are known and certain.
        """
        ranks = gather_objects((lengths, is_certain), self._group)
        self.asks = not all(certain for _, certain in ranks)
        shortest = [min(part) for part in zip(*(lengths for lengths, _ in ranks), strict=True)]
        pairs = [list(zip(lengths, shortest, strict=True)) for lengths, _ in ranks]
        left = [sum(own - least for own, least in parts if least < own < float("inf")) for parts in pairs]
        self._given = 0
        self._tell([f"{count:g}" if count else "" for count in left], any(shortest))
        return shortest

    def compare(self, position: int) -> tuple[int, int]:
        """Return the smallest and the largest position of all ranks, each of which has to call it.

        Args:
            position: The part of which this rank has a batch; the number of parts if it has none; -1 after an error.
        """
        least, furthest = least_and_furthest(position, self._group)
        if 0 <= least < furthest:
            ranks = gather_objects(position, self._group)
            self._tell(["at least 1" if one < furthest else "" for one in ranks], self._given)
        self._given += 1
        return least, furthest

    def _tell(self, left: Sequence[str], has_batches: object = True) -> None:
        ends = list_names((f"rank {rank}" for rank, count in enumerate(left) if not count), _MAX_LISTED)
        more = list_names((f"{count} of rank {rank}" for rank, count in enumerate(left) if count), _MAX_LISTED)
        line = f"EndTogether: {self._name} ends with the fewest batches, those of {ends}. Left out: {more}."
        if not has_batches:
            line += " Nothing is left: give the data at least as many shards as ranks times workers."
        if any(left) and line not in self._said:
            self._said.add(line)
            self._say(line)
