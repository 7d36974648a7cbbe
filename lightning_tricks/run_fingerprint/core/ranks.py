"""Compare what the ranks of one run have recorded: batches that are equal, weights and learning rates that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, Subset, TensorDataset

from lightning_tricks._shared.text import list_names
from lightning_tricks.run_fingerprint.core import record as on_disk
from lightning_tricks.run_fingerprint.core.record import Column, FingerprintRecord, FingerprintRecordError

# Of two shuffles that are independent, one pair in 13! = 6e9 begins with the same 13 samples. Data that is constant, or
# repeats a few batches, has no 13 different ones.
_PROOF = 13
_FIRST = 1000  # indices of a part of a data set
_MOST_WAITING = 10_000  # rows of a rank that others lack
_MOST_BYTES = 1 << 21  # sent at once: a store takes 8 MB, of text that is longer
_AT_THE_END = timedelta(seconds=10)
_WORDS = {
    "data": "Each rank should read a part of its own: look at the sampler, or at how an iterable data set is divided "
    "among ranks and workers.",
    "rate": "Replicas drift apart by it: look at schedulers and callbacks that decide by a value of their own rank.",
    "replicated": "DDP keeps them equal: look at what changes weights, gradients or optimizers on single ranks.",
    "dataset": "Lightning divides one data set among ranks. Split it alike on all of them, with one seed: or one rank "
    "trains on what another one validates with.",
}
_REPEATED = "Divide an iterable data set among its workers, by torch.utils.data.get_worker_info()."
_Row = dict[str, dict[tuple[Any, ...], int]]  # kind -> name and call -> fingerprint


class RankComparison:
    """Compares the rows of all ranks, whichever come first.

    Args:
        ranks: The numbers of the ranks.

    Attributes:
        found: Kind -> what is wrong, in sentences that name the step at which it began: "data" (ranks read the same
            batches), "rate" (learning rates differ), "replicated" (weights differ that DDP keeps equal) or "dataset"
            (data differ that a sampler divides).
        compared: Kind -> the number of rows that were compared.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.found: dict[str, str] = {}
        self.compared = dict.fromkeys(_WORDS, 0)
        self._waiting: dict[int, dict[tuple[int, ...], _Row]] = {rank: {} for rank in ranks}
        self._alike: dict[tuple[int, ...], frozenset[Any]] = {}  # ranks -> different batches that all of them read
        self._alike_from = ""

    def __str__(self) -> str:
        data, rates, weights, _ = self.compared.values()
        counts = f"{data:,} batches, {rates:,} times the learning rates, {weights:,} times the weights"
        return "\n".join(self.found.values()) or f"No difference among {len(self._waiting)} ranks: compared {counts}."

    def add(self, rank: int, columns: Sequence[Column], table: NDArray[np.int64]) -> None:
        """Add rows of a rank, and compare those that all ranks have by now."""
        own = self._waiting[rank]
        for step, epoch, batch, *values in table.tolist():
            key, row = (step, epoch, batch), _Row((kind, {}) for kind in _WORDS)
            for (kind, *name), value in zip(columns, values, strict=True):
                if kind in row and value:
                    row[kind][tuple(name)] = value
            own[key] = row
            if all(key in rows for rows in self._waiting.values()):
                self._compare(key, {each: rows.pop(key) for each, rows in self._waiting.items()})
            elif len(own) > _MOST_WAITING:
                del own[next(iter(own))]

    def _compare(self, key: tuple[int, int, int], rows: Mapping[int, _Row]) -> None:
        at = f"step {key[0]} (epoch {key[1]}, batch {key[2]})"
        for kind in _WORDS:
            values = {rank: row[kind] for rank, row in rows.items()}
            if all(values.values()):
                self.compared[kind] += 1
                said = self._shared_batches(at, values) if kind == "data" else _difference(kind, at, values)
                if said:
                    self.found.setdefault(kind, f"{said}. {_WORDS[kind]}")

    def _shared_batches(self, at: str, values: Mapping[int, Mapping[Any, int]]) -> str:
        self._alike_from = self._alike_from if self._alike else at
        self._alike = {
            part: (seen | {frozenset(values[part[0]].items())}) if len(seen) < _PROOF else seen
            for ranks, seen in (self._alike or {tuple(values): frozenset()}).items()
            for part in _grouped(ranks, values)
            if len(part) > 1
        }
        whose = [_named(ranks) for ranks, seen in self._alike.items() if len(seen) == _PROOF]
        read = f"read the same batches from {self._alike_from} to {at}, {_PROOF} different ones"
        return f"{', and '.join(whose)} {read}".capitalize() if whose else ""


def _difference(kind: str, at: str, values: Mapping[int, Mapping[Any, int]]) -> str:
    usual, *others = _grouped(values, values)
    if not others:
        return ""
    first, other = values[usual[0]], values[others[0][0]]
    names = [name for name, call in first if name and first[name, call] != other.get((name, call))]
    whats = {"rate": ("learning rates", f" at {at}"), "replicated": ("weights", f" after {at}")}
    what, at = whats.get(kind, ("data", ""))
    said = f"The {what} of {', '.join(map(_named, others))} differ from those of {_named(usual)}{at}"
    return f"{said}: {list_names(names)}" if names else said


