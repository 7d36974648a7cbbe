"""Digests of values at a bounded cost, which tell whether a value changed, or differs between two processes."""

from __future__ import annotations

import inspect
import io
import itertools
import logging
import mmap
import operator
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks._torch_compat.loaders import loader_iterator_type, num_yielded
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.attributes.alike_rows import WHOLE_ARRAY, WHOLE_TENSOR, columns, joined
from lightning_tricks.auto_resume.core.attributes.attribute_access import SCALARS, is_subclass, key_label, type_name
from lightning_tricks.auto_resume.core.attributes.encoding import MAX_DEPTH, EncodeBudget, encode
from lightning_tricks.auto_resume.core.attributes.value_kinds import (
    ValueKind,
    container_kind,
    is_generator,
    kind_of,
)
from lightning_tricks.auto_resume.core.attributes.value_parts import is_plain_dtype

MAX_ENTRIES = 10_000  # of a container; a larger one is sampled
_SAMPLED_ENTRIES = 1_000
_MAX_PARTS = 200_000  # of a value, with all that it holds
_SAMPLED_BYTES = 2**18
_WHOLE_ANYWHERE = 2**20
_WHOLE_IN_ALL = 2**24  # bytes of the tensors and arrays of a value; of those behind them, a sample
_SAMPLED_ELEMENTS = 64
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
# a fresh process has these anyway, or they say nothing about a run
IGNORED_TYPES = (types.ModuleType, logging.Logger, type(threading.Lock()), type(threading.RLock()))
_BUFFERS = (memoryview, mmap.mmap, np.memmap)
_NO_PATHS: Mapping[int, str] = {}
_never_twice = itertools.count()


