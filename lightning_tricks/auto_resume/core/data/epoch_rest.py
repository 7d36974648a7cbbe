"""The rest of an epoch, shared out anew among another number of ranks, so that each sample of the epoch is read once.

Of one order of all samples, torch's DistributedSampler gives rank r of R what lies at r, r + R, r + 2R and so on.
After k batches of B samples on each rank, the first k * B * R samples of that order were read, whoever read them; what
follows is shared out in the same way. The order is not saved: it is drawn again, and is the run's own if the indices
that rank zero had in it have the digest that was saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.auto_resume.core.data.iterator_parts import OrderDigest
from lightning_tricks.auto_resume.core.data.loader_objects import LoaderSnapshot

# Samplers whose order follows from the random state: what the Trainer replaces on several ranks, and what it wraps
_REPLACED, _WRAPPED = (RandomSampler, SequentialSampler), (SubsetRandomSampler, WeightedRandomSampler)
_ORIGIN_KEYS = ("created", "started", "order", "batches", "shares")  # of the position that tells how to draw the order


def why_not_shared_out(loader: DataLoader[Any]) -> str:
    """Return why the rest of an epoch of a map-style loader cannot be shared out anew; empty where it can."""
    batches, sampler = loader.batch_sampler, _inner_sampler(loader)
    if type(batches) is not BatchSampler or batches.sampler is not loader.sampler:
        return f"a {type(batches).__name__} chooses its batches"
    if type(sampler) not in (*_REPLACED, *_WRAPPED, DistributedSampler):
        return f"a {type(sampler).__name__} chooses its samples"
    return ""


def _inner_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that the Trainer wrapped to share it out among ranks; the loader's own where it did not."""
    return getattr(getattr(loader.sampler, "dataset", None), "_sampler", loader.sampler)


def share_of(loader: Any) -> tuple[int, int]:
    """Return which share of the samples a loader reads, and of how many."""
    sampler = getattr(loader, "sampler", None)
    return (sampler.rank, sampler.num_replicas) if isinstance(sampler, DistributedSampler) else (0, 1)


@dataclass(frozen=True)
class EpochRest:
    """What is left of an epoch in which the number of ranks has changed; its fields are a format.

    Attributes:
        origin: Of rank zero's position when the number first changed, what tells how to draw the order again; with the
            "batch_size" and the "epoch" of then.
        offset: Samples of that order that were read before the number changed last.
        done: The batches that a loader's rest begins after: as many as it has more than the rest needs.
    """

    origin: Mapping[str, Any]
    offset: int
    done: int

    @classmethod
    def after(cls, position: Mapping[str, Any], *, batch_size: int, epoch: int) -> EpochRest:
        """Return what is left after the position of rank zero, in an epoch with batches of this size."""
        rest = cls(**position["rest"]) if position.get("rest") else None
        if rest is None:
            known = {key: position.get(key) for key in _ORIGIN_KEYS}
            rest = cls({**known, "batch_size": batch_size, "epoch": epoch}, 0, 0)
        read = (int(position["batches"]) - rest.done) * batch_size * (position.get("shares") or 1)
        return cls(rest.origin, rest.offset + read, 0)

    def batches(self, loader: DataLoader[Any], rank: int, ranks: int) -> list[list[int]] | None:
        """Return the indices of the batches that a rank still has; None where the order cannot be drawn again.

        All ranks have equally many: as with DistributedSampler, samples are repeated to that end, or left out if its
        `drop_last` is set.
        """
        order = next((order for order in _orders(loader, self.origin) if _explains(order, self.origin)), None)
        if order is None or loader.batch_size is None:
            return None
        rest, size = order[self.offset :], loader.batch_size
        drops = loader.sampler.drop_last if isinstance(loader.sampler, DistributedSampler) else False
        each = len(rest) // ranks if drops else -(-len(rest) // ranks)
        own = [rest[index % len(rest)] for index in range(rank, each * ranks, ranks)]
        batches = [own[start : start + size] for start in range(0, each, size)]
        return batches[:-1] if batches and loader.drop_last and len(batches[-1]) < size else batches

    def as_dict(self, done: int) -> dict[str, Any]:
        """Return the rest as plain values, for a loader that counts so many batches before it."""
        return {**asdict(self), "done": done}


def _orders(loader: DataLoader[Any], origin: Mapping[str, Any]) -> Iterator[Sequence[int]]:
    """Yield the orders in which samplers may have given the samples in the origin's epoch."""
    data: Any = loader.dataset
    sampler: Any = loader.sampler
    seed = getattr(sampler, "seed", int(os.environ.get("PL_GLOBAL_SEED", 0)))  # as the Trainer's is

    def shuffled(order: Any) -> list[int]:
        distributed: DistributedSampler[Any] = DistributedSampler(order, 1, 0, shuffle=True, seed=seed)
        distributed.set_epoch(origin["epoch"])
        return [order[index] for index in distributed]

    yield range(len(data))
    yield shuffled(range(len(data)))
    before, inner = LoaderSnapshot(loader), _inner_sampler(loader)
    if type(inner) not in _WRAPPED:
        inner = RandomSampler(data, generator=getattr(sampler, "generator", loader.generator))
    for drawn in range(2):  # the iterator of a loader draws a seed for its workers, and then asks the sampler
        with isolated_rng():
            LoaderSnapshot.from_dict(origin["started"] or origin["created"]).restore(loader)
            for _ in range(drawn):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            order = list(inner)
        before.restore(loader)
        yield order
        yield shuffled(order)


def _explains(order: Sequence[int], origin: Mapping[str, Any]) -> bool:
    """Whether the batches that rank zero has read are the first ones of its share of an order."""
    digest, size = OrderDigest(), origin["batch_size"]
    own = order[:: origin["shares"] or 1]
    for batch in range(origin["batches"]):
        digest.add(list(own[batch * size : (batch + 1) * size]))
    return bool(origin["order"]) and digest.digest(origin["batches"]) == origin["order"]
