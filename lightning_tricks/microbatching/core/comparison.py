"""Whether the loss of a batch and its gradient follow from those of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.dry_run.shared_state import restored_state
from lightning_tricks._shared.memory_errors import memory_that_ran_out
from lightning_tricks._shared.rng import capture_rng_state, isolated_rng, restore_rng_state
from lightning_tricks._shared.step_state import copy_step_state, refuse_lazy, restore_step_state
from lightning_tricks._shared.tensors import tensors_in
from lightning_tricks._shared.text import describe_error, list_names
from lightning_tricks._torch_compat.modules import is_batch_norm
from lightning_tricks.microbatching.core.batches import copy_batch, take_rows

LossOf = Callable[[Any], Tensor | None]


@dataclass
class Comparison:
    """The outcome of a comparison; without a reduction and a problem, another batch may tell more.

    Attributes:
        reduction: "mean" or "sum" if loss and gradient are those over the rows, else None.
        problem: Why there is no reduction.
        is_refuted: Whether loss or gradient differ; otherwise they could not be compared.
    """

    reduction: str | None = None
    problem: str = ""
    is_refuted: bool = False


def part_weights(reduction: str | None, sizes: Sequence[int]) -> list[float]:
    """Return the weights with which the losses of parts with these numbers of rows add up to that of the whole."""
    return [1.0] * len(sizes) if reduction == "sum" else [size / sum(sizes) for size in sizes]


def batch_norms_in(module: nn.Module) -> list[str]:
    """Return the names of the layers that normalize with the statistics of each microbatch."""
    return [name for name, part in module.named_modules() if is_batch_norm(part) and part.training]


def compare_with_parts(
    module: nn.Module,
    loss_of: LossOf,
    batch: Any,
    rows: int,
    *,
    known: str | None = None,
    half_precision: bool = False,
) -> Comparison:
    """Compare loss and gradient of a batch with those of two parts of it, and leave no trace.

    BatchNorm is in evaluation mode. Where the loss depends on random numbers, dropout is off: all modules but recurrent
    ones are in evaluation mode then.

    Args:
        module: The module, in training mode.
        loss_of: Computes the loss of a batch, a tensor without dimensions, or None.
        batch: A batch that fits in memory.
        rows: Its number of rows, at least 2.
        known: What the loss is over the rows, where that was found out before.
        half_precision: Whether the loss is computed in fp16 or bf16, whose rounding errors then do not count.
    """
    parameters = [*module.parameters()]
    refuse_lazy(dict(module.named_parameters()))
    state, gradients = copy_step_state(module), [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        with restored_state(module), isolated_rng():
            for is_deterministic in (False, True):
                for part in module.modules():
                    # cuDNN's recurrent layers have no backward pass in evaluation mode
                    if is_batch_norm(part) or (is_deterministic and not isinstance(part, nn.RNNBase)):
                        part.training = False
                random_state = capture_rng_state()
                frozen = {name: (p, p._version) for name, p in module.named_parameters() if not p.requires_grad}
                cut = max(1, rows // 3)  # parts of two sizes, so that their weights count
                limits = slice(0, rows), slice(0, cut), slice(cut, rows)
                whole, *halves = (copy_batch(take_rows(batch, rows, at), with_values=True) for at in limits)
                try:
                    loss = loss_of(whole)
                    if written := [name for name, (p, version) in frozen.items() if p._version != version]:
                        problem = f"`training_step` changes {list_names(written)} (let `on_train_batch_end` do that)"
                        return Comparison(problem=problem, is_refuted=True)
                    if _is_random_state(random_state):
                        return _compare(parameters, loss_of, loss, halves, [cut, rows - cut], known, half_precision)
                except Exception as error:
                    if not is_deterministic or memory_that_ran_out(error):
                        raise
                    reason = f"fails where its modules are in evaluation mode ({describe_error(error)})"
                    return Comparison(problem=f"`training_step` draws random numbers, and {reason}")
                restore_rng_state(random_state)
    finally:
        restore_step_state(module, state)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return Comparison(problem="`training_step` draws random numbers also where its modules are in evaluation mode")


def _is_random_state(state: dict[str, Any]) -> bool:
    """Whether the global random number generators are as they were when `capture_rng_state` returned a state."""
    now = capture_rng_state()
    return now["numpy"][2] == state["numpy"][2] and all(map(torch.equal, tensors_in(now), tensors_in(state)))


def _compare(
    parameters: Sequence[Tensor],
    loss_of: LossOf,
    whole: Tensor | None,
    halves: Sequence[Any],
    sizes: Sequence[int],
    known: str | None,
    half_precision: bool,
) -> Comparison:
    if whole is None:
        return Comparison()
    tolerance = _tolerance(parameters, half_precision)
    scale = 1024.0 if half_precision else 1.0  # of the loss, so that no gradient underflows in fp16
    (whole * scale).backward()
    loss, norm = float(whole.detach()), _gradient_norm(parameters)
    del whole
    losses = [part for part in map(loss_of, halves) if part is not None]
    values = [float(part.detach()) for part in losses]
    least = 1e-6 * scale if half_precision else 0.0  # of a gradient whose smallest values have not become zero
    if len(losses) < len(halves) or not all(map(math.isfinite, (loss, norm, *values))) or norm <= least:
        return Comparison()

    cut = f"their microbatches of {sizes[0]} and {sizes[1]} rows"
    reductions = {how: [*map(mul, values, part_weights(how, sizes))] for how in ("mean", "sum")}
    possible = [how for how, parts in reductions.items() if _adds_up(loss, parts, tolerance)]
    reduction = next((how for how in possible if known in (None, how)), None)
    if reduction is None:
        mean, total = map(sum, reductions.values())
        given = f"{mean:.6g} as a mean over the rows and {total:.6g} as a sum"
        problem = f"the loss of {sum(sizes)} rows is {loss:.6g}, but {cut} give {given}"
        return Comparison(problem=problem, is_refuted=True)
    for part, weight in zip(losses, part_weights(reduction, sizes), strict=True):
        (part * (-weight * scale)).backward()
    difference = _gradient_norm(parameters)
    if difference <= tolerance * norm:
        return Comparison(reduction)
    share = f"{difference / norm if norm else math.inf:.2g} of its norm"
    problem = f"the gradient of {sum(sizes)} rows and that of {cut} differ by {share}"
    return Comparison(problem=problem, is_refuted=True)


def _adds_up(whole: float, parts: Sequence[float], tolerance: float) -> bool:
    return abs(whole - sum(parts)) <= tolerance * (abs(whole) + sum(map(abs, parts)))


def _gradient_norm(parameters: Sequence[Tensor]) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    norms = [torch.linalg.vector_norm(gradient.float() if gradient.itemsize < 4 else gradient) for gradient in dense]
    return math.hypot(*torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()) if norms else 0.0


def _tolerance(parameters: Sequence[Tensor], half_precision: bool) -> float:
    """Return the relative difference that rounding may cause."""
    bytes_each = min((p.dtype.itemsize for p in parameters if p.is_floating_point()), default=4)
    if half_precision or bytes_each < 4:
        return 3e-2
    return 1e-7 if bytes_each == 8 else 2e-3
