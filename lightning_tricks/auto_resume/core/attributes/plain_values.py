"""Values as plain data: what a checkpoint keeps of an attribute, and the attribute from it, without running its code.

What has no JSON of its own becomes a dict with a `kind`. A value that is no data, such as a function, leaves a hole,
which the value that stands in the same place of the fresh process fills.
"""

from __future__ import annotations

import datetime
import enum
import pathlib
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEPTH = 24  # containers in each other; each takes up to four of the 200 that a checkpoint may have
SCALARS = frozenset({type(None), bool, int, float, str})
MISSING: Any = object()
_BASES = (OrderedDict, Counter, defaultdict, dict, list, set, frozenset, deque, tuple)  # special ones first
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, deque, Counter)}
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_ARRAY_KINDS = "biufcUSmM"
_TIMES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}
_PATHS = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath)}


class TooLargeError(ValueError):
    """A value has more bytes than there is room for."""


class CannotRestoreError(ValueError):
    """A value that was saved has no equal in this process."""


@dataclass
class EncodeBudget:
    """What an encoding may take, and what it leaves out.

    Attributes:
        bytes_left: Bytes.
        registered: Ids of parameters and buffers, which are no part of a value.
        known: Id -> path of what is kept elsewhere.
        is_clock: Tells the readings of a clock, by name and value, among attributes and entries of dicts.
        opaque_values: Place of each value that is no data, with the name of its type.
    """

    bytes_left: int
    registered: Collection[int] = ()
    known: Mapping[int, str] = field(default_factory=dict)
    is_clock: Callable[[str, float], bool] = lambda name, value: False
    opaque_values: set[tuple[tuple[str, ...], str]] = field(default_factory=set)
    opaque_types: dict[str, type] = field(default_factory=dict)  # of holes
    open_containers: set[int] = field(default_factory=set)  # containers that are being walked

    def consume(self, size: int) -> None:
        """Count bytes.

        Raises:
            TooLargeError: If none are left.
        """
        self.bytes_left -= size
        if self.bytes_left < 0:
            raise TooLargeError


def is_subclass(kind: type, *bases: type) -> bool:
    """Whether a type inherits from one of others, whatever its instances say of themselves."""
    return any(base in kind.__mro__ for base in bases)


def type_name(kind: type) -> str:
    """Return the qualified name of a type."""
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    return f"{module}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")


def function_name(value: Any) -> str:
    """Return what a function of a user's code is called; nothing for what is none."""
    if type(value) not in (types.FunctionType, types.MethodType):
        return ""
    return f"function {value.__module__}.{value.__qualname__}"


def container_base(kind: type) -> type | None:
    """Return the container of the standard library that a type is or extends."""
    if is_subclass(kind, torch.Size) or (
        is_subclass(kind, tuple) and kind is not tuple and not hasattr(kind, "_fields")
    ):
        return None
    return next((base for base in _BASES if base in kind.__mro__), None)


def container_items(value: Any, base: type) -> Iterable[tuple[Any, Any]]:
    """Return the (key, value) pairs of a container as its base gives them; no method of a subclass is called."""
    if is_subclass(base, OrderedDict):
        return OrderedDict.items(value)
    if is_subclass(base, dict):
        return dict.items(value)
    return enumerate(base.__iter__(value))  # type: ignore[attr-defined]


def is_mutable(kind: type) -> bool:
    """Whether it matters which of two equal values of a type an object holds."""
    return is_subclass(kind, list, dict, set, deque, bytearray, Tensor, np.ndarray, *_GENERATORS)


def key_label(key: Any) -> str:
    """Return what a path calls an entry of a container."""
    return str(key)[:100] if type(key) in SCALARS else type(key).__name__


def encode(value: Any, budget: EncodeBudget, location: tuple[str, ...] = ()) -> Any:
    """Return a value as tensors and JSON, with holes where it is no data.

    Raises:
        TooLargeError: If there is no room for it.
    """
    kind = type(value)
    if kind in SCALARS and not (kind is int and value.bit_length() > 1000):
        budget.consume(16 + (len(value) if kind is str else 0))
        return value
    if location and id(value) in budget.known and id(value) not in budget.open_containers:
        return {"kind": "same", "path": budget.known[id(value)]}
    base = container_base(kind)
    if base is not None and len(location) < MAX_DEPTH and id(value) not in budget.open_containers:
        budget.open_containers.add(id(value))
        encoded = _encode_container(value, base, budget, location)
        budget.open_containers.discard(id(value))
        return encoded
    try:
        found = None if id(value) in budget.registered else _encode_leaf(value, kind, budget)
    except TooLargeError:
        raise
    except Exception:  # whatever a strange object raises
        found = None
    if found is None:
        budget.opaque_values.add((location, type_name(kind)))
        budget.opaque_types[type_name(kind)] = kind
        return {"kind": "hole", "type": type_name(kind)}
    return found


