"""Digests of values: whether one has changed since the fit began, or differs from that of another process.

All of a value is written into a hash as `pickle` writes it, so nothing of it changes unseen, whatever it is; what
`pickle` cannot write is told. Plain data, objects in Python, functions and modules are written by what `Encoder` saves
of them; for all else, `__reduce_ex__` and `__getstate__` of its class are called.
"""

from __future__ import annotations

import copyreg
import mmap
import operator
import pickle
import types
from array import array
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import is_dense, local_part
from lightning_tricks._torch_compat.loaders import loader_iterator_type, num_yielded
from lightning_tricks._torch_compat.modules import module_internals
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    HANDLES,
    IGNORED_TYPES,
    SCALARS,
    attribute_dict,
    attributes,
    is_subclass,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.encoding import (
    MAX_BYTES,
    MIN_ROWS,
    Encoder,
    attributes_beside,
    content_of,
    is_held_object,
    is_in_shared_memory,
    unsaved_tensors,
)
from lightning_tricks.auto_resume.core.attributes.user_code import (
    CALLABLES,
    FUNCTIONS,
    held_parts,
    is_stateful,
    is_user_class,
)
from lightning_tricks.auto_resume.core.attributes.value_kinds import has_data, is_generator, is_plain_dtype, kind_of
from lightning_tricks.auto_resume.core.tensor_block import stacked

_READ_EACH_TIME = 2**18  # bytes of a tensor; of a larger one the version tells whether it changed
_SEEN = 1000  # entries of such a tensor
_MAPPED_BYTES = 2**20  # of a mapped file that are read
_WEIGHTS = np.random.PCG64(1).random_raw(4096) | np.uint64(1)  # the same in each process, with any NumPy
_ROW_PARTS = SCALARS | {Tensor}
_TRAITS, _SIMPLE = operator.attrgetter("requires_grad", "is_nested", "layout"), {(False, False, torch.strided)}
_never_twice = count()
_tokens = dict[int, tuple[Any, int]]()  # id of a large tensor -> a weak reference to it, and a number of its own


class _EnoughError(Exception):
    """As many bytes were read as may be."""


