"""64-bit fingerprints of tensors and of what contains them, computed on the device of the tensors."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, time, timedelta
from functools import lru_cache
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import local_part

# Longer memory is added up in rows, whose lengths are primes, so that no row of a matrix and no sample of a batch is a
# multiple of one. Two words of at most _LONG words fall together in rows of one of the two lengths, never of both.
_SHORT, _LONG = 2_048, 262_144  # 64-bit words
_TWO_ROW_LENGTHS, _LONG_ROW_LENGTH = (509, 521), 32_749
# odd factors, so that no bit gets lost
_GOLDEN_RATIO, _MURMUR_FACTOR = -0x61C8864680B583EB, -0x00AE502812AA7333
_MIXED_AT_ONCE = 65_536  # words; a longer row is mixed by itself
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the number of bytes
# their `repr` shows the whole value, and no address
_PLAIN = (type(None), str, bytes, bytearray, Number, np.generic, range, date, time, timedelta, os.PathLike)
_WITHOUT_VALUE = (type, nn.Module, FunctionType, BuiltinFunctionType, MethodType)


class Condensed(NamedTuple):
    """What is left of a value before its fingerprint is computed.

    Attributes:
        words: At most some thousand 64-bit words for each tensor, on the device of the fingerprint.
        description: A hash of names, shapes and dtypes, which is to be added to the fingerprint of the words.
    """

    words: Tensor
    description: int


ABSENT = Condensed(torch.zeros(0, dtype=torch.int64, device="cpu"), 0)  # its fingerprint is zero


def fingerprint(value: Any) -> Tensor:
    """Return 64 bits that are equal for bit-identical values, and practically never equal for others.

    The fingerprint depends on values, order, names, shapes and dtypes: one flipped bit, two swapped samples or a
    permuted weight changes it. Zeros of different sign differ, and so do NaNs with different bits. Nothing is copied to
    the host. Memory longer than 262,144 64-bit words is first added up in rows of 32,749 words: it does not detect a
    swap of two words at a distance that is an exact multiple of it.

    Args:
        value: A tensor of any shape, dtype, layout and device, or tensors, arrays and plain values in containers,
            dataclasses and other objects. For a DTensor, only this rank's shard counts.

    Returns:
        A scalar of dtype int64, on the first device that is not the CPU, if there is one, else on the CPU.

    Source: the mixing is that of the finalizer of MurmurHash3, on words that are numbered by the golden ratio.

    Examples:
        >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
        tensor(False)
    """
    words, description = condense(value)
    mixer = Mixer()
    mixer.add([words])
    return mixer.take()[0, 0] + description


def condense(value: Any) -> Condensed:
    """Add up and copy what the fingerprint of a value depends on, so that the value may change afterwards."""
    description: list[Hashable] = []
    parts: list[Tensor] = []
    short: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for name, tensor in tensors_of(value):
        dense = _dense(tensor)
        shape = tuple(each.shape for each in dense) if tensor.is_nested else tensor.shape
        description.append((name, shape, tensor.dtype))
        for each in dense:
            flat = each if each.dim() == 1 else each.reshape(-1)
            if flat.nbytes > 8 * _SHORT:
                parts += _rows(flat)
            else:
                short.setdefault((flat.device, flat.dtype), []).append(flat)
    for flats in short.values():
        parts += _rows(flats[0] if len(flats) == 1 else torch.cat(flats))
    words = torch.cat(_on_one_device(parts)) if parts else ABSENT.words
    return Condensed(words, _hash_of_description(tuple(description)))


class Mixer:
    """Computes the fingerprints of rows of condensed values, of several rows at once if their lengths are the same."""

    def __init__(self) -> None:
        self._rows: list[Sequence[Tensor]] = []  # that are not mixed yet
        self._lengths: list[int] = []  # of their values
        self._mixed: list[Tensor] = []
        self._numbers = torch.empty(0)
        self._numbered: tuple[list[int], torch.device] | None = None

    def add(self, row: Sequence[Tensor]) -> None:
        """Add the words of the values of a row."""
        lengths = [words.numel() for words in row]
        if lengths != self._lengths:
            self._mix()
            self._lengths = lengths
        self._rows.append(row)
        if len(self._rows) * sum(lengths) >= _MIXED_AT_ONCE:
            self._mix()

    def take(self) -> Tensor:
        """Return the fingerprints of the values, without their descriptions, of all rows added since the last call."""
        self._mix()
        mixed, self._mixed = self._mixed, []
        return torch.cat(_on_one_device(mixed))

    def _mix(self) -> None:
        if not self._rows:
            return
        rows, lengths, self._rows = self._rows, self._lengths, []
        words = torch.cat(_on_one_device([words for row in rows for words in row])).view(len(rows), sum(lengths))
        if self._numbered != (lengths, words.device):
            numbers = torch.arange(max(lengths), device=words.device).mul_(_GOLDEN_RATIO)
            self._numbers = torch.cat([numbers[:length] for length in lengths])
            self._numbered = lengths, words.device
        # Each word gets the number of its place, and is mixed as by MurmurHash3's finalizer, before the sum: a plain
        # sum would not depend on the order. All operations wrap around in int64 and are exact, so the order in which a
        # device adds does not matter.
        words.add_(self._numbers)
        words.bitwise_xor_(words >> 32).mul_(_MURMUR_FACTOR)
        words.bitwise_xor_(words >> 29)
        self._mixed.append(torch.stack([part.sum(1) for part in words.split(lengths, 1)], 1))


def _on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """Move tensors to the first of their devices that is not the CPU, if there is one."""
    devices = [tensor.device for tensor in tensors]
    if devices.count(devices[0]) == len(devices):
        return tensors
    device = next(device for device in devices if device.type != "cpu")
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def _rows(flat: Tensor) -> list[Tensor]:
    """Return the words of a tensor, or, if they are many, sums of them."""
    words, *last = _words(flat)
    if words.numel() <= _SHORT:
        return [words, *last]
    if words.numel() > _LONG:
        rest = words.numel() % _LONG_ROW_LENGTH
        row = _sum_of_rows(words, _LONG_ROW_LENGTH)
        row[:rest].add_(words[words.numel() - rest :])
        words = row
    rest = max([words.numel() % length for length in _TWO_ROW_LENGTHS])  # what either of them leaves over
    sums = [_sum_of_rows(words, length) for length in _TWO_ROW_LENGTHS]
    return [*sums, words[words.numel() - rest :], *last]


def _sum_of_rows(words: Tensor, length: int) -> Tensor:
    return words.as_strided((words.numel() // length, length), (length, 1)).sum(0)


def _words(flat: Tensor) -> list[Tensor]:
    """Return the 64-bit words of a tensor, without a copy if it is aligned, and what fills no word as words."""
    size, number = flat.itemsize, flat.numel()
    rest = number % (8 // size) if size < 8 else 0
    if rest:
        last = (flat[number - rest :] if number > rest else flat).view(_INTEGERS[size]).to(torch.int64)
        return [*_words(flat[: number - rest]), last] if number > rest else [last]
    aligned = flat if flat.storage_offset() * size % 8 == 0 else flat.clone()
    return [aligned if aligned.dtype == torch.int64 else aligned.view(torch.int64)]


def _dense(tensor: Tensor) -> Sequence[Tensor]:
    """Return the dense tensors that a tensor of any layout consists of; none for a tensor on the meta device."""
    if type(tensor) not in (Tensor, nn.Parameter):
        tensor = local_part(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_meta:
        return ()
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return (tensor.int_repr(),)
    if tensor.layout is not torch.strided:
        coordinates = tensor.to_sparse_coo().coalesce()
        return coordinates.indices(), coordinates.values()
    if tensor.is_complex() or tensor.is_neg():
        return (tensor.resolve_conj().resolve_neg(),)
    return (tensor,)


@lru_cache(maxsize=4096)
def _hash_of_description(description: Hashable) -> int:
    digest = hashlib.blake2b(repr(description).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors in containers, dataclasses and other objects; plain values as tensors of bytes.

    Of an object its attributes count; of a module, a function and the like only the type.
    """
    return _parts(value, name, ())


