"""Values as plain data: tensors and JSON, which a checkpoint holds and a fresh process reads as data.

What has no JSON form becomes a dict with a `kind`, see `VALUE_KINDS`. A value that is not plain data, such as a
function, leaves a hole, which the value in the same place of the fresh process fills. No code of a file is run.
Tuples that are alike, such as the transitions of a replay buffer, are written by columns: their tensors are few blocks.
To read, write and create a hundred thousand tensors one by one takes most of its time for what is done once for each.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks._shared.tensors import local_part
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    MISSING,
    SCALARS,
    CannotRestoreError,
    attributes,
    find_class,
    function_name,
    has_attributes,
    is_subclass,
    labelled,
    set_attribute,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.value_kinds import (
    ValueKind,
    is_mutable,
    kind_named,
    kind_of,
    num_bytes,
)
from lightning_tricks.auto_resume.core.tensor_block import stacked

KEY = "a key"  # the name of a key of a dict in a path
MAX_DEPTH = 24  # containers in each other; each takes up to four of the 200 that a checkpoint may have
_CLOCKS = [(clock, clock()) for clock in (time.monotonic, time.perf_counter)]  # and what they showed at first
_A_DAY = 86400.0
_MIN_ROWS = 8  # fewer are not worth it
_byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # elsewhere before NumPy 2
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # other objects may not define equality


class TooLargeError(ValueError):
    """A value has more bytes than the budget has left."""


@dataclass
class EncodeBudget:
    """How many bytes an encoding may take, and what it leaves out.

    Attributes:
        bytes_left: Number of bytes that are left.
        registered: Id -> path of parameters and buffers, which are encoded as holes.
        known: Id -> path of values that are saved elsewhere, which are encoded as references.
        path: Path of the value that is encoded; empty if entries that are shared need not be.
        places: Id -> path of objects, and of entries that were encoded, which are encoded as references elsewhere.
        taken: The paths among them.
        memory: First and last address of the tensors and arrays that were encoded, sorted.
        opaque_values: Location of each value that is not plain data, with the name of its type -> the value.
        open_containers: Ids of the containers that are being encoded, to find cycles.
    """

    bytes_left: int
    registered: Mapping[int, str] = field(default_factory=dict)
    known: Mapping[int, str] = field(default_factory=dict)
    path: str = ""
    places: dict[int, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    memory: list[tuple[int, int]] = field(default_factory=list)
    opaque_values: dict[tuple[tuple[str, ...], str], Any] = field(default_factory=dict)
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

    def shares_memory(self, value: Any) -> bool:
        """Whether a tensor or an array lies in the memory of another one that was encoded before: a copy would not."""
        array = value if type(value) is np.ndarray else value.detach().numpy()
        first, last = _byte_bounds(array)
        at = bisect(self.memory, (first, last))
        if not array.size:
            return False
        if (at and self.memory[at - 1][1] > first) or (at < len(self.memory) and self.memory[at][0] < last):
            return True
        self.memory.insert(at, (first, last))
        return False

    def consume(self, size: int) -> None:
        """Subtract bytes from the budget.

        Raises:
            TooLargeError: If fewer are left.
        """
        self.bytes_left -= size
        if self.bytes_left < 0:
            raise TooLargeError


def encode(value: Any, budget: EncodeBudget, location: tuple[str, ...] = ()) -> Any:
    """Return a value as tensors and JSON, with holes where it is not plain data.

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
    found = kind_of(value)
    if found is not None and found.container and len(location) < MAX_DEPTH and id(value) not in budget.open_containers:
        budget.open_containers.add(id(value))
        encoded = _encode_container(value, found, budget, location)
        budget.open_containers.discard(id(value))
        return encoded
    if found is not None and not found.container and id(value) not in budget.registered:
        with suppress(TypeError, RuntimeError):  # NumPy has no such type
            if kind in (Tensor, np.ndarray) and budget.path and budget.shares_memory(value) and location:
                return _hole(value, budget, location, f"{type_name(kind)} in the memory of another one")
        try:
            return _encode_leaf(value, found, budget, location)
        except TooLargeError:
            raise
        except Exception:  # noqa: S110  # the value may be of any class, and raise anything
            pass
    return _hole(value, budget, location)


