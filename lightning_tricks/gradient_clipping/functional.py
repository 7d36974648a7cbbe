"""Gradient norms and clipping by norm, for any training loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

_HALF = (torch.float16, torch.bfloat16)


class GradientNorms(NamedTuple):
    """The norms of a set of gradients, from one pass over them.

    Attributes:
        total: The norm of all gradients as one vector; shape ().
        per_parameter: The norm of each gradient, in the order of the parameters that have one; shape (n,).
    """

    total: Tensor
    per_parameter: Tensor


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their common norm is at most `max_norm`.

    In fp32 the result is that of `torch.nn.utils.clip_grad_norm_`, bit for bit. Beyond it: norms of fp16 and bf16
    gradients are accumulated in fp32 (in fp16 they overflow at 65504), and DTensors of several meshes, with plain
    tensors among them, share one norm. It never reads a value back to the host.

    Args:
        parameters: A tensor or tensors; those without a gradient are passed over.
        max_norm: The largest norm allowed, > 0; `float("inf")` leaves the gradients untouched.
        norm_type: The p of the p-norm, > 0; `float("inf")` for the maximum norm.

    Returns:
        The norm before clipping: shape (), on the device of the first gradient, a plain tensor; 0 when there is no
        gradient. NaN or Inf when a gradient is not finite (the scaled gradients then are NaN or 0, as in torch).

    Raises:
        TypeError: If `max_norm` or `norm_type` is no number.
        ValueError: If one of them is not positive.

    Source: Pascanu et al., arXiv 1211.5063.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(weight, max_norm=1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not isinstance(parameters, Tensor):
        parameters = list(parameters)  # a generator serves once
    total = gradient_norms(parameters, norm_type).total
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


@torch.no_grad()
def gradient_norms(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> GradientNorms:
    """Compute the norm of each gradient and of all gradients together, in one pass.

    Args:
        parameters: A tensor or tensors; those without a gradient are passed over.
        norm_type: The p of the p-norm, > 0; `float("inf")` for the maximum norm.

    Returns:
        The norms, on the device of the first gradient, in fp32 or the gradients' own higher precision.

    Raises:
        TypeError: If `norm_type` is no number.
        ValueError: If it is not positive.
    """
    norm_type = check_norm_type(norm_type)
    gradients = _gradients(parameters)
    if not gradients:
        return GradientNorms(torch.tensor(0.0), torch.zeros(0))
    device = gradients[0].device
    norms: list[Tensor] = []
    order: list[int] = []
    for batch, indices in _foreach_batches(gradients):
        norms.append(_stacked_norms(batch, norm_type).to(device))
        order += indices
    per_parameter = norms[0]
    if len(norms) > 1:
        per_parameter = torch.cat(norms)[torch.tensor(order, device=device).argsort()]
    return GradientNorms(torch.linalg.vector_norm(per_parameter, norm_type), per_parameter)


@torch.no_grad()
def clip_grads_with_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor) -> Tensor:
    """Scale gradients in place by `min(1, max_norm / (total_norm + 1e-6))`.

    Args:
        parameters: A tensor or tensors; those without a gradient are passed over.
        max_norm: The largest norm allowed, > 0; `float("inf")` leaves the gradients untouched.
        total_norm: Their norm, as `gradient_norms` or `clip_grad_norm_` returns it; shape ().

    Returns:
        The factor, at most 1; shape ().

    Raises:
        TypeError: If `max_norm` is no number.
        ValueError: If it is not positive.
    """
    max_norm = check_max_norm(max_norm)
    if max_norm == math.inf:
        return torch.ones_like(total_norm)
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for batch, _ in _foreach_batches(_gradients(parameters)):
        torch._foreach_mul_(batch, factor.to(batch[0].device))
    return factor


def check_max_norm(value: object) -> float:
    """Return `value` as a float, or say why it is no `max_norm`."""
    return _positive("max_norm", value, "clips nothing")


def check_norm_type(value: object) -> float:
    """Return `value` as a float, or say why it is no `norm_type`."""
    return _positive("norm_type", value, "is the maximum norm")


def _positive(name: str, value: object, infinity: str) -> float:
    must = f'{name} must be a number > 0 (float("inf"), in YAML .inf, {infinity})'
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{must}, got {value!r} ({type(value).__name__}).")
    number = float(value)
    if not number > 0:  # NaN, too
        raise ValueError(f"{must}, got {value!r}.")
    return number


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _foreach_batches(gradients: list[Tensor]) -> Iterator[tuple[list[Tensor], Sequence[int]]]:
    """Split gradients into what one foreach call can take: one device, one dtype, one mesh; with their positions."""
    if not gradients:
        return
    grouped: dict[Any, Any] = _group_tensors_by_device_and_dtype([gradients], with_indices=True)  # type: ignore[list-item]
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


def _stacked_norms(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return the norms of gradients of one device, dtype and mesh as one plain tensor of shape (n,)."""
    dtype = torch.float32 if gradients[0].dtype in _HALF else None
    if dtype and type(gradients[0]) is not Tensor:
        # DTensor's _foreach_norm takes no dtype
        stacked = torch.stack([torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients])
    else:
        stacked = torch.stack(torch._foreach_norm(gradients, norm_type, dtype=dtype))
    # one collective for a whole mesh, not one for each gradient
    return stacked.full_tensor() if hasattr(stacked, "full_tensor") else stacked