def _encode_container(value: Any, base: type, budget: EncodeBudget, location: tuple[str, ...]) -> Any:
    kind = type(value)
    budget.consume(16 + 8 * base.__len__(value))  # type: ignore[attr-defined]
    if is_subclass(base, dict):
        parts: list[Any] = []
        for key, part in container_items(value, base):
            inner = (*location, key_label(key))
            is_clock = type(part) is float and budget.is_clock(".".join(inner), part)
            encoded_part = {"kind": "clock", "value": part} if is_clock else encode(part, budget, inner)
            parts.append([encode(key, budget, inner), encoded_part])
    else:
        parts = list(base.__iter__(value))  # type: ignore[attr-defined]
        if not _are_plain(parts):
            by_value = is_subclass(base, set, frozenset)
            parts = [
                encode(part, budget, (*location, key_label(part if by_value else at))) for at, part in enumerate(parts)
            ]
        else:
            budget.consume(16 * len(parts) + sum(len(part) for part in parts if type(part) is str))
    if kind is list:
        return parts
    encoded: dict[str, Any] = {"kind": base.__name__, "items": parts}
    if kind is not base:
        encoded["class"] = type_name(kind) if kind.__module__ != "__main__" else f"__main__.{kind.__qualname__}"
    if base is deque:
        encoded["maxlen"] = value.maxlen
    if base is defaultdict and value.default_factory in _FACTORIES.values():
        encoded["factory"] = value.default_factory.__name__
    return encoded


def _are_plain(parts: list[Any]) -> bool:
    opaque_types = set(map(type, parts))
    return opaque_types <= SCALARS and (
        int not in opaque_types or all(part.bit_length() < 1000 for part in parts if type(part) is int)
    )


def _encode_leaf(value: Any, kind: type, budget: EncodeBudget) -> dict[str, Any] | None:
    if kind is Tensor or kind is nn.Parameter:
        return _encode_tensor(value, budget)
    if is_subclass(kind, np.ndarray, np.generic):
        if kind is not np.ndarray and is_subclass(kind, np.ndarray):
            return None
        return _encode_array(value, kind is not np.ndarray, budget)
    if kind in (bytes, bytearray):
        budget.consume(len(value))
        return {"kind": kind.__name__, "data": _as_tensor(bytes(value))}
    if is_subclass(kind, enum.Enum):
        return {"kind": "enum", "class": f"{kind.__module__}.{kind.__qualname__}", "name": str(value._name_)}
    for names, write in _WRITERS:
        if kind in names:
            budget.consume(64)
            return {"kind": _KIND_NAMES.get(kind, kind.__name__), "value": write(value)}
    state = generator_state(value)
    if state is None:
        return None
    return {"kind": "generator", "type": state[0], "state": encode(state[1], budget)}


def _encode_tensor(value: Tensor, budget: EncodeBudget) -> dict[str, Any] | None:
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta" or value.is_nested:
        return None
    budget.consume(64 + value.numel() * value.element_size())
    data = value.detach().resolve_conj().resolve_neg()
    data = data.cpu() if data.device.type != "cpu" else data.clone()  # a view would take the whole storage along
    needs_grad = value.requires_grad and value.is_leaf
    return {
        "kind": "parameter" if type(value) is nn.Parameter else "tensor",
        "data": data,
        "device": value.device.type,
        "requires_grad": needs_grad,
    }


def _encode_array(value: Any, is_scalar: bool, budget: EncodeBudget) -> dict[str, Any] | None:
    array = np.asarray(value)
    if array.dtype.kind not in _ARRAY_KINDS:
        return None
    budget.consume(64 + array.nbytes)
    kind = "scalar" if is_scalar else "array"
    return {"kind": kind, "dtype": array.dtype.str, "shape": list(array.shape), "data": _as_tensor(array.tobytes())}


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def generator_state(value: Any) -> tuple[str, Any] | None:
    """Return the kind of a random generator and its state; None for what is no generator."""
    kind = type(value)
    if kind is torch.Generator:
        return f"torch {value.device}", value.get_state()
    if kind is random.Random:
        return "random", value.getstate()
    if kind is np.random.Generator:
        return f"numpy {type(value.bit_generator).__name__}", value.bit_generator.state
    if kind is np.random.RandomState:
        return f"legacy {type(value._bit_generator).__name__}", value.get_state(legacy=False)
    return None


def _set_generator_state(value: Any, state: Any) -> None:
    kind = type(value)
    if kind is torch.Generator:
        value.set_state(state)
    elif kind is random.Random:
        value.setstate(state)
    elif kind is np.random.Generator:
        value.bit_generator.state = state
    else:
        value.set_state(state)


