"""The kinds of values that a checkpoint holds: how each is taken apart, made again, and changed in place.

All that reads values looks here: `encode` and `decode`, digests, the walk over objects, and what restores in place. So
a kind that is added to `VALUE_KINDS` is compared, saved and restored.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import operator
import pathlib
import random
import types
import uuid
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks.auto_resume.core.attributes import value_parts
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    MISSING,
    SCALARS,
    CannotRestoreError,
    find_class,
    is_subclass,
)

ARRAY_KINDS = "biufcUSmMV"
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
# also those without data, and of other classes
_MUTABLE = (Tensor, np.ndarray, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, deque, Counter)}


@dataclass(frozen=True, eq=False)
class ValueKind:
    """How values of a kind are taken apart, made again, and changed in place.

    Attributes:
        name: What the kind is called in a file.
        types: The types whose values are of the kind; a string names a type of a library that may not be loaded.
        parts: Returns what a value is made of, by name; tensors among it are saved as they are. Of a composite, returns
            plain data, tensors, arrays or containers of them.
        rebuild: Returns a value that is made of such parts, given the value in the same place of this process.
        fill: Replaces the contents of a value by those of another one, or raises; None for what never changes in place.
        bases: Types whose subclasses are of the kind as well.
        accepts: Whether a subclass is of the kind.
        size: Returns how many bytes `parts` copies.
        is_composite: Whether the parts are values of other kinds, which are digested, encoded and decoded in turn.
        sample: Returns the value, or a smaller one of it if it has more than a number of bytes.
        container: The class whose methods read the entries of a container; None for other kinds. The parts of which a
            container is rebuilt have its entries under "items" and its class under "class".
    """

    name: str
    types: tuple[type | str, ...]
    parts: Callable[[Any], Any]
    rebuild: Callable[[Any, Any], Any]
    fill: Callable[[Any, Any], object] | None = None
    bases: tuple[type, ...] = ()
    accepts: Callable[[type], bool] = lambda kind: True
    size: Callable[[Any], int] = lambda value: 0
    is_composite: bool = False
    sample: Callable[[Any, int], Any] = lambda value, max_bytes: value
    container: Any = None

    @property
    def has_order(self) -> bool:
        """Whether the entries of a container have keys or numbers by which they are found again."""
        return not issubclass(self.container, set | frozenset)

    @property
    def is_keyed(self) -> bool:
        """Whether entries have keys of their own."""
        return self.container is not None and issubclass(self.container, dict)

    def entries(self, value: Any) -> Iterable[tuple[Any, Any]]:
        """Return (key, value) or (number, value) pairs of a container; no method of a subclass is called."""
        return self.container.items(value) if self.is_keyed else enumerate(self.container.__iter__(value))


def kind_of_type(kind: type) -> ValueKind | None:
    """Return the kind of the values of a type; None if they are not plain data."""
    found = _of_types.get(kind, MISSING)
    if found is MISSING:
        found = _of_other_types.get(kind, MISSING)
    if found is MISSING:
        found = _of_other_types[kind] = _find_kind(kind)
    return found  # type: ignore[no-any-return]


def kind_of(value: Any) -> ValueKind | None:
    """Return the kind of a value; None if it is not plain data."""
    kind = type(value)
    if kind is np.ndarray and value.dtype.kind == "O":
        return _OBJECTS
    if kind is Tensor and value.layout is not torch.strided:
        return _COO if value.layout is torch.sparse_coo else _COMPRESSED
    return kind_of_type(kind)


def container_kind(kind: type) -> ValueKind | None:
    """Return the kind of the containers of a type; None if they are no containers."""
    found = kind_of_type(kind)
    return None if found is None or found.container is None else found


def kind_named(encoded: dict[str, Any]) -> ValueKind:
    """Return the kind of an encoded value."""
    return _BY_NAME[encoded["kind"], encoded["type"] if encoded["kind"] == "parts" else ""]


def is_mutable(kind: type) -> bool:
    """Whether it matters which of two equal values of a type an object holds."""
    found = kind_of_type(kind)
    return (found is not None and found.fill is not None) or is_subclass(kind, *_MUTABLE)


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator."""
    return kind_of_type(type(value)) is _GENERATOR


def replace_contents(target: Any, value: Any) -> bool:
    """Replace the contents of an object by those of another of its type; return whether that was possible in place."""
    if type(target) is not type(value) and not (is_subclass(type(target), Tensor) and is_subclass(type(value), Tensor)):
        return False
    kind = kind_of(target)
    if kind is None or kind.fill is None:
        return False
    try:
        kind.fill(target, value)
    except Exception:  # it is of another size, or the library that it is from cannot
        return False
    return True