def children_of(value: Any) -> dict[str, Any]:
    """Return the items of a container or the attributes of an object, by name; {"batch": value} for a single value."""
    inner = None if isinstance(value, Tensor) else _children(value)
    return {"batch": value} if inner is None else {str(name): part for name, part in inner.items()}


def _parts(value: Any, name: str, around: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        yield name, torch.from_numpy(np.array(value))
    elif type(value) not in (dict, list, tuple) and isinstance(value, _PLAIN):  # the second takes its time
        yield name, _as_bytes(value)
    elif id(value) not in around:
        inner = _children(value)
        if inner is None:
            yield name, _as_bytes(type(value).__qualname__)
        around = (*around, id(value))
        for key, part in (inner or {}).items():
            label = f"{name}.{key}" if name else str(key)
            if isinstance(part, Tensor):  # most are, and there may be many
                yield label, part
            else:
                yield from _parts(part, label, around)


def _children(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, Set):
        return dict(enumerate(sorted(value, key=repr)))
    if isinstance(value, np.ndarray):
        return dict(enumerate(np.atleast_1d(value).tolist()))
    if isinstance(value, _WITHOUT_VALUE):
        return None
    if hasattr(type(value), "__array__") or hasattr(type(value), "__array_interface__"):  # pictures, data frames
        with suppress(Exception):
            return {"values": np.asarray(value)}
    return _attributes(value)


def _attributes(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object, also those in slots; None if it can have none."""
    slots: list[str] = []
    for base in type(value).__mro__:
        own = vars(base).get("__slots__", ())
        private = f"_{base.__name__.lstrip('_')}"  # before names with two underscores; the special ones drop out
        slots += [private + key if key.startswith("__") else key for key in ([own] if isinstance(own, str) else own)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(getattr(value, "__dict__", {}))


def _as_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