def _write_time(value: Any) -> str:
    if getattr(value, "tzinfo", None) is not None and type(value.tzinfo) is not datetime.timezone:
        raise ValueError("a zone that only its own class knows")
    return str(value.isoformat())


_KIND_NAMES: dict[type, str] = {pathlib.PosixPath: "Path", pathlib.WindowsPath: "Path"}
_WRITERS: tuple[tuple[Collection[Any], Callable[[Any], Any]], ...] = (
    ((int,), hex),
    ((complex,), lambda value: [value.real, value.imag]),
    ((torch.Size,), list),
    ((torch.dtype, torch.device), str),
    (tuple(_TIMES.values()), _write_time),
    ((datetime.timedelta,), lambda value: [value.days, value.seconds, value.microseconds]),
    ((*_PATHS.values(), *_KIND_NAMES), str),
    ((range,), lambda value: [value.start, value.stop, value.step]),
    ((slice,), lambda value: [_validated_int(part) for part in (value.start, value.stop, value.step)]),
)
_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda value: int(value, 16),
    "complex": lambda value: complex(*value),
    "Size": torch.Size,
    "dtype": lambda value: _validated(vars(torch).get(value.removeprefix("torch.")), torch.dtype),
    "device": torch.device,
    **{name: kind.fromisoformat for name, kind in _TIMES.items()},
    "timedelta": lambda value: datetime.timedelta(*value),
    **_PATHS,
    "Path": pathlib.Path,
    "range": lambda value: range(*value),
    "slice": lambda value: slice(*value),
}


def _validated_int(value: Any) -> Any:
    if type(value) not in SCALARS:
        raise TypeError("a slice of something else")
    return value


def _validated(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise CannotRestoreError(f"{value!r} is no {kind.__name__}")
    return value


class ObjectResolver:
    """What a process has to offer to values that come into it; here, nothing."""

    def known(self, path: str) -> Any:
        """Return what is kept elsewhere.

        Raises:
            CannotRestoreError: If it is not there.
        """
        raise CannotRestoreError(f"it holds {path}, which is not there")

    def rebuild(self, name: str) -> Any:
        """Return a new object of a class, without attributes.

        Raises:
            CannotRestoreError: If none can be made without running code of the class.
        """
        raise CannotRestoreError(f"it holds a {name}, which is no plain data")


def decode(encoded: Any, present: Any = MISSING, resolver: ObjectResolver | None = None) -> Any:
    """Return the value that was encoded.

    Args:
        encoded: By `encode`, through a file.
        present: What stands in its place in this process; it fills holes, and tells classes and devices.
        resolver: Gives what neither holds.

    Raises:
        CannotRestoreError: If the value needs something that is not there.
    """
    if type(encoded) is list:
        return _decode_container({"kind": "list", "items": encoded}, present, resolver or ObjectResolver())
    if type(encoded) is not dict:
        return encoded
    kind, resolver = encoded["kind"], resolver or ObjectResolver()
    if kind == "hole":
        is_there = present is not MISSING and encoded["type"] in (type_name(type(present)), function_name(present))
        return present if is_there else resolver.rebuild(encoded["type"])
    if kind == "clock":
        return present if type(present) is float else encoded["value"]
    if kind == "same":
        return resolver.known(encoded["path"])
    if "items" in encoded:
        return _decode_container(encoded, present, resolver)
    if kind in ("tensor", "parameter"):
        return _decode_tensor(encoded, present)
    if kind in ("array", "scalar"):
        data = np.frombuffer(encoded["data"].numpy().tobytes(), dtype=np.dtype(encoded["dtype"]))
        array = data.reshape(encoded["shape"]).copy()
        return array if kind == "array" else array[()]
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(encoded["data"].numpy().tobytes())
    if kind == "enum":
        members = find_class(encoded["class"], enum.Enum, present)._member_map_  # type: ignore[attr-defined]
        if encoded["name"] not in members:
            raise CannotRestoreError(f"{encoded['class']} has no {encoded['name']}")
        return members[encoded["name"]]
    if kind == "generator":
        return _decode_generator(encoded["type"], decode(encoded["state"]))
    return _READERS[kind](encoded["value"])


def _decode_container(encoded: dict[str, Any], present: Any, resolver: ObjectResolver) -> Any:
    base = next(base for base in _BASES if base.__name__ == encoded["kind"])
    kind = find_class(encoded["class"], base, present) if "class" in encoded else base
    ordered = present is not MISSING and is_subclass(type(present), base) and not is_subclass(base, set, frozenset)
    here = dict(container_items(present, base)) if ordered else {}
    if is_subclass(base, dict):
        keys = [decode(key, resolver=resolver) for key, _ in encoded["items"]]
        pairs = [
            (key, decode(part, here.get(key, MISSING), resolver))
            for key, (_, part) in zip(keys, encoded["items"], strict=True)
        ]
        return _new_dict(kind, base, pairs, encoded, present)
    parts = [decode(part, here.get(number, MISSING), resolver) for number, part in enumerate(encoded["items"])]
    if base in (tuple, frozenset):
        return base.__new__(kind, parts)
    value: Any = base.__new__(kind)
    base.__init__(value, parts, *([encoded["maxlen"]] if base is deque else []))
    return value


def _new_dict(kind: type, base: Any, pairs: list[tuple[Any, Any]], encoded: dict[str, Any], present: Any) -> Any:
    value = base.__new__(kind)
    if base is defaultdict:
        factory = _FACTORIES.get(encoded.get("factory", ""))
        if factory is None and is_subclass(type(present), defaultdict):
            factory = present.default_factory
        if factory is None:
            raise CannotRestoreError("the factory of a defaultdict is not there")
        defaultdict.__init__(value, factory)
    fill_container(value, pairs, base)
    return value


def _decode_tensor(encoded: dict[str, Any], present: Any) -> Tensor:
    device = torch.device(encoded["device"])
    if is_subclass(type(present), Tensor) and present.device.type == device.type:
        device = present.device
    elif device.type != "cpu" and not torch.get_device_module(device).is_available():
        device = torch.device("cpu")
    data = encoded["data"].to(device, copy=True)
    if encoded["kind"] == "parameter":
        return nn.Parameter(data, requires_grad=bool(encoded["requires_grad"]))
    return data.requires_grad_() if encoded["requires_grad"] else data  # type: ignore[no-any-return]


def _decode_generator(name: str, state: Any) -> Any:
    library, _, which = name.partition(" ")
    if library in ("numpy", "legacy") and which not in _BIT_GENERATORS:
        raise CannotRestoreError(f"NumPy's generator {which} is not known")
    made: Any
    if library == "torch":
        made = torch.Generator(which)
    elif library == "random":
        made = random.Random()  # noqa: S311
    else:
        bits = getattr(np.random, which)()
        made = np.random.Generator(bits) if library == "numpy" else np.random.RandomState(bits)
    _set_generator_state(made, state)
    return made


def find_class(name: str, base: type, present: Any = MISSING) -> type:
    """Return a class of this process by its name; nothing is imported.

    Raises:
        CannotRestoreError: If there is none, or it does not extend `base`.
    """
    if present is not MISSING and name in (f"{type(present).__module__}.{type(present).__qualname__}",):
        return type(present)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:] if found is not None else ():
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if isinstance(found, type) and is_subclass(found, base):
            return found
    raise CannotRestoreError(f"the class {name} is not there")


