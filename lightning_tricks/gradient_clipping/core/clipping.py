"""Gradient norms, and clipping by norm, by value and unit by unit (AGC), for any training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_number
from lightning_tricks._shared.tensors import full_tensor, is_sharded, local_part
from lightning_tricks._torch_compat.foreach import (
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    foreach_norm,
    group_by_device_and_dtype,
)


class GradientNorms(NamedTuple):
    """The norms of a set of gradients, from one pass over them.

    Attributes:
        total: The norm of all gradients as one vector; shape ().
        per_parameter: The norm of each gradient, in the order of the parameters that have one; shape (n,).
    """

    total: Tensor
    per_parameter: Tensor


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`.

    In fp32 the result is that of `torch.nn.utils.clip_grad_norm_`, bit for bit. In addition, norms of fp16 and bf16
    gradients are accumulated in fp32 (in fp16 they overflow at 65504), and DTensors of different meshes may be mixed
    with plain tensors. No value is read back to the host.

    Args:
        parameters: A tensor or tensors; those without a gradient are ignored.
        max_norm: The largest norm allowed, > 0; `float("inf")` leaves the gradients untouched.
        norm_type: The p of the p-norm, > 0; `float("inf")` for the maximum norm.

    Returns:
        The norm before clipping: shape (), on the device of the first gradient, a plain tensor; 0 when there is no
        gradient. NaN or Inf when a gradient is not finite (the scaled gradients then are NaN or 0, as in torch).

    Raises:
        TypeError: If `max_norm` or `norm_type` is not a number.
        ValueError: If one of them is not positive.

    Source: Pascanu et al., arXiv 1211.5063.

    Examples:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(weight, max_norm=1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not isinstance(parameters, Tensor):
        parameters = list(parameters)  # a generator can be read only once
    total = gradient_norms(parameters, norm_type).total
    clip_grads_with_norm_(parameters, max_norm, total)
    return total


def gradient_norms(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> GradientNorms:
    """Compute the norm of each gradient and of all gradients together, in one pass.

    Args:
        parameters: A tensor or tensors; those without a gradient are ignored.
        norm_type: The p of the p-norm, > 0; `float("inf")` for the maximum norm.

    Returns:
        The norms, on the device of the first gradient, in fp32 or in the gradients' precision if that is higher.

    Raises:
        TypeError: If `norm_type` is not a number.
        ValueError: If it is not positive.
    """
    norm_type = check_norm_type(norm_type)
    gradients = gradients_of(parameters)
    if not gradients:
        return GradientNorms(torch.tensor(0.0), torch.zeros(0))
    device = gradients[0].device
    norms: list[Tensor] = []
    order: list[int] = []
    with torch.no_grad():  # not as a decorator, which takes twice the time
        for batch, indices in foreach_batches(gradients):
            norms.append(stacked_norms(batch, norm_type).to(device))
            order += indices
        per_parameter = norms[0]
        if len(norms) > 1:
            per_parameter = torch.cat(norms)[torch.tensor(order, device=device).argsort()]
        return GradientNorms(torch.linalg.vector_norm(per_parameter, norm_type), per_parameter)


def is_nonfinite(norm: Tensor) -> Tensor:
    """Whether a norm is NaN or Inf, elementwise; in two operators, where `isfinite` has four."""
    return norm - norm != 0


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float | Tensor, total_norm: Tensor
) -> Tensor:
    """Scale gradients in place by `min(1, max_norm / (total_norm + 1e-6))`.

    Args:
        parameters: A tensor or tensors; those without a gradient are ignored.
        max_norm: The largest norm allowed, > 0; `float("inf")` leaves the gradients untouched. A tensor of shape (), as
            `PercentileThreshold` and `ZScoreThreshold` return it, is not validated.
        total_norm: Their norm, as `gradient_norms` or `clip_grad_norm_` returns it; shape ().

    Returns:
        The factor, at most 1; shape ().

    Raises:
        TypeError: If `max_norm` is not a number.
        ValueError: If it is not positive.
    """
    if not isinstance(max_norm, Tensor):
        max_norm = check_bound("max_norm", max_norm)
        if max_norm == math.inf:
            return torch.ones_like(total_norm)
    with torch.no_grad():
        factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
        for batch, _ in foreach_batches(gradients_of(parameters)):
            foreach_mul_(batch, factor.to(batch[0].device))
        return factor


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamp each element of the gradients in place to [-clip_value, clip_value].

    The result is that of `torch.nn.utils.clip_grad_value_`, bit for bit; NaN stays NaN, Inf becomes `clip_value`.

    Args:
        parameters: A tensor or tensors; those without a gradient are ignored.
        clip_value: The largest absolute value allowed, > 0; `float("inf")` leaves the gradients untouched.

    Raises:
        TypeError: If `clip_value` is not a number, or a gradient is sparse or complex.
        ValueError: If `clip_value` is not positive.

    Examples:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, -0.4])
        >>> clip_grad_value_(weight, 0.5)
        >>> weight.grad
        tensor([ 0.5000, -0.4000])
    """
    clip_value = check_bound("clip_value", clip_value)
    gradients = gradients_of(parameters)
    refuse_sparse("clip_grad_value_", gradients)
    if any(gradient.is_complex() for gradient in gradients):
        raise TypeError("clip_grad_value_ takes real gradients, got a complex one: clip its parameter by norm.")
    for batch, _ in foreach_batches(gradients):
        foreach_clamp_min_(batch, -clip_value)
        foreach_clamp_max_(batch, clip_value)


def check_bound(name: str, value: object) -> float:
    """Return `value` as a float, or raise an error if it is not a valid bound, such as `max_norm`."""
    return check_number(name, value, above=0, note='float("inf"), in YAML .inf, clips nothing')


def check_norm_type(value: object) -> float:
    """Return `value` as a float, or raise an error if it is not a valid `norm_type`."""
    return check_number("norm_type", value, above=0, note='float("inf"), in YAML .inf, is the maximum norm')


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
    grouped: dict[Any, Any] = group_by_device_and_dtype([gradients], with_indices=True)
    for (tensors,), indices in grouped.values():
        if {*map(type, tensors)} == {Tensor}:
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
    if norm_type == math.inf:
        # torch has no maximum of nothing, such as a rank's part of a layer with fewer outputs than ranks
        parts = [part if part.numel() else part.new_zeros(1) for part in map(local_part, gradients)]
        return _largest_of_ranks(torch.stack(foreach_norm(parts, norm_type, dtype=dtype)), gradients[0])
    if dtype and is_sharded(gradients[0]):
        # DTensor's _foreach_norm takes no dtype
        stacked = torch.stack([torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients])
    else:
        stacked = torch.stack(foreach_norm(gradients, norm_type, dtype=dtype))
    return full_tensor(stacked)  # one collective for a whole mesh, not one for each gradient


def _largest_of_ranks(values: Tensor, like: Any) -> Tensor:
    """Return the largest of the values that the ranks have over which a tensor is sharded."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor, Partial

    placements = [Partial("max")] * like.device_mesh.ndim
    return full_tensor(DTensor.from_local(values, like.device_mesh, placements, run_check=False))


@torch.no_grad()
def adaptive_clip_grad_(
    parameters: Tensor | Iterable[Tensor], clip_factor: float = 0.01, eps: float = 1e-3
) -> UnitClipResult:
    """Scale the gradient of each unit in place to at most `clip_factor` times the norm of the unit's weights (AGC).

    A unit computes one output: the slice of a weight at one index of its first dimension (a row of a Linear, a filter
    of a convolution), or a whole tensor of fewer than two dimensions (a bias, the scale of a normalization).

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
