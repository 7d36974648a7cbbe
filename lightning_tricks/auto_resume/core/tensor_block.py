"""Small tensors of nested containers in one block: `torch.save` writes a record of its own for each storage."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import replace_tensors

_MAX_BYTES = 1 << 14  # of a tensor in a block
_NAMES = "float64 int64 float32 int32 float16 bfloat16 int16 int8 uint8 bool"  # each begins at a multiple of its size
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


def pack(value: Any) -> dict[str, Any]:
    """Return nested containers with a mark in the place of each small tensor, and all of these in one tensor.

    Tensors are packed that are plain and contiguous, on the CPU, without gradients, and of 16 KiB at most; others stay.
    """
    alike: dict[tuple[torch.dtype, torch.Size], tuple[str, list[Tensor]]] = {}
    prefix = secrets.token_hex(8)  # of the marks, each of which stands for the next tensor of its kind

    def mark(_: Any, tensor: Tensor) -> Any:
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.requires_grad
            or not (tensor.is_cpu and tensor.is_contiguous() and 0 < tensor.nbytes <= _MAX_BYTES)
            or tensor.dtype not in _DTYPES.values()
        ):
            return tensor
        kind = tensor.dtype, tensor.shape
        if kind not in alike:
            alike[kind] = f"{prefix}{len(alike)}", []
        name, tensors = alike[kind]
        tensors.append(tensor)
        return name

    marked = replace_tensors(value, mark)
    kinds, blocks = [], [torch.empty(0, dtype=torch.uint8, device="cpu")]
    for name, dtype in _DTYPES.items():
        for (_, shape), (place, tensors) in alike.items():
            if tensors[0].dtype is dtype:
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
            raise ValueError("the small tensors of the checkpoint are not where it says")
        of_kind = block[start:end].view(_DTYPES[name]).view(count, *shape)
        start, tensors[place] = end, iter(unbind_copy(of_kind))

    def tensor_at(mark: Any) -> Any:
        if type(mark) is not str or mark not in tensors:
            return mark
        if (found := next(tensors[mark], None)) is None:
            raise ValueError("the checkpoint has fewer small tensors than places for them")
        return found

    return replace_tensors(packed["value"], lambda _, tensor: tensor, others=tensor_at)