def fill_container(target: Any, pairs: Iterable[Any], base: type) -> None:
    """Replace what a container holds, by the methods of its base: pairs of a dict, entries of others."""
    if is_subclass(base, dict):
        owner: Any = OrderedDict if is_subclass(base, OrderedDict) else dict
        pairs = list(pairs)
        owner.clear(target)
        for key, part in pairs:
            owner.__setitem__(target, key, part)
    elif base is list:
        list.__setitem__(target, slice(None), list(pairs))
    else:
        pairs = list(pairs)
        base.clear(target)  # type: ignore[attr-defined]
        (deque.extend if base is deque else set.update)(target, pairs)


def replace_contents(target: Any, value: Any) -> bool:
    """Give an object the content of another of its kind, and say whether that could be done in place."""
    kind = type(target)
    if kind is not type(value) and not (is_subclass(kind, Tensor) and is_subclass(type(value), Tensor)):
        return False
    base = container_base(kind)
    if base in (list, set, deque) or (base is not None and is_subclass(base, dict)):
        if base is deque and target.maxlen != value.maxlen:
            return False
        fill_container(target, value.items() if is_subclass(base, dict) else value, base)
        return True
    if is_subclass(kind, Tensor):
        return _copy_tensor(target, value)
    if kind is np.ndarray and (target.shape, target.dtype) == (value.shape, value.dtype) and target.flags.writeable:
        np.copyto(target, value)
        return True
    if kind is bytearray:
        target[:] = value
        return True
    state, other = generator_state(target), generator_state(value)
    if state is None or other is None or state[0] != other[0]:
        return False
    _set_generator_state(target, other[1])
    return True


def _copy_tensor(resolver: Tensor, value: Tensor) -> bool:
    if (resolver.shape, resolver.dtype) != (value.shape, value.dtype) or resolver.requires_grad != value.requires_grad:
        return False
    try:
        with torch.no_grad():
            resolver.copy_(value)
    except RuntimeError:  # of inference mode, or expanded
        return False
    return True