def _hole(value: Any, budget: EncodeBudget, location: tuple[str, ...], name: str = "") -> dict[str, Any]:
    name = name or type_name(type(value))
    budget.opaque_values[location, name] = value
    return {"kind": "hole", "type": name}


def _encode_container(value: Any, found: ValueKind, budget: EncodeBudget, location: tuple[str, ...]) -> Any:
    kind, base = type(value), found.container
    budget.consume(16 + 8 * base.__len__(value))
    items: list[Any] = list(base.__iter__(value))
    by_id = (
        [key for key in items if type(key) is int and key in budget.known]
        if not found.has_order or found.is_keyed
        else []
    )
    if by_id and len(by_id) < len(items):
        return _hole(value, budget, location, f"{type_name(kind)} with the ids of objects")
    if found.is_keyed:
        pairs, items = list(found.entries(value)), []
        for (key, part), label in zip(pairs, labelled((key for key, _ in pairs), budget.registered), strict=True):
            inner = (*location, label)
            is_clock = type(part) is float and budget.path and is_clock_reading(part)
            encoded_part = {"kind": "clock", "value": part} if is_clock else encode(part, budget, inner)
            encoded_key = {"kind": "id", "path": budget.known[key]} if by_id else encode(key, budget, (*inner, KEY))
            items.append([encoded_key, encoded_part])
    elif by_id:
        items = [{"kind": "id", "path": budget.known[key]} for key in items]
    elif (rows := _encode_rows(items, budget, location) if found.has_order else MISSING) is not MISSING:
        items = rows
    else:
        labels = map(str, range(len(items))) if found.has_order else labelled(items, budget.registered)
        items = [encode(part, budget, (*location, label)) for part, label in zip(items, labels, strict=True)]
    if kind is list and type(items) is list:
        return items
    encoded: dict[str, Any] = {"kind": found.name, "items": items, **found.parts(value)}
    if kind is not base:
        encoded["class"] = type_name(kind) if kind.__module__ != "__main__" else f"__main__.{kind.__qualname__}"
    return encoded


def _encode_rows(rows: Sequence[Any], budget: EncodeBudget, location: tuple[str, ...]) -> Any:
    """Return tuples that hold numbers, strings and tensors by columns; `MISSING` where there are others, or few.

    A column of tensors is one of numbers: each tensor is written once, however many tuples hold it.
    """
    if len(rows) < _MIN_ROWS or set(map(type, rows)) != {tuple} or len(set(map(len, rows))) > 1 or not rows[0]:
        return MISSING
    columns, numbers, tensors, size = list[Any](), dict[int, int](), list[Tensor](), 0
    for column in zip(*rows, strict=True):
        kinds = set(map(type, column))
        if kinds == {Tensor}:
            for part in column:
                if numbers.setdefault(id(part), len(tensors)) == len(tensors):
                    tensors.append(part)
            columns.append(torch.tensor([numbers[id(part)] for part in column]))
        elif kinds <= SCALARS and not any(type(part) is int and part.bit_length() > 1000 for part in column):
            columns.append(list(column))
            size += 16 * len(column) + sum(len(part) for part in column if type(part) is str)
        else:
            return MISSING
    encoded = _encode_tensors(tensors, budget, location)
    if encoded is MISSING:
        return MISSING
    budget.consume(size)
    return {"columns": columns, **encoded}


def _encode_tensors(tensors: Sequence[Tensor], budget: EncodeBudget, location: tuple[str, ...]) -> Any:
    """Return tensors as blocks, and as references those that are saved elsewhere; `MISSING` if one is no plain data."""
    same, own = dict[int, str](), dict[int, Tensor]()
    for number, tensor in enumerate(tensors):
        if path := budget.known.get(id(tensor)) or budget.places.get(id(tensor)):
            same[number] = path
        elif id(tensor) in budget.registered or tensor.layout is not torch.strided or tensor.is_nested:
            return MISSING
        else:
            own[number] = tensor
    left, places = list(own.values()), list(own)
    blocks, others = stacked(left)
    if others or not all(map(Tensor.is_contiguous, left)):
        return MISSING
    starts = np.fromiter(map(Tensor.data_ptr, left), np.int64)
    ends, order = starts + np.fromiter((one.nbytes for one in left), np.int64), starts.argsort(kind="stable")
    if (ends[order][:-1] > starts[order][1:]).any():
        return MISSING  # they share memory
    budget.consume(sum(data.nbytes for _, data in blocks))
    if budget.path:
        here = ".".join((budget.path, *location))
        paths = [f"{here}.tensor {number}" for number in places]
        budget.places.update(zip(map(id, left), paths, strict=True))
        budget.taken.update(paths)
    return {
        "blocks": [[torch.tensor([places[at] for at in numbers]), data] for numbers, data in blocks],
        "same": [[number, {"kind": "same", "path": path}] for number, path in same.items()],
    }


