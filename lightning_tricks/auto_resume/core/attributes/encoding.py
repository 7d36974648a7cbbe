"""Values as plain data: tensors and JSON, which a checkpoint holds and a fresh process reads as data.

What has no JSON form becomes a dict with a `kind`, see `VALUE_KINDS`. An object of a class in Python is its attributes,
a function what it keeps, a module its tensors, and what has a `state_dict` is that. All else leaves a hole, which the
value in the same place of the fresh process fills. What a fresh process has in a place is filled in place, so whatever
shares it there sees the change. No code of a file is run.
"""

from __future__ import annotations

import functools
import math
import time
import types
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchmetrics import MetricTracker

from lightning_tricks._shared.tensors import local_part
from lightning_tricks._torch_compat.modules import module_internals
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    CELL_CONTENTS,
    HANDLES,
    IGNORED_TYPES,
    MISSING,
    SCALARS,
    CannotRestoreError,
    attribute_dict,
    attributes,
    delete_attribute,
    find_class,
    function_name,
    has_only_attributes,
    is_subclass,
    labelled,
    set_attribute,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.user_code import (
    CALLABLES,
    FUNCTIONS,
    held_parts,
    is_stateful,
    is_user_class,
)
from lightning_tricks.auto_resume.core.attributes.value_kinds import (
    ValueKind,
    is_mutable,
    kind_named,
    kind_of,
    kind_of_type,
    num_bytes,
    replace_contents,
)
from lightning_tricks.auto_resume.core.tensor_block import stacked

KEY = "a key"  # the name of a key of a dict in a path
STATE_KEY = "state_dict()"  # the name of an object's own state among its attributes
MIN_ROWS = 8  # fewer tuples are not written by columns
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 24  # containers in each other; each takes up to four of the 200 that a checkpoint may have
_CLOCKS = [(clock, clock()) for clock in (time.monotonic, time.perf_counter)]  # and what they showed at first
_A_DAY = 86400.0
_byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # elsewhere before NumPy 2
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # other objects may not define equality
SkippedNames = Callable[[Any], Collection[str]]


def nothing_skipped(_: Any) -> Collection[str]:
    """Skip no attribute."""
    return ()


class TooLargeError(ValueError):
    """A value has more bytes than the encoder has left."""


@dataclass(frozen=True)
class Hole:
    """What is not plain data, and what it is called."""

    value: Any
    name: str


def is_held_object(kind: type) -> bool:
    """Whether objects of a type are their attributes: nothing of them is written in C, nobody else restores them."""
    return kind_of_type(kind) is None and has_only_attributes(kind) and not is_subclass(kind, nn.Module, *HANDLES)


def has_identity(kind: type) -> bool:
    """Whether it matters which of two equal values of a type an object holds."""
    return is_mutable(kind) or is_held_object(kind) or is_subclass(kind, nn.Module, Optimizer)


