"""Adaptive gradient clipping (AGC): unit by unit, relative to the norm of the unit's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_number
from lightning_tricks._shared.tensors import full_tensor, is_sharded
from lightning_tricks._torch_compat.foreach import foreach_mul_
from lightning_tricks.gradient_clipping.core.clipping import (
    HALF_DTYPES,
    check_bound,
    foreach_batches,
    gradients_of,
    refuse_sparse,
    stacked_norms,
)


@torch.no_grad()
def adaptive_clip_grad_(
    parameters: Tensor | Iterable[Tensor], clip_factor: float = 0.01, eps: float = 1e-3
) -> UnitClipResult:
    """Scale the gradient of each unit in place to at most `clip_factor` times the norm of the unit's weights (AGC).

    A unit is what computes one output: the slice of a weight at one index of its first dimension (a row of a Linear, a
    filter of a convolution), or a whole tensor of fewer than two dimensions (a bias, the scale of a normalisation).

    In fp32 the result is that of `timm.utils.agc.adaptive_clip_grad`. No value is read back to the host. Exclude the
    final linear layer, as the paper does.

    Args:
        parameters: A tensor or tensors; those without a gradient are ignored.
        clip_factor: The largest ratio of the norms allowed, > 0; `float("inf")` leaves the gradients untouched.
        eps: The lower bound for the norm of a unit's weights, > 0: without it, weights of zero would never change.

    Returns:
        The 2-norm of all gradients after clipping, and how many units were clipped.

    Raises:
        TypeError: If `clip_factor` or `eps` is not a number, or a gradient is sparse.
        ValueError: If one of them is not positive.

    Source: Brock et al., arXiv 2102.06171.

    Examples:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
        >>> weight.grad = torch.tensor([[30.0, 40.0], [0.0, 1e-6]])
        >>> adaptive_clip_grad_(weight, clip_factor=0.1)
        UnitClipResult(norm=tensor(0.5000), num_clipped=tensor(1))
        >>> weight.grad
        tensor([[3.0000e-01, 4.0000e-01],
                [0.0000e+00, 1.0000e-06]])
    """
    clip_factor, eps = check_bound("clip_factor", clip_factor), check_number("eps", eps, above=0)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = gradients_of(parameters)
    refuse_sparse("adaptive_clip_grad_", gradients)
    if not gradients:
        return UnitClipResult(torch.tensor(0.0), torch.tensor(0))
    device = gradients[0].device
    after, clipped = [], []
    for batch, indices in foreach_batches(gradients):
        weights = [parameters[index] for index in indices]
        for clip, run in _split_by_strategy(batch):
            norms, counts = clip([batch[i] for i in run], [weights[i] for i in run], clip_factor, eps)
            after.append(norms.to(device))
            clipped.append(counts.to(device))
    return UnitClipResult(torch.linalg.vector_norm(torch.cat(after)), torch.cat(clipped).sum())


class UnitClipResult(NamedTuple):
    """The result of `adaptive_clip_grad_`.

    Attributes:
        norm: The 2-norm of all gradients after clipping; shape ().
        num_clipped: How many units were clipped, int64; shape ().
    """

    norm: Tensor
    num_clipped: Tensor


def _split_by_strategy(gradients: list[Tensor]) -> Iterator[tuple[_ClipUnits, list[int]]]:
    """Split a batch by how it is clipped: in few kernels on an accelerator, tensor by tensor in the cache of a CPU."""
    vectors = [position for position, gradient in enumerate(gradients) if gradient.ndim <= 1]
    others = [position for position, gradient in enumerate(gradients) if gradient.ndim > 1]
    together = gradients[0].device.type != "cpu" and not is_sharded(gradients[0])
    if vectors:
        yield _clip_vectors_, vectors
    if others:
        yield (_clip_units_foreach_ if together else _clip_units_one_by_one_), others


# Each takes gradients, their weights, `clip_factor` and `eps`, and returns norms after clipping, of units or of whole
# tensors, and counts of clipped units; plain tensors of shape (n,) and (m,).
_ClipUnits = Callable[[list[Tensor], list[Tensor], float, float], tuple[Tensor, Tensor]]


def _clip_vectors_(
    gradients: list[Tensor], weights: list[Tensor], clip_factor: float, eps: float
) -> tuple[Tensor, Tensor]:
    norms = stacked_norms(gradients, 2.0)
    factors = _unit_factors(norms, stacked_norms(weights, 2.0), clip_factor, eps)
    foreach_mul_(gradients, factors.unbind())
    after = norms * factors
    return after, after < norms


def _clip_units_foreach_(
    gradients: list[Tensor], weights: list[Tensor], clip_factor: float, eps: float
) -> tuple[Tensor, Tensor]:
    by_tensor = [_unit_norms(gradient) for gradient in gradients]
    norms = torch.cat([norm.flatten() for norm in by_tensor])
    weight_norms = torch.cat([_unit_norms(weight).flatten() for weight in weights])
    factors = _unit_factors(norms, weight_norms, clip_factor, eps)
    parts = factors.split([norm.numel() for norm in by_tensor])
    foreach_mul_(gradients, [part.view_as(norm) for part, norm in zip(parts, by_tensor, strict=True)])
    after = norms * factors
    return after, after < norms


def _clip_units_one_by_one_(
    gradients: list[Tensor], weights: list[Tensor], clip_factor: float, eps: float
) -> tuple[Tensor, Tensor]:
    norms, factors = [], []
    for gradient, weight in zip(gradients, weights, strict=True):
        norms.append(_unit_norms(gradient))
        factors.append(_unit_factors(norms[-1], _unit_norms(weight), clip_factor, eps))
        gradient.mul_(factors[-1])
    after = [norm * factor for norm, factor in zip(norms, factors, strict=True)]
    if not is_sharded(gradients[0]):
        flat = torch.cat([norm.flatten() for norm in after])
        return flat, flat < torch.cat([norm.flatten() for norm in norms])
    # one value for each tensor, and one collective for all tensors of a mesh
    clipped = [(new < old).sum() for new, old in zip(after, norms, strict=True)]
    whole_norms = torch.stack([torch.linalg.vector_norm(norm) for norm in after])
    return full_tensor(whole_norms), full_tensor(torch.stack(clipped))


def _unit_norms(tensor: Tensor) -> Tensor:
    """Return the 2-norms of a tensor's units, shaped so that they broadcast against it."""
    dtype = torch.float32 if tensor.dtype in HALF_DTYPES else None
    dims = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=tensor.ndim > 1, dtype=dtype)
    return norms


def _unit_factors(norms: Tensor, weight_norms: Tensor, clip_factor: float, eps: float) -> Tensor:
    # the lower bound for the norm of a gradient is that of timm, and avoids a division by zero
    return weight_norms.clamp(min=eps).mul_(clip_factor).div_(norms.clamp(min=1e-6)).clamp_(max=1)
