"""Predictions in parts: each rank appends rows to files of its own, and all are read in one order.

A part is a line of JSON, which tells the loader and the columns, and rows of bytes of one length: the index of a sample
plus one, and its value in each column. Texts, and values whose first dimension varies, lie in a file of values: their
row tells the bytes at which one starts and ends, and its length. A kill leaves a last row that is too short, or lacks
its values; a power failure may leave zeros. Neither counts.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.files import atomic_write, find_write_problem, open_file
from lightning_tricks._shared.read_budget import Budget, parse_json
from lightning_tricks._shared.tensors import local_part
from lightning_tricks._shared.text import list_names
from lightning_tricks.predictions.core.columns import Column, Kind, array_dtype, join_kinds, kinds_of, to_array

Array: TypeAlias = npt.NDArray[Any]
Kinds: TypeAlias = Mapping[str, Kind]
_CHUNK_BYTES = 1 << 22
_INDICES = range((1 << 63) - 1)  # a part holds an index plus one
_TEXT = "utf-8", "surrogatepass"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def weights_digest(module: nn.Module) -> str:
    """Return 64 bits of the parameters and buffers of a module, of this rank's parts of sharded ones."""
    tensors = [tensor for tensor in chain(module.parameters(), module.buffers()) if not is_lazy(tensor)]
    digest = hashlib.blake2b(digest_size=8)
    file: Any = SimpleNamespace(write=digest.update, flush=lambda: None)
    for start in range(0, len(tensors), 64):  # on the CPU: a file tells the device of a tensor
        torch.save([local_part(tensor.detach()).cpu() for tensor in tensors[start : start + 64]], file)
    return digest.hexdigest()


def begin_parts(path: Path, folder: Path, run: Mapping[str, Any], *, resume: bool) -> tuple[int, str]:
    """Create a folder for the parts of a run, or continue with those in it.

    Args:
        path: The path of the file into which they will be merged.
        folder: The folder, in which nothing but parts is removed.
        run: What tells the run from others, as plain values, and its "hyperparameters".
        resume: Whether to continue with the parts of a run that was killed; False removes them.

    Returns:
        How many files there are, and which hyperparameters differ from those of the parts.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the parts belong to another run; the message says what differs.
    """
    if problem := find_write_problem(path):
        raise OSError(f"{path}: {problem}")
    file, text = folder / "run.json", json.dumps(run, default=lambda value: type(value).__name__, skipkeys=True)
    if not resume or not file.exists():
        remove_parts(folder)
        folder.mkdir(exist_ok=True)
        with atomic_write(file) as staged:
            staged.write_text(text, encoding="utf-8")
    before, now = _read_run(file), json.loads(text)
    changed = _differences(before.pop("hyperparameters"), now.pop("hyperparameters"))
    if differing := _differences(before, now):
        raise ValueError(
            f"{folder} contains predictions of another run, which differs from this one ({differing}). Give "
            "resume=False to remove them and start again, or another path."
        )
    return len([*folder.glob("*.part"), *folder.glob("*.values")]), changed


