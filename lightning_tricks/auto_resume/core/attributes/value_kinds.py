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
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import is_dense
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    CannotRestoreError,
    find_class,
    is_subclass,
    remembered_by_type,
    type_name,
)

# also those without data, and of other classes
_MUTABLE = (
    Tensor,
    np.ndarray,
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    SynchronizedBase,
)
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_MAX_SPAWNED, _MAX_SEEDS = 2**20, 64  # generators that another one has spawned, and numbers in a pool of seeds
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, deque, Counter)}


@dataclass(frozen=True, eq=False)
class ValueKind:
    """How values of a kind are taken apart, made again, and changed in place.

    Attributes:
        name: What the kind is called in a file.
        types: The types whose values are of the kind; a string names a type of a library that may not be loaded.
        parts: Returns the parts of a value by name; a tensor called "data" is saved as it is, the others are encoded.
            Of a container, returns what it has beside its entries.
        rebuild: Returns a value that is made of such parts, given the value in the same place of this process.
        fill: Replaces the contents of a value by those of another one, or raises; None for what never changes in place.
        bases: Types whose subclasses are of the kind as well.
        accepts: Whether a subclass is of the kind.
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
    is_plain = value.layout is torch.strided if kind is Tensor else kind is not np.ndarray or not value.dtype.hasobject
    return kind_of_type(kind) if is_plain else None


def container_kind(kind: type) -> ValueKind | None:
    """Return the kind of the containers of a type; None if they are not containers."""
    found = kind_of_type(kind)
    return None if found is None or found.container is None else found


def kind_named(encoded: dict[str, Any]) -> ValueKind:
    """Return the kind of an encoded value."""
    return _BY_NAME[encoded["kind"]]


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
        raise CannotRestoreError("it contains a defaultdict with an unknown factory")
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


def has_data(value: Tensor) -> bool:
    """Whether a tensor can be read: not on the meta device, nor after FSDP2 freed the weights that it had gathered."""
    # to read what was freed (`untyped_storage().resize_(0)`) ends the process, without an error
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
    return value.device.type != "meta" and (not is_plain or value.numel() == 0 or value.data_ptr() != 0)


def _take_tensor(value: Any) -> dict[str, Any]:
    """Return the data of a tensor on the CPU, and where it was."""
    if not (is_dense(value) and has_data(value)):
        raise CannotRestoreError("it has no plain data")
    data = value.detach().resolve_conj().resolve_neg()
    data = data.cpu() if data.device.type != "cpu" else data.clone()  # a view would save the whole storage
    parts = {"data": data, "device": value.device.type, "requires_grad": value.requires_grad and value.is_leaf}
    return parts if not value.is_leaf or value.grad is None else {**parts, "grad": value.grad}


def _make_tensor(parts: Any, present: Any) -> Tensor:
    """Return a tensor, on the device of the tensor in the same place of this process."""
    device = torch.device(parts["device"])
    if is_subclass(type(present), Tensor) and present.device.type == device.type:
        device = present.device
    elif device.type != "cpu" and not torch.get_device_module(device).is_available():
        device = torch.device("cpu")
    data = parts["data"].to(device, copy=True)
    return data.requires_grad_() if parts["requires_grad"] else data  # type: ignore[no-any-return]


def _make_parameter(parts: Any, present: Any) -> nn.Parameter:
    """Return a parameter as `_make_tensor` does a tensor."""
    return nn.Parameter(_make_tensor(parts | {"requires_grad": False}, present), bool(parts["requires_grad"]))


def _require_same(target: Any, value: Any, *names: str) -> None:
    for name in names:
        if getattr(target, name) != getattr(value, name):
            raise ValueError(f"of another {name}")


def _fill_tensor(target: Tensor, value: Tensor) -> None:
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


def _take_array(value: Any) -> dict[str, Any]:
    """Return the bytes of an array or a number of NumPy."""
    array = np.asarray(value)
    if not is_plain_dtype(array.dtype):
        raise CannotRestoreError("it has no plain data")
    dtype = np.lib.format.dtype_to_descr(array.dtype)
    return {"dtype": dtype, "shape": list(array.shape), "data": _as_tensor(array.tobytes())}


def _make_array(parts: Any, present: Any) -> Any:
    """Return the array that `_take_array` took apart."""
    data = np.frombuffer(parts["data"].numpy().tobytes(), dtype=np.lib.format.descr_to_dtype(parts["dtype"]))
    return data.reshape(parts["shape"]).copy()


def _fill_array(target: Any, value: Any) -> None:
    """Copy an array into another one."""
    _require_same(target, value, "shape", "dtype")
    np.copyto(target, value)


def _take_bytes(value: Any) -> dict[str, Any]:
    return {"data": _as_tensor(bytes(value))}


def _fill_all(target: Any, value: Any) -> None:
    """Replace all entries of an array or of bytes."""
    target[:] = value


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _take_generator(value: Any) -> dict[str, Any]:
    """Return which random generator it is, its state, and the seeds of which it spawns others."""
    kind, parts = type(value), {}
    if kind not in _GENERATOR.types and not is_subclass(kind, np.random.BitGenerator):
        parts = {"class": type_name(kind)}
    if kind is torch.Generator:
        return {"type": f"torch {value.device}", "state": value.get_state()}
    if is_subclass(kind, random.Random):
        return {**parts, "type": "random", "state": random.Random.getstate(value)}
    if is_subclass(kind, np.random.RandomState):
        state = np.random.RandomState.get_state(value, legacy=False)
        return {**parts, "type": f"legacy {type(value._bit_generator).__name__}", "state": state}
    bits = value.bit_generator if is_subclass(kind, np.random.Generator) else value
    library = "numpy" if bits is not value else "bits"
    seeds = bits.seed_seq.state if type(bits.seed_seq) is np.random.SeedSequence else None
    return {**parts, "type": f"{library} {type(bits).__name__}", "state": bits.state, "seeds": seeds}


def _make_generator(parts: Any, present: Any) -> Any:
    if "class" in parts and type_name(type(present)) != parts["class"]:
        raise CannotRestoreError(f"it contains a {parts['class']}, which cannot be created from its state")
    if is_generator(present) and _continue_generator(present, parts):
        return present
    library, _, which = parts["type"].partition(" ")
    if library in ("numpy", "legacy", "bits") and which not in _BIT_GENERATORS:
        raise CannotRestoreError(f"NumPy's bit generator {which} is not supported")
    made: Any
    if library == "torch":
        made = torch.Generator(which)
    elif library == "random":
        made = random.Random()  # noqa: S311
    else:
        bits = getattr(np.random, which)(_make_seeds(parts["seeds"]) if parts.get("seeds") else None)
        made = {"numpy": np.random.Generator, "legacy": np.random.RandomState}.get(library, lambda own: own)(bits)
    _set_state(made, parts["state"])
    return made


def _continue_generator(present: Any, parts: Any) -> bool:
    """Let a generator of the same type and seeds continue from a state; return whether that is possible."""
    own = _take_generator(present)
    seeds, wanted = dict(own.get("seeds") or {}), dict(parts.get("seeds") or {})
    more = wanted.pop("n_children_spawned", 0) - seeds.pop("n_children_spawned", 0)
    if own["type"] != parts["type"] or seeds != wanted or not 0 <= more <= _MAX_SPAWNED:
        return False
    if more:
        getattr(present, "bit_generator", present).seed_seq.spawn(more)
    _set_state(present, parts["state"])
    return True


def _set_state(value: Any, state: Any) -> None:
    kind = type(value)
    if is_subclass(kind, random.Random):
        random.Random.setstate(value, state)
    elif is_subclass(kind, torch.Generator, np.random.RandomState):
        value.set_state(state)
    else:
        (value.bit_generator if is_subclass(kind, np.random.Generator) else value).state = state


def _make_seeds(state: Any) -> Any:
    if state["pool_size"] > _MAX_SEEDS:
        raise CannotRestoreError("it contains seeds that take too much memory")
    return np.random.SeedSequence(**state)


def _read_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name."""
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise CannotRestoreError(f"{name} is not a dtype")
    return found