def _grouped(ranks: Iterable[int], values: Mapping[int, Any]) -> list[tuple[int, ...]]:
    """Return the ranks with equal values together, most of them first."""
    groups: dict[int, tuple[int, ...]] = {}  # by their first rank
    for rank in ranks:
        first = next((each for each in groups if values[each] == values[rank]), rank)
        groups[first] = (*groups.get(first, ()), rank)
    return sorted(groups.values(), key=len, reverse=True)


def _named(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {list_names(map(str, ranks), 8)}"


def divided_data(loaders: Iterable[Any]) -> list[Any]:
    """Return what ranks should have equal in the data sets that a sampler divides among them: lengths and first rows.

    Nothing is asked of data sets of other types than torch's own, whose code may read files, or draw random numbers.
    """
    return [
        _known(loader.dataset) for loader in loaders if isinstance(getattr(loader, "sampler", 0), DistributedSampler)
    ]


def _known(dataset: Any) -> list[Any]:
    if isinstance(dataset, Subset):
        return [np.asarray(dataset.indices[:_FIRST]), len(dataset), *_known(dataset.dataset)]
    rows = dataset.tensors if type(dataset) is TensorDataset else [dataset] if isinstance(dataset, list) else []
    return [len(dataset), *(row[:1] for row in rows)]


def compare_ranks(records: Sequence[FingerprintRecord]) -> RankComparison:
    """Compare what the ranks of a run have recorded, as `read_ranks` returns it.

    Raises:
        FingerprintRecordError: If these are not ranks of a run that should be equal in something.
    """
    comparison = RankComparison(record.header.rank for record in records)
    if len({replace(record.header, rank=0) for record in records}) > 1 or not records[0].compare_ranks:
        raise FingerprintRecordError(
            "There is nothing to compare: these are not several ranks of a run, its ranks share no gradients, or it "
            "was recorded with `compare_ranks=False`."
        )
    for blocks in zip_longest(*(record.blocks for record in records)):
        for record, block in zip(records, blocks, strict=True):
            if block is not None:
                comparison.add(record.header.rank, *block)
    return comparison


class RankExchange(RankComparison):
    """Compares, on rank zero, what all ranks send through a store: no rank waits for another one in training.

    Args:
        store: The store, for this run alone.
        rank: The rank of this process.
        world_size: The number of ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(range(world_size))
        self._store, self._rank = store, rank
        self._blocks = [0] * world_size  # that this rank has sent, and received from others

    def watch(self, columns: Sequence[Column], table: NDArray[np.int64]) -> None:
        """Send rows to rank zero; there, compare them with those that have come."""
        kept = [place for place, column in enumerate(columns) if column.kind in _WORDS]
        columns, table = tuple(columns[place] for place in kept), table[:, [0, 1, 2, *(place + 3 for place in kept)]]
        with suppress(RuntimeError):  # of a store that is gone
            if self._rank == 0:
                self.add(0, columns, table)
                self._receive()
            for part in np.array_split(table, 1 + table.nbytes // _MOST_BYTES) if self._rank else ():
                self._store.set(f"{self._rank}/{self._blocks[self._rank]}", on_disk.format_rows(columns, part, ()))
                self._blocks[self._rank] += 1

    def finish(self) -> None:
        """Say that no rows follow; on rank zero, wait some seconds for the last ones."""
        with suppress(RuntimeError):
            if self._rank:
                self._store.set(f"{self._rank}/end", "")
            else:
                with suppress(RuntimeError):  # of a rank that does not come
                    self._store.wait([f"{rank}/end" for rank in range(1, len(self._blocks))], _AT_THE_END)
                self._receive()

    def _receive(self) -> None:
        for rank in range(1, len(self._blocks)):
            while self._store.check([key := f"{rank}/{self._blocks[rank]}"]):
                self.add(rank, *on_disk.parse_rows(self._store.get(key)))
                self._store.delete_key(key)
                self._blocks[rank] += 1


class RepeatedBatches:
    """Finds an epoch in which each batch comes several times in a row.

    Attributes:
        found: "repeats" -> what is wrong.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._epoch = -1
        self._counts: dict[bytes, int] | None = None  # in their order; None where one came once, or later again

    def watch(self, columns: Sequence[Column], table: NDArray[np.int64]) -> None:
        """Count the batches in rows."""
        data = [place for place, column in enumerate(columns, 3) if column.kind == "data"]
        for line in table[table[:, 2] >= 0]:
            if line[1] != self._epoch:
                self.finish()
                self._epoch, self._counts = int(line[1]), {}
            if self._counts is not None:
                word = line[data].tobytes()
                last = next(reversed(self._counts), word)
                self._counts[word] = self._counts.get(word, 0) + 1
                if word != last and (self._counts[word] > 1 or self._counts[last] == 1):
                    self._counts = None

    def finish(self) -> None:
        """Judge the epoch that ends."""
        if self._counts and len(self._counts) >= _PROOF and not self.found:
            count, times = len(self._counts), next(iter(self._counts.values()))
            said = f"In epoch {self._epoch}, {count:,} different batches came {times} times each, one after the other"
            self.found["repeats"] = f"{said}. {_REPEATED}"
