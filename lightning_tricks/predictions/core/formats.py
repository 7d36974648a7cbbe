"""Predictions in one file of a known format, written a piece at a time."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_tricks._shared.extras import import_extra
from lightning_tricks._shared.files import atomic_write
from lightning_tricks.predictions.core.columns import Kind
from lightning_tricks.predictions.core.parts import MergedParts

Array: TypeAlias = npt.NDArray[Any]


def check_format(name: str, kinds: Mapping[str, Kind]) -> None:
    """Raise an error if a format lacks its package, or cannot hold columns of these kinds.

    Raises:
        ModuleNotFoundError: If the package is not installed.
        ValueError: If it cannot hold one of the columns.
    """
    if name == "parquet":
        import_extra("pyarrow", "parquet", "PredictionWriter(format='parquet') needs pyarrow")
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
    from pyarrow import array, from_numpy_dtype, list_, string, table
    from pyarrow.parquet import ParquetWriter

    with ExitStack() as stack:
        writer = None
        for rows, values in parts.chunks():
            columns = {"loader": array(loaders[parts.loader[rows]]), "index": array(parts.index[rows])}
            for name, (dtype, shape) in parts.kinds.items():
                dtype = torch.float32 if dtype is torch.half else dtype
                kind = string() if dtype is None else from_numpy_dtype(_to_numpy(torch.empty(0, dtype=dtype)).dtype)
                for _ in shape:
                    kind = list_(kind)
                columns[name] = array([_to_plain(value, dtype, len(shape) == 1) for value in values[name]], kind)
            batch = table(columns)
            writer = writer or stack.enter_context(ParquetWriter(path, batch.schema))
            writer.write_table(batch)


def _write_jsonl(path: Path, parts: MergedParts, loaders: Array) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for rows, values in parts.chunks():
            places = loaders[parts.loader[rows]].tolist(), parts.index[rows].tolist()
            for row in zip(*places, *values.values(), strict=True):
                line = dict(zip(("loader", "index", *values), map(_to_plain, row), strict=True))
                file.write(f"{json.dumps(line, ensure_ascii=False)}\n")


def _to_plain(value: Any, dtype: torch.dtype | None = None, as_array: bool = False) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.to(dtype or value.dtype)
    return _to_numpy(value) if as_array else value.tolist()


def _write_npz(path: Path, parts: MergedParts, loaders: Array) -> None:
    arrays = {"loader": loaders[parts.loader], "index": parts.index}
    for name, values, lengths in _gathered(parts):
        arrays[name] = _to_numpy(values) if isinstance(values, Tensor) else np.array(values)
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
        content[name] = values if lengths is None else [*values.split(lengths)]
    torch.save(content, path)


def _gathered(parts: MergedParts) -> Iterator[tuple[str, Any, list[int] | None]]:
    """Yield name, values and, if they vary, lengths of each column; texts as a list, others joined to one tensor.

    The memory of a tensor is a file in the folder of the parts, so that the operating system can take it back.
    """
    listed: dict[str, list[Any]] = {name: [] for name in parts.kinds}
    files = {name: parts.folder / f"{number}.column" for number, name in enumerate(parts.kinds)}
    with ExitStack() as stack:
        streams = {name: stack.enter_context(file.open("wb")) for name, file in files.items()}
        for _, values in parts.chunks():
            for name, (dtype, shape) in parts.kinds.items():
                if dtype is None or -1 in shape:
                    listed[name] += values[name] if dtype is None else map(len, values[name])
                if dtype is not None:
                    flat = torch.cat([value.reshape(-1) for value in values[name]]).to(dtype)
                    streams[name].write(flat.view(torch.uint8).numpy().data)
    for name, (dtype, shape) in parts.kinds.items():
        if dtype is None:
            yield name, listed[name], None
            continue
        size = files[name].stat().st_size // dtype.itemsize
        flat = torch.from_file(str(files[name]), size=size, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        if -1 in shape:
            yield name, flat.reshape(sum(listed[name]), *shape[1:]), listed[name]
        else:
            yield name, flat.reshape(len(parts), *shape), None


FORMATS = {"parquet": _write_parquet, "npz": _write_npz, "jsonl": _write_jsonl, "pt": _write_pt}


def _to_numpy(values: Tensor) -> Array:
    """Return values as an array; those of a dtype that numpy lacks, such as bfloat16, as float32."""
    try:
        return values.numpy()
    except TypeError:
        return values.float().numpy()