class ValueDigest:
    """Digests one value with all that it holds.

    Args:
        paths: Id -> path of objects that are walked, parameters and buffers; the path counts.
        same_process: Whether the digest is compared in this process alone: then the identities of opaque and of sampled
            values, and the states of generators, count as well.
        is_walkable: Whether a value is an object that is walked; only its type counts.

    Attributes:
        is_complete: Whether the digest covers everything, not a sample.
        opaque_values: Location of each value that is not plain data, with the name of its type -> a number that
            changes when the value changes in place, as far as that can be seen.
    """

    def __init__(
        self,
        paths: Mapping[int, str] = _NO_PATHS,
        same_process: bool = True,
        is_walkable: Callable[[Any], bool] = lambda value: False,
    ) -> None:
        self._paths, self._same_process, self._is_walkable = paths, same_process, is_walkable
        self._hash = blake2b(digest_size=8)
        self._parts, self._open_containers = 0, set[int]()
        self._whole_bytes_left = _WHOLE_IN_ALL
        self._of_parts = False  # whether the value was made to be digested: its identity says nothing
        self.is_complete = True
        self.opaque_values: dict[tuple[tuple[str, ...], str], int] = {}

    @classmethod
    def of(cls, value: Any, *args: Any, **options: Any) -> ValueDigest:
        """Return the digest of a value."""
        digest = cls(*args, **options)
        digest.feed(value)
        return digest

    def __int__(self) -> int:
        return int.from_bytes(self._hash.digest(), "big")

    def feed(self, value: Any, location: tuple[str, ...] = ()) -> None:
        """Add a value to the digest."""
        kind = type(value)
        self._parts += 1
        if kind in SCALARS:
            self._feed_scalar(kind, value)
            return
        container = container_kind(kind)
        if container is not None and len(location) < MAX_DEPTH and id(value) not in self._open_containers:
            self._open_containers.add(id(value))
            self._feed_container(value, container, location)
            self._open_containers.discard(id(value))
            return
        try:
            known = id(value) not in self._paths and self._feed_leaf(value, kind, location)
        except Exception:  # the value may be of any class, and raise anything
            known = False
        if not known:
            self._feed_opaque(value, kind, location)

    def _update(self, text: str, data: Any = b"") -> None:
        self._hash.update(f"{text};".encode("utf-8", "surrogatepass"))
        self._hash.update(data)

    def _feed_scalar(self, kind: type, value: Any) -> None:
        if kind is str and len(value) > _SAMPLED_BYTES:
            self._mark_sampled(value, len(value))
            value = value[:: len(value) // _SAMPLED_BYTES]
        self._update(f"{kind.__name__} {value if kind is not int else hex(value)!r}")

    def _mark_sampled(self, value: Any, size: Any) -> None:
        self.is_complete = False
        self._update(f"{size} {id(value) if self._same_process and not self._of_parts else ''}")

    def _feed_container(self, value: Any, container: ValueKind, location: tuple[str, ...]) -> None:
        size = container.container.__len__(value)
        self._update(f"{type_name(type(value))} {size} {container.parts(value).get('maxlen', '')}")
        step = 1
        if size > MAX_ENTRIES or self._parts + size > _MAX_PARTS:
            self._mark_sampled(value, size)
            if self._parts > 2 * _MAX_PARTS:
                return
            step = max(1, size // _SAMPLED_ENTRIES)
        if not container.has_order:
            self._feed_set(container.entries(value) if step == 1 else (), location)
            return
        if self._same_process and container.container in (list, tuple):
            rows = container.container.__getitem__(value, slice(0, None, step))
            if self._feed_rows(rows):
                return
        for key, part in itertools.islice(container.entries(value), 0, None, step):
            inner = (*location, key_label(key))
            if container.is_keyed:
                self.feed(key, inner)
            self.feed(part, inner)

    def _feed_rows(self, rows: Sequence[Any]) -> bool:
        """Add rows of tensors, arrays and numbers, or dicts of them, if they are alike: at once, which costs less."""
        head, alike = columns(rows) or ("", [])
        parts = len(rows) * (len(alike) + 1)
        if not alike or self._parts + parts > _MAX_PARTS:
            return False
        blocks, bytes_left = list[tuple[str, Any]](), self._whole_bytes_left
        for column in alike:
            are_known = self._paths and not self._paths.keys().isdisjoint(map(id, column))
            block = None if are_known else joined(column, bytes_left)
            if block is None:
                return False
            blocks.append(block)
            bytes_left -= getattr(block[1], "nbytes", 0)
        for text, data in ((head, b""), *blocks):
            self._update(text, data)
        self._parts, self._whole_bytes_left = self._parts + parts, bytes_left
        return True

    def _feed_set(self, entries: Iterable[tuple[Any, Any]], location: tuple[str, ...]) -> None:
        """Add the entries of a set, whose order differs between processes: so those of a large one are not sampled."""
        numbers = []
        for _, part in entries:
            digest = self._part_digest()
            digest.feed(part, (*location, key_label(part)))
            self.opaque_values |= digest.opaque_values
            numbers.append(int(digest))
        self._parts += len(numbers)
        self._update(repr(sorted(numbers)))

    def _part_digest(self, of_parts: bool = False) -> ValueDigest:
        digest = ValueDigest(self._paths, self._same_process, self._is_walkable)
        digest._of_parts = self._of_parts or of_parts
        return digest

    def _feed_leaf(self, value: Any, kind: type, location: tuple[str, ...]) -> bool:
        """Add a value that is not a container; return False where the value is not plain data."""
        found = kind_of(value)
        if found is not None and found.is_composite:
            self._feed_composite(value, found, location)
            return True
        if is_subclass(kind, Tensor):
            return self._feed_tensor(value, bool(location))
        if kind is np.ndarray or is_subclass(kind, np.generic):
            return self._feed_array(np.asarray(value), value)
        if is_subclass(kind, np.memmap, mmap.mmap):
            return self._feed_mapped_file(value)
        if kind in (bytes, bytearray):
            step = max(1, len(value) // WHOLE_ARRAY)
            if step > 1:
                self._mark_sampled(value, len(value))
            self._update(f"{kind.__name__} {len(value)}", bytes(value[::step]))
            self._whole_bytes_left -= len(value)
            return True
        if is_subclass(kind, *_FUNCTIONS):
            self._update(f"function {value.__module__} {value.__qualname__}")
            return False
        if found is not None and is_generator(value):
            parts = found.parts(value)
            self._update(f"generator {parts['type'].partition(' ')[0]}")
            if self._same_process:
                self.feed(parts["state"])
            return True
        budget = EncodeBudget(bytes_left=4096)
        encoded = encode(value, budget)
        if budget.opaque_values:
            return False
        self._update(f"{kind.__name__} {encoded!r}")
        return True

    def _feed_composite(self, value: Any, found: ValueKind, location: tuple[str, ...]) -> None:
        inner = self._part_digest(of_parts=True)
        inner._whole_bytes_left = self._whole_bytes_left
        smaller = found.sample(value, self._whole_bytes_left)
        inner.feed(found.parts(smaller), (*location, found.name))
        self._whole_bytes_left = inner._whole_bytes_left
        self._parts += inner._parts
        if smaller is not value or not inner.is_complete:
            self._mark_sampled(value, getattr(value, "shape", getattr(value, "size", "")))
        self._update(f"{type_name(type(value))} {int(inner)}")
        if inner.opaque_values:
            self.opaque_values[location, type_name(type(value))] = int(inner)

    def _feed_tensor(self, value: Tensor, is_entry: bool) -> bool:
        if value.is_quantized or value.is_nested or value.device.type == "meta":
            return False
        size = value.numel() * value.element_size()
        self._update(f"tensor {value.dtype} {tuple(value.shape)} {value.requires_grad and value.is_leaf}")
        if self._same_process and value.device.type != "cpu" and not (is_entry or value.is_inference()):
            self._mark_sampled(value, size)  # reading it would wait for the device
            self._update(str(tensor_version(value)))
            return True
        data = value.detach().resolve_conj().resolve_neg()
        if step := self._sampling_step(size, value.numel(), WHOLE_TENSOR):
            self._mark_sampled(value, size)
            if self._same_process and not value.is_inference():
                self._update(str(tensor_version(value)))
                step *= 16  # of changes, the version misses only those that were made through `data`
            data = _sample(data, step)
        self._hash.update(data.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
        return True

    def _feed_array(self, array: Any, value: Any) -> bool:
        if not is_plain_dtype(array.dtype):
            return False
        self._update(f"{type(value).__name__} {array.dtype.descr} {array.shape}")
        if step := self._sampling_step(array.nbytes, array.size, WHOLE_ARRAY):
            self._mark_sampled(value, array.nbytes)
            array = array.reshape(-1)[::step] if array.flags.contiguous else array[:1]
        self._hash.update(array.tobytes())
        return True

    def _feed_mapped_file(self, value: Any) -> bool:
        """Add the content of a mapped file if this process may change it; each entry may be read from the disk."""
        array = np.frombuffer(value, np.uint8) if is_subclass(type(value), mmap.mmap) else np.asarray(value)
        if not array.flags.writeable:
            return False
        if array.nbytes > _WHOLE_ANYWHERE:
            self._mark_sampled(value, array.nbytes)
            if self._same_process and getattr(value, "filename", None):
                self._update(str(Path(value.filename).stat().st_mtime_ns))  # another after most writes
            contiguous = array.flags.contiguous
            array = array.reshape(-1)[:: max(1, array.size // _SAMPLED_ENTRIES)] if contiguous else array[:1]
        return self._feed_array(array, value)

    def _sampling_step(self, size: int, entries: int, limit: int) -> int:
        """Return the distance of the entries to sample from data of `size` bytes; 0 to take all of them."""
        if size > (limit if self._same_process else _WHOLE_ANYWHERE):
            return max(1, size // _SAMPLED_BYTES)
        if size > self._whole_bytes_left and entries > _SAMPLED_ELEMENTS:
            return entries // _SAMPLED_ELEMENTS
        self._whole_bytes_left -= size
        return 0

    def _feed_opaque(self, value: Any, kind: type, location: tuple[str, ...]) -> None:
        self._update(f"object {type_name(kind)} {self._paths.get(id(value), '')}")
        if id(value) in self._paths and self._of_parts:
            return  # it is saved as a reference
        content = self._part_digest(of_parts=True)
        # a fresh process has the value at any rate, or it is tracked elsewhere
        is_expected = is_subclass(kind, *IGNORED_TYPES) or id(value) in self._paths or self._is_walkable(value)
        if self._same_process and not is_expected:
            with suppress(Exception):  # the value may be of any class, and raise anything
                content.feed(_identity(value, kind), (*location, "content"))
                content.feed(_visible_content(value, kind), (*location, "content"))
        self.opaque_values[location, type_name(kind)] = int(content)
        self._update(str(int(content)))


def _sample(data: Tensor, step: int) -> Tensor:
    """Return entries that are spread over a whole tensor."""
    if data.is_contiguous():
        return data.reshape(-1)[:: max(1, step)]
    while data.dim() and data.numel() > _SAMPLED_BYTES:
        sizes = data.shape
        axis = max(range(data.dim()), key=sizes.__getitem__)
        data = data.narrow(axis, 0, 1) if sizes[axis] < 4 else data[(slice(None),) * axis + (slice(None, None, 2),)]
    return data


def _identity(value: Any, kind: type) -> Any:
    if not is_subclass(kind, *_FUNCTIONS):
        return id(value)
    code = getattr(value, "__code__", None)
    return [value.__module__, value.__qualname__, code.co_firstlineno if code else 0]


def _visible_content(value: Any, kind: type) -> Any:
    """Return something that shows whether a value without plain data changed in place; empty where nothing does.

    Of an iterator it is the position, or another number each time if its type does not tell the position.
    """
    if is_subclass(kind, loader_iterator_type()):
        return str(num_yielded(value))
    if kind.__module__ == "multiprocessing.sharedctypes":
        return repr(value.get_obj().value)
    if is_subclass(kind, itertools.count):
        return repr(value)
    if is_subclass(kind, types.GeneratorType) and inspect.getgeneratorstate(value) != inspect.GEN_SUSPENDED:
        return inspect.getgeneratorstate(value)
    if kind.__module__ == "builtins" and hasattr(kind, "__length_hint__"):
        return str(operator.length_hint(value, -1))
    if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
        return str(next(_never_twice))  # such as `map`, `itertools.cycle` or a generator between two of its values
    if any(base.__module__ == "_ctypes" for base in kind.__mro__) or is_subclass(kind, *_BUFFERS):
        return _buffer_sample(value)
    if kind.__module__ == "_queue":
        return value.qsize()
    if kind.__module__ == "_io" and is_subclass(kind, io.StringIO, io.BytesIO):
        return [value.getvalue(), value.tell()]
    if kind.__module__.startswith("polars."):
        size = len(value)
        return [size, (value if size <= MAX_ENTRIES else value[:: size // _SAMPLED_ENTRIES]).__reduce_ex__(2)[1:]]
    return ""


def _buffer_sample(value: Any) -> bytes:
    data = memoryview(value).cast("B")
    return bytes(data if len(data) <= _WHOLE_ANYWHERE else data[:: len(data) // _SAMPLED_ELEMENTS])