def _encode_leaf(value: Any, found: ValueKind, budget: EncodeBudget, location: tuple[str, ...]) -> dict[str, Any]:
    """Return a value by its parts.

    Raises:
        CannotRestoreError: If a part is not plain data.
    """
    budget.consume(64 + num_bytes(value))
    # parts are made for this, and nothing else shares them
    inner, inside = replace(budget, opaque_values={}, path=""), (*location, found.name)
    parts = found.parts(value).items()
    encoded = {name: part if name == "data" else encode(part, inner, inside) for name, part in parts}
    budget.bytes_left = inner.bytes_left
    if inner.opaque_values:
        raise CannotRestoreError("a part of it is not plain data")
    return {"kind": found.name, **encoded}


class Decoder:
    """Makes the values that were encoded; this base class knows no objects of this process.

    Attributes:
        made: Path -> entry of a container that was decoded.
        names: Id -> path of objects, parameters and buffers, which may be keys.
    """

    def __init__(self) -> None:
        self.made, self.names = dict[str, Any](), dict[int, str]()

    def known(self, path: str) -> Any:
        """Return the value at a path.

        Raises:
            CannotRestoreError: If there is no such path.
        """
        if path in self.made:
            return self.made[path]
        raise CannotRestoreError(f"it refers to {path}, which does not exist")

    def rebuild(self, name: str) -> Any:
        """Return a new object of a class, without attributes and without calling `__init__`.

        Raises:
            CannotRestoreError: If that is not possible without running code of the class.
        """
        raise CannotRestoreError(f"it contains a {name}, which is not plain data")

    def note_made(self) -> None:
        """Note that there is a new container that has attributes."""

    def decode(self, encoded: Any, present: Any = MISSING, path: str = "") -> Any:
        """Return the value that was encoded.

        Args:
            encoded: What `encode` returned, possibly saved to a file and loaded.
            present: The value in the same place of this process; it fills holes, and tells classes and devices.
            path: Path of the value, for others that refer to its entries; empty if none does.

        Raises:
            CannotRestoreError: If the value needs something that this process lacks.
        """
        if type(encoded) is list:
            encoded = {"kind": "list", "items": encoded}
        if type(encoded) is not dict:
            return encoded
        kind = encoded["kind"]
        if kind == "hole":
            fits = present is not MISSING and encoded["type"] in (type_name(type(present)), function_name(present))
            return present if fits else self.rebuild(encoded["type"])
        if kind == "clock":  # a timer of another process is not this one's
            return present if type(present) is float and is_clock_reading(present) else encoded["value"]
        if kind in ("same", "id"):
            value = self.known(encoded["path"])
            return value if kind == "same" else id(value)
        found = kind_named(encoded)
        if found.container:
            return self._decode_container(encoded, found, present, path)
        return found.rebuild(
            {name: part if name == "data" else self.decode(part) for name, part in encoded.items()}, present
        )

    def _decode_container(self, encoded: dict[str, Any], found: ValueKind, present: Any, path: str) -> Any:
        base, items = found.container, encoded["items"]
        kind = find_class(encoded["class"], base, present) if "class" in encoded else base
        has_places = present is not MISSING and is_subclass(type(present), base) and found.has_order
        here = dict(found.entries(present)) if has_places else {}

        def entry(key: Any, part: Any, label: str) -> Any:
            inner = f"{path}.{label}" if path else ""
            value = self.decode(part, here.get(key, MISSING), inner)
            reference = part["kind"] if type(part) is dict else ""
            if inner and reference != "same" and (reference == "hole" or is_mutable(type(value))):
                self.made.setdefault(inner, value)
            return value

        if found.is_keyed:
            keys = [self.decode(key) for key, _ in items]
            labels = labelled(keys, self.names)
            items = [(key, entry(key, part, to)) for key, (_, part), to in zip(keys, items, labels, strict=True)]
        elif type(items) is dict:
            items = self._decode_rows(items, path)
        else:
            items = [entry(number, part, str(number)) for number, part in enumerate(items)]
        value = found.rebuild({**encoded, "items": items, "class": kind}, present)
        if kind is not base and has_attributes(kind):  # they are restored afterwards, where they changed
            for name, part in attributes(present) if type(present) is kind else ():
                set_attribute(value, name, part)
            self.note_made()
        return value

    def _decode_rows(self, rows: dict[str, Any], path: str) -> list[Any]:
        """Return the tuples that were encoded by columns."""
        tensors = dict[int, Tensor]()
        for numbers, data in rows["blocks"]:  # copies: one tensor that is left would keep all in memory
            tensors.update(zip(numbers.tolist(), map(Tensor.clone, data.unbind()), strict=True))
        self.made.update({f"{path}.tensor {number}": tensor for number, tensor in tensors.items()} if path else {})
        tensors.update((number, self.decode(reference)) for number, reference in rows["same"])
        columns = [
            [tensors[number] for number in column.tolist()] if isinstance(column, Tensor) else column
            for column in rows["columns"]
        ]
        return list(zip(*columns, strict=True))