def _find_kind(kind: type) -> ValueKind | None:
    name = f"{str(kind.__module__).partition('.')[0]}.{kind.__qualname__}"
    return _of_types.get(name) or next(
        (one for one in VALUE_KINDS if is_subclass(kind, *one.bases) and one.accepts(kind)), None
    )


def _check_same(what: str, one: object, other: object) -> None:
    if one != other:
        raise ValueError(f"{what} is {one} and {other}")  # so that it is replaced, not filled


def _new_container(parts: Any, present: Any, base: Any) -> Any:
    made = base.__new__(parts["class"])
    base.__init__(made, parts["items"], *([parts["maxlen"]] if base is deque else []))
    return made


def _fill_container(target: Any, value: Any, base: Any) -> None:
    if base is deque:
        _check_same("the longest length", target.maxlen, value.maxlen)
    items = list(base.__iter__(value))
    base.clear(target)
    (base.update if base is set else base.extend)(target, items)


def _new_dict(parts: Any, present: Any, base: Any) -> Any:
    made = base.__new__(parts["class"])
    if base is defaultdict:
        factory = _FACTORIES.get(parts.get("factory", ""))
        if factory is None and is_subclass(type(present), defaultdict):
            factory = present.default_factory
        if factory is None:
            raise CannotRestoreError("it holds a defaultdict whose factory is unknown")
        defaultdict.__init__(made, factory)
    for key, part in parts["items"]:
        base.__setitem__(made, key, part)
    return made


def _fill_dict(target: Any, value: Any, base: Any) -> None:
    pairs = list(base.items(value))
    base.clear(target)
    for key, part in pairs:
        base.__setitem__(target, key, part)


def _factory_name(value: Any) -> dict[str, str]:
    factory = value.default_factory
    return {"factory": factory.__name__} if factory in _FACTORIES.values() else {}


def _container(base: Any, parts: Callable[[Any], dict[str, Any]] = lambda value: {}) -> ValueKind:
    new, fill = (_new_dict, _fill_dict) if issubclass(base, dict) else (_new_container, _fill_container)
    return ValueKind(
        base.__name__, (base,), parts, partial(new, base=base), partial(fill, base=base), bases=(base,), container=base
    )


def _frozen_container(base: Any, accepts: Callable[[type], bool] = lambda kind: True) -> ValueKind:
    def rebuild(parts: Any, present: Any) -> Any:
        return base.__new__(parts["class"], parts["items"])

    return ValueKind(base.__name__, (base,), lambda value: {}, rebuild, bases=(base,), accepts=accepts, container=base)


def _tensor_parts(value: Any) -> dict[str, Any]:
    if value.is_quantized or value.device.type == "meta" or value.is_nested:
        raise CannotRestoreError("it has no plain data")
    data = value.detach().resolve_conj().resolve_neg()
    data = data.cpu() if data.device.type != "cpu" else data.clone()  # a view would save the whole storage
    return {"data": data, "device": value.device.type, "requires_grad": value.requires_grad and value.is_leaf}


def _new_tensor(parts: Any, present: Any) -> Tensor:
    device = torch.device(parts["device"])
    if is_subclass(type(present), Tensor) and present.device.type == device.type:
        device = present.device
    elif device.type != "cpu" and not torch.get_device_module(device).is_available():
        device = torch.device("cpu")
    data = parts["data"].to(device, copy=True)
    return data.requires_grad_() if parts["requires_grad"] else data  # type: ignore[no-any-return]


def _new_parameter(parts: Any, present: Any) -> nn.Parameter:
    return nn.Parameter(_new_tensor(parts | {"requires_grad": False}, present), bool(parts["requires_grad"]))


def _fill_tensor(target: Tensor, value: Tensor) -> None:
    _check_same("the shape", target.shape, value.shape)
    _check_same("the dtype", target.dtype, value.dtype)
    _check_same("requires_grad", target.requires_grad, value.requires_grad)
    with torch.no_grad():
        target.copy_(value)  # raises for a tensor of inference mode and an expanded one


