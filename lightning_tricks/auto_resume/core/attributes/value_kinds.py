"""The kinds of values that a checkpoint holds: how each is taken apart, made again, and changed in place.

Digests, `encode`, `Decoder`, `replace_contents` and the walk over objects all look here: a kind that is added to
`VALUE_KINDS` is compared, saved and restored.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import random
import types
import uuid
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks.auto_resume.core.attributes import value_parts
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    CannotRestoreError,
    is_subclass,
    remembered_by_type,
)

# also those without data, and of other classes
_MUTABLE = (Tensor, np.ndarray, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, deque, Counter)}


@dataclass(frozen=True, eq=False)
class ValueKind:
    """How values of a kind are taken apart, made again, and changed in place.

    Attributes:
        name: What the kind is called in a file.
        types: The types whose values are of the kind; a string names a type of a library that may not be loaded.
        parts: Returns the parts of a value by name; a tensor called "data" is saved as it is, the others are encoded.
            Of a composite, returns a value of other kinds, such as a list of arrays. Of a container, returns what it
            has beside its entries.
        rebuild: Returns a value that is made of such parts, given the value in the same place of this process.
        fill: Replaces the contents of a value by those of another one, or raises; None for what never changes in place.
        bases: Types whose subclasses are of the kind as well.
        accepts: Whether a subclass is of the kind.
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
    is_composite: bool = False
    sample: Callable[[Any, int], Any] = lambda value, max_bytes: value
    container: Any = None

    @cached_property
    def has_order(self) -> bool:
        """Whether the entries of a container have keys or numbers by which they are found again."""
        return not issubclass(self.container, Set)

    @cached_property
    def is_keyed(self) -> bool:
        """Whether entries have keys of their own."""
        return self.container is not None and issubclass(self.container, Mapping)

    def entries(self, value: Any) -> Iterable[tuple[Any, Any]]:
        """Return (key, value) or (number, value) pairs of a container; no method of a subclass is called."""
        return self.container.items(value) if self.is_keyed else enumerate(self.container.__iter__(value))


def kind_of_type(kind: type) -> ValueKind | None:
    """Return the kind of the values of a type; None if they are not plain data."""
    return _of_types.get(kind) or _kind_of_other_type(kind)


@remembered_by_type
def _kind_of_other_type(kind: type) -> ValueKind | None:
    name = f"{str(kind.__module__).partition('.')[0]}.{kind.__qualname__}"
    candidates = (found for found in VALUE_KINDS if is_subclass(kind, *found.bases) and found.accepts(kind))
    return _of_types.get(name) or next(candidates, None)


def kind_of(value: Any) -> ValueKind | None:
    """Return the kind of a value; None if it is not plain data."""
    kind = type(value)
    if kind is np.ndarray and value.dtype.kind == "O":
        return _OBJECTS
    if kind is Tensor and value.layout is not torch.strided:
        return _COO if value.layout is torch.sparse_coo else _COMPRESSED
    return kind_of_type(kind)


def container_kind(kind: type) -> ValueKind | None:
    """Return the kind of the containers of a type; None if they are not containers."""
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


def _container(
    base: Any,
    parts: Callable[[Any], dict[str, Any]] = lambda value: {},
    begin: Callable[[Any, Any, Any], object] = lambda made, parts, present: None,
    accepts: Callable[[type], bool] = lambda kind: True,
) -> ValueKind:
    """Return the kind of a container; only methods of its base are called.

    Args:
        base: The container. It can be changed if it has `clear`, and `extend`, `update` or `__setitem__` of a mapping.
        parts: Returns its parts beside its entries.
        begin: Prepares an empty one, given its parts and the value in the same place of this process.
        accepts: Whether a subclass is a container of the kind.
    """

    def refill(target: Any, items: Iterable[Any]) -> None:
        base.clear(target)
        if not kind.is_keyed:
            (base.extend if hasattr(base, "extend") else base.update)(target, items)
            return
        for key, part in items:
            base.__setitem__(target, key, part)

    def fill(target: Any, value: Any) -> None:
        if parts(target).get("maxlen") != parts(value).get("maxlen"):
            raise ValueError("of another maxlen")
        refill(target, list(base.items(value) if kind.is_keyed else base.__iter__(value)))

    def rebuild(parts: Any, present: Any) -> Any:
        made = base.__new__(parts["class"])
        begin(made, parts, present)
        refill(made, parts["items"])
        return made

    def rebuild_frozen(parts: Any, present: Any) -> Any:
        return base.__new__(parts["class"], parts["items"])

    kind = ValueKind(base.__name__, (base,), parts, rebuild, fill, (base,), accepts, container=base)
    return kind if hasattr(base, "clear") else replace(kind, rebuild=rebuild_frozen, fill=None)


