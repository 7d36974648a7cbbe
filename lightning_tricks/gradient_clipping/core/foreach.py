"""Gradients in batches that torch's foreach operators take, and their norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import full_tensor, is_sharded
from lightning_tricks._torch_compat.foreach import foreach_norm, group_by_device_and_dtype

HALF_DTYPES = (torch.float16, torch.bfloat16)


def refuse_sparse(function: str, gradients: list[Tensor]) -> None:
    """Raise a TypeError that names the function if a gradient is sparse."""
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise TypeError(
            f"{function} takes dense gradients, got a sparse one (Embedding(sparse=True)?): exclude its parameter."
        )


def gradients_of(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of a tensor or tensors, without those that have none."""
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def foreach_batches(gradients: list[Tensor]) -> Iterator[tuple[list[Tensor], Sequence[int]]]:
    """Split gradients into batches for foreach calls, each of one device, dtype and mesh; with their positions."""
    if not gradients:
        return
    grouped: dict[Any, Any] = group_by_device_and_dtype([gradients], with_indices=True)  # type: ignore[list-item]
    for (tensors,), indices in grouped.values():
        if all(type(tensor) is Tensor for tensor in tensors):
            yield tensors, indices
            continue
        meshes: dict[Any, tuple[list[Tensor], list[int]]] = {}
        for tensor, index in zip(tensors, indices, strict=True):
            batch = meshes.setdefault(getattr(tensor, "device_mesh", None), ([], []))
            batch[0].append(tensor)
            batch[1].append(index)
        yield from meshes.values()


def stacked_norms(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return the norms of gradients of one device, dtype and mesh as one plain tensor of shape (n,)."""
    dtype = torch.float32 if gradients[0].dtype in HALF_DTYPES else None
    if not is_sharded(gradients[0]) and norm_type == math.inf and not all(gradient.numel() for gradient in gradients):
        # torch has no maximum of nothing
        gradients = [gradient if gradient.numel() else gradient.new_zeros(1) for gradient in gradients]
    if dtype and is_sharded(gradients[0]):
        # DTensor's _foreach_norm takes no dtype
        stacked = torch.stack([torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients])
    else:
        stacked = torch.stack(foreach_norm(gradients, norm_type, dtype=dtype))
    return full_tensor(stacked)  # one collective for a whole mesh, not one for each gradient
