"""64-bit fingerprints of tensors and of what contains them, computed on the device of the tensors."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, time, timedelta
from functools import lru_cache
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import local_part

_ROW_LENGTH = 32_749  # words; a prime, so that no row of a matrix and no sample of a batch is a multiple of it
# odd factors, so that no bit gets lost
_GOLDEN_RATIO, _MURMUR_FACTOR, _COMBINE_FACTOR = -0x61C8864680B583EB, -0x00AE502812AA7333, 0x2545F4914F6CDD1D
# their `repr` shows the whole value, and no address
_PLAIN = (type(None), str, bytes, bytearray, Number, np.generic, range, date, time, timedelta, os.PathLike)
_WITHOUT_VALUE = (type, nn.Module, FunctionType, BuiltinFunctionType, MethodType)


@torch.no_grad()
def fingerprint(value: Any) -> Tensor:
    """Return 64 bits that are equal for bit-identical values, and practically never equal for others.

    The fingerprint depends on values, order, names, shapes and dtypes: one flipped bit, two swapped samples or a
    permuted weight changes it. Zeros of different sign differ, and so do NaNs with different bits. Memory is read once,
    and nothing is copied to the host. Memory longer than 32,749 64-bit words is first added up in rows of that length:
    it does not detect a swap of two words at a distance that is an exact multiple of it.

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
    groups: dict[torch.device, list[Tensor]] = {}
    description: list[Hashable] = []
    for name, tensor in tensors_of(value):
        dense = _dense(tensor)
        shape = tuple(each.shape for each in dense) if tensor.is_nested else tensor.shape
        description.append((name, shape, tensor.dtype))
        for each in dense:
            groups.setdefault(each.device, []).append(each)
    hashes = [_hash(tensors) for tensors in groups.values()] or [torch.zeros((), dtype=torch.int64)]
    device = next((device for device in groups if device.type != "cpu"), hashes[0].device)
    whole = hashes[0].to(device, non_blocking=True)
    for other in hashes[1:]:
        whole = torch.add(other.to(device, non_blocking=True), whole, alpha=_COMBINE_FACTOR)
    return whole + _hash_of_description(tuple(description))


def _hash(tensors: Iterable[Tensor]) -> Tensor:
    long: list[Tensor] = []
    short: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if flat.nbytes > 8 * _ROW_LENGTH:
            long.append(flat)
        else:
            short.setdefault(flat.dtype, []).append(flat)
    words = [_words([flat]) for flat in long]
    if short:
        words.append(_words([torch.cat(flats) for flats in short.values()]))
    rows = words[0] if len(words) == 1 and len(words[0]) <= _ROW_LENGTH else _sum_of_rows(words)
    # Each word gets the number of its place, and is mixed as by MurmurHash3's finalizer, before the sum: a plain sum
    # would not depend on the order. All operations wrap around in int64 and are exact, so the order in which a device
    # adds does not matter.
    numbered = torch.add(rows, torch.arange(len(rows), device=rows.device), alpha=_GOLDEN_RATIO)
    numbered.bitwise_xor_(numbered >> 32).mul_(_MURMUR_FACTOR)
    return numbered.bitwise_xor_(numbered >> 29).sum()


def _sum_of_rows(words: Sequence[Tensor]) -> Tensor:
    """Return the sum of the rows of the concatenated words, without concatenating them."""
    total = words[0].new_zeros(_ROW_LENGTH)
    start = 0
    for part in words:
        whole = len(part) // _ROW_LENGTH * _ROW_LENGTH
        row = part[:whole].view(-1, _ROW_LENGTH).sum(0)
        row[: len(part) - whole] += part[whole:]
        total[start:] += row[: _ROW_LENGTH - start]
        total[:start] += row[_ROW_LENGTH - start :]
        start = (start + len(part)) % _ROW_LENGTH
    return total


def _words(flats: Sequence[Tensor]) -> Tensor:
    """Return the 64-bit words of concatenated tensors; a single tensor of whole words is not copied."""
    first, size = flats[0], sum(flat.nbytes for flat in flats)
    if len(flats) == 1 and size % 8 == 0 and first.storage_offset() * first.itemsize % 8 == 0:
        return first.view(torch.int64)
    parts = [flat.view(torch.uint8) for flat in flats]
    if size % 8:
        parts.append(first.new_zeros(-size % 8, dtype=torch.uint8))
    return torch.cat(parts).view(torch.int64)


def _dense(tensor: Tensor) -> Sequence[Tensor]:
    """Return the dense tensors that a tensor of any layout consists of; none for a tensor on the meta device."""
    tensor = local_part(tensor)
    if tensor.is_meta:
        return ()
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return (tensor.int_repr(),)
    if tensor.layout is not torch.strided:
        coordinates = tensor.detach().to_sparse_coo().coalesce()
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
    elif isinstance(value, _PLAIN):
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
    if isinstance(value, Set):
        return dict(enumerate(sorted(value, key=repr)))
    if isinstance(value, np.ndarray):
        value = np.atleast_1d(value).tolist()
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
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
