"""Digests of values, which tell whether a value changed, or differs between two processes.

A value is pickled into a hash. Its tensors and arrays count by their bytes, and whatever is not plain data by what can
be seen of it. No code of the user is run.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import mmap
import operator
import pickle
import threading
import types
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import ref
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightning_tricks._torch_compat.loaders import loader_iterator_type, num_yielded
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    SCALARS,
    attribute_dict,
    is_subclass,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.value_kinds import ValueKind, is_generator, is_plain_dtype, kind_of
from lightning_tricks.auto_resume.core.tensor_block import stacked

MAX_BYTES = 64 * 2**20  # of a value that are read
_READ_EACH_TIME = 2**18  # bytes of a tensor; of a larger one the version tells whether it changed
_SEEN = 1000  # entries of such a tensor
_MAPPED_BYTES = 2**20  # of a mapped file that are read
_BUILT_IN = SCALARS | {bytes, list, tuple, dict}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
# a fresh process has these anyway, or they say nothing about a run
IGNORED_TYPES = (types.ModuleType, logging.Logger, type(threading.Lock()), type(threading.RLock()))
# library -> what shows whether an object of its types has changed
_SHOWN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("decimal", "sched", "_io", "configparser", "graphlib", "polars"), lambda one: one.__reduce_ex__(2)[1:]
    ),
    "sqlite3": lambda one: one.total_changes,
    "_queue": lambda one: one.qsize(),
    "PIL": lambda one: one.tobytes(),
}
_NO_PATHS: Mapping[int, str] = {}
_never_twice = itertools.count()
_tokens = dict[int, tuple[Any, int]]()  # id of a large tensor -> a weak reference to it, and a number of its own


class _EnoughError(Exception):
    """As many bytes were read as may be."""


class ValueDigest:
    """Digests one value with all that it holds, of which at most 64 MiB are read.

    Beyond them, identity and size count in the same process, and nothing in others. Of a tensor over 256 KiB,
    identity, version and a thousand entries count in the same process: what they miss is a change of few entries that
    was made through `data` or another library.

    Args:
        paths: Id -> path of objects that are walked, parameters and buffers; the path counts.
        same_process: Whether the digest is compared in this process alone: then the identities of what is not plain
            data, and the states of generators, count as well.
        is_walkable: Whether a value is an object that is walked; only its type counts.

    Attributes:
        is_complete: Whether the digest tells each change; else the identity of the value counts as well.
        is_plain: Whether all of the value is plain data, or objects with paths.
    """

    def __init__(
        self,
        paths: Mapping[int, str] = _NO_PATHS,
        same_process: bool = True,
        is_walkable: Callable[[Any], bool] = lambda value: False,
    ) -> None:
        self._paths, self._same_process, self._is_walkable = paths, same_process, is_walkable
        self._hash, self._bytes_left = sha256(), MAX_BYTES  # which processors compute by themselves
        self.tensors = list[Tensor]()
        self._value: Any = None
        self.is_complete = self.is_plain = True

    @classmethod
    def of(cls, value: Any, *args: Any, **options: Any) -> ValueDigest:
        """Return the digest of a value."""
        digest = cls(*args, **options)
        digest.feed(value)
        return digest

    def __int__(self) -> int:
        return int.from_bytes(self._hash.digest()[:8], "big")

    def feed(self, value: Any) -> None:
        """Add a value to the digest."""
        self._value = value
        try:
            try:
                _Pickler(self, fast=True).dump(value)
            except ValueError:  # it holds itself
                self.tensors.clear()
                _Pickler(self, fast=False).dump(value)
            self._add_tensors()
        except Exception:  # it is too large, nested too deep, or of a class that raises anything
            self.is_complete = False
            kind = type(value)
            size = value.shape if kind is np.ndarray else len(value) if kind in _BUILT_IN - SCALARS else ""
            self._hash.update(f"{type_name(type(value))} {size} {id(value) if self._same_process else ''}".encode())

    def write(self, data: Any) -> None:
        """Add bytes to the hash.

        Raises:
            _EnoughError: If more were read than may be.
        """
        self._hash.update(memoryview(data)[: max(0, self._bytes_left)])
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise _EnoughError

    def replacement(self, value: Any) -> Any:
        """Return what a value counts by that `pickle` does not read itself."""
        kind = type(value)
        if (path := self._paths.get(id(value))) is not None:
            return path, type_name(kind)
        try:
            found = kind_of(value)
            if found is not None:
                return self._plain(value, type_name(kind), found)
        except _EnoughError:
            raise
        except Exception:  # noqa: S110  # the value may be of any class, and raise anything
            pass
        return self._opaque(value, kind)

    def _plain(self, value: Any, name: str, found: ValueKind) -> Any:
        """Return what a value counts by that is plain data.

        Raises:
            Exception: If it is not, after all.
        """
        if found.container is not None:
            if not found.has_order:
                return name, self._set(found.container.__iter__(value))
            return name, found.parts(value), list((found.container.items if found.is_keyed else list)(value))
        if is_generator(value) and not self._same_process:
            return name, found.parts(value)["type"].partition(" ")[0]
        if found.name in ("tensor", "parameter"):
            return self._tensor(value, name)
        if found.name in ("array", "scalar") and is_plain_dtype(value.dtype):
            return name, value.dtype.descr, value.shape, self._read(value)
        return name, found.parts(value)

    def _set(self, entries: Any) -> list[Any]:
        """Return the entries of a set in an order that does not depend on the process."""
        parts = list(entries)
        if SCALARS.issuperset(map(type, parts)):
            return sorted(parts, key=repr)
        digests = [ValueDigest.of(part, self._paths, self._same_process, self._is_walkable) for part in parts]
        self.is_plain &= all(digest.is_plain for digest in digests)
        return sorted(map(int, digests))

    def _tensor(self, value: Any, name: str) -> Any:
        if value.is_quantized or value.is_nested or value.device.type == "meta":
            raise ValueError("it has no plain data")
        head: tuple[Any, ...] = name, str(value.dtype), tuple(value.shape), value.requires_grad and value.is_leaf
        data = value.detach().resolve_conj().resolve_neg()
        if self._same_process and not value.is_inference():
            waits = value is self._value and not value.is_cpu  # for the device
            if waits or value.nbytes > _READ_EACH_TIME:
                head = *head, _token(value), tensor_version(value)
                # the version misses what changes through `data`, such as averages of weights
                flat = data.reshape(-1) if data.is_contiguous() and not waits else data.new_empty(0)
                data = flat[:: max(1, data.numel() // _SEEN)]
        return *head, self._read(data.reshape(-1)[: 1 + MAX_BYTES].contiguous().cpu().view(torch.uint8).numpy())

    def _read(self, values: Any) -> bytes | int:
        """Return the bytes of an array; of one over 256 KiB the CRC-32, which is a third of SHA-256's cost.

        Raises:
            _EnoughError: If it has more than may be read, of which the first ones were added.
        """
        if values.nbytes > self._bytes_left:
            self.write(values.reshape(-1)[: 1 + self._bytes_left // values.itemsize].tobytes())
            raise _EnoughError
        if values.nbytes > _READ_EACH_TIME:
            self._bytes_left -= values.nbytes
            return crc32(np.ascontiguousarray(values).view(np.uint8).data)
        return bytes(values.tobytes())

    def _add_tensors(self) -> None:
        """Add the tensors that were set apart, those that are alike at once."""
        tensors, self.tensors = self.tensors, []
        if not self._paths.keys().isdisjoint(map(id, tensors)):
            self.feed([self._paths.get(id(tensor), "") for tensor in tensors])
            tensors = [tensor for tensor in tensors if id(tensor) not in self._paths]
        blocks, others = stacked(tensors, _READ_EACH_TIME)
        for numbers, data in blocks:
            self.write(f"{data.dtype} {tuple(data.shape)}".encode())
            self.write(array("Q", numbers).tobytes())
            self.write(data.reshape(-1).view(torch.uint8).numpy())
        if others:
            self.feed([(number, self.replacement(tensors[number])) for number in others])

    def _opaque(self, value: Any, kind: type) -> Any:
        """Return what a value counts by that is not plain data."""
        first: Any = ""
        if is_subclass(kind, np.memmap, mmap.mmap):
            if memoryview(value).readonly:
                return type_name(kind)
            first = "" if self._same_process else _first_bytes(value)
        elif is_subclass(kind, np.ndarray, Tensor) and not self._same_process:
            first = _visible_content(value, kind)
        self.is_plain, content = False, ValueDigest()
        if self._same_process and not self._is_walkable(value):
            content._bytes_left = self._bytes_left
            content.feed_opaque(value)
            self._bytes_left = content._bytes_left
            if self._bytes_left < 0:
                raise _EnoughError
        return type_name(kind), _function_name(value, kind), first, int(content)

    def feed_opaque(self, value: Any) -> None:
        """Add what changes when a value that is not plain data changes, as far as that can be seen."""
        kind = type(value)
        if not is_subclass(kind, *IGNORED_TYPES):
            with suppress(Exception):  # the value may be of any class, and raise anything
                self.feed(_function_name(value, kind) or id(value))
                self.feed(_visible_content(value, kind))


class _Pickler(pickle.Pickler):
    """Pickles a value into a digest; what `pickle` does not read itself is replaced."""

    def __init__(self, digest: ValueDigest, fast: bool) -> None:
        super().__init__(digest, protocol=5)
        self._set_apart = digest.tensors.append
        self.fast = fast  # then values that are equal count alike, whether they are identical or not
        self._replacement = digest.replacement

    def persistent_id(self, value: Any) -> Any:
        """Return what a value counts by; None for one that `pickle` reads itself."""
        if type(value) is Tensor and value.layout is torch.strided and not value.is_nested:
            self._set_apart(value)
            return "tensor"
        return None if type(value) in _BUILT_IN else self._replacement(value)


def _token(value: Tensor) -> int:
    """Return a number that no other tensor has or had."""
    number = id(value)
    known = _tokens.get(number)
    if known is None or known[0]() is not value:
        known = _tokens[number] = ref(value, lambda _: _tokens.pop(number, None)), next(_never_twice)
    return known[1]


def content_digest(value: Any) -> int:
    """Return a number that changes when a value that is not plain data changes, as far as that can be seen."""
    digest = ValueDigest()
    digest.feed_opaque(value)
    return int(digest)


def _function_name(value: Any, kind: type) -> Any:
    if not is_subclass(kind, *_FUNCTIONS):
        return ""
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
    if is_subclass(kind, np.memmap, mmap.mmap):
        file = getattr(value, "filename", None)
        return [str(Path(file).stat().st_mtime_ns) if file else "", _first_bytes(value)]
    if is_subclass(kind, memoryview) or any(base.__module__ == "_ctypes" for base in kind.__mro__):
        return bytes(memoryview(value).cast("B")[:MAX_BYTES])
    if is_subclass(kind, Tensor):
        return _tensor_parts(value)
    if is_subclass(kind, np.ndarray):  # of objects, or a subclass
        plain = np.asarray(value)
        return plain.tolist() if plain.dtype.hasobject else plain, attribute_dict(value)
    if kind is types.MappingProxyType:
        return gc.get_referents(value)
    library = kind.__module__.partition(".")[0]
    if library in ("weakref", "_weakrefset"):
        held = [(value(),)] if kind is ref else value.items() if hasattr(kind, "items") else zip(value)
        return repr([(type_name(type(part)), id(part)) for entry in held for part in entry])
    if library == "pandas" and kind.__name__ in ("DataFrame", "Series"):
        columns = [column for _, column in value.items()] if value.ndim == 2 else [value]
        return [*map(np.asarray, (*columns, value.index)), list(value.keys()), value.attrs]
    return _SHOWN[library](value) if library in _SHOWN else ""


def _first_bytes(value: Any) -> bytes:
    return bytes(memoryview(value).cast("B")[:_MAPPED_BYTES])


def _tensor_parts(value: Any) -> Any:
    """Return the plain tensors of a quantized, nested or sparse one, or one of a subclass."""
    if value.is_quantized:
        return value.dequantize()
    if value.is_nested:
        return list(value.unbind())
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout is not torch.strided:
        return value.values()
    return "" if type(value) is Tensor else value.detach().as_subclass(Tensor)