def attributes_beside(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of plain data to which the user may add some; shared memory and shards have their own."""
    kind = type(value)
    if is_subclass(kind, Tensor):
        own = attribute_dict(value) or {}  # without slots, in which a DTensor keeps its data
        # torch.compile marks the parameters that it compiles (`_dynamo_static_input_type`)
        return [(name, part) for name, part in attributes(value) if name in own and not name.startswith("_dynamo_")]
    return attributes(value) if is_mutable(kind) and not is_subclass(kind, SynchronizedBase) else []


def is_in_shared_memory(value: Any) -> bool:
    """Whether other processes see what this one writes into a value."""
    kind = type(value)
    return is_subclass(kind, SynchronizedBase) or (is_subclass(kind, Tensor) and value.is_cpu and value.is_shared())


def _tensor_bounds(value: Tensor) -> tuple[int, int]:
    """Return the first address of a dense tensor, and the one behind its last; NumPy does not know all dtypes."""
    sides = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sides) if value.numel() else 0
    return value.data_ptr(), value.data_ptr() + span * value.element_size()


@dataclass
class Encoder:
    """Encodes values of one process.

    Attributes:
        references: Id -> path of what is saved elsewhere: parameters, buffers, modules, parts of the Trainer.
        skipped: Returns the names of attributes to leave out of an object; `"state_dict"` leaves out its state.
        owns_memory: Whether memory that processes share is this process's; else it is left to the one that owns it.
        bytes_left: Number of bytes that may follow.
        places: Id -> path under which a mutable value was met first; None where identity is nothing.
        memory: First and last address of the tensors and arrays that were encoded, sorted.
        holes: Path -> what is not plain data.
    """

    references: Mapping[int, str] = field(default_factory=dict)
    skipped: SkippedNames = nothing_skipped
    owns_memory: bool = True
    bytes_left: float = MAX_BYTES
    places: dict[int, str] | None = None
    memory: list[tuple[int, int]] = field(default_factory=list)
    holes: dict[str, Any] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _depth: int = 0

    def encode(self, value: Any, path: str = "") -> Any:
        """Return a value as tensors and JSON, with holes where it is not plain data.

        Args:
            value: The value to encode.
            path: Its path.

        Raises:
            TooLargeError: If it has more bytes than are left.
        """
        kind = type(value)
        if kind in SCALARS and not (kind is int and value.bit_length() > 1000):
            self._consume(16 + (len(value) if kind is str else 0))
            return {"kind": "clock", "value": value} if kind is float and is_clock_reading(value) else value
        if known := self.references.get(id(value)):
            return {"kind": "same", "path": known}
        is_object = is_held_object(kind) or is_subclass(kind, nn.Module)  # which exists before its parts are decoded
        if (id(value) in self._open and not is_object) or self._depth > MAX_DEPTH:
            return self._hole(value, path)
        if self.places is not None and has_identity(kind) and self.places.setdefault(id(value), path) != path:
            return {"kind": "same", "path": self.places[id(value)]}
        self._open.add(id(value))
        self._depth += 1
        try:
            return self._encode_parts(value, kind, path)
        finally:
            self._depth -= 1
            self._open.discard(id(value))

    def _encode_parts(self, value: Any, kind: type, path: str) -> Any:
        if (found := kind_of(value)) is not None:
            return self._container(value, kind, found, path) if found.container else self._leaf(value, found, path)
        if is_subclass(kind, nn.Module):
            return self._module(value, path)
        if is_stateful(kind) and "state_dict" not in self.skipped(value):
            return self._state(value, path)
        if is_subclass(kind, *CALLABLES) and (parts := held_parts(value)):
            return self._function(value, parts, path)
        return self._object(value, kind, path) if is_held_object(kind) else self._hole(value, path)

    def _container(self, value: Any, kind: type, found: ValueKind, path: str) -> Any:
        base, by_id = found.container, False
        self._consume(16 + 8 * base.__len__(value))
        items: Any = list(base.__iter__(value))
        if found.is_keyed or not found.has_order:
            numbers = [key for key in items if type(key) is int and key in self.references]
            if numbers and len(numbers) < len(items):
                return self._hole(value, path, f"{type_name(kind)} with the ids of objects")
            by_id = bool(numbers)
        if found.is_keyed:
            pairs = zip(labelled(items, self.references), list(found.entries(value)), strict=True)
            items = [
                [self._key(key, by_id, f"{path}.{KEY} {number}"), self.encode(part, f"{path}.{name}")]
                for number, (name, (key, part)) in enumerate(pairs)
            ]
        elif found.has_order and (rows := self._rows(items, path)) is not None:
            items = rows
        elif by_id or not _are_scalars(items):  # else in one piece: there may be a hundred thousand
            names = map(str, range(len(items))) if found.has_order else labelled(items, self.references)
            items = [self._key(part, by_id, f"{path}.{name}") for part, name in zip(items, names, strict=True)]
        if kind is list and type(items) is list:
            return items
        encoded: dict[str, Any] = {"kind": found.name, "items": items, **found.parts(value)}
        if kind is not base:
            encoded["class"] = type_name(kind) if kind.__module__ != "__main__" else f"__main__.{kind.__qualname__}"
            encoded |= self._attributes_beside(value, path)
        return encoded

    def _rows(self, rows: list[Any], path: str) -> Any:
        """Return tuples that hold numbers, strings and tensors by columns; None where there are others, or few.

        A column of tensors is one of numbers: each tensor is written once, however many tuples hold it, and all that
        are alike in one block, as torch.save takes 20 microseconds for each of those in a replay buffer.
        """
        if len(rows) < MIN_ROWS or set(map(type, rows)) != {tuple} or len(set(map(len, rows))) > 1 or not rows[0]:
            return None
        columns, numbers, tensors = list[Any](), dict[int, int](), list[Tensor]()
        for column in map(list, zip(*rows, strict=True)):
            if set(map(type, column)) == {Tensor}:
                for part in column:
                    if numbers.setdefault(id(part), len(tensors)) == len(tensors):
                        tensors.append(part)
                columns.append(torch.tensor([numbers[id(part)] for part in column]))
            elif _are_scalars(column):
                columns.append(column)
            else:
                return None
        elsewhere = {**(self.places or {}), **self.references}
        known = {number: elsewhere.get(id(one)) for number, one in enumerate(tensors)}
        own = {number: one for number, one in enumerate(tensors) if known[number] is None}
        if not all(one.layout is torch.strided and one.is_contiguous() and not vars(one) for one in own.values()):
            return None
        blocks, others = stacked(list(own.values()))
        bounds = sorted([*self.memory, *((one.data_ptr(), one.data_ptr() + one.nbytes) for one in own.values())])
        if others or any(end > start for (_, end), (start, _) in pairwise(bounds)):
            return None  # they are no plain data, or share memory
        self._consume(sum(data.nbytes for _, data in blocks) + 16 * len(rows) * len(columns))
        if self.places is not None:
            self.memory[:] = bounds
            self.places.update((id(one), f"{path}.tensor {number}") for number, one in own.items())
        places = list(own)
        return {
            "columns": columns,
            "blocks": [[torch.tensor([places[at] for at in numbers]), data] for numbers, data in blocks],
            "same": [[number, place] for number, place in known.items() if place is not None],
        }

    def _key(self, key: Any, by_id: bool, path: str) -> Any:
        return {"kind": "id", "path": self.references[key]} if by_id else self.encode(key, path)

    def _leaf(self, value: Any, found: ValueKind, path: str) -> Any:
        if not self.owns_memory and is_in_shared_memory(value):
            return {"kind": "hole", "type": type_name(type(value))}
        with suppress(Exception):  # the value may be of any class, and raise anything
            self._consume(64 + num_bytes(value))
            inside = replace(self, places=None, holes={})  # parts are made for this, and nothing else shares them
            parts = found.parts(value).items()
            encoded = {name: part if name == "data" else inside.encode(part, path) for name, part in parts}
            if not inside.holes:
                self.bytes_left = inside.bytes_left
                if is_subclass(type(value), Tensor, np.ndarray) and self._shares_memory(value):
                    encoded["is_view"] = True
                return {"kind": found.name, **encoded, **self._attributes_beside(value, path)}
        self._consume(0)
        return self._hole(value, path)

    def _attributes_beside(self, value: Any, path: str) -> dict[str, Any]:
        """Return the attributes of a value whose class extends plain data, or of a tensor that the user gave some."""
        own = attributes_beside(value)
        return {"vars": [[name, self.encode(part, f"{path}.{name}")] for name, part in own]} if own else {}

    def _object(self, value: Any, kind: type, path: str) -> Any:
        """Return an object by its attributes. Holes of one of a library are one: its parts are nobody's to name."""
        left_out, holes = self.skipped(value), self.holes
        self.holes = {}
        own = [(name, part) for name, part in attributes(value) if name not in left_out]
        encoded = [[name, self.encode(part, f"{path}.{name}")] for name, part in own]
        inner, self.holes = self.holes, holes
        if not is_user_class(kind) and any(not is_subclass(type(one.value), *FUNCTIONS) for one in inner.values()):
            inner = {path: Hole([one.value for one in inner.values()], type_name(kind))}
        self.holes |= inner
        return {"kind": "object", "type": type_name(kind), "vars": encoded}

    def _function(self, value: Any, parts: list[tuple[str, Any]], path: str) -> Any:
        """Return what a function holds; the function itself is a hole, and comes from the fresh process."""
        name = function_name(value) or type_name(type(value))
        self.holes[path] = Hole(value, name)
        held = [(to, content_of(part)) for to, part in parts]
        encoded = [[to, self.encode(part, f"{path}.{to}")] for to, part in held if part is not MISSING]
        return {"kind": "function", "type": name, "parts": encoded}

    def _state(self, value: Any, path: str) -> Any:
        with suppress(Exception):  # user code
            state = value.state_dict()  # made for this: nothing else shares it
            inside = replace(self, places=None, holes={}, skipped=nothing_skipped)
            inside.bytes_left = math.inf if isinstance(value, Optimizer) else self.bytes_left  # as large as the model
            encoded = inside.encode(state, f"{path}.{STATE_KEY}")
            if not inside.holes:
                return {"kind": "state", "type": type_name(type(value)), "state": encoded}
        return self._hole(value, path)

    def _module(self, module: Any, path: str) -> Any:
        """Return a module that nobody else saves: its tensors, modes and frozen parameters, and its attributes."""
        tensors, whole = unsaved_tensors(module, self.references), replace(self, bytes_left=math.inf)
        parts = {f"{path}.{name}".removesuffix("."): part for name, part in module.named_modules()}
        if (places := self.places) is not None:
            for place, part in parts.items():
                places.setdefault(id(part), place)
        copied = tuple(f"{place}." for place, part in parts.items() if is_subclass(type(part), MetricTracker))
        holes, self.holes = self.holes, {}
        encoded = {
            "kind": "module",
            "type": type_name(type(module)),
            "tensors": {name: whole.encode(one, f"{path}.{name}") for name, one in tensors.items()},
            "trains": {name: one.requires_grad for name, one in tensors.items()},
            # frozen scripts have no mode
            "modes": {name: getattr(part, "training", None) for name, part in module.named_modules()},
            "parts": [[place[len(path) + 1 :], self._attributes_of_part(part, place)] for place, part in parts.items()],
        }
        # `restore_tracker_steps` copies the metrics of a MetricTracker: what is not plain data in them comes from there
        self.holes = holes | {place: one for place, one in self.holes.items() if not place.startswith(copied or "\n")}
        return encoded

    def _attributes_of_part(self, part: Any, path: str) -> list[Any]:
        left_out = {*module_internals(), *self.skipped(part)}
        own = [(name, value) for name, value in attributes(part) if name not in left_out]
        return [[name, self.encode(value, f"{path}.{name}")] for name, value in own]

    def _hole(self, value: Any, path: str, name: str = "") -> dict[str, Any]:
        name = name or function_name(value) or type_name(type(value))
        if not is_subclass(type(value), *IGNORED_TYPES):
            self.holes[path] = Hole(value, name)
        return {"kind": "hole", "type": name}

    def _shares_memory(self, value: Any) -> bool:
        """Whether a tensor or an array lies in the memory of another one that was encoded before: a copy would not."""
        is_array = is_subclass(type(value), np.ndarray)
        if self.places is None or not (is_array or (value.is_cpu and value.layout is torch.strided)):
            return False
        first, last = _byte_bounds(value) if is_array else _tensor_bounds(local_part(value.detach()))
        at = bisect(self.memory, (first, last))
        if first == last:
            return False
        if (at and self.memory[at - 1][1] > first) or (at < len(self.memory) and self.memory[at][0] < last):
            return True
        self.memory.insert(at, (first, last))
        return False

    def _consume(self, size: int) -> None:
        """Subtract bytes from those that are left.

        Raises:
            TooLargeError: If fewer are left.
        """
        self.bytes_left -= size
        if self.bytes_left < 0:
            raise TooLargeError


def _are_scalars(values: list[Any]) -> bool:
    """Whether JSON holds all of some values as they are."""
    kinds = set(map(type, values))
    return kinds <= SCALARS and not (
        int in kinds and any(type(one) is int and one.bit_length() > 1000 for one in values)
    )


def _not_found(path: str) -> Any:
    raise CannotRestoreError(f"it refers to {path}, which does not exist")


def _not_plain(name: str, owners: list[Any]) -> Any:
    raise CannotRestoreError(f"it contains a {name}, which is not plain data")


class Decoder:
    """Makes the values that were encoded, in the place of those that this process has, as far as these can be filled.

    Args:
        find: Returns the value at a path of this process.
        may_fill: Whether a value of this process may be filled: nothing else that keeps its value holds it.
        rebuild: Returns a new object of a class that its owners know, without attributes; `__init__` is not called.
        skipped: Returns the names of attributes to leave out of an object.

    Attributes:
        made: Path -> what was decoded there.
        names: Id -> path of objects, parameters and buffers, which may be keys.
    """

    def __init__(
        self,
        find: Callable[[str], Any] = _not_found,
        may_fill: Callable[[Any], bool] = lambda value: True,
        rebuild: Callable[[str, list[Any]], Any] = _not_plain,
        skipped: SkippedNames = nothing_skipped,
        names: Mapping[int, str] = {},
    ) -> None:
        self._find, self._may_fill, self._rebuild, self._skipped = find, may_fill, rebuild, skipped
        self.made, self._names, self.owners = dict[str, Any](), names, list[Any]()
        self._filled = dict[int, str]()  # id of a value of this process -> path under which it was filled

    def decode(self, encoded: Any, present: Any = MISSING, path: str = "") -> Any:
        """Return the value that was encoded.

        Args:
            encoded: What `Encoder.encode` returned, possibly saved to a file and loaded.
            present: The value in the same place of this process; it fills holes, and tells classes and devices.
            path: Path of the value, for others that refer to it.

        Raises:
            CannotRestoreError: If the value needs something that this process lacks.
        """
        if type(encoded) is list:
            encoded = {"kind": "list", "items": encoded}
        if type(encoded) is not dict:
            return encoded
        kind = encoded["kind"]
        if kind == "clock":  # a timer of another process is not this one's
            return present if type(present) is float and is_clock_reading(present) else encoded["value"]
        if kind in ("same", "id"):
            value = self.made[encoded["path"]] if encoded["path"] in self.made else self._find(encoded["path"])
            return value if kind == "same" else id(value)
        if kind in _OF_OBJECTS:
            return _OF_OBJECTS[kind](self, encoded, present, path)
        value = self._plain(encoded, kind_named(encoded), present, path)
        for name, part in encoded.get("vars", ()):
            self._set(value, name, part, path)
        return value

    def _set(self, owner: Any, name: str, encoded: Any, path: str) -> None:
        """Set an attribute of an object, unless its value was filled in place."""
        present = dict(attributes(owner)).get(name, MISSING)
        value = self.decode(encoded, present, f"{path}.{name}")
        is_equal = type(value) in SCALARS and type(value) is type(present) and value == present
        if value is not present and not is_equal:
            set_attribute(owner, name, value)

    def _plain(self, encoded: dict[str, Any], found: ValueKind, present: Any, path: str) -> Any:
        fills = self._fills(present, path)
        if found.container:
            parts = self._entries(encoded, found, present, path)
        else:
            parts = {name: part if name == "data" else self.decode(part) for name, part in encoded.items()}
        made = found.rebuild(parts, present if fills or found.container else MISSING)
        value = present if fills and made is not present and replace_contents(present, made) else made
        if value is not present and encoded.get("is_view"):
            raise CannotRestoreError(
                "it shares memory with another tensor or array, and is none of the kind in this run"
            )
        if found.name in ("tensor", "parameter"):
            value.grad = parts.get("grad")
        self.made[path] = value
        return value

    def _fills(self, present: Any, path: str) -> bool:
        """Whether to fill a value of this process: once, as what shared it at first may have come to differ."""
        if present is MISSING or not self._may_fill(present):
            return False
        return not has_identity(type(present)) or self._filled.setdefault(id(present), path) == path

    def _entries(self, encoded: dict[str, Any], found: ValueKind, present: Any, path: str) -> dict[str, Any]:
        base, items = found.container, encoded["items"]
        kind = find_class(encoded["class"], base, present) if "class" in encoded else base
        has_places = present is not MISSING and is_subclass(type(present), base) and found.has_order
        here = dict(found.entries(present)) if has_places else {}
        if found.is_keyed:
            keys = [self.decode(key, path=f"{path}.{KEY} {number}") for number, (key, _) in enumerate(items)]
            labels = labelled(keys, self._names)
            parts = [(key, part, to) for key, (_, part), to in zip(keys, items, labels, strict=True)]
            items = [(key, self.decode(part, here.get(key, MISSING), f"{path}.{to}")) for key, part, to in parts]
        elif type(items) is dict:
            items = self._decode_rows(items, path)
        elif not SCALARS.issuperset(map(type, items)):
            items = [self.decode(part, here.get(n, MISSING), f"{path}.{n}") for n, part in enumerate(items)]
        return {**encoded, "items": items, "class": kind}

    def _decode_rows(self, rows: dict[str, Any], path: str) -> list[Any]:
        """Return the tuples that were encoded by columns."""
        tensors = dict[int, Any]()
        for numbers, data in rows["blocks"]:  # copies: one tensor that is left would keep all in memory
            tensors.update(zip(numbers.tolist(), map(Tensor.clone, data.unbind()), strict=True))
        self.made.update({f"{path}.tensor {number}": tensor for number, tensor in tensors.items()})
        tensors.update((number, self.decode({"kind": "same", "path": place})) for number, place in rows["same"])
        columns = [
            [tensors[number] for number in column.tolist()] if isinstance(column, Tensor) else column
            for column in rows["columns"]
        ]
        return list(zip(*columns, strict=True))

    def _hole(self, encoded: dict[str, Any], present: Any, path: str) -> Any:
        if present is not MISSING and encoded["type"] in (type_name(type(present)), function_name(present)):
            return present
        raise CannotRestoreError(f"it is a {encoded['type']}, which is not plain data, and not there in this run")

    def _object(self, encoded: dict[str, Any], present: Any, path: str) -> Any:
        is_there = present is not MISSING and type_name(type(present)) == encoded["type"]
        value = present if is_there and self._fills(present, path) else self._rebuild(encoded["type"], self.owners)
        self.made[path] = value
        self.owners.append(value)
        own = dict(attributes(value))
        for name, part in encoded["vars"]:
            self._set(value, name, part, path)
        for name in own.keys() - {*(name for name, _ in encoded["vars"]), *self._skipped(value)}:
            delete_attribute(value, name)
        self.owners.pop()
        return value

    def _function(self, encoded: dict[str, Any], present: Any, path: str) -> Any:
        if present is MISSING or encoded["type"] not in (type_name(type(present)), function_name(present)):
            raise CannotRestoreError(f"it is the {encoded['type']}, which this run has not there")
        held, parts = dict(held_parts(present)), dict[str, Any]()
        for name, part in encoded["parts"]:
            now = content_of(held.get(name, MISSING))
            parts[name] = self.decode(part, now, f"{path}.{name}")
            if parts[name] is not now and type(present) is types.FunctionType:
                _set_held(present, name, held.get(name), parts[name])
        if type(present) is not functools.partial or all(part is held.get(name) for name, part in parts.items()):
            return present
        function, places = parts.pop("func", present.func), [parts.pop(str(n)) for n in range(len(present.args))]
        return functools.partial(function, *places, **parts)

    def _state(self, encoded: dict[str, Any], present: Any, path: str) -> Any:
        if present is MISSING or type_name(type(present)) != encoded["type"]:
            raise CannotRestoreError(f"it is the state of a {encoded['type']}, which this run has not there")
        load_state(present, Decoder().decode(encoded["state"]))
        return present

    def _module(self, encoded: dict[str, Any], present: Any, path: str) -> Any:
        if present is MISSING or type_name(type(present)) != encoded["type"]:
            raise CannotRestoreError(f"it is a {encoded['type']}, which this run has not there")
        own, modules = unsaved_tensors(present, self._names), dict(present.named_modules())
        for name, part in encoded["tensors"].items():
            if name in own and own[name].requires_grad != encoded["trains"][name]:
                own[name].requires_grad_(encoded["trains"][name])
            if name not in own or self.decode(part, own[name], f"{path}.{name}") is not own[name]:
                raise CannotRestoreError(f"it has no tensor {name} of the saved shape")
        self.made |= {f"{path}.{name}".removesuffix("."): part for name, part in modules.items()}
        for name, own_attributes in encoded["parts"]:
            if (part := modules.get(name)) is None:
                raise CannotRestoreError(f"it has no module {name} in this run")
            if encoded["modes"][name] is not None:
                part.training = encoded["modes"][name]
            for to, value in own_attributes:
                self._set(part, to, value, f"{path}.{name}".removesuffix("."))
        return present


_OF_OBJECTS: dict[str, Callable[..., Any]] = {
    "hole": Decoder._hole,
    "object": Decoder._object,
    "function": Decoder._function,
    "state": Decoder._state,
    "module": Decoder._module,
}


def load_state(stateful: Any, state: Any) -> None:
    """Load a state; into the dicts that an optimizer has, where `Optimizer.load_state_dict` sets new ones."""
    if not isinstance(stateful, Optimizer):
        stateful.load_state_dict(state)
        return
    groups, kept = stateful.param_groups, stateful.state  # which other objects may hold
    stateful.load_state_dict(state)
    for group, loaded in zip(groups, stateful.param_groups, strict=True):
        group.update(loaded)
    loaded_state = dict(stateful.state)
    kept.clear()
    kept.update(loaded_state)
    stateful.param_groups, stateful.state = groups, kept


def unsaved_tensors(module: nn.Module, saved: Collection[int]) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module that are saved nowhere else: name -> tensor."""
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if id(tensor) not in saved and not is_lazy(tensor) and tensor.device.type != "meta"
    }


def _set_held(function: Any, name: str, held: Any, value: Any) -> None:
    """Set what a function holds: a variable of its closure, a default of a keyword or an attribute."""
    if type(held) is types.CellType:
        set_attribute(held, CELL_CONTENTS, value)
    elif name in (function.__kwdefaults__ or {}):
        function.__kwdefaults__[name] = value
    elif not name.startswith("defaults."):
        set_attribute(function, name, value)
    elif any(True for _ in differing_paths(value, held)):
        raise CannotRestoreError("it is a default argument that cannot be changed")


def content_of(part: Any) -> Any:
    """Return the value of a closure's variable, `MISSING` if it is not set; of others, themselves."""
    if type(part) is not types.CellType:
        return part
    try:
        return part.cell_contents
    except ValueError:
        return MISSING


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
