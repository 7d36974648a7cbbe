"""Values as plain data: tensors and JSON, which a checkpoint holds and a fresh process reads as data.

What has no JSON form becomes a dict with a `kind`. A value that is no data, such as a function, leaves a hole, which
the value in the same location of the fresh process fills.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks.auto_resume.core.attributes.comparison import differing_paths
from lightning_tricks.auto_resume.core.attributes.generators import generator_state
from lightning_tricks.auto_resume.core.attributes.scalar_encoding import write_scalar
from lightning_tricks.auto_resume.core.attributes.value_parts import PART_KINDS, is_mutable, part_kind_of
from lightning_tricks.auto_resume.core.attributes.value_types import (
    SCALARS,
    container_base,
    container_items,
    is_subclass,
    key_label,
    type_name,
)

KEY = "a key"  # the name of a key of a dict in a path
MAX_DEPTH = 24  # containers in each other; each takes up to four of the 200 that a checkpoint may have
FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, deque, Counter)}
ARRAY_KINDS = "biufcUSmMV"


class TooLargeError(ValueError):
    """A value has more bytes than the budget has left."""


@dataclass
class EncodeBudget:
    """How many bytes an encoding may take, and what it leaves out.

    Attributes:
        bytes_left: Number of bytes that are left.
        registered: Ids of parameters and buffers, which are encoded as holes.
        known: Id -> path of values that are saved elsewhere, which are encoded as references.
        path: Path of the value that is encoded; empty if entries that are shared need not be.
        places: Id -> path of objects, and of entries that were encoded, which are encoded as references elsewhere.
        taken: The paths among them.
        is_clock: Tells by name and value whether an entry of a dict is the reading of a clock.
        opaque_values: Location of each value that is no data, with the name of its type.
        opaque_types: Name -> type of those values.
        open_containers: Ids of the containers that are being encoded, to find cycles.
    """

    bytes_left: int
    registered: Collection[int] = ()
    known: Mapping[int, str] = field(default_factory=dict)
    path: str = ""
    places: dict[int, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    is_clock: Callable[[str, float], bool] = lambda name, value: False
    opaque_values: set[tuple[tuple[str, ...], str]] = field(default_factory=set)
    opaque_types: dict[str, type] = field(default_factory=dict)
    open_containers: set[int] = field(default_factory=set)

    def place_of(self, value: Any, location: tuple[str, ...]) -> str:
        """Return the path under which a value was encoded first; empty if it is here, or its identity is nothing."""
        if not self.path or id(value) in self.open_containers:
            return ""
        here = ".".join((self.path, *location))
        found = self.places.get(id(value), here)
        if found == here and here not in self.taken and is_mutable(type(value)):
            self.places[id(value)] = here
            self.taken.add(here)
        return "" if found == here else found

    def consume(self, size: int) -> None:
        """Subtract bytes from the budget.

        Raises:
            TooLargeError: If fewer are left.
        """
        self.bytes_left -= size
        if self.bytes_left < 0:
            raise TooLargeError


def encode(value: Any, budget: EncodeBudget, location: tuple[str, ...] = ()) -> Any:
    """Return a value as tensors and JSON, with holes where it is no data.

    Args:
        value: The value to encode.
        budget: Counts the bytes, and takes the locations of holes.
        location: Keys of the containers that lead to the value.

    Raises:
        TooLargeError: If it has more bytes than the budget.
    """
    kind = type(value)
    if kind in SCALARS and not (kind is int and value.bit_length() > 1000):
        budget.consume(16 + (len(value) if kind is str else 0))
        return value
    if location and id(value) in budget.known and id(value) not in budget.open_containers:
        return {"kind": "same", "path": budget.known[id(value)]}
    if place := budget.place_of(value, location):
        return {"kind": "same", "path": place}
    base = container_base(kind)
    if base is not None and len(location) < MAX_DEPTH and id(value) not in budget.open_containers:
        budget.open_containers.add(id(value))
        encoded = _encode_container(value, base, budget, location)
        budget.open_containers.discard(id(value))
        return encoded
    try:
        found = None if id(value) in budget.registered else _encode_leaf(value, kind, budget, location)
    except TooLargeError:
        raise
    except Exception:  # the value may be of any class, and raise anything
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
            parts.append([encode(key, budget, (*inner, KEY)), encoded_part])
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
    if base is defaultdict and value.default_factory in FACTORIES.values():
        encoded["factory"] = value.default_factory.__name__
    return encoded


def _are_plain(parts: list[Any]) -> bool:
    opaque_types = set(map(type, parts))
    return opaque_types <= SCALARS and (
        int not in opaque_types or all(part.bit_length() < 1000 for part in parts if type(part) is int)
    )


def _encode_leaf(value: Any, kind: type, budget: EncodeBudget, location: tuple[str, ...]) -> dict[str, Any] | None:
    if name := part_kind_of(value):
        return _encode_parts(value, name, budget, location)
    if kind is Tensor or kind is nn.Parameter:
        return _encode_tensor(value, budget)
    if kind is np.ndarray or is_subclass(kind, np.generic):
        return _encode_array(value, kind is not np.ndarray, budget)
    if kind in (bytes, bytearray):
        budget.consume(len(value))
        return {"kind": kind.__name__, "data": _as_tensor(bytes(value))}
    if is_subclass(kind, enum.Enum):
        return {"kind": "enum", "class": f"{kind.__module__}.{kind.__qualname__}", "name": str(value._name_)}
    scalar = write_scalar(value)
    if scalar is not None:
        budget.consume(64)
        return scalar
    state = generator_state(value)
    if state is None:
        return None
    budget.consume(64)
    return {"kind": "generator", "type": state[0], "state": encode(state[1], EncodeBudget(2**20))}


def _encode_parts(value: Any, name: str, budget: EncodeBudget, location: tuple[str, ...]) -> dict[str, Any] | None:
    """Return what a value is made of; None if a part is no data, or another value would be made of the parts."""
    kind, inner = PART_KINDS[name], replace(budget, opaque_values=set(), path="")
    parts = kind.take(value)
    encoded = encode(parts, inner, (*location, name))
    again = encode(kind.take(kind.make(parts)), replace(inner, bytes_left=budget.bytes_left), (*location, name))
    budget.bytes_left = inner.bytes_left
    if inner.opaque_values or any(True for _ in differing_paths(encoded, again)):
        return None
    return {"kind": "parts", "type": name, "parts": encoded}


def _encode_tensor(value: Tensor, budget: EncodeBudget) -> dict[str, Any] | None:
    if value.is_quantized or value.device.type == "meta" or value.is_nested:
        return None
    budget.consume(64 + value.numel() * value.element_size())
    data = value.detach().resolve_conj().resolve_neg()
    data = data.cpu() if data.device.type != "cpu" else data.clone()  # a view would save the whole storage
    needs_grad = value.requires_grad and value.is_leaf
    return {
        "kind": "parameter" if type(value) is nn.Parameter else "tensor",
        "data": data,
        "device": value.device.type,
        "requires_grad": needs_grad,
    }


def _encode_array(value: Any, is_scalar: bool, budget: EncodeBudget) -> dict[str, Any] | None:
    array = np.asarray(value)
    if array.dtype.kind not in ARRAY_KINDS or array.dtype.hasobject:
        return None
    budget.consume(64 + array.nbytes)
    kind = "scalar" if is_scalar else "array"
    dtype = encode(np.lib.format.dtype_to_descr(array.dtype), budget)
    return {"kind": kind, "dtype": dtype, "shape": list(array.shape), "data": _as_tensor(array.tobytes())}


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