def _make_member(parts: Any, present: Any) -> Any:
    """Return a member of an enum that this process has."""
    members = find_class(parts["class"], enum.Enum, present)._member_map_  # type: ignore[attr-defined]
    if parts["name"] not in members:
        raise CannotRestoreError(f"{parts['class']} has no {parts['name']}")
    return members[parts["name"]]


def _take_member(value: Any) -> dict[str, str]:
    """Return the class of an enum and the name of its member."""
    kind = type(value)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "name": str(value._name_)}


def _shared_bytes(value: Any) -> memoryview:
    """Return the memory of a `multiprocessing.Value` or `Array`."""
    return memoryview(value.get_obj()).cast("B")


def _fill_shared(parts: Any, present: Any) -> Any:
    """Write into the memory that this process shares with others: only a process that owns it can create it."""
    data = parts["data"].numpy()
    if not is_subclass(type(present), SynchronizedBase) or _shared_bytes(present).nbytes != len(data):
        raise CannotRestoreError("it is memory of another size, or none, in this run")
    with present.get_lock():
        _shared_bytes(present)[:] = data.tobytes()
    return present


_GENERATOR = ValueKind(
    "generator",
    (torch.Generator, random.Random, np.random.Generator, np.random.RandomState),
    _take_generator,
    _make_generator,
    bases=(random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
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
    ValueKind("tensor", (Tensor, "torch.DTensor"), _take_tensor, _make_tensor, _fill_tensor),
    ValueKind("parameter", (nn.Parameter,), _take_tensor, _make_parameter, _fill_tensor),
    ValueKind("array", (np.ndarray,), _take_array, _make_array, _fill_array),
    ValueKind("scalar", (), _take_array, lambda parts, present: _make_array(parts, present)[()], bases=(np.generic,)),
    ValueKind("bytes", (bytes,), _take_bytes, lambda parts, present: parts["data"].numpy().tobytes()),
    ValueKind(
        "bytearray", (bytearray,), _take_bytes, lambda parts, present: bytearray(parts["data"].numpy()), _fill_all
    ),
    _GENERATOR,
    ValueKind(
        "shared",
        (),
        lambda value: {"data": _as_tensor(bytes(_shared_bytes(value)))},
        _fill_shared,
        bases=(SynchronizedBase,),
    ),
    ValueKind("enum", (), _take_member, _make_member, bases=(enum.Enum,)),
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
    *(_scalar(kind.__name__, (kind,), str, kind) for kind in (decimal.Decimal, fractions.Fraction, uuid.UUID)),
    _scalar("range", (range,), lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    ValueKind(
        "array.array",
        (array,),
        lambda value: {"type": value.typecode, **_take_bytes(value.tobytes())},
        lambda parts, present: array(parts["type"], parts["data"].numpy().tobytes()),
        _fill_all,
    ),
    _scalar("SeedSequence", (np.random.SeedSequence,), lambda value: value.state, _make_seeds),
)
_BY_NAME = {kind.name: kind for kind in VALUE_KINDS}
_of_types: dict[type | str, ValueKind] = {name: kind for kind in VALUE_KINDS for name in kind.types}
