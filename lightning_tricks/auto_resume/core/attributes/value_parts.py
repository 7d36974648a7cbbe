"""Values that are made of plain data without being any: what their parts are, and how they are made of them again.

No library is imported here: where a fit holds a value of one, it is loaded.
"""

from __future__ import annotations

import sys
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks.auto_resume.core.attributes.attribute_access import attribute_dict
from lightning_tricks.auto_resume.core.attributes.value_types import (
    GENERATORS,
    CannotRestoreError,
    find_class,
    is_subclass,
)

_MAX_ROWS, _SAMPLED_ROWS = 10_000, 1_000  # of a table with columns of other than numbers, which is sampled if larger

_part_names: WeakKeyDictionary[type, str] = WeakKeyDictionary()


@dataclass(frozen=True)
class PartKind:
    """How values of a kind are taken apart.

    Attributes:
        take: Returns the parts: plain data, tensors, arrays and containers of them.
        make: Returns a value made of its parts.
        fill: Replaces the contents of a value by those of another one, in place; None for what never changes in place.
        sample: Returns the value, or a smaller one of it if it has more than a number of bytes.
    """

    take: Callable[[Any], Any]
    make: Callable[[Any], Any]
    fill: Callable[[Any, Any], object] | None = None
    sample: Callable[[Any, int], Any] = lambda value, max_bytes: value


def part_kind(kind: type) -> str:
    """Return the name of the kind in `PART_KINDS` that values of a type have; empty if they have none."""
    if kind not in _part_names:
        _part_names[kind] = _find_part_kind(kind)
    return _part_names[kind]


def _find_part_kind(kind: type) -> str:
    if is_subclass(kind, np.ndarray) and not is_subclass(kind, np.memmap):
        return "array" if kind is not np.ndarray else ""
    if is_subclass(kind, Tensor):
        has_data = getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__
        return "tensor" if has_data and kind not in (Tensor, nn.Parameter) else ""
    name = f"{str(kind.__module__).partition('.')[0]}.{kind.__qualname__}"
    return name if name in PART_KINDS else ""


def part_kind_of(value: Any) -> str:
    """Return the name of the kind in `PART_KINDS` that a value has; empty if it has none."""
    kind = type(value)
    if kind is np.ndarray:
        return "objects" if value.dtype.kind == "O" else ""
    if kind is Tensor and value.layout is not torch.strided:
        return "coo" if value.layout is torch.sparse_coo else "compressed"
    return part_kind(kind)


def is_mutable(kind: type) -> bool:
    """Whether it matters which of two equal values of a type an object holds."""
    plain = (list, dict, set, deque, bytearray, Tensor, np.ndarray, *GENERATORS)
    name = part_kind(kind)
    return is_subclass(kind, *plain) or (bool(name) and PART_KINDS[name].fill is not None)


def _take_subclass(value: Any) -> Any:
    """Return the data of an array or a tensor as one of the base class, its class, and its attributes."""
    kind = type(value)
    plain = np.asarray(value) if is_subclass(kind, np.ndarray) else value.detach().as_subclass(Tensor)
    own = {name: part for name, part in (attribute_dict(value) or {}).items() if not is_subclass(type(part), type)}
    return [plain, f"{kind.__module__}.{kind.__qualname__}", own]


def _make_subclass(parts: Any) -> Any:
    plain, name, own = parts
    kind = find_class(name, type(plain))
    made: Any = plain.view(kind) if type(plain) is np.ndarray else plain.as_subclass(kind)
    _set_attributes(made, own)
    return made


def _set_attributes(value: Any, own: dict[str, Any]) -> None:
    present = attribute_dict(value)
    if present is not None:
        present.update(own)


def _fill_subclass(target: Any, value: Any) -> None:
    (plain, _, _), (other, _, own) = _take_subclass(target), _take_subclass(value)
    if (plain.shape, plain.dtype) != (other.shape, other.dtype):
        raise ValueError("of another shape")
    plain[...] = other
    _set_attributes(target, own)


def _make_objects(parts: Any) -> Any:
    made = np.empty(parts[0], object)
    for number, part in enumerate(parts[1]):
        made.flat[number] = part
    return made


def _fill_objects(target: Any, value: Any) -> None:
    if target.shape != value.shape:
        raise ValueError("of another shape")
    target[...] = value


def _take_compressed(value: Any) -> Any:
    rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (value.crow_indices, value.col_indices) if rows else (value.ccol_indices, value.row_indices)
    return [str(value.layout), *(one() for one in indices), value.values().detach(), list(value.shape)]


def _make_compressed(parts: Any) -> Any:
    layout = vars(torch)[parts[0].removeprefix("torch.")]
    return torch.sparse_compressed_tensor(*parts[1:], layout=layout, check_invariants=True)


def _take_column(values: Any) -> Any:
    """Return a column of a pandas table as an array, with a dtype or categories where NumPy has none such."""
    name = str(values.dtype)
    if isinstance(values.dtype, np.dtype):
        return np.asarray(values)
    if name == "category":
        return [name, np.asarray(values.codes), _take_index(values.categories), bool(values.ordered)]
    if getattr(values.dtype, "tz", None) is not None:
        return [name, np.asarray(values.tz_convert(None))]
    return [name, values.to_numpy(dtype=object, na_value=None)]


def _make_column(parts: Any) -> Any:
    pandas = sys.modules["pandas"]
    if type(parts) is np.ndarray:
        return parts
    if len(parts) == 4:
        return pandas.Categorical.from_codes(parts[1], _make_index(parts[2]), ordered=parts[3])
    if parts[1].dtype.kind == "M":
        return pandas.DatetimeIndex(parts[1]).tz_localize("UTC").astype(parts[0]).array
    return pandas.array(parts[1], dtype=parts[0])


