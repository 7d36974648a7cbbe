"""64-bit fingerprints of tensors and of what contains them, computed on the device of the tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.run_fingerprint.core.value_parts import tensors_of

_ROW_LENGTH = 32_749  # words; a prime, so that no row of a matrix and no sample of a batch is a multiple of it
_GOLDEN_RATIO, _MURMUR_FACTOR, _COMBINE_FACTOR = (
    -0x61C8864680B583EB,
    -0x00AE502812AA7333,
    0x2545F4914F6CDD1D,
)  # odd: no bit gets lost


@torch.no_grad()
def fingerprint(value: Any) -> Tensor:
    """Return 64 bits that are equal for values that are equal bit for bit, and practically never for others.

    The fingerprint depends on values, order, names, shapes and dtypes: one flipped bit, two swapped samples or a
    permuted weight changes it. Zeros of different sign differ, and so do NaNs of different bits. Memory is read once,
    and nothing is copied to the host. Memory longer than 32,749 64-bit words is first added up in rows of that length:
    a swap of two words goes unseen if their distance is an exact multiple of it.

    Args:
        value: A tensor of any shape, dtype, layout and device, or tensors, arrays and plain values in containers,
            dataclasses and other objects. Of a DTensor only this rank's shard counts.

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
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
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