class ValueDigest:
    """Digests one value with all that it holds, of which at most 64 MiB are read.

    Beyond them, identity and size count in the same process, and nothing in others. Of a tensor over 256 KiB,
    identity, version and a thousand entries count in the same process: what they miss is a change of few entries that
    was made through `data` or another library.

    Args:
        encoder: Knows what is saved elsewhere, whose paths count, and what is left out.
        same_process: Whether the digest is compared in this process alone: then what is not plain data, and the states
            of generators, count as well; else sets count in an order that no process decides.

    Attributes:
        is_complete: Whether the digest tells each change; else the identity of the value counts as well.
        is_plain: Whether all of the value is saved as plain data.
        unwatched: Types of what `pickle` cannot write, whose changes are not seen.
    """

    def __init__(self, encoder: Encoder | None = None, same_process: bool = True) -> None:
        self.encoder, self.same_process = encoder or Encoder(), same_process
        self._hash, self._bytes_left = sha256(), MAX_BYTES  # which processors compute by themselves
        self.tensors, self._apart = list[Tensor](), dict[int, Any]()
        self._value: Any = None
        self.is_complete = self.is_plain = True
        self.unwatched = list[str]()

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
        # first without memo, so that values that are equal count alike; with it if the value holds itself (ValueError);
        # and last with a pickler for each object that is not plain, to know which of them cannot be pickled
        kind = _Pickler if self.same_process else _PortablePickler
        for fast, apart in ((True, False), (False, False), (False, True)):
            self._hash, self._bytes_left, self.tensors, self.unwatched = sha256(), MAX_BYTES, [], []
            self._apart.clear()
            try:
                kind(self, fast, apart).dump(value)
                self._add_tensors()
            except _EnoughError:
                break
            except Exception:  # noqa: S110  # of a class that may raise anything
                pass
            else:
                return
        else:
            self.unwatched.append(type_name(type(value)))
        self.is_complete, kind = False, type(value)
        size = value.shape if kind is np.ndarray else len(value) if kind in (str, bytes, list, tuple, dict) else ""
        self._hash.update(f"{type_name(kind)} {size} {id(value) if self.same_process else ''}".encode())

    def write(self, data: Any) -> None:
        """Add bytes to the hash.

        Raises:
            _EnoughError: If more were read than may be.
        """
        self._hash.update(memoryview(data)[: max(0, self._bytes_left)])
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise _EnoughError

    def reduced(self, value: Any) -> Any:
        """Return what a value counts by; `NotImplemented` for one that `pickle` reads itself.

        Raises:
            Exception: If the value is of a class that raises it.
        """
        kind = type(value)
        if (path := self.encoder.references.get(id(value))) is not None:
            return path, type_name(kind)
        if is_subclass(kind, *FUNCTIONS, *CALLABLES):
            self.is_plain, code = False, getattr(value, "__code__", None)
            name = getattr(value, "__module__", ""), getattr(value, "__qualname__", ""), code and code.co_firstlineno
            held = [(to, content_of(part)) for to, part in held_parts(value)] if self.same_process else []
            return name, held
        if is_subclass(kind, *IGNORED_TYPES, *HANDLES):
            return type_name(kind)
        if (
            is_subclass(kind, Tensor, np.ndarray, mmap.mmap)
            and not self.encoder.owns_memory
            and is_in_shared_memory(value)
        ):
            return type_name(kind)
        if is_subclass(kind, Tensor):
            self.is_plain &= kind_of(value) is not None
            return type_name(kind), attributes_beside(value), self._tensor(value)
        if is_subclass(kind, np.ndarray, np.generic, mmap.mmap):
            return type_name(kind), self._array(value, kind)
        if (found := kind_of(value)) is not None and not found.container:
            if is_generator(value) and not self.same_process:
                return type_name(kind), found.parts(value)["type"].partition(" ")[0]
            return type_name(kind), attributes_beside(value), found.parts(value)
        if found is not None:
            return NotImplemented
        if not self.same_process:
            return type_name(kind)
        if is_subclass(kind, nn.Module):
            return type_name(kind), self._module(value)
        if is_stateful(kind) and "state_dict" not in self.encoder.skipped(value):
            return type_name(kind), value.state_dict()
        if kind is types.MappingProxyType:
            self.is_plain = False
            return type_name(kind), dict(value)
        if is_subclass(kind, ref):
            self.is_plain = False
            return type_name(kind), self.encoder.references.get(id(value())) or id(value())
        if is_held_object(kind) and (is_user_class(kind) or not _reduces_itself(value, kind)):
            left_out = self.encoder.skipped(value)
            return type_name(kind), [(name, part) for name, part in attributes(value) if name not in left_out]
        self.is_plain = False
        if is_subclass(kind, loader_iterator_type()):
            return type_name(kind), num_yielded(value)
        return NotImplemented

    def _module(self, module: Any) -> Any:
        tensors, internals = unsaved_tensors(module, self.encoder.references), module_internals()
        parts = [
            (name, getattr(part, "training", None), [one for one in attributes(part) if one[0] not in internals])
            for name, part in module.named_modules()
        ]
        return [*tensors.items()], [one.requires_grad for one in tensors.values()], parts

    def _tensor(self, value: Any) -> Any:
        if not has_data(value):
            self.is_plain = False
            return str(value.dtype), tuple(value.shape)
        if not is_dense(value):
            self.is_plain = False
            return _plain_parts(value)
        grad = value.grad if value.is_leaf else None
        head: tuple[Any, ...] = str(value.dtype), tuple(value.shape), value.requires_grad and value.is_leaf, grad
        data = local_part(value.detach()).resolve_conj().resolve_neg().as_subclass(Tensor)
        if self.same_process and not value.is_inference():
            waits = value is self._value and not value.is_cpu  # for the device
            if waits or value.nbytes > _READ_EACH_TIME:
                head = *head, _token(value), tensor_version(value)
                # the version misses what changes through `data`, such as averages of weights
                flat = data.reshape(-1) if data.is_contiguous() and not waits else data.new_empty(0)
                data = flat[:: max(1, data.numel() // _SEEN)]
        return *head, self._read(data.reshape(-1)[: 1 + MAX_BYTES].contiguous().cpu().view(torch.uint8).numpy())

    def _array(self, value: Any, kind: type) -> Any:
        if is_subclass(kind, np.memmap, mmap.mmap):
            self.is_plain = False
            if memoryview(value).readonly:
                return ""
            file = getattr(value, "filename", None)
            return str(Path(file).stat().st_mtime_ns) if file else "", bytes(
                memoryview(value).cast("B")[:_MAPPED_BYTES]
            )
        plain = np.asarray(value)
        self.is_plain &= kind_of(value) is not None
        beside = [(name, part) for name, part in attributes(value) if name != "_base"]
        if not is_plain_dtype(plain.dtype):
            return plain.shape, beside, plain.tolist()
        return plain.dtype.descr, plain.shape, beside, self._read(plain)

    def _read(self, values: Any) -> bytes:
        """Return the bytes of an array; of one over 256 KiB those of sums, which take less time.

        Raises:
            _EnoughError: If it has more than may be read, of which the first ones were added.
        """
        if values.nbytes > self._bytes_left:
            self.write(values.reshape(-1)[: 1 + self._bytes_left // values.itemsize].tobytes())
            raise _EnoughError
        if values.nbytes > _READ_EACH_TIME:
            self._bytes_left -= values.nbytes
            return _weighted_sums(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return bytes(values.tobytes())

    def _add_tensors(self) -> None:
        """Add the tensors that were set apart, those that are alike at once."""
        while self.tensors:
            tensors, self.tensors = self.tensors, []
            blocks, others = stacked(tensors, _READ_EACH_TIME)
            for numbers, data in blocks:
                self.write(f"{data.dtype} {tuple(data.shape)}".encode())
                self.write(array("Q", numbers).tobytes())
                self.write(data.reshape(-1).view(torch.uint8).numpy())
            if others:  # among whose parts may be tensors again
                _Pickler(self, False, False).dump([(number, self._tensor(tensors[number])) for number in others])

    def apart(self, value: Any) -> Any:
        """Return what a value counts by that `pickle` reads itself, and note it if `pickle` cannot."""
        if id(value) in self._apart:
            return self._apart[id(value)]
        inner = ValueDigest(self.encoder, self.same_process)
        inner._bytes_left, inner._apart = self._bytes_left, self._apart
        self._apart[id(value)] = type_name(type(value))  # what it counts by within itself, and if it cannot be pickled
        try:
            _Pickler(inner, False, True).dump(_reduced_by_class(value))
            inner._add_tensors()
        except _EnoughError:
            raise
        except Exception:  # of a class that may raise anything
            self.unwatched.append(type_name(type(value)))
        else:
            self._bytes_left, self._apart[id(value)] = inner._bytes_left, int(inner)
            self.unwatched += inner.unwatched
        return self._apart[id(value)]


def _weighted_sums(values: Any) -> bytes:
    """Return the bytes of a sum for each 32 KiB, modulo 2**64, of words that are multiplied by random weights.

    Of two arrays that differ, such sums are equal by chance alone: the weights are odd, each word has its own
    (multilinear hashing: Carter and Wegman, 1979).
    """
    whole = len(values) // _WEIGHTS.nbytes * _WEIGHTS.nbytes
    words = values[:whole].view(np.uint64).reshape(-1, len(_WEIGHTS))
    return bytes(np.einsum("ij,j->i", words, _WEIGHTS).tobytes() + values[whole:].tobytes())


class _Pickler(pickle.Pickler):
    """Pickles a value into a digest; what is not made of numbers, texts, lists and dicts counts by what `reduced` says.

    With `apart`, what is opaque has a digest of its own, and is told if it cannot be pickled.
    """

    def __init__(self, digest: ValueDigest, fast: bool, apart: bool) -> None:
        super().__init__(digest, protocol=5)
        self.fast, self._apart = fast, apart
        self._digest, self._set_apart = digest, digest.tensors.append
        self._references, self._owns_memory = digest.encoder.references, digest.encoder.owns_memory

    def dump(self, value: Any) -> None:
        """Write a value; of a long list of tensors, or of tuples of them, the tensors are set apart at once."""
        are_rows = type(value) is list and len(value) >= MIN_ROWS and set(map(type, value)) == {tuple}
        flat = list(chain.from_iterable(value)) if are_rows else value if type(value) is list else []
        tensors = [part for part in flat if type(part) is Tensor]
        if len(tensors) >= MIN_ROWS and _ROW_PARTS.issuperset(map(type, flat)) and self._are_simple(tensors):
            self._digest.tensors += tensors
            value = are_rows and list(map(len, value)), [None if type(part) is Tensor else part for part in flat]
        super().dump(value)

    def reducer_override(self, value: Any) -> Any:
        """Return how to write a value."""
        if value is str:  # by which all others are written
            return NotImplemented
        if type(value) is Tensor and self._are_simple([value]):
            self._set_apart(value)
            return str, ("tensor",)
        reduced = self._digest.reduced(value)
        if reduced is not NotImplemented:
            return str, ("",), (reduced,)  # a state, which may hold the value: `pickle` has noted it by then
        if kind_of(value) is not None:
            return NotImplemented
        return (str, (), self._digest.apart(value)) if self._apart else _reduced_by_class(value)

    def _are_simple(self, tensors: list[Tensor]) -> bool:
        """Whether tensors count by their numbers alone, without a call in Python for each: there may be millions."""
        return (
            set(map(_TRAITS, tensors)) == _SIMPLE
            and not any(map(vars, tensors))
            and self._references.keys().isdisjoint(map(id, tensors))
            and (self._owns_memory or not any(map(Tensor.is_shared, tensors)))
            and all(map(Tensor.data_ptr, tensors))  # 0 on the meta device, of empty ones, and where it was freed
        )


class _PortablePickler(_Pickler):
    """Writes sets in an order that does not depend on the process, which takes a call for each value."""

    def persistent_id(self, value: Any) -> Any:
        """Return a set as a list of sorted digests; None for all else."""
        if type(value) not in (set, frozenset):
            return None
        return "set", sorted(int(ValueDigest.of(part, self._digest.encoder, False)) for part in value)


def _reduced_by_class(value: Any) -> Any:
    """Return how its class lets `pickle` write a value.

    Raises:
        PicklingError: If that is the name of a variable, which says nothing of what the value holds.
    """
    attribute_dict(value)  # a text buffer has a dict, which it counts, from the first time that anyone asks for it
    reducer = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(5) if reducer is None else reducer(value)
    if isinstance(reduced, str):
        raise pickle.PicklingError("it is written by its name")
    return reduced


def _reduces_itself(value: Any, kind: type) -> bool:
    """Whether the class of an object decides how `pickle` writes it, and writes more than its name."""
    if all(getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__")):
        return False
    return not isinstance(value.__reduce_ex__(5), str)


def _token(value: Tensor) -> int:
    """Return a number that no other tensor has or had."""
    number = id(value)
    known = _tokens.get(number)
    if known is None or known[0]() is not value:
        known = _tokens[number] = ref(value, lambda _: _tokens.pop(number, None)), next(_never_twice)
    return known[1]


def _plain_parts(value: Any) -> Any:
    """Return the plain tensors of a quantized, nested or sparse one."""
    if value.is_quantized:
        return value.dequantize()
    if value.is_nested:
        return list(value.unbind())
    return [value._indices(), value._values()] if value.layout is torch.sparse_coo else value.values()
