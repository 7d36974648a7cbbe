"""Predictions in one file of a known format, written a piece at a time."""

from __future__ import annotations

import json
import math
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_tricks._shared.files import atomic_write
from lightning_tricks.predictions.core.columns import Kind, array_dtype
from lightning_tricks.predictions.core.parts import Array, Kinds, MergedParts


def check_kinds(name: str, kinds: Kinds) -> None:
    """Raise an error if a format cannot hold columns of these kinds.

    Raises:
        ValueError: If it cannot; the message names the column.
    """
    for column, (dtype, _) in kinds.items():
        if name in ("parquet", "jsonl") and dtype is not None and dtype.is_complex:
            raise ValueError(f"{column!r} is complex, which {name} cannot hold: return torch.view_as_real(...)")


def write_predictions(path: Path, name: str, parts: MergedParts, loaders: Sequence[str]) -> None:
    """Write predictions into a file, which replaces `path` when it is complete.

    Args:
        path: The path of the file.
        name: The name of its format, one of `FORMATS`.
        parts: The predictions.
        loaders: The names of their loaders; if they are 0, 1, ..., they are written as numbers.

    Raises:
        OSError: If the file cannot be written.
    """
    numbers = np.arange(len(loaders))
    with atomic_write(path) as staged:
        FORMATS[name](staged, parts, numbers if [*loaders] == [*map(str, numbers)] else np.array(loaders))


def _write_parquet(path: Path, parts: MergedParts, loaders: Array) -> None:
    from pyarrow import array, table
    from pyarrow.parquet import ParquetWriter

    with ExitStack() as stack:
        writer = None
        for rows, values in parts.chunks():
            columns = {"loader": array(loaders[parts.loader[rows]]), "index": array(parts.index[rows])}
            batch = table(columns | {name: _to_arrow(column, parts.kinds[name]) for name, column in values.items()})
            writer = writer or stack.enter_context(ParquetWriter(path, batch.schema))
            writer.write_table(batch)


def _to_arrow(column: Array, kind: Kind) -> Any:
    from pyarrow import ListArray, array, string

    if kind[0] is None:
        return array(column, string())
    flat, lengths = _flat(column, kind)
    values = array((flat.astype(np.float32) if kind[0] is torch.half else flat).reshape(-1))
    for dim in range(flat.ndim - 1, 0, -1):
        starts = np.arange(math.prod(flat.shape[:dim]) + 1, dtype=np.int32) * flat.shape[dim]
        values = ListArray.from_arrays(starts, values)
    return ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), values) if -1 in kind[1] else values


def _flat(column: Array, kind: Kind) -> tuple[Array, list[Any]]:
    """Return the numbers of a column as one array and, where it holds arrays or texts, their lengths or the texts."""
    dtype, shape = kind
    if dtype is None:
        return np.empty(0), column.tolist()
    if -1 in shape:
        return np.concatenate(column, dtype=array_dtype(dtype), casting="unsafe"), [*map(len, column)]
    return column, []


def _write_jsonl(path: Path, parts: MergedParts, loaders: Array) -> None:
    # What is no utf-8, as in some names of files, is escaped as JSON escapes it
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for rows, values in parts.chunks():
            places = {"loader": loaders[parts.loader[rows]], "index": parts.index[rows]}
            for row in zip(*places.values(), *values.values(), strict=True):
                plain = (value if isinstance(value, str) else value.tolist() for value in row)
                line = dict(zip((*places, *values), plain, strict=True))
                file.write(f"{json.dumps(line, ensure_ascii=False)}\n")


def _write_npz(path: Path, parts: MergedParts, loaders: Array) -> None:
    arrays = {"loader": loaders[parts.loader], "index": parts.index}
    for name, values, lengths in _gathered(parts):
        arrays[name] = np.asarray(values)
        if arrays[name].dtype.kind == "U" and (cut := sum(text.endswith("\0") for text in values)):
            words = (
                f"npz keeps no NUL at the end of a text, as {cut:,} of {name!r} have: write another format to keep it."
            )
            warnings.warn(words, stacklevel=2)
        arrays |= {f"{name}.lengths": np.array(lengths)} if lengths is not None else {}
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _write_pt(path: Path, parts: MergedParts, loaders: Array) -> None:
    names: Any = loaders[parts.loader]
    content = {"loader": torch.tensor(names) if names.dtype.kind == "i" else names.tolist()}
    content["index"] = torch.tensor(parts.index)
    for name, values, lengths in _gathered(parts):
        if not isinstance(values, list):
            values = values.to(parts.kinds[name][0])
        content[name] = values if lengths is None else [*values.split(lengths)]
    torch.save(content, path)


def _gathered(parts: MergedParts) -> Iterator[tuple[str, Any, list[int] | None]]:
    """Yield name, values and, if they vary, lengths of each column; texts as a list, others joined to one array.

    The memory of an array is a file in the folder of the parts, so that the operating system can take it back.
    """
    listed: dict[str, list[Any]] = {name: [] for name in parts.kinds}
    files = {name: parts.folder / f"{number}.column" for number, name in enumerate(parts.kinds)}
    for rows, columns in parts.chunks():
        for name, column in columns.items():
            flat, rest = _flat(column, parts.kinds[name])
            with files[name].open("ab" if rows.start else "wb") as file:  # closed, as there may be thousands
                file.write(flat.data)
            listed[name] += rest
    for name, (dtype, shape) in parts.kinds.items():
        if dtype is None:
            yield name, listed[name], None
            continue
        whole = (sum(listed[name]), *shape[1:]) if -1 in shape else (len(parts), *shape)
        size, kind = math.prod(whole), torch.from_numpy(np.empty(0, array_dtype(dtype))).dtype
        values = torch.from_file(str(files[name]), size=size, dtype=kind) if size else torch.empty(0, dtype=kind)
        yield name, values.view(whole), listed[name] if -1 in shape else None


FORMATS = {"parquet": _write_parquet, "npz": _write_npz, "jsonl": _write_jsonl, "pt": _write_pt}