def _read_run(file: Path) -> dict[str, Any]:
    with open_file(file) as stream:
        data = stream.read()
    with suppress(ValueError):  # it is not JSON, or too large
        run = parse_json(data, Budget(len(data)))
        if isinstance(run, dict) and isinstance(run.get("hyperparameters"), dict):
            return run
    raise ValueError(
        f"{file} is damaged, so the run that wrote these parts is unknown. Give resume=False to start again."
    )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what differs as text: 1 batch is not 1.0, all of them, and the order of loaders counts."""
    pairs = {name: (f"{before.get(name)}", f"{now.get(name)}") for name in {**before, **now}}
    differing = [f"{name}: {old:.80} before, {new:.80} now" for name, (old, new) in pairs.items() if old != new]
    return list_names(differing, 10) if differing else ""


def remove_parts(folder: Path) -> None:
    """Remove the parts of a run, and their folder if nothing else is in it."""
    for file in chain(*map(folder.glob, ("*.part", "*.values", "*.column", "run.json"))):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


class PartWriter:
    """Appends batches to parts: one for each loader, and for each combination of dtypes that its columns have.

    Args:
        stem: The path of the files, without their endings.
        stack: What closes the files.
        kinds: What the columns hold in other parts.
        check: What raises an error for kinds that cannot be written.

    Attributes:
        rows: How many rows were appended.
    """

    def __init__(self, stem: Path, stack: ExitStack, kinds: Kinds, check: Callable[[Kinds], object]) -> None:
        self._stem, self._stack, self._kinds, self._check = stem, stack, kinds, check
        self.rows = 0
        self._values = self._open(".values")
        self._parts: dict[tuple[Any, ...], tuple[BinaryIO, np.dtype[Any]]] = {}  # by loader and kinds

    def append(self, loader: int, indices: list[int], columns: Mapping[str, Column]) -> None:
        """Append a batch: the number of its loader, the index of each sample, and its columns.

        When it returns, the operating system has them: they outlive the process.

        Raises:
            ValueError: If the columns do not go with those of other batches.
        """
        kinds = kinds_of(columns)
        self._kinds = join_kinds(self._kinds, kinds)
        key: tuple[Any, ...] = (loader, *((name, dtype, self._kinds[name][1]) for name, (dtype, _) in kinds.items()))
        if key not in self._parts:
            self._check(kinds)
            head = json.dumps([loader, {name: (dtype and str(dtype), shape) for name, dtype, shape in key[1:]}])
            part = self._open(f"-{len(self._parts):06}.part")
            part.write(f"{head}\n".encode())
            self._parts[key] = part, _parse_head(head)[2]
        part, rows_dtype = self._parts[key]
        rows = np.empty(len(indices), rows_dtype)
        rows["index"] = np.array(indices) + 1
        for name, column in columns.items():
            rows[name] = self._place(column) if -1 in self._kinds[name][1] else to_array(column)
        self._values.flush()  # before the rows that name its bytes
        part.write(rows.data)
        part.flush()
        self.rows += len(rows)

    def _place(self, column: Column) -> Array:
        """Append values that vary; return the bytes at which each starts and ends, and its length."""
        pieces = [value.encode(*_TEXT) if isinstance(value, str) else to_array(value).tobytes() for value in column]
        edges = np.cumsum([self._values.tell(), *map(len, pieces)], dtype=np.int64)
        self._values.write(b"".join(pieces))
        return np.stack([edges[:-1], edges[1:], [*map(len, column)]], axis=1)

    def _open(self, ending: str) -> BinaryIO:
        return self._stack.enter_context(Path(f"{self._stem}{ending}").open("xb"))


def _parse_head(head: str | bytes) -> tuple[int, dict[str, Kind], np.dtype[Any]]:
    """Return the loader of a part, the kinds of its columns, and the dtype of its rows."""
    loader, columns = json.loads(head)
    kinds = {name: (dtype and _DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in columns.items()}
    fields: list[Any] = [("index", np.int64)]
    for name, (dtype, shape) in kinds.items():
        fields.append((name, np.int64, 3) if -1 in shape else (name, array_dtype(dtype), shape))
    return loader, kinds, np.dtype(fields)


def _read_part(path: Path) -> tuple[int, dict[str, Kind], Array, Array]:
    """Return the loader of a part, the kinds of its columns and, memory-mapped, its rows and the bytes of values."""
    with open_file(path) as file:
        head = file.readline(1 << 24)
        loader, kinds, dtype = _parse_head(head if head.endswith(b"\n") else "[0, {}]")
        rows = _mapped(file, dtype)
    with open_file(path.with_name(f"{path.name.rpartition('-')[0]}.values")) as file:
        return loader, kinds, rows, _mapped(file, np.dtype(np.uint8))


def _mapped(file: BinaryIO, dtype: np.dtype[Any]) -> Array:
    """Return what a file holds from its position on, without a rest that is too short."""
    start = file.tell()
    count = (os.fstat(file.fileno()).st_size - start) // dtype.itemsize
    return np.memmap(file, dtype, "r", start, (count,)) if count else np.empty(0, dtype)


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
        self.kinds: Kinds = {}
        self._paths = sorted(folder.glob("*.part"))
        tables = [np.zeros((4, 0), np.int64)]
        for number, path in enumerate(self._paths):
            loader, kinds, rows, values = _read_part(path)
            is_whole = rows["index"] > 0
            for name, (_, shape) in kinds.items():
                if -1 in shape:
                    is_whole &= rows[name][:, 1] <= len(values)
            if is_whole.any():
                self.kinds = join_kinds(self.kinds, kinds)
                whole = np.flatnonzero(is_whole)
                tables.append(np.stack(np.broadcast_arrays(loader, rows["index"][whole] - 1, number, whole)))
        table = np.concatenate(tables, axis=1)
        table = table[:, np.lexsort((table[1], table[0]))]  # of equal ones the first one comes first
        is_first = np.append(True, np.diff(table[:2]).any(axis=0))[: table.shape[1]]
        self.loader, self.index, self._part, self._row = table[:, is_first]
        self.repeated = int((~is_first).sum())

    def __len__(self) -> int:
        return len(self.index)

    def chunks(self) -> Iterator[tuple[slice, dict[str, Array]]]:
        """Yield slices of all samples, and their values by columns: an array of numbers, or of texts or arrays."""
        size = sum(file.stat().st_size for file in self.folder.iterdir())
        step = max(1, min(1 << 16, _CHUNK_BYTES * len(self) // max(size, 1)))
        for start in range(0, len(self), step):
            parts, rows = self._part[start : start + step], self._row[start : start + step]
            columns = {
                name: np.empty(len(rows), object) if -1 in shape else np.empty((len(rows), *shape), array_dtype(dtype))
                for name, (dtype, shape) in self.kinds.items()
            }
            for number in np.unique(parts):
                at = np.flatnonzero(parts == number)
                for name, values in _read_values(self._paths[number], rows[at]):
                    dtype, shape = self.kinds[name]
                    if -1 in shape and dtype is not None:
                        values = (value.reshape(len(value), *shape[1:]) for value in values)  # of an empty list, too
                    columns[name][at] = np.fromiter(values, object, len(at)) if -1 in shape else values
            yield slice(start, start + step), columns


def _read_values(path: Path, numbers: Array) -> Iterator[tuple[str, Any]]:
    """Yield the values of some rows of a part by columns."""
    _, kinds, rows, content = _read_part(path)
    for name, (dtype, shape) in kinds.items():
        values = rows[name][numbers]
        if -1 not in shape:
            yield name, values
        elif dtype is None:
            yield name, [content[start:end].tobytes().decode(*_TEXT) for start, end, _ in values.tolist()]
        else:
            flat = ((content[start:end].view(array_dtype(dtype)), length) for start, end, length in values.tolist())
            yield name, [value.reshape(length, *shape[1:]) for value, length in flat]


class KnownBatches:
    """A batch sampler that remembers the indices of each batch until they are taken.

    Args:
        sampler: The batch sampler that is asked.
        limit: The number of batches after which it ends.

    Attributes:
        done: The indices that need not be read, in ascending order. A batch of only such samples is left out, but
            never the first batch, as each rank has to call a model that is distributed.
    """

    def __init__(self, sampler: Any, limit: float) -> None:
        self._sampler = sampler
        self._limit = limit
        self._batches: dict[int, list[int]] = {}
        self.done: Array = np.zeros(0, np.int64)

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
                indices = [_INDICES.index(operator.index(index)) for index in batch]
            except (TypeError, ValueError) as error:
                raise TypeError(f"PredictionWriter needs indices, and a batch sampler yields {batch!r}.") from error
            if number == 0 or (self.done.searchsorted(indices, "right") == self.done.searchsorted(indices)).any():
                self._batches[count] = indices
                count += 1
                yield batch

    def __len__(self) -> int:
        return len(self._sampler)