def _array_parts(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.kind not in ARRAY_KINDS or array.dtype.hasobject:
        raise CannotRestoreError("it has no plain data")
    dtype = np.lib.format.dtype_to_descr(array.dtype)
    return {"dtype": dtype, "shape": list(array.shape), "data": _as_tensor(array.tobytes())}


def _new_array(parts: Any, present: Any) -> Any:
    data = np.frombuffer(parts["data"].numpy().tobytes(), dtype=np.lib.format.descr_to_dtype(parts["dtype"]))
    return data.reshape(parts["shape"]).copy()


def _fill_array(target: Any, value: Any) -> None:
    _check_same("the shape", target.shape, value.shape)
    _check_same("the dtype", target.dtype, value.dtype)
    np.copyto(target, value)


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _bytes(kind: Any, fill: Any = None) -> ValueKind:
    return ValueKind(
        kind.__name__,
        (kind,),
        lambda value: {"data": _as_tensor(bytes(value))},
        lambda parts, present: kind(parts["data"].numpy().tobytes()),
        fill,
        size=len,
    )


def _generator_parts(value: Any) -> dict[str, Any]:
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


def _new_generator(parts: Any, present: Any) -> Any:
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


def _fill_generator(target: Any, value: Any) -> None:
    own, parts = _generator_parts(target), _generator_parts(value)
    _check_same("the type", own["type"], parts["type"])
    _set_state(target, parts["state"])


def _set_state(value: Any, state: Any) -> None:
    kind = type(value)
    if kind is random.Random:
        value.setstate(state)
    elif kind in (torch.Generator, np.random.RandomState):
        value.set_state(state)
    else:
        (value.bit_generator if kind is np.random.Generator else value).state = state


def _times(kind: Any) -> ValueKind:
    def write(value: Any) -> str:
        if getattr(value, "tzinfo", None) is not None and type(value.tzinfo) is not datetime.timezone:
            raise CannotRestoreError("only datetime.timezone can be written as a time zone")
        return str(value.isoformat())

    return _scalar(kind.__name__, (kind,), write, kind.fromisoformat)


def _read_dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise CannotRestoreError(f"{name} is not a dtype")
    return found


def _write_slice(value: slice) -> list[Any]:
    parts = [value.start, value.stop, value.step]
    if any(type(part) not in SCALARS for part in parts):
        raise CannotRestoreError("it is a slice of values that are not numbers")
    return parts


def _find_member(parts: Any, present: Any) -> Any:
    members = find_class(parts["class"], enum.Enum, present)._member_map_  # type: ignore[attr-defined]
    if parts["name"] not in members:
        raise CannotRestoreError(f"{parts['class']} has no {parts['name']}")
    return members[parts["name"]]


def _enum_parts(value: Any) -> dict[str, str]:
    kind = type(value)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "name": str(value._name_)}


def _scalar(name: str, kinds: tuple[type, ...], write: Callable[[Any], Any], read: Callable[[Any], Any]) -> ValueKind:
    """Return the kind of small values that never change, which a number, a string or a list of these describes."""
    return ValueKind(name, kinds, lambda value: {"value": write(value)}, lambda parts, present: read(parts["value"]))


def _composite(
    name: str, take: Callable[[Any], Any], make: Callable[[Any], Any], fill: Any = None, **options: Any
) -> ValueKind:
    """Return the kind of values of a library, or of the standard library, that are made of values of other kinds."""
    return ValueKind(name, (name,), take, lambda parts, present: make(parts), fill, is_composite=True, **options)


def _fill_weak(target: Any, value: Any) -> None:
    target.clear()
    target.update(value)