def _take_index(index: Any) -> Any:
    if hasattr(index, "levels"):
        return [[_take_index(level) for level in index.levels], [np.asarray(c) for c in index.codes], [*index.names]]
    if type(index).__name__ == "RangeIndex":
        return [index.start, index.stop, index.step, index.name]
    return [_take_column(index.array), index.name]


def _make_index(parts: Any) -> Any:
    pandas = sys.modules["pandas"]
    if len(parts) == 4:
        return pandas.RangeIndex(*parts[:3], name=parts[3])
    if len(parts) == 3:
        return pandas.MultiIndex(levels=[_make_index(level) for level in parts[0]], codes=parts[1], names=parts[2])
    return pandas.Index(_make_column(parts[0]), name=parts[1])


def _take_frame(frame: Any) -> Any:
    columns = [_take_column(column.array) for _, column in frame.items()]
    return [_take_index(frame.columns), _take_index(frame.index), columns, dict(frame.attrs)]


def _make_frame(parts: Any) -> Any:
    columns, index, values, attrs = parts
    frame = sys.modules["pandas"].DataFrame(dict(enumerate(map(_make_column, values))), index=_make_index(index))
    frame.columns = _make_index(columns)
    frame.attrs = attrs
    return frame


def _take_series(series: Any) -> Any:
    return [_take_column(series.array), _take_index(series.index), series.name, dict(series.attrs)]


def _make_series(parts: Any) -> Any:
    series = sys.modules["pandas"].Series(_make_column(parts[0]), index=_make_index(parts[1]), name=parts[2])
    series.attrs = parts[3]
    return series


def _fill_table(target: Any, value: Any) -> None:
    type(target).__init__(target, value)
    target.attrs = value.attrs


def _sample_table(value: Any, max_bytes: int) -> Any:
    dtypes = value.dtypes if len(value.shape) == 2 else [value.dtype]
    is_plain = all(isinstance(one, np.dtype) and one.kind != "O" for one in dtypes)
    if len(value) <= _MAX_ROWS or (is_plain and 8 * value.size <= max_bytes):
        return value
    return (value.iloc if hasattr(value, "iloc") else value)[:: len(value) // _SAMPLED_ROWS]


def _take_image(image: Any) -> Any:
    palette = [image.palette.mode, bytes(image.palette.palette)] if image.palette else None
    return [image.mode, list(image.size), image.tobytes(), palette, dict(image.info)]


def _make_image(parts: Any) -> Any:
    mode, (width, height), data, palette, info = parts
    if width * height > 8 * len(data):
        raise CannotRestoreError("it holds an image with fewer bytes than pixels")
    image = sys.modules["PIL.Image"].frombytes(mode, (width, height), data)
    if palette:
        image.putpalette(palette[1], palette[0])
    image.info = info
    return image


def _fill_image(target: Any, value: Any) -> None:
    if (target.mode, target.size) != (value.mode, value.size):
        raise ValueError("of another size")
    target.paste(value)
    target.palette, target.info = value.palette, value.info


def _sample_image(image: Any, max_bytes: int) -> Any:
    width, height = image.size
    return image if 4 * width * height <= max_bytes else image.crop((0, height // 2, width, height // 2 + 1))


def _fill_array(target: Any, value: Any) -> None:
    target[:] = value


def _fill_weak(target: Any, value: Any) -> None:
    target.clear()
    target.update(value)


_TABLES = {"sample": _sample_table, "fill": _fill_table}
PART_KINDS: dict[str, PartKind] = {
    "array": PartKind(_take_subclass, _make_subclass, _fill_subclass),
    "tensor": PartKind(_take_subclass, _make_subclass, _fill_subclass),
    "objects": PartKind(lambda one: [list(one.shape), one.reshape(-1).tolist()], _make_objects, _fill_objects),
    "coo": PartKind(
        lambda one: [one._indices(), one._values().detach(), list(one.shape), one.is_coalesced()],
        lambda parts: torch.sparse_coo_tensor(*parts[:3], is_coalesced=parts[3], check_invariants=True),
    ),
    "compressed": PartKind(_take_compressed, _make_compressed),
    "array.array": PartKind(
        lambda one: [one.typecode, one.tobytes()], lambda parts: array(parts[0], parts[1]), _fill_array
    ),
    "numpy.SeedSequence": PartKind(lambda one: one.state, lambda parts: np.random.SeedSequence(**parts)),
    "builtins.mappingproxy": PartKind(dict, types.MappingProxyType),
    "weakref.ReferenceType": PartKind(lambda one: [one()], lambda parts: weakref.ref(parts[0])),
    "weakref.WeakKeyDictionary": PartKind(dict, weakref.WeakKeyDictionary, _fill_weak),
    "weakref.WeakValueDictionary": PartKind(dict, weakref.WeakValueDictionary, _fill_weak),
    "_weakrefset.WeakSet": PartKind(set, weakref.WeakSet, _fill_weak),
    "PIL.Image": PartKind(_take_image, _make_image, _fill_image, _sample_image),
    "pandas.DataFrame": PartKind(_take_frame, _make_frame, **_TABLES),
    "pandas.Series": PartKind(_take_series, _make_series, **_TABLES),
    **{
        f"pandas.{name}Index": PartKind(_take_index, _make_index, sample=_sample_table)
        for name in ("", "Range", "Multi", "Datetime", "Timedelta", "Categorical")
    },
}