def differing_paths(saved: Any, restored: Any, path: str = "") -> Iterator[str]:
    """Yield the paths, such as `state_dict.net.weight`, at which nested plain values and tensors differ.

    Tensors are compared bit by bit: NaN equals itself. What only `restored` has is ignored, and so are clock readings.
    """
    if isinstance(saved, Tensor):
        if not (isinstance(restored, Tensor) and _same_tensor(saved, restored)):
            yield path
    elif isinstance(saved, Mapping):
        if saved.keys() == {"kind", "value"} and saved["kind"] == "clock":
            return
        saved, restored = _in_order(saved), _in_order(restored)
        for key, value in saved.items():
            counterpart = restored.get(key, MISSING) if isinstance(restored, Mapping) else MISSING
            yield from differing_paths(value, counterpart, f"{path}.{key}" if path else str(key))
    elif isinstance(saved, list | tuple):
        if not isinstance(restored, list | tuple) or len(restored) != len(saved):
            yield path
        else:
            for number, (saved_value, restored_value) in enumerate(zip(saved, restored, strict=True)):
                yield from differing_paths(saved_value, restored_value, f"{path}.{number}" if path else str(number))
    elif not _same_value(saved, restored):
        yield path


def _in_order(value: Any) -> Any:
    """Return an encoded set with sorted entries, as their order depends on what it once held; others as they are."""
    is_set = isinstance(value, Mapping) and value.get("kind") in ("set", "frozenset") and "items" in value
    return {**value, "items": sorted(value["items"], key=repr)} if is_set else value


def _same_tensor(saved: Tensor, restored: Tensor) -> bool:
    saved, restored = local_part(saved), local_part(restored.detach()).to("cpu")
    if saved.shape != restored.shape or saved.layout != restored.layout:
        return False
    if saved.layout != torch.strided or saved.is_quantized:
        return True  # these have no plain bits to compare
    saved, restored = saved.detach().to("cpu"), restored.to(saved.dtype)
    return torch.equal(saved, restored) or torch.equal(_bits(saved), _bits(restored))


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _same_value(saved: Any, restored: Any) -> bool:
    if isinstance(restored, Tensor):
        return restored.numel() == 1 and bool(restored == saved)
    if isinstance(saved, float) and isinstance(restored, int | float):
        same = saved == restored or (math.isnan(saved) and math.isnan(restored))
        return same or (_is_time_of_day(saved) and _is_time_of_day(restored))
    return not isinstance(saved, _PLAIN) or saved == restored


def is_clock_reading(value: float) -> bool:
    """Whether a number is what a clock has shown since this process began, or `time.time()` in the last day."""
    if value.is_integer():
        return False
    return _is_time_of_day(value) or any(first <= value <= clock() for clock, first in _CLOCKS)


def _is_time_of_day(value: float) -> bool:
    return 0 <= time.time() - value < _A_DAY
