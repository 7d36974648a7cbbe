"""Which rows each member sees in which order, and the batches that hold the rows of all members."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import data

from lightning_tricks._shared.rng import derive_seed, isolated_rng, seed_global_rngs

# The purposes of an ensemble's seeds: no two of them draw the same numbers
INITIAL_WEIGHTS, SAMPLE_ORDER, BOOTSTRAP, WORKERS, HELD_OUT, CROSS_VALIDATION = range(6)


def purpose_seed(seed: int, *path: int) -> int:
    """Derive the seed for one purpose from the seed of the ensemble.

    Args:
        seed: Seed of the ensemble, >= 0.
        *path: The purpose and whole numbers >= 0 that go with it, such as the member and the epoch. Paths of different
            length have different seeds: (1,) and (1, 0) differ.

    Returns:
        A seed in [0, 2**32 - 1].
    """
    # numpy's SeedSequence does not tell (1,) from (1, 0): the length of the path is hashed as well
    return derive_seed(len(path), seed, *path)


class MemberOrders:
    """The order in which each member sees the samples, epoch by epoch; the same on all ranks, which share it out.

    Args:
        size: Number of samples that each member sees in an epoch, on all ranks that share them out.
        members: The numbers of the members.
        seed: The seed, which decides about all orders together with the epoch.
        member_rows: Rows of the data set that each member is trained on, (size,) each; None for all rows.
        sampler: Yields the rows of each member, or their places in `member_rows`; None shuffles them.
        shard: This rank and the number of ranks, for a loader that Lightning would distribute.
    """

    def __init__(
        self,
        size: int,
        members: Sequence[int],
        seed: int,
        *,
        member_rows: Sequence[Tensor] | None = None,
        sampler: Any = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.size, self.members, self.seed = size, members, seed
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
        return torch.stack([self._of(member) for member in self.members])

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
        if isinstance(sampler, data.DistributedSampler):
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
    if not isinstance(loader, data.DataLoader):
        return f"a {type(loader).__name__} is not a DataLoader"
    if type(loader).__iter__ is not data.DataLoader.__iter__:
        return f"{type(loader).__name__} has its own __iter__"
    if isinstance(loader.dataset, data.IterableDataset):
        return f"{type(loader.dataset).__name__} is an IterableDataset, which has only one order"
    if type(loader.batch_sampler) is not data.BatchSampler:
        return f"{type(loader.batch_sampler or loader.dataset).__name__} makes the batches itself"
    return _why_not_ask(sampler_of(loader))


def _why_not_ask(sampler: Any) -> str:
    """Return why a sampler cannot be asked for the rows of several members, or nothing."""
    name = type(sampler).__name__
    try:
        size = len(sampler)
    except (TypeError, NotImplementedError):
        return f"{name} has no length"
    if type(sampler).__module__ == data.RandomSampler.__module__:
        return ""
    with isolated_rng():
        first = next(iter(copy.copy(sampler)), None) if size else None
    is_row = first is None or isinstance(first, int | np.integer) or (isinstance(first, Tensor) and first.ndim == 0)
    return "" if is_row else f"{name} yields {first!r} instead of the number of a row"


def is_shuffled(loader: data.DataLoader[Any]) -> bool:
    """Whether a loader gives another order each time."""
    sampler = sampler_of(loader)
    if isinstance(sampler, data.DistributedSampler):
        return bool(sampler.shuffle)
    return type(sampler) is not data.SequentialSampler


def sampler_of(loader: data.DataLoader[Any]) -> Any:
    """Return the sampler that chooses the rows; `loader.sampler` is another one where a batch sampler was given."""
    return cast(data.BatchSampler, loader.batch_sampler).sampler


def _generator(sampler: Any) -> torch.Generator | None:
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None  # a sampler may have one of numpy


def yields_all_once(sampler: Any) -> bool:
    """Whether a sampler yields the rows from 0 to its length, each of them once in an epoch."""
    if type(sampler) is data.RandomSampler:
        return not sampler.replacement and sampler._num_samples is None
    return type(sampler) is data.SequentialSampler


def member_orders(
    loader: data.DataLoader[Any],
    members: Sequence[int],
    seed: int,
    member_rows: Sequence[Tensor] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> MemberOrders:
    """Return the orders of the members for a loader's sampler.

    Args:
        loader: A DataLoader for which `why_not_reorder` returns an empty string.
        members: The numbers of the members.
        seed: The seed of the orders; that of the sampler's generator counts if it has one.
        member_rows: For each member, which of the rows that the sampler yields it is trained on, as whole numbers below
            the length of the sampler. What the sampler yields for a member is then drawn once, and shuffled in each
            epoch; a sampler that draws with replacement decides alone.
        shard: This rank and the number of ranks, as Lightning would share the samples out.
    """
    sampler = sampler_of(loader)
    size, generator = len(sampler), _generator(sampler)
    if isinstance(sampler, data.DistributedSampler):
        shard = (0, 1)  # shares out by itself
    if member_rows is not None:
        if not yields_all_once(sampler):
            all_members = range(len(member_rows))
            drawn = MemberOrders(size, all_members, purpose_seed(seed, BOOTSTRAP), sampler=copy.copy(sampler))
            is_drawn = getattr(sampler, "replacement", False)
            orders = drawn.draw_orders()
            member_rows = [rows if is_drawn else rows[own] for rows, own in zip(orders, member_rows, strict=True)]
        sampler = None if is_shuffled(loader) else data.SequentialSampler(range(size))
    elif type(sampler) is data.RandomSampler and yields_all_once(sampler):
        sampler = None
    if generator is not None:  # its seed alone, so that a run that is resumed has the same orders
        seed = generator.initial_seed()
    return MemberOrders(size, members, seed, member_rows=member_rows, sampler=sampler, shard=shard)


class MemberLoader:
    """The batches of a DataLoader, with rows of n members in an order of each one's own.

    Data sets of tensors in memory are indexed directly; others are read by a DataLoader with the settings of the given
    one. A batch holds n times as many rows. As the seed and the epoch decide about the orders, and with the batch about
    the random numbers in workers, a run that is resumed in the middle of an epoch continues with the batches that it
    has not seen, whatever the number of workers.

    Args:
        loader: A DataLoader for which `why_not_reorder` returns an empty string.
        orders: The sample orders of the members.
    """

    checks_ranks = True  # AutoResume leaves a state of another number of ranks to it

    def __init__(self, loader: data.DataLoader[Any], orders: MemberOrders) -> None:
        self.loader, self.sampler = loader, orders
        batches = cast(data.BatchSampler, loader.batch_sampler)
        self.dataset, self.batch_size, self.drop_last = loader.dataset, batches.batch_size, batches.drop_last
        self.worker_init_fn = loader.worker_init_fn  # which Lightning may set
        self._batch_loader: data.DataLoader[Any] | None = None
        self._indices: Tensor | None = None  # those of the epoch
        self.data: tuple[tuple[Tensor, ...], Tensor | None] | None = None  # `tensors_in_memory` in this epoch
        self.given = 0  # batches of the epoch in which the last iteration started
        self._epoch = -1  # that epoch
        self._resume_position = {"epoch": -1, "batches": 0}

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its batches that were given."""
        epoch = self.sampler.epoch  # it is set before the epoch's iteration starts
        if self._resume_position["epoch"] == epoch:
            return dict(self._resume_position)
        return {"epoch": epoch, "batches": self.given if self._epoch == epoch else 0, "ranks": self.sampler.shard[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at that batch, if the next epoch is the one of the state.

        The iteration raises a ValueError if another number of ranks shared out its samples.
        """
        self._resume_position = dict(state)

    def __len__(self) -> int:
        count = len(self.sampler)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resume_position = self._resume_position, {"epoch": -1, "batches": 0}
        self._epoch = self.sampler.epoch
        self.given = resumed["batches"] if resumed["epoch"] == self._epoch else 0
        now = self.sampler.shard[1]
        saved = resumed.get("ranks", now)
        if self.given and saved != now:
            raise ValueError(
                f"{saved} ranks divided the samples of each member in this epoch, and {now} would see other samples: "
                f"resume on {saved} ranks, or from the end of an epoch."
            )
        self.data = tensors_in_memory(self.loader)
        for batch in self._load_batches() if self.data is None else self._index_batches(*self.data):
            self.given += 1
            yield batch

    def batches(self) -> Iterator[Tensor]:
        """Yield this epoch's indices that were not given yet, (n, batch) for each batch."""
        self._indices = self.sampler.draw_orders()
        yield from self._indices.split(self.batch_size, dim=1)[self.given : len(self)]

    def indices_of(self, batch_idx: int) -> Tensor:
        """Return the indices of the samples in a batch of this epoch, (n, batch)."""
        return cast(Tensor, self._indices)[:, batch_idx * self.batch_size : (batch_idx + 1) * self.batch_size]

    def _index_batches(self, tensors: Sequence[Tensor], subset: Tensor | None) -> Iterator[Any]:
        pinned = self.loader.pin_memory and torch.cuda.is_available()
        for indices in self.batches():
            rows = indices.flatten() if subset is None else subset[indices.flatten()]
            parts = [tensor.index_select(0, rows.to(tensor.device, non_blocking=True)) for tensor in tensors]
            yield [part.pin_memory() if pinned and not part.is_cuda else part for part in parts]

    def _load_batches(self) -> Iterator[Any]:
        if self._batch_loader is None:
            given = self.loader
            self._batch_loader = data.DataLoader(
                _SeededBatchDataset(given.dataset),
                batch_sampler=_FlatBatchSampler(self),
                num_workers=given.num_workers,
                collate_fn=given.collate_fn,
                pin_memory=given.pin_memory,
                timeout=given.timeout,
                worker_init_fn=self.worker_init_fn,
                multiprocessing_context=given.multiprocessing_context,
                generator=given.generator or torch.Generator(),  # not the global generator, whose state would change
                prefetch_factor=given.prefetch_factor,
                persistent_workers=given.persistent_workers,
            )
        return iter(self._batch_loader)


class _FlatBatchSampler:
    """A batch sampler of all members' indices."""

    def __init__(self, loader: MemberLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[int]]:
        orders = self.loader.sampler
        for number, indices in enumerate(self.loader.batches(), self.loader.given):
            seed = purpose_seed(orders.seed, WORKERS, orders.epoch, number, orders.shard[0] + orders.members[0])
            yield [seed, *indices.flatten().tolist()]


class _SeededBatchDataset(data.Dataset[Any]):
    """A data set asked for whole batches, whose random numbers in workers follow from the batch alone."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[Any]:
        seed, *rows = indices
        if data.get_worker_info() is not None:
            seed_global_rngs(seed)
        whole = getattr(self.dataset, "__getitems__", None)
        return list(whole(rows)) if whole is not None else [self.dataset[row] for row in rows]


def tensors_in_memory(loader: data.DataLoader[Any]) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """Return the tensors behind a loader, and the rows of a subset of them; None where there is more to it."""
    dataset: Any = loader.dataset
    rows: Tensor | None = None
    while type(dataset) is data.Subset:
        indices = torch.as_tensor(dataset.indices)
        rows = indices if rows is None else indices[rows]
        dataset = dataset.dataset
    if type(dataset) is not data.TensorDataset or loader.collate_fn is not data.default_collate:
        return None
    return dataset.tensors, rows


def batch_of_first_sample(loader: Any) -> Any:
    """Return the first sample of a loader's data set as a batch of one; None where that would read on in a stream."""
    if not isinstance(loader, data.DataLoader) or isinstance(loader.dataset, data.IterableDataset):
        return None
    return loader.collate_fn([loader.dataset[0]])