def _has_data(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__


_NUM_BYTES = operator.attrgetter("nbytes")
_SUBCLASS = (value_parts.take_subclass, value_parts.make_subclass, value_parts.fill_subclass)
_TABLE = {"fill": value_parts.fill_table, "sample": value_parts.sample_table}
_OBJECTS = _composite(
    "objects",
    lambda value: [list(value.shape), value.reshape(-1).tolist()],
    value_parts.make_objects,
    value_parts.fill_objects,
)
_COO = _composite(
    "coo",
    lambda value: [value._indices(), value._values().detach(), list(value.shape), value.is_coalesced()],
    lambda parts: torch.sparse_coo_tensor(*parts[:3], is_coalesced=parts[3], check_invariants=True),
)
_COMPRESSED = _composite("compressed", value_parts.take_compressed, value_parts.make_compressed)
_GENERATOR = ValueKind(
    "generator",
    (torch.Generator, random.Random, np.random.Generator, np.random.RandomState),
    _generator_parts,
    _new_generator,
    _fill_generator,
    bases=(np.random.BitGenerator,),
)
VALUE_KINDS: tuple[ValueKind, ...] = (
    *(_container(base) for base in (OrderedDict, Counter)),
    _container(defaultdict, _factory_name),
    *(_container(base) for base in (dict, list, set)),
    _frozen_container(frozenset),
    _container(deque, lambda value: {"maxlen": value.maxlen}),
    _frozen_container(tuple, accepts=lambda kind: hasattr(kind, "_fields")),
    ValueKind("tensor", (Tensor,), _tensor_parts, _new_tensor, _fill_tensor, size=_NUM_BYTES),
    ValueKind("parameter", (nn.Parameter,), _tensor_parts, _new_parameter, _fill_tensor, size=_NUM_BYTES),
    ValueKind("array", (np.ndarray,), _array_parts, _new_array, _fill_array, size=_NUM_BYTES),
    ValueKind(
        "scalar",
        (),
        _array_parts,
        lambda parts, present: _new_array(parts, present)[()],
        bases=(np.generic,),
        size=_NUM_BYTES,
    ),
    _bytes(bytes),
    _bytes(bytearray, fill=lambda target, value: target.__setitem__(slice(None), value)),
    _GENERATOR,
    ValueKind("enum", (), _enum_parts, _find_member, bases=(enum.Enum,)),
    _scalar("int", (int,), hex, lambda text: int(text, 16)),
    _scalar("complex", (complex,), lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    _scalar("Size", (torch.Size,), list, torch.Size),
    _scalar("dtype", (torch.dtype,), str, _read_dtype),
    _scalar("device", (torch.device,), str, torch.device),
    *(_times(kind) for kind in (datetime.datetime, datetime.date, datetime.time)),
    _scalar(
        "timedelta",
        (datetime.timedelta,),
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    *(_scalar(kind.__name__, (kind,), str, kind) for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath)),
    _scalar("Path", (pathlib.PosixPath, pathlib.WindowsPath), str, pathlib.Path),
    _scalar(
        "Fraction",
        (fractions.Fraction,),
        lambda value: [hex(value.numerator), hex(value.denominator)],
        lambda parts: fractions.Fraction(*(int(part, 16) for part in parts)),
    ),
    *(_scalar(kind.__name__, (kind,), str, kind) for kind in (decimal.Decimal, uuid.UUID)),
    _scalar("range", (range,), lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    _scalar("slice", (slice,), _write_slice, lambda parts: slice(*parts)),
    _composite("array", *_SUBCLASS, bases=(np.ndarray,), accepts=lambda kind: not is_subclass(kind, np.memmap)),
    _composite("tensor", *_SUBCLASS, bases=(Tensor,), accepts=_has_data),
    _OBJECTS,
    _COO,
    _COMPRESSED,
    _composite(
        "array.array",
        lambda value: [value.typecode, value.tobytes()],
        lambda parts: array(*parts),
        lambda target, value: target.__setitem__(slice(None), value),
    ),
    _composite("numpy.SeedSequence", lambda value: value.state, lambda parts: np.random.SeedSequence(**parts)),
    _composite("builtins.mappingproxy", dict, types.MappingProxyType),
    _composite("weakref.ReferenceType", lambda value: [value()], lambda parts: weakref.ref(*parts)),
    *(
        _composite(name, take, make, _fill_weak)
        for name, take, make in (
            ("weakref.WeakKeyDictionary", dict, weakref.WeakKeyDictionary),
            ("weakref.WeakValueDictionary", dict, weakref.WeakValueDictionary),
            ("_weakrefset.WeakSet", set, weakref.WeakSet),
        )
    ),
    _composite(
        "PIL.Image",
        value_parts.take_image,
        value_parts.make_image,
        value_parts.fill_image,
        sample=value_parts.sample_image,
    ),
    _composite("pandas.DataFrame", value_parts.take_frame, value_parts.make_frame, **_TABLE),
    _composite("pandas.Series", value_parts.take_series, value_parts.make_series, **_TABLE),
    *(
        _composite(
            f"pandas.{name}Index", value_parts.take_index, value_parts.make_index, sample=value_parts.sample_table
        )
        for name in ("", "Range", "Multi", "Datetime", "Timedelta", "Categorical")
    ),
)
_BY_NAME = {("parts", kind.name) if kind.is_composite else (kind.name, ""): kind for kind in VALUE_KINDS}
_of_types: dict[type | str, ValueKind] = {name: kind for kind in VALUE_KINDS for name in kind.types}
_of_other_types: WeakKeyDictionary[type, ValueKind | None] = WeakKeyDictionary()
