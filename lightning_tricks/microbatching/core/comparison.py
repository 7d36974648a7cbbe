"""Whether the loss of a batch and its gradient follow from those of its parts: by what is called, and by comparison.

A cross-entropy with class weights or ignored targets is no mean over rows, whatever the rows of a batch: where all of
them are of one class, a comparison shows no difference, and with the first row of another class there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_tricks._shared.dry_run.shared_state import restored_state
from lightning_tricks._shared.rng import capture_rng_state, isolated_rng, restore_rng_state
from lightning_tricks._shared.step_state import copy_step_state, refuse_lazy, restore_step_state
from lightning_tricks._shared.tensors import read_numbers, tensors_in
from lightning_tricks._shared.text import describe_error, list_names
from lightning_tricks._torch_compat.memory import memory_that_ran_out
from lightning_tricks._torch_compat.modules import is_batch_norm
from lightning_tricks.microbatching.core.batches import copy_batch, take_rows

_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_FUNCTIONS: dict[Any, tuple[str, ...]] = {functional.cross_entropy: _ARGUMENTS, functional.nll_loss: _ARGUMENTS}
if hasattr(functional, "linear_cross_entropy"):  # newer versions of torch have it
    _FUNCTIONS[functional.linear_cross_entropy] = ("input", "linear_weight", "target")


Loss = Callable[..., Tensor | None]
Calls = Sequence[tuple[str, Tensor]]


class ComparisonError(Exception):
    """What prevents that microbatches train as whole batches, and whether loss or gradient are known to differ."""


class TargetMeans(TorchFunctionMode):
    """Notes the means over targets that are computed with gradients, until the context is left.

    Attributes:
        calls: The name of each function, with a tensor of what all targets count together, by the weights of their
            classes and without those that are ignored, and by how much the weights of classes differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        if func in _FUNCTIONS and result.requires_grad:
            given = zip(_FUNCTIONS[func], args)  # noqa: B905  # torch 2.6 compiles no `strict`
            self._note(func.__name__, dict(given) | (kwargs or {}))
        return result

    def _note(self, name: str, given: dict[str, Any]) -> None:
        target, weight, ignored = given["target"], given.get("weight"), given.get("ignore_index")
        if given.get("reduction", "mean") != "mean" or target.is_floating_point():
            return  # probabilities of the classes are averaged over the rows
        counts = (target != (-100 if ignored is None else ignored)).float()
        spread = counts.new_zeros(())
        if weight is not None:
            weights = weight.detach().float()
            counts, spread = counts * weights[target.where(counts > 0, 0)], weights.max() - weights.min()
        self.calls.append((name, torch.stack([counts.sum(), spread])))


def problem_of_means(
    parts: Sequence[Calls], rows: Sequence[float], least: float = 1e-5, counts: Sequence[Tensor] = ()
) -> tuple[str, bool]:
    """Say which mean over targets those of parts of a batch do not add up to; the host waits for its numbers.

    Args:
        parts: The calls for each part. Where their numbers differ, each is for a single row, and right.
        rows: The numbers of rows of the parts.
        least: The share by which what a row counts has to differ; sums in single precision are not exact.
        counts: The numbers of targets of the parts, where each mean has to be over so many.

    Returns:
        The problem, "" if there is none, and whether it makes a difference for these rows.
    """
    for column in zip(*parts, strict=True) if len({*map(len, parts)}) == 1 else ():
        numbers = read_numbers([*(both for _, both in column), *counts])
        for (total, _), (count,) in zip(numbers, numbers[len(column) :], strict=False):
            if not math.isclose(total, count, rel_tol=1e-6):
                return f"`{column[0][0]}` is a mean over {total:.10g} targets, and `count` gives {count:.10g}", True
        if counts:
            continue
        shares = sorted(total / count for (total, _), count in zip(numbers, rows, strict=True))
        has_weights, differ = any(spread for _, spread in numbers), shares[-1] - shares[0] > least * shares[-1]
        if differ or has_weights:
            of = "the class weights of its targets" if has_weights else "its targets that are not ignored"
            found = f" ({shares[0]:.4g} for each row of one microbatch, {shares[-1]:.4g} of another)" if differ else ""
            return f"`{column[0][0]}` is a mean over {of}, not over the rows{found}", differ
    return "", False


