"""In which order each member sees which rows: what a loader's sampler yields, bootstrap samples and fixed rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.ensembles.core.seeds import BOOTSTRAP, SAMPLE_ORDER, purpose_seed


class MemberOrders:
    """The order in which each member sees the samples, epoch by epoch; the same on all ranks, which share it out.

    Args:
        size: Number of samples that each member sees in an epoch, on all ranks that share them out.
        n_members: Number of orders.
        seed: The seed, which decides about all orders together with the epoch.
        member_rows: Rows of the data set that each member is trained on, (size,) each; None for all rows.
        sampler: What is asked for the rows of each member, or for their places in `member_rows`; None shuffles them.
        shard: This rank and the number of ranks, for a loader that Lightning would distribute.
    """

    def __init__(
        self,
        size: int,
        n_members: int,
        seed: int,
        *,
        member_rows: Sequence[Tensor] | None = None,
        sampler: Any = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.size, self.n_members, self.seed = size, n_members, seed
        self.sampler, self.shard = sampler, shard
        self.epoch = 0
        self.member_rows = member_rows

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as samplers of Lightning have it."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples that each member sees on this rank."""
        return -(-self.size // self.shard[1])

    def draw_orders(self) -> Tensor:
        """Return this epoch's indices, (n_members, samples)."""
        return torch.stack([self._of(member) for member in range(self.n_members)])

    def _of(self, member: int) -> Tensor:
        order = self._sampled(member)
        rank, world = self.shard
        if world > 1:  # as DistributedSampler does it
            missing = len(self) * world - len(order)
            order = torch.cat([order, order.repeat(-(-missing // len(order)))[:missing]])[rank::world]
        return order if self.member_rows is None else self.member_rows[member][order]

    def _sampled(self, member: int) -> Tensor:
        seed = purpose_seed(self.seed, SAMPLE_ORDER, self.epoch, member)
        sampler, own = self.sampler, torch.Generator().manual_seed(seed)
        if sampler is None:
            return torch.randperm(self.size, generator=own)
        if isinstance(sampler, DistributedSampler):
            sampler = copy.copy(sampler)
            sampler.seed = purpose_seed(sampler.seed, SAMPLE_ORDER, self.seed, member)
        elif _generator(sampler) is not None:
            sampler = copy.copy(sampler)
            sampler.generator = own
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(self.epoch)
        with isolated_rng(seed):
            rows = list(sampler)
        if len(rows) != self.size:
            raise ValueError(
                f"{type(sampler).__name__} has given {len(rows)} rows in an epoch, and its len() is {self.size}: let "
                "__len__ return the number of rows that each epoch has."
            )
        return torch.tensor(rows, dtype=torch.int64)


def bootstrap_rows(size: int, n_members: int, seed: int) -> list[Tensor]:
    """Draw a bootstrap sample for each member, with replacement: indices (size,) each."""
    generators = (torch.Generator().manual_seed(purpose_seed(seed, BOOTSTRAP, member)) for member in range(n_members))
    return [torch.randint(size, (size,), generator=generator) for generator in generators]


def why_not_reorder(loader: Any) -> str:
    """Return why the order of a loader's samples cannot be chosen, or nothing."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is not a DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in a way of its own"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is an IterableDataset, which gives one order"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"{type(loader.batch_sampler or loader.dataset).__name__} makes the batches itself"
    return _why_not_ask(sampler_of(loader))


def _why_not_ask(sampler: Any) -> str:
    """Return why a sampler cannot be asked for the rows of several members, or nothing."""
    name = type(sampler).__name__
    try:
        size = len(sampler)
    except (TypeError, NotImplementedError):
        return f"{name} has no length"
    if type(sampler).__module__ == RandomSampler.__module__:
        return ""
    with isolated_rng():
        first = next(iter(copy.copy(sampler)), None) if size else None
    is_row = first is None or isinstance(first, int | np.integer) or (isinstance(first, Tensor) and first.ndim == 0)
    return "" if is_row else f"{name} yields {first!r} instead of the number of a row"


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives another order each time."""
    sampler = sampler_of(loader)
    return bool(sampler.shuffle) if isinstance(sampler, DistributedSampler) else type(sampler) is not SequentialSampler


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what chooses the rows of a loader; `loader.sampler` is another one where a batch sampler was given."""
    return cast(BatchSampler, loader.batch_sampler).sampler


def _generator(sampler: Any) -> torch.Generator | None:
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None  # a sampler may have one of numpy


def _yields_all_once(sampler: Any) -> bool:
    """Whether a sampler yields the rows from 0 to its length, each of them once in an epoch."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler._num_samples is None
    return type(sampler) is SequentialSampler


def member_orders(
    loader: DataLoader[Any],
    n_members: int,
    seed: int,
    member_rows: Sequence[Tensor] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> MemberOrders:
    """Return the orders of the members for a loader's sampler.

    Args:
        loader: A DataLoader for which `why_not_reorder` returns an empty string.
        n_members: Number of members.
        seed: The seed of the orders; that of the sampler's generator counts if it has one.
        member_rows: For each member, which of the rows that the sampler yields it is trained on, as whole numbers below
            the length of the sampler. What the sampler yields for a member is then drawn once, and shuffled in each
            epoch; a sampler that draws with replacement decides alone.
        shard: This rank and the number of ranks, as Lightning would share the samples out.
    """
    sampler = sampler_of(loader)
    size, generator = len(sampler), _generator(sampler)
    if isinstance(sampler, DistributedSampler):
        shard = (0, 1)  # shares out by itself
    if member_rows is not None:
        if not _yields_all_once(sampler):
            drawn = MemberOrders(size, n_members, purpose_seed(seed, BOOTSTRAP), sampler=copy.copy(sampler))
            own = range(n_members), drawn.draw_orders()
            is_drawn = getattr(sampler, "replacement", False)
            member_rows = [rows if is_drawn else rows[member_rows[member]] for member, rows in zip(*own, strict=True)]
        sampler = None if is_shuffled(loader) else SequentialSampler(range(size))
    elif type(sampler) is RandomSampler and _yields_all_once(sampler):
        sampler = None
    if generator is not None:  # its seed alone, so that a run that is resumed has the same orders
        seed = generator.initial_seed()
    return MemberOrders(size, n_members, seed, member_rows=member_rows, sampler=sampler, shard=shard)


def fixed_rows(loader: DataLoader[Any]) -> Tensor | str:
    """Return the rows that a loader's sampler yields in each epoch, in ascending order, or why there are no such rows.

    Args:
        loader: A DataLoader for which `why_not_reorder` returns an empty string.
    """
    sampler = sampler_of(loader)
    name, size = type(sampler).__name__, len(sampler)
    if isinstance(sampler, DistributedSampler):
        return f"a {name} gives each rank rows of its own, which the Trainer does by itself"
    if _yields_all_once(sampler):
        return torch.arange(size)
    orders = MemberOrders(size, 2, 0, sampler=copy.copy(sampler))  # of two members in two epochs
    drawn = [orders.draw_orders()]
    orders.set_epoch(1)
    rows = torch.cat([*drawn, orders.draw_orders()]).sort(dim=1).values
    if getattr(sampler, "replacement", False) or not (rows == rows[0]).all() or len(rows[0].unique()) < size:
        return f"a {name} may draw rows that are held out"
    return rows[0]
