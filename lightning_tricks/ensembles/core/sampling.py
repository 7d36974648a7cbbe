"""Batches that hold the rows of all members, one member after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lightning_tricks._shared.rng import seed_global_rngs
from lightning_tricks.ensembles.core.sample_orders import MemberOrders
from lightning_tricks.ensembles.core.seeds import WORKERS, purpose_seed


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

    def __init__(self, loader: DataLoader[Any], orders: MemberOrders) -> None:
        self.loader, self.sampler = loader, orders
        batches = cast(BatchSampler, loader.batch_sampler)
        self.dataset, self.batch_size, self.drop_last = loader.dataset, batches.batch_size, batches.drop_last
        self.worker_init_fn = loader.worker_init_fn  # which Lightning may set
        self._batch_loader: DataLoader[Any] | None = None
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
        return {"epoch": epoch, "batches": self.given if self._epoch == epoch else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at that batch, if the next epoch is the one of the state."""
        self._resume_position = dict(state)

    def __len__(self) -> int:
        count = len(self.sampler)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resume_position = self._resume_position, {"epoch": -1, "batches": 0}
        self._epoch = self.sampler.epoch
        self.given = resumed["batches"] if resumed["epoch"] == self._epoch else 0
        self.data = tensors_in_memory(self.loader)
        for batch in self._load_batches() if self.data is None else self._index_batches(*self.data):
            self.given += 1
            yield batch

    def batches(self) -> Iterator[Tensor]:
        """Yield this epoch's indices that were not given yet, (n, batch) for each batch."""
        self._indices = self.sampler.draw_orders()
        for number in range(self.given, len(self)):
            yield self.indices_of(number)

    def indices_of(self, batch_idx: int) -> Tensor:
        """Return the indices of the samples in a batch of this epoch, (n, batch)."""
        return cast(Tensor, self._indices)[:, batch_idx * self.batch_size : (batch_idx + 1) * self.batch_size]

    def _index_batches(self, tensors: Sequence[Tensor], subset: Tensor | None) -> Iterator[Any]:
        pinned = self.loader.pin_memory and torch.cuda.is_available()
        for indices in self.batches():
            flat = indices.flatten()
            rows = flat if subset is None else subset[flat]
            parts = [tensor.index_select(0, rows.to(tensor.device)) for tensor in tensors]
            yield [part.pin_memory() if pinned and not part.is_cuda else part for part in parts]

    def _load_batches(self) -> Iterator[Any]:
        if self._batch_loader is None:
            given = self.loader
            self._batch_loader = DataLoader(
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
            seed = purpose_seed(orders.seed, WORKERS, orders.epoch, number, orders.shard[0])
            yield [seed, *indices.flatten().tolist()]


class _SeededBatchDataset(Dataset[Any]):
    """A data set asked for whole batches, whose random numbers in workers follow from the batch alone."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[Any]:
        seed, *rows = indices
        if get_worker_info() is not None:
            seed_global_rngs(seed)
        whole = getattr(self.dataset, "__getitems__", None)
        return list(whole(rows)) if whole is not None else [self.dataset[row] for row in rows]


def tensors_in_memory(loader: DataLoader[Any]) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """Return the tensors behind a loader, and the rows of a subset of them; None where there is more to it."""
    dataset: Any = loader.dataset
    rows: Tensor | None = None
    while type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices)
        rows = indices if rows is None else indices[rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or loader.collate_fn is not default_collate:
        return None
    return dataset.tensors, rows


def batch_of_first_sample(loader: Any) -> Any:
    """Return the first sample of a loader's data set as a batch of one; None where that would read on in a stream."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.collate_fn([loader.dataset[0]])
