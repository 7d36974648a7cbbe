"""Whether the loss of a batch and its gradient follow from those of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.dry_run.shared_state import restored_state
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks._torch_compat.modules import is_batch_norm
from lightning_tricks.microbatching.core.batch_state import BatchState, StatefulParts, same_random_state
from lightning_tricks.microbatching.core.batches import take_rows

REDUCTIONS = ("mean", "sum")


@dataclass
class Comparison:
    """The outcome of a comparison.

    Attributes:
        reduction: "mean" or "sum" if loss and gradient are those over the rows, else None.
        problem: Why there is no reduction.
        is_refuted: Whether loss or gradient differ; otherwise they could not be compared.
        is_final: Whether another batch would show the same.
    """

    reduction: str | None
    problem: str = ""
    is_refuted: bool = False
    is_final: bool = True


def part_weights(reduction: str | None, sizes: Sequence[int]) -> list[float]:
    """Return the weights with which the losses of parts with these numbers of rows add up to that of the whole."""
    return [1.0] * len(sizes) if reduction == "sum" else [size / sum(sizes) for size in sizes]


def compare_with_parts(
    module: nn.Module,
    parts: StatefulParts,
    loss_of: Callable[[Any], Tensor | None],
    batch: Any,
    rows: int,
    *,
    half_precision: bool = False,
) -> Comparison:
    """Compare loss and gradient of a batch with those of two parts of it, and leave no trace.

    BatchNorm is in evaluation mode. Where the loss depends on random numbers, dropout is off: all modules but recurrent
    ones are in evaluation mode then.

    Args:
        module: The module, in training mode.
        parts: Its parameters and states.
        loss_of: Computes the loss of a batch, a tensor without dimensions, or None.
        batch: A batch that fits in memory.
        rows: Its number of rows, at least 2.
        half_precision: Whether the loss is computed in fp16 or bf16, whose rounding errors then do not count.
    """
    state = BatchState(parts)
    state.set_gradients_aside()
    with restored_state(module):
        try:
            for is_deterministic in (False, True):
                for part in module.modules():
                    # cuDNN's recurrent layers have no backward pass in evaluation mode
                    if is_batch_norm(part) or (is_deterministic and not isinstance(part, nn.RNNBase)):
                        part.training = False
                random_state = capture_rng_state()
                loss = loss_of(batch)
                is_random = not same_random_state(random_state)
                restore_rng_state(random_state)
                if is_random:
                    continue
                cut = max(1, rows // 3)  # parts of two sizes, so that their weights count
                halves = [take_rows(batch, rows, chosen) for chosen in (slice(0, cut), slice(cut, rows))]
                return _compare(parts.parameters, loss_of, loss, halves, [cut, rows - cut], half_precision)
        finally:
            state.restore()
    return Comparison(None, "`training_step` draws random numbers also where its modules are in evaluation mode")


def batch_norm_names(module: nn.Module) -> list[str]:
    """Return the names of the layers that normalize with the statistics of each microbatch."""
    return [name for name, part in module.named_modules() if is_batch_norm(part) and part.training]


def _compare(
    parameters: Sequence[Tensor],
    loss_of: Callable[[Any], Tensor | None],
    whole: Tensor | None,
    halves: Sequence[Any],
    sizes: Sequence[int],
    half_precision: bool,
) -> Comparison:
    if whole is None:
        return Comparison(None, "`training_step` returned None", is_final=False)
    tolerance = _tolerance(parameters, half_precision)
    scale = 1024.0 if half_precision else 1.0  # of the loss, so that no gradient underflows in fp16
    (whole * scale).backward()
    loss, norm = float(whole.detach()), _gradient_norm(parameters)
    del whole
    losses = [loss_of(half) for half in halves]
    if any(part is None for part in losses):
        return Comparison(None, "`training_step` returned None", is_final=False)
    values = [float(part.detach()) for part in losses if part is not None]
    if not all(map(torch.isfinite, torch.tensor([loss, norm, *values], device="cpu"))):
        return Comparison(None, "the loss or its gradient is not finite", is_final=False)

    sums = {}
    for reduction in REDUCTIONS:
        weighted = [value * weight for value, weight in zip(values, part_weights(reduction, sizes), strict=True)]
        sums[reduction] = sum(weighted)
        if abs(loss - sum(weighted)) <= tolerance * (abs(loss) + sum(map(abs, weighted))):
            break
    else:
        return Comparison(
            None,
            f"the loss of {sum(sizes)} rows is {loss:.6g}, but their microbatches of {sizes[0]} and {sizes[1]} rows "
            f"give {sums['mean']:.6g} as a mean over the rows and {sums['sum']:.6g} as a sum",
            is_refuted=True,
        )
    for part, weight in zip(losses, part_weights(reduction, sizes), strict=True):
        if part is not None:
            (part * (-weight * scale)).backward()
    difference = _gradient_norm(parameters)
    if difference <= tolerance * norm:
        return Comparison(reduction)
    return Comparison(
        None,
        f"the gradient of {sum(sizes)} rows and that of their microbatches of {sizes[0]} and {sizes[1]} rows differ by "
        f"{difference / norm if norm else float('inf'):.2g} of its norm",
        is_refuted=True,
    )


def _gradient_norm(parameters: Sequence[Tensor]) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    norms = [torch.linalg.vector_norm(gradient.float() if gradient.itemsize < 4 else gradient) for gradient in dense]
    return float(torch.stack([norm.double().cpu() for norm in norms]).norm()) if norms else 0.0


def _tolerance(parameters: Sequence[Tensor], half_precision: bool) -> float:
    """Return the relative difference that rounding may cause."""
    bytes_each = min((p.dtype.itemsize for p in parameters if p.is_floating_point()), default=4)
    if half_precision or bytes_each < 4:
        return 3e-2
    return 1e-7 if bytes_each == 8 else 2e-3
