"""Predictions in parts: each rank appends its batches to a file of its own, and all are read in one order.

A part is never changed later: it is a sequence of records, each the number of its bytes and what `torch.save` makes of
a batch. A process that is killed leaves a last record that is too short, which does not count.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.files import atomic_write, find_write_problem, open_file
from lightning_tricks._shared.tensors import local_part
from lightning_tricks.predictions.core.columns import Column, Kind, join_kinds

_CHUNK_BYTES = 1 << 25


def weights_digest(module: nn.Module) -> str:
    """Return 64 bits of the parameters and buffers of a module, of this rank's parts of sharded ones."""
    tensors = [tensor for tensor in chain(module.parameters(), module.buffers()) if not is_lazy(tensor)]
    digest = hashlib.blake2b(digest_size=8)
    file: Any = SimpleNamespace(write=digest.update, flush=lambda: None)
    torch.save([local_part(tensor.detach()) for tensor in tensors], file)
    return digest.hexdigest()


def begin_parts(path: Path, folder: Path, run: Mapping[str, Any], *, resume: bool) -> int:
    """Create a folder for the parts of a run, or go on with those in it; return how many there are.

    Args:
        path: The path of the file into which they will be merged.
        folder: The folder, in which nothing but parts is removed.
        run: What tells the run from others, as plain values.
        resume: Whether to go on with the parts of a run that was killed; False removes them.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the parts belong to another run; the message says what differs.
    """
    if problem := find_write_problem(path):
        raise OSError(f"{path}: {problem}")
    file = folder / "run.json"
    if not resume or not file.exists():
        remove_parts(folder)
        folder.mkdir(exist_ok=True)
        with atomic_write(file) as staged:
            staged.write_text(json.dumps(run), encoding="utf-8")
    with open_file(file) as stream:
        before = json.loads(stream.read())
    differing = [f"{name}: {before.get(name)} then, {now} now" for name, now in run.items() if before.get(name) != now]
    if differing:
        raise ValueError(
            f"{folder} holds predictions of another run, which are not mixed with those of this one "
            f"({'; '.join(differing)}). Give resume=False to remove them and start anew, or another path."
        )
    return len([*folder.glob("*.part")])


def remove_parts(folder: Path) -> None:
    """Remove the parts of a run, and their folder if nothing else is in it."""
    for file in (*folder.glob("*.part"), *folder.glob("*.column"), folder / "run.json"):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def append_batch(file: BinaryIO, loader: int, indices: list[int], columns: Mapping[str, Column]) -> None:
    """Append a batch to a part: the number of its loader, the index of each sample, and its columns."""
    torch.save((loader, indices, dict(columns)), record := io.BytesIO())
    file.writelines([len(record.getbuffer()).to_bytes(8, "little"), record.getbuffer()])
    file.flush()


class MergedParts:
    """The predictions in all parts of a folder by loader and index, each sample once.

    Attributes:
        folder: The folder.
        kinds: The kind of each column.
        loader: The number of the loader of each sample.
        index: The index of each sample.
        repeated: How many predictions are left out, as there is another one of the sample.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kinds: dict[str, Kind] = {}
        self._places: list[tuple[Path, int, int]] = []
        tables = [np.zeros((4, 0), np.int64)]
        for part in sorted(folder.glob("*.part")):
            with open_file(part) as file:
                size, place = part.stat().st_size, 8
                while (length := int.from_bytes(file.read(8), "little")) and place + length <= size:
                    loader, indices, columns = torch.load(io.BytesIO(file.read(length)), weights_only=True)
                    count = len(indices)
                    tables.append(np.array([[loader] * count, indices, [len(self._places)] * count, range(count)]))
                    self._places.append((part, place, length))
                    self.kinds = join_kinds(self.kinds, columns)
                    place += length + 8
        table = np.concatenate(tables, axis=1)
        table = table[:, np.lexsort((table[1], table[0]))]  # of equal ones the first one comes first
        is_first = np.append(True, np.diff(table[:2]).any(axis=0))[: table.shape[1]]
        self.loader, self.index, self._batch, self._row = table[:, is_first]
        self.repeated = int((~is_first).sum())

    def __len__(self) -> int:
        return len(self.index)

    def chunks(self) -> Iterator[tuple[slice, dict[str, list[Any]]]]:
        """Yield slices of all samples, and the values of each column in them, a tensor or a text for each sample."""
        size = sum(length for *_, length in self._places)
        step = max(1, min(1 << 16, _CHUNK_BYTES * len(self) // max(size, 1)))
        for start in range(0, len(self), step):
            batches, rows = self._batch[start : start + step], self._row[start : start + step].tolist()
            values: dict[str, list[Any]] = {name: [None] * len(rows) for name in self.kinds}
            loaded = -1
            for at in np.argsort(batches, kind="stable").tolist():
                if batches[at] != loaded:
                    part, place, length = self._places[loaded := batches[at]]
                    with open_file(part) as file:
                        file.seek(place)
                        columns = torch.load(io.BytesIO(file.read(length)), weights_only=True)[2]
                for name, column in columns.items():
                    values[name][at] = column[rows[at]]
            yield slice(start, start + step), values


class KnownBatches:
    """A batch sampler that remembers the indices of each batch until they are taken.

    Args:
        sampler: The batch sampler that is asked.
        limit: The number of batches after which it ends.

    Attributes:
        done: Whether each sample need not be read, up to the last such one. A batch of only such samples is left out,
            but never the first batch, as each rank has to call a model that is distributed.
    """

    def __init__(self, sampler: Any, limit: float) -> None:
        self._sampler = sampler
        self._limit = limit
        self._batches: dict[int, list[int]] = {}
        self.done = np.zeros(0, bool)

    def take(self, number: int) -> list[int]:
        """Return the indices of the n-th batch that was read, once.

        Raises:
            ValueError: If there is no such batch.
        """
        if number not in self._batches:
            raise ValueError("its loader does not read what its batch sampler yields")
        return self._batches.pop(number)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for number, batch in enumerate(islice(self._sampler, None if self._limit == math.inf else int(self._limit))):
            try:
                indices = [operator.index(index) for index in batch]
            except TypeError as error:
                raise TypeError(f"PredictionWriter needs indices, and a batch sampler yields {batch!r}.") from error
            if number == 0 or not all(index < len(self.done) and self.done[index] for index in indices):
                self._batches[count] = indices
                count += 1
                yield batch

    def __len__(self) -> int:
        return len(self._sampler)
