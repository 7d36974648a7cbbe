"""How values are taken apart, made again and changed in place, for the table of their kinds.

No library is imported here: where a fit holds a value of one, it is loaded.
"""

from __future__ import annotations

import enum
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    SCALARS,
    CannotRestoreError,
    attribute_dict,
    find_class,
    is_subclass,
)

_MAX_ROWS, _SAMPLED_ROWS = 10_000, 1_000  # of a table with columns of other than numbers, which is sampled if larger
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def take_tensor(value: Any) -> dict[str, Any]:
    """Return the data of a tensor on the CPU, and where it was."""
    if value.is_quantized or value.device.type == "meta" or value.is_nested:
        raise CannotRestoreError("it has no plain data")
    data = value.detach().resolve_conj().resolve_neg()
    data = data.cpu() if data.device.type != "cpu" else data.clone()  # a view would save the whole storage
    return {"data": data, "device": value.device.type, "requires_grad": value.requires_grad and value.is_leaf}


def make_tensor(parts: Any, present: Any) -> Tensor:
    """Return a tensor, on the device of the tensor in the same place of this process."""
    device = torch.device(parts["device"])
    if is_subclass(type(present), Tensor) and present.device.type == device.type:
        device = present.device
    elif device.type != "cpu" and not torch.get_device_module(device).is_available():
        device = torch.device("cpu")
    data = parts["data"].to(device, copy=True)
    return data.requires_grad_() if parts["requires_grad"] else data  # type: ignore[no-any-return]


def make_parameter(parts: Any, present: Any) -> nn.Parameter:
    """Return a parameter as `make_tensor` does a tensor."""
    return nn.Parameter(make_tensor(parts | {"requires_grad": False}, present), bool(parts["requires_grad"]))


def _require_same(target: Any, value: Any, *names: str) -> None:
    for name in names:
        if getattr(target, name) != getattr(value, name):
            raise ValueError(f"of another {name}")


def fill_tensor(target: Tensor, value: Tensor) -> None:
    """Copy a tensor into another one, as far as it allows that."""
    _require_same(target, value, "shape", "dtype", "requires_grad")
    with torch.no_grad():
        target.copy_(value)  # raises an error for tensors of inference mode and expanded ones


def num_bytes(value: Any) -> int:
    """Return the size of a block of data, such as a tensor or a string, in bytes; 0 for other values."""
    if is_subclass(type(value), str, bytes, bytearray):
        return len(value)
    if is_subclass(type(value), Tensor):
        return int(value.numel() * value.element_size())
    return int(value.nbytes) if is_subclass(type(value), np.ndarray, np.generic) else 0


def is_plain_dtype(dtype: Any) -> bool:
    """Whether arrays of a dtype hold numbers, dates and text, and no objects."""
    return dtype.kind in "biufcUSmMV" and not dtype.hasobject


def take_array(value: Any) -> dict[str, Any]:
    """Return the bytes of an array or a number of NumPy."""
    array = np.asarray(value)
    if not is_plain_dtype(array.dtype):
        raise CannotRestoreError("it has no plain data")
    dtype = np.lib.format.dtype_to_descr(array.dtype)
    return {"dtype": dtype, "shape": list(array.shape), "data": _as_tensor(array.tobytes())}


def make_array(parts: Any, present: Any) -> Any:
    """Return the array that `take_array` took apart."""
    data = np.frombuffer(parts["data"].numpy().tobytes(), dtype=np.lib.format.descr_to_dtype(parts["dtype"]))
    return data.reshape(parts["shape"]).copy()


def fill_array(target: Any, value: Any) -> None:
    """Copy an array into another one."""
    _require_same(target, value, "shape", "dtype")
    np.copyto(target, value)


def make_number(parts: Any, present: Any) -> Any:
    """Return the number of NumPy that `take_array` took apart."""
    return make_array(parts, present)[()]


def take_bytes(value: Any) -> dict[str, Any]:
    """Return bytes as a tensor."""
    return {"data": _as_tensor(bytes(value))}


def make_bytes(parts: Any, present: Any) -> bytes:
    """Return the bytes of a tensor."""
    return bytes(parts["data"].numpy().tobytes())


def make_bytearray(parts: Any, present: Any) -> bytearray:
    """Return the bytes of a tensor, which may be changed."""
    return bytearray(make_bytes(parts, present))


def fill_all(target: Any, value: Any) -> None:
    """Replace all entries of an array or of bytes."""
    target[:] = value


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def take_generator(value: Any) -> dict[str, Any]:
    """Return which random generator it is, and its state."""
    kind = type(value)
    if kind is torch.Generator:
        return {"type": f"torch {value.device}", "state": value.get_state()}
    if kind is random.Random:
        return {"type": "random", "state": value.getstate()}
    if kind is np.random.Generator:
        return {"type": f"numpy {type(value.bit_generator).__name__}", "state": value.bit_generator.state}
    if kind is np.random.RandomState:
        return {"type": f"legacy {type(value._bit_generator).__name__}", "state": value.get_state(legacy=False)}
    return {"type": f"bits {kind.__name__}", "state": value.state}