def part_weights(reduction: str | None, sizes: Sequence[float]) -> list[float]:
    """Return the weights with which the losses of parts with these numbers of rows add up to that of the whole."""
    return [1.0] * len(sizes) if reduction == "sum" else [size / sum(sizes) for size in sizes]


def batch_norms_in(module: nn.Module) -> list[str]:
    """Return the names of the layers that normalize with the statistics of each microbatch."""
    return [name for name, part in module.named_modules() if is_batch_norm(part) and part.training]


def compare_with_parts(
    module: nn.Module,
    loss_of: Loss,
    batch: Any,
    rows: int,
    known: str | None = None,
    is_half: bool = False,
    count: Callable[[Any], Tensor] | None = None,
) -> tuple[str | None, bool]:
    """Compare loss and gradient of a batch with those of two parts of it, and leave no trace.

    BatchNorm is in evaluation mode. Where the loss depends on random numbers, dropout is off: all modules but recurrent
    ones are in evaluation mode then.

    Args:
        module: The module, in training mode.
        loss_of: Computes the loss of a batch, a tensor without dimensions, or None.
        batch: A batch that fits in memory.
        rows: Its number of rows, at least 2.
        known: What the loss is over the rows, where that was found out before.
        is_half: Whether the loss is computed in fp16 or bf16, whose rounding errors then do not count.
        count: Returns the number of targets of a batch, over which the loss is to be a mean; None for the rows.

    Returns:
        What the loss is over the rows, "mean" or "sum", or None if another batch may tell more; and whether it is so
        although means over targets in it differ.

    Raises:
        ComparisonError: If it is neither, or no batch can tell.
    """
    parameters = [*module.parameters()]
    refuse_lazy(dict(module.named_parameters()))
    state, gradients = copy_step_state(module), [parameter.grad for parameter in parameters]
    cut = max(1, rows // 3)  # parts of two sizes, so that their weights count
    limits = ((0, cut), (cut, rows))
    counts = [count(take_rows(batch, rows, slice(*limit))) for limit in limits if count is not None]

    def loss_at(start: int, stop: int) -> Tensor | None:
        return loss_of(copy_batch(take_rows(batch, rows, slice(start, stop))))

    try:
        with restored_state(module), isolated_rng():
            for is_deterministic in (False, True):
                for part in module.modules():
                    # cuDNN's recurrent layers have no backward pass in evaluation mode
                    if is_batch_norm(part) or (is_deterministic and not isinstance(part, nn.RNNBase)):
                        part.training = False
                random_state = capture_rng_state()
                frozen = {name: (p, p._version) for name, p in module.named_parameters() if not p.requires_grad}
                try:
                    with TargetMeans() as means:
                        loss = loss_at(0, rows)
                    if written := [name for name, (p, version) in frozen.items() if p._version != version]:
                        problem = f"`training_step` changes {list_names(written)} (let `on_train_batch_end` do that)"
                        raise ComparisonError(problem, True)
                    if _is_random_state(random_state):
                        sample = _Sample(parameters, loss_at, rows, is_half)
                        return sample.compare(loss, len(means.calls), known, limits, counts)
                except Exception as error:
                    if not is_deterministic or memory_that_ran_out(error) or isinstance(error, ComparisonError):
                        raise
                    reason = f"fails with its modules in evaluation mode ({describe_error(error)})"
                    raise ComparisonError(f"`training_step` draws random numbers, and {reason}", False) from error
                restore_rng_state(random_state)
    finally:
        restore_step_state(module, state)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    raise ComparisonError("`training_step` draws random numbers even with its modules in evaluation mode", False)


def _is_random_state(state: dict[str, Any]) -> bool:
    """Whether the global random number generators are as they were when `capture_rng_state` returned a state."""
    now = capture_rng_state()
    return now["numpy"][2] == state["numpy"][2] and all(map(torch.equal, tensors_in(now), tensors_in(state)))


class _Sample:
    """Some rows of a batch, whose loss and gradient are compared; the gradients of the parameters are set."""

    def __init__(self, parameters: Sequence[Tensor], loss_at: Loss, rows: int, is_half: bool) -> None:
        self._parameters, self._loss_at, self._rows = parameters, loss_at, rows
        bytes_each = min((p.dtype.itemsize for p in parameters if p.is_floating_point()), default=4)
        self._tolerance, self._unit = (1e-7, 2.0**-49) if bytes_each == 8 else (2e-3, 2.0**-20)
        if is_half or bytes_each < 4:
            self._tolerance, self._unit = 3e-2, 2.0**-9
        self._scale = 1024.0 if is_half else 1.0  # of the loss, so that no gradient underflows in fp16

    def compare(
        self, whole: Tensor | None, means: int, known: str | None, limits: Any, counts: Sequence[Tensor]
    ) -> tuple[str | None, bool]:
        """Compare the loss of all rows, with so many means over targets in it, with those of two parts of them."""
        if whole is None:
            return None, False
        norm, loss = self._gradient([(whole, 1.0)], anew=True), float(whole.detach())
        del whole
        rows, parts, calls = [stop - start for start, stop in limits], [], []
        sizes = [number for (number,) in read_numbers(counts)] or rows
        for start, stop in limits:
            with TargetMeans() as found:
                parts += [] if (part := self._loss_at(start, stop)) is None else [part]
            calls.append(found.calls)
        values = [float(part.detach()) for part in parts]
        if len(parts) < len(sizes) or not all(map(math.isfinite, (loss, norm, *values))) or 0 in (norm, *sizes):
            return None, False
        sums = {how: sum(map(mul, values, part_weights(how, sizes))) for how in ("mean", "sum")}
        reduction = known or min(sums, key=lambda how: abs(sums[how] - loss))
        gap = self._gradient([(part, -w) for part, w in zip(parts, part_weights(reduction, sizes), strict=True)])
        are_of_rows, least = means != len(calls[0]), 10 * self._tolerance  # as clear as gradients would show
        problem, differs = ("", True) if are_of_rows else problem_of_means(calls, sizes, least, counts)
        if gap <= self._tolerance * norm:
            return reduction, differs
        if self._may_be_rounding(gap):
            return None, False
        text = f"the gradient of {self._rows} rows, a {reduction}, and that of {rows[0]} and {rows[1]} rows differ by"
        raise ComparisonError(problem or f"{text} {gap / norm:.2g} of its norm", True)

    def _may_be_rounding(self, gap: float) -> bool:
        """Whether gradients differ by no more than those of weights that differ in their last places.

        The gradient of a loss that has converged consists of what rounding has left of larger numbers.
        """
        kept, changes = [parameter.detach().clone() for parameter in self._parameters], []
        try:
            for weight in (1.0, -1.0) * 5:
                norm = self._gradient([(self._loss_at(0, self._rows), weight)], anew=weight > 0)
                changes.append(norm if weight < 0 else 0.0)
                for parameter in filter(Tensor.is_floating_point, self._parameters):
                    parameter.data.mul_(1 + self._unit * torch.randn_like(parameter).sign())
        finally:
            for parameter, value in zip(self._parameters, kept, strict=True):
                parameter.data.copy_(value)
        return (
            gap <= 4 * max(changes) + min(self._unit, 2.0**-20) * self._scale
        )  # the least error of a probability near 1

    def _gradient(self, losses: Sequence[tuple[Any, float]], anew: bool = False) -> float:
        """Add the gradients of weighted losses to the present ones, or to none; return the norm of all."""
        for parameter in self._parameters if anew else ():
            parameter.grad = None
        for loss, weight in losses:
            (loss * (weight * self._scale)).backward()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        norms = [torch.linalg.vector_norm(each.float() if each.itemsize < 4 else each) for each in dense]
        return math.hypot(*torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()) if norms else 0.0
