"""Small tensors in few blocks: `torch.save` writes a record of its own for each storage."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_MAX_BYTES = 1 << 14  # of a tensor in a block
_NAMES = "float64 int64 float32 int32 float16 bfloat16 int16 int8 uint8 bool"  # each begins at a multiple of its size
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_TRAITS = operator.attrgetter("is_cpu", "requires_grad", "is_quantized", "dtype", "shape")
Block = tuple[list[int], Tensor]


def pack(value: Any) -> dict[str, Any]:
    """Return lists, tuples and dicts with a mark in the place of each small tensor, and all of these in one tensor.

    Tensors are packed that are plain and contiguous, on the CPU, without gradients, and of 16 KiB at most; others stay.
    """
    alike: dict[tuple[torch.dtype, torch.Size], tuple[str, list[Tensor]]] = {}
    prefix = secrets.token_hex(8)  # of the marks, each of which stands for the next tensor of its kind

    def mark(part: Any) -> Any:
        if type(part) is not Tensor or part.requires_grad or part.layout is not torch.strided:
            return part
        if not (part.is_cpu and part.is_contiguous()):
            return part
        kind = part.dtype, part.shape
        if kind not in alike:
            is_packed = kind[0] in _DTYPES.values() and 0 < part.nbytes <= _MAX_BYTES
            alike[kind] = f"{prefix}{len(alike)}" if is_packed else "", []
        place, tensors = alike[kind]
        if not place:
            return part
        tensors.append(part)
        return place

    marked = _rebuilt(value, mark)
    kinds, blocks = [], [torch.empty(0, dtype=torch.uint8, device="cpu")]
    for name, dtype in _DTYPES.items():
        for (of_kind, shape), (place, tensors) in alike.items():
            if of_kind is dtype and tensors:
                kinds.append([place, name, list(shape), len(tensors)])
                blocks.append(torch.stack(tensors).view(-1).view(torch.uint8))
    return {"value": marked, "kinds": kinds, "block": torch.cat(blocks)}


def unpack(packed: Mapping[str, Any]) -> Any:
    """Return the containers that `pack` was given, with tensors that have memory of their own.

    Raises:
        ValueError: If the description is not that of the block.
    """
    block, start, tensors = packed["block"], 0, dict[str, Iterator[Tensor]]()
    unbind_copy: Any = torch.unbind_copy  # which torch declares to return nothing
    for place, name, shape, count in packed["kinds"]:
        is_known = name in _DTYPES and all(type(number) is int and number > 0 for number in (count, *shape))
        end = start + count * math.prod(shape) * _DTYPES[name].itemsize if is_known else 0
        if not start < end <= block.numel():
            raise ValueError("the small tensors of the checkpoint do not match their index")
        of_kind = block[start:end].view(_DTYPES[name]).view(count, *shape)
        start, tensors[place] = end, iter(unbind_copy(of_kind))

    def tensor_at(mark: Any) -> Any:
        if type(mark) is not str or mark not in tensors:
            return mark
        if (found := next(tensors[mark], None)) is None:
            raise ValueError("the checkpoint has fewer small tensors than it refers to")
        return found

    return _rebuilt(packed["value"], tensor_at)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _rebuilt(part, change) for key, part in value.items()}
    if kind is list or kind is tuple:
        return kind([_rebuilt(part, change) for part in value])
    return change(value)


def stacked(tensors: Sequence[Tensor], max_bytes: float = math.inf) -> tuple[list[Block], list[int]]:
    """Return tensors as a few blocks: the numbers of those of one dtype and shape, and their data, stacked.

    Args:
        tensors: The tensors, which have to be dense.
        max_bytes: The size of the largest tensor to take.

    Returns:
        The blocks, and the numbers of all others: large ones, and what is no plain data on the CPU.
    """
    groups, blocks, others = dict[Any, list[int]](), list[Block](), list[int]()
    for number, traits in enumerate(map(_TRAITS, tensors)):
        groups.setdefault(traits, []).append(number)
    for (is_cpu, requires_grad, is_quantized, *_), numbers in groups.items():
        if is_cpu and not (requires_grad or is_quantized) and tensors[numbers[0]].nbytes <= max_bytes:
            blocks.append((numbers, torch.stack([tensors[number] for number in numbers])))
        else:
            others += numbers
    return blocks, others