def _factory_name(value: Any) -> dict[str, str]:
    factory = value.default_factory
    return {"factory": factory.__name__} if factory in _FACTORIES.values() else {}


def _set_factory(made: Any, parts: Any, present: Any) -> None:
    factory = _FACTORIES.get(parts.get("factory", ""))
    if factory is None and is_subclass(type(present), defaultdict):
        factory = present.default_factory
    if factory is None:
        raise CannotRestoreError("it holds a defaultdict whose factory is unknown")
    defaultdict.__init__(made, factory)


def _times(kind: Any) -> ValueKind:
    def write(value: Any) -> str:
        if getattr(value, "tzinfo", None) is not None and type(value.tzinfo) is not datetime.timezone:
            raise CannotRestoreError("only datetime.timezone can be written as a time zone")
        return str(value.isoformat())

    return _scalar(kind.__name__, (kind,), write, kind.fromisoformat)


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


_SUBCLASS = (value_parts.take_subclass, value_parts.make_subclass, value_parts.fill_subclass)
_PARAMETER = (value_parts.take_tensor, value_parts.make_parameter, value_parts.fill_tensor)
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
    value_parts.take_generator,
    value_parts.make_generator,
    value_parts.fill_generator,
    bases=(np.random.BitGenerator,),
)
VALUE_KINDS: tuple[ValueKind, ...] = (
    *(_container(base) for base in (OrderedDict, Counter)),  # the special ones first
    _container(defaultdict, _factory_name, _set_factory),
    *(_container(base) for base in (dict, list, set, frozenset)),
    _container(
        deque,
        lambda value: {"maxlen": value.maxlen},
        lambda made, parts, present: deque.__init__(made, (), parts["maxlen"]),
    ),
    _container(tuple, accepts=lambda kind: hasattr(kind, "_fields")),
    ValueKind(
        "tensor", (Tensor, "torch.DTensor"), value_parts.take_tensor, value_parts.make_tensor, value_parts.fill_tensor
    ),
    ValueKind("parameter", (nn.Parameter,), *_PARAMETER),
    ValueKind("array", (np.ndarray,), value_parts.take_array, value_parts.make_array, value_parts.fill_array),
    ValueKind("scalar", (), value_parts.take_array, value_parts.make_number, bases=(np.generic,)),
    ValueKind("bytes", (bytes,), value_parts.take_bytes, value_parts.make_bytes),
    ValueKind("bytearray", (bytearray,), value_parts.take_bytes, value_parts.make_bytearray, value_parts.fill_all),
    _GENERATOR,
    ValueKind("enum", (), value_parts.take_member, value_parts.make_member, bases=(enum.Enum,)),
    _scalar("int", (int,), hex, lambda text: int(text, 16)),
    _scalar("complex", (complex,), lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    _scalar("Size", (torch.Size,), list, torch.Size),
    _scalar("dtype", (torch.dtype,), str, value_parts.read_dtype),
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
    _scalar("slice", (slice,), value_parts.write_slice, lambda parts: slice(*parts)),
    _composite("array", *_SUBCLASS, bases=(np.ndarray,), accepts=lambda kind: not is_subclass(kind, np.memmap)),
    _composite("tensor", *_SUBCLASS, bases=(Tensor,), accepts=_has_data),
    _OBJECTS,
    _COO,
    _COMPRESSED,
    _composite(
        "array.array",
        lambda value: [value.typecode, value.tobytes()],
        lambda parts: array(*parts),
        value_parts.fill_all,
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