def make_generator(parts: Any, present: Any) -> Any:
    """Return a new random generator with a state."""
    library, _, which = parts["type"].partition(" ")
    if library in ("numpy", "legacy", "bits") and which not in _BIT_GENERATORS:
        raise CannotRestoreError(f"NumPy's bit generator {which} is not supported")
    made: Any
    if library == "torch":
        made = torch.Generator(which)
    elif library == "random":
        made = random.Random()  # noqa: S311
    else:
        bits = getattr(np.random, which)()
        made = {"numpy": np.random.Generator, "legacy": np.random.RandomState}.get(library, lambda own: own)(bits)
    _set_state(made, parts["state"])
    return made


def fill_generator(target: Any, value: Any) -> None:
    """Give a random generator the state of another one."""
    parts = take_generator(value)
    if take_generator(target)["type"] != parts["type"]:
        raise ValueError("of another type")
    _set_state(target, parts["state"])


def _set_state(value: Any, state: Any) -> None:
    kind = type(value)
    if kind is random.Random:
        value.setstate(state)
    elif kind in (torch.Generator, np.random.RandomState):
        value.set_state(state)
    else:
        (value.bit_generator if kind is np.random.Generator else value).state = state


def read_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name."""
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise CannotRestoreError(f"{name} is not a dtype")
    return found


def write_slice(value: slice) -> list[Any]:
    """Return the three numbers of a slice."""
    parts = [value.start, value.stop, value.step]
    if any(type(part) not in SCALARS for part in parts):
        raise CannotRestoreError("it is a slice of values that are not numbers")
    return parts


def make_member(parts: Any, present: Any) -> Any:
    """Return a member of an enum that this process has."""
    members = find_class(parts["class"], enum.Enum, present)._member_map_  # type: ignore[attr-defined]
    if parts["name"] not in members:
        raise CannotRestoreError(f"{parts['class']} has no {parts['name']}")
    return members[parts["name"]]


def take_member(value: Any) -> dict[str, str]:
    """Return the class of an enum and the name of its member."""
    kind = type(value)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "name": str(value._name_)}


def take_subclass(value: Any) -> Any:
    """Return the data of an array or a tensor as one of the base class, its class, and its attributes."""
    kind = type(value)
    plain = np.asarray(value) if is_subclass(kind, np.ndarray) else value.detach().as_subclass(Tensor)
    own = {name: part for name, part in (attribute_dict(value) or {}).items() if not is_subclass(type(part), type)}
    return [plain, f"{kind.__module__}.{kind.__qualname__}", own]


def make_subclass(parts: Any) -> Any:
    """Return an array or a tensor of a class that this process has."""
    plain, name, own = parts
    kind = find_class(name, type(plain))
    made: Any = plain.view(kind) if type(plain) is np.ndarray else plain.as_subclass(kind)
    _set_attributes(made, own)
    return made


def _set_attributes(value: Any, own: dict[str, Any]) -> None:
    present = attribute_dict(value)
    if present is not None:
        present.update(own)


def fill_subclass(target: Any, value: Any) -> None:
    """Copy data and attributes of an array or a tensor into another one."""
    (plain, _, _), (other, _, own) = take_subclass(target), take_subclass(value)
    _require_same(plain, other, "shape", "dtype")
    plain[...] = other
    _set_attributes(target, own)


def make_objects(parts: Any) -> Any:
    """Return an array of objects of its shape and its entries."""
    made = np.empty(parts[0], object)
    for number, part in enumerate(parts[1]):
        made.flat[number] = part
    return made


def fill_objects(target: Any, value: Any) -> None:
    """Copy the entries of an array of objects into another one."""
    _require_same(target, value, "shape")
    target[...] = value


def take_compressed(value: Any) -> Any:
    """Return layout, indices, values and shape of a sparse tensor in a compressed format."""
    rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (value.crow_indices, value.col_indices) if rows else (value.ccol_indices, value.row_indices)
    return [str(value.layout), *(index() for index in indices), value.values().detach(), list(value.shape)]


def make_compressed(parts: Any) -> Any:
    """Return the sparse tensor that `take_compressed` took apart."""
    layout = vars(torch)[parts[0].removeprefix("torch.")]
    return torch.sparse_compressed_tensor(*parts[1:], layout=layout, check_invariants=True)


def _take_column(values: Any) -> Any:
    """Return a column of a pandas table as an array, with a dtype or categories where NumPy has none such."""
    name = str(values.dtype)
    if isinstance(values.dtype, np.dtype):
        return np.asarray(values)
    if name == "category":
        return [name, np.asarray(values.codes), take_index(values.categories), bool(values.ordered)]
    if getattr(values.dtype, "tz", None) is not None:
        return [name, np.asarray(values.tz_convert(None))]
    return [name, values.to_numpy(dtype=object, na_value=None)]


def _make_column(parts: Any) -> Any:
    pandas = sys.modules["pandas"]
    if type(parts) is np.ndarray:
        return parts
    if len(parts) == 4:
        return pandas.Categorical.from_codes(parts[1], make_index(parts[2]), ordered=parts[3])
    if parts[1].dtype.kind == "M":
        return pandas.DatetimeIndex(parts[1]).tz_localize("UTC").astype(parts[0]).array
    return pandas.array(parts[1], dtype=parts[0])


def take_index(index: Any) -> Any:
    """Return the values and names of a pandas index, or what it is computed from."""
    if hasattr(index, "levels"):
        return [[take_index(level) for level in index.levels], [np.asarray(c) for c in index.codes], [*index.names]]
    if type(index).__name__ == "RangeIndex":
        return [index.start, index.stop, index.step, index.name]
    return [_take_column(index.array), index.name]


def make_index(parts: Any) -> Any:
    """Return the index that `take_index` took apart."""
    pandas = sys.modules["pandas"]
    if len(parts) == 4:
        return pandas.RangeIndex(*parts[:3], name=parts[3])
    if len(parts) == 3:
        return pandas.MultiIndex(levels=[make_index(level) for level in parts[0]], codes=parts[1], names=parts[2])
    return pandas.Index(_make_column(parts[0]), name=parts[1])


def take_frame(frame: Any) -> Any:
    """Return the labels, columns and `attrs` of a pandas table."""
    columns = [_take_column(column.array) for _, column in frame.items()]
    return [take_index(frame.columns), take_index(frame.index), columns, dict(frame.attrs)]


def make_frame(parts: Any) -> Any:
    """Return the table that `take_frame` took apart."""
    columns, index, values, attrs = parts
    frame = sys.modules["pandas"].DataFrame(dict(enumerate(map(_make_column, values))), index=make_index(index))
    frame.columns = make_index(columns)
    frame.attrs = attrs
    return frame


def take_series(series: Any) -> Any:
    """Return the values, labels, name and `attrs` of a pandas series."""
    return [_take_column(series.array), take_index(series.index), series.name, dict(series.attrs)]


def make_series(parts: Any) -> Any:
    """Return the series that `take_series` took apart."""
    series = sys.modules["pandas"].Series(_make_column(parts[0]), index=make_index(parts[1]), name=parts[2])
    series.attrs = parts[3]
    return series


def fill_table(target: Any, value: Any) -> None:
    """Make a pandas table or series the same as another one, in place."""
    type(target).__init__(target, value)
    target.attrs = value.attrs


def sample_table(value: Any, max_bytes: int) -> Any:
    """Return a table, a series or an index; only some rows of a large one."""
    dtypes = value.dtypes if len(value.shape) == 2 else [value.dtype]
    is_plain = all(isinstance(dtype, np.dtype) and dtype.kind != "O" for dtype in dtypes)
    if len(value) <= _MAX_ROWS or (is_plain and 8 * value.size <= max_bytes):
        return value
    return (value.iloc if hasattr(value, "iloc") else value)[:: len(value) // _SAMPLED_ROWS]


def take_image(image: Any) -> Any:
    """Return mode, size, bytes, palette and `info` of a PIL image."""
    palette = [image.palette.mode, bytes(image.palette.palette)] if image.palette else None
    return [image.mode, list(image.size), image.tobytes(), palette, dict(image.info)]


def make_image(parts: Any) -> Any:
    """Return the image that `take_image` took apart."""
    mode, (width, height), data, palette, info = parts
    if width * height > 8 * len(data):
        raise CannotRestoreError("it holds an image with fewer bytes than pixels")
    image = sys.modules["PIL.Image"].frombytes(mode, (width, height), data)
    if palette:
        image.putpalette(palette[1], palette[0])
    image.info = info
    return image


def fill_image(target: Any, value: Any) -> None:
    """Make a PIL image the same as another one, in place."""
    _require_same(target, value, "mode", "size")
    target.paste(value)
    target.palette, target.info = value.palette, value.info


def sample_image(image: Any, max_bytes: int) -> Any:
    """Return an image; of a large one, the row in the middle."""
    width, height = image.size
    return image if 4 * width * height <= max_bytes else image.crop((0, height // 2, width, height // 2 + 1))
