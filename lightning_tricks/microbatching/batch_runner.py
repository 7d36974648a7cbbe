"""Runs a batch in place of the closure of automatic optimization."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.ddp import ddp_wrapper, synchronize_buffers
from lightning_tricks._lightning_compat.fit import is_tuning
from lightning_tricks._lightning_compat.flavor import MisconfigurationException, Trainer, rank_zero_info, rank_zero_warn
from lightning_tricks._lightning_compat.left_out_steps import ends_step
from lightning_tricks._lightning_compat.microbatches import BatchStep, LogQueue
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks._shared.step_state import copy_gradients, copy_step_state, restore_gradients, restore_step_state
from lightning_tricks._shared.tensors import detach_tensors
from lightning_tricks._shared.text import describe_error, list_names
from lightning_tricks._torch_compat.memory import memory_that_ran_out
from lightning_tricks.microbatching.core import batches, comparison
from lightning_tricks.microbatching.core.batches import TargetMean

WHOLE = 2**62  # a size that no batch has


@dataclass
class Found:
    """The findings of a fit.

    Attributes:
        found: The number of rows that fit, after memory has run out.
        reduction: What the loss is over the rows, "mean" or "sum", once a batch was compared; "mean" over targets.
        cut_batches: How many batches were cut.
        compare_at: How many batches are cut before the next comparison; None where there is no other.
        without_rows: The returned values whose length, and the logged keys whose batch size, is that of any number of
            rows.
        means_add_up: Whether the loss is one over the rows although means over targets in it are not.
        are_losses: For each logged key whether its values are the losses.
    """

    found: int | None = None
    reduction: str | None = None
    cut_batches: int = 0
    compare_at: int | None = 0
    without_rows: list[str] = field(default_factory=list)
    means_add_up: bool = False
    are_losses: dict[str, bool] = field(default_factory=dict)


class BatchRunner:
    """Runs the batches of a fit, in microbatches if they are too large.

    Args:
        trainer: The Trainer.
        size: The largest number of rows of a microbatch; None finds it when memory runs out.
        on_mismatch: "raise" or "warn", where the comparison shows another loss or gradient.
        found: Filled in meanwhile.
        mean: Weights losses by their targets; None where they count by their rows.

    Attributes:
        logs: Takes what the microbatches log.
    """

    def __init__(
        self, trainer: Trainer, size: int | None, on_mismatch: str, found: Found, mean: TargetMean | None
    ) -> None:
        self._trainer, self._size, self._on_mismatch, self._found = trainer, size, on_mismatch, found
        self._mean = mean
        self._logged = batches.LoggedValues()
        self.logs = LogQueue(trainer, self._logged.merge)
        self._has_ranks = size is None and trainer.world_size > 1  # which have to agree on a size
        needs_group = self._has_ranks and torch.distributed.get_backend() != "gloo"
        self._group: Any = torch.distributed.new_group(backend="gloo") if needs_group else None

    def run(self, step: BatchStep) -> Any:
        """Do the work of a closure."""
        if not step.trains or is_tuning(self._trainer):
            return step.run_whole()
        if self._mean is not None:
            if step.batch is None:
                _count_rows(step.batch)  # raises an error
            ranks = self._trainer.world_size if ends_step(self._trainer) and ddp_wrapper(self._trainer) else 1
            self._mean.begin(step.batch, ranks, begins_window=step.begins_window)
        if self._size is None:
            return self._run_what_fits(step)
        parts, sizes = self._cut(step, self._size)
        if len(parts) == 1 and self._mean is None:
            return step.run_whole()
        with self.logs.keeping():
            return step.result(*self._train(step, parts, sizes, partial(self._begin_backward, step)))

    def _begin_backward(self, step: BatchStep, loss: Tensor | None) -> None:
        """Set the gradients to zero, or rescale them, before the first backward pass of a batch."""
        step.zero_grad()
        if self._mean is not None and loss is not None:
            self._mean.rescale_(p.grad for p in self._trainer.lightning_module.parameters() if p.grad is not None)

    def _run_what_fits(self, step: BatchStep) -> Any:
        """Run a batch in parts that fit on all ranks, which try it again as long as memory runs out on one of them."""
        synchronize_buffers(self._trainer)  # or a rank without memory would leave the others alone with it
        module = self._trainer.lightning_module
        state, random_state = copy_step_state(module), capture_rng_state()
        batch = step.batch
        with suppress(Exception):  # of a container of its own kind, which cannot be cut either
            batch = batches.copy_batch(batch)
        gradients: dict[str, Tensor] | None = None

        def begin(loss: Tensor | None) -> None:
            nonlocal gradients
            if gradients is None:
                self._begin_backward(step, loss)
                gradients = copy_gradients(module)

        while True:
            limit, reason = WHOLE, "on another rank"
            with self.logs.keeping():
                try:
                    loss, extra = self._train(step, *self._cut(step, self._found.found), begin)
                except Exception as error:
                    if not memory_that_ran_out(error):
                        raise
                    rows = min(_count_rows(batch, "memory ran out. "), self._found.found or WHOLE)
                    limit, reason = -(-rows // 2) if rows > 1 else 0, describe_error(error)
                if self._has_ranks:
                    smallest = torch.tensor([limit], device="cpu")
                    torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=self._group)
                    limit = int(smallest)
                if limit == WHOLE:
                    self.logs.flush()
                    if self._has_ranks and loss is not None:
                        step.end_unsynchronised(loss)
                    return step.result(loss, extra)
            gc.collect()
            torch.cuda.empty_cache()  # nothing without CUDA
            restore_step_state(module, state)
            restore_rng_state(random_state)
            if gradients is not None:
                restore_gradients(module, gradients)
            step.rewind()
            step.batch = batches.copy_batch(batch)
            if limit == 0:
                raise torch.OutOfMemoryError(f"Microbatching: a single row runs out of memory ({reason}).")
            self._found.found = limit
            rank_zero_info(f"Microbatching: out of memory; microbatches now have at most {limit:,} rows.")

    def _cut(self, step: BatchStep, size: int | None) -> tuple[Sequence[Any], list[int]]:
        """Return the microbatches and their numbers of rows; 1 for a batch that need not be cut."""
        if size is None or (rows := _count_rows(step.batch)) <= size:
            return [step.batch], [1]
        if self._found.compare_at is not None and self._found.cut_batches >= self._found.compare_at:
            self._compare(step, rows, size)
        self._found.cut_batches += not step.is_cut
        step.is_cut = True
        return batches.cut_batch(step.batch, -(-rows // size))

    def _train(
        self, step: BatchStep, parts: Sequence[Any], sizes: Sequence[int], begin: Callable[[Any], None]
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Add up the gradients of the parts; return their loss and what else `training_step` returned.

        The last backward pass averages the gradients of all ranks and calls hooks, unless ranks have to agree first.

        Args:
            step: The batch.
            parts: Its parts.
            sizes: Their numbers of rows.
            begin: Called with the first loss, between the first forward and the first backward pass.
        """
        total: Tensor | None = None
        extras: list[dict[str, Any]] = []
        calls: list[Any] = []
        found, divisor, mean = self._found, self._trainer.accumulate_grad_batches, self._mean
        logged, weights = self._logged, comparison.part_weights(found.reduction, sizes)
        logged.losses, logged.targets, logged.without_rows = [], (), found.without_rows
        if mean is None:
            is_first = found.cut_batches == 1 and found.compare_at is not None  # in which nobody was warned yet
            looks = len(parts) > 1 and not found.means_add_up and (is_first or self._on_mismatch == "raise")
        else:
            looks, logged.are_losses = mean.is_checked, found.are_losses
            logged.targets, weights = mean.count_parts(parts)
        for place, (part, weight, rows) in enumerate(zip(parts, weights, sizes, strict=True)):
            self.logs.rows = rows
            if mean is not None:
                mean.part = logged.targets[place]
            is_last, means = place + 1 == len(parts) and not self._has_ranks, comparison.TargetMeans()
            with nullcontext() if is_last else step.without_sync():
                with means if looks else nullcontext():
                    loss, extra = step.training_step(part)
                calls.append(means.calls)
                if loss is not None and (mean is not None or found.reduction == "sum"):
                    logged.losses.append(loss.detach() * divisor)
                if place == 0:
                    begin(loss)
                elif (loss is None) != (total is None):
                    raise MisconfigurationException(
                        f"`training_step` returned None for some of {len(parts)} microbatches: return a loss that is 0."
                    )
                extras.append(detach_tensors(extra))
                if is_last and self._size is not None:
                    self.logs.flush()  # before gradients are averaged, as on a rank whose batch is not cut
                if loss is None:
                    continue
                loss = loss if len(parts) == 1 else (loss * weight).to(loss.dtype)
                before, total = total, loss.detach() if total is None else total + loss.detach()
                if is_last and before is not None:
                    loss = loss + before  # the hooks see the loss of the whole batch
                if mean is not None:
                    loss = (loss * (mean.scale * divisor)).to(loss.dtype)
                (step.backward_with_hooks if is_last else step.backward)(loss)
        if looks and (problem := comparison.problem_of_means(calls, sizes, counts=logged.targets)[0]):
            self._report_mismatch(problem)
        if mean is not None:
            mean.checks += any(calls)
        return total, batches.join_rows(extras, sizes, found.without_rows)

    def _compare(self, step: BatchStep, rows: int, size: int) -> None:
        """Find out, or confirm, what the loss is over the rows, on as many of them at once as fit."""
        module, precision, found = self._trainer.lightning_module, str(self._trainer.precision), self._found
        is_half, compared = "16" in precision or "transf" in precision, max(size, 2)
        lengths: list[dict[str, int]] = []  # of what each call has returned, and batch sizes that it has logged

        def loss_of(part: Any) -> Tensor | None:
            loss, returned = step.training_step_alone(part)
            lengths.append(batches.lengths_in(returned) | self.logs.batch_sizes())
            return loss

        if batch_norms := comparison.batch_norms_in(module):
            self._report_mismatch(f"BatchNorm uses the statistics of each microbatch in {list_names(batch_norms)}")
        try:
            with self.logs.keeping():
                for start in range(0, rows - 1, compared):
                    number = min(compared, rows - start)
                    sample = batches.take_rows(step.batch, rows, slice(start, start + number))
                    how, add_up = comparison.compare_with_parts(
                        module, loss_of, sample, number, found.reduction, is_half, getattr(self._mean, "count", None)
                    )
                    found.reduction, found.means_add_up = found.reduction or how, found.means_add_up or add_up
            if batch_norms or found.reduction is not None:
                # the rows that were compared may have been alike
                found.compare_at = None if batch_norms else max(32, 2 * found.cut_batches)
        except Exception as error:
            # evaluation mode may leave out what saves memory, such as checkpoints of activations
            ran_out = memory_that_ran_out(error) and (size == 1 or self._size is not None)
            if not ran_out and not isinstance(error, comparison.ComparisonError):
                raise
            found.compare_at = None
            problem, is_mismatch = (f"{number:,} rows at once run out of memory", False) if ran_out else error.args
            if is_mismatch:
                self._report_mismatch(problem)
            else:
                doubt = f"It assumes that the loss is a {found.reduction or 'mean'} over the rows: check that it is."
                rank_zero_warn(
                    f"Microbatching could not compare microbatches with whole batches, as {problem}. {doubt}"
                )
        if len(lengths) > 2:  # of all rows and of two parts of them
            found.without_rows = [name for name in lengths[0] if len({each.get(name) for each in lengths}) == 1]

    def _report_mismatch(self, problem: str) -> None:
        text = f"Microbatching does not train as whole batches would: {problem}."
        if self._on_mismatch == "warn":
            rank_zero_warn(text)
            return
        remedy = "Let `training_step` return a mean or a sum over the rows, or give count=... for a mean over targets"
        if self._mean is not None:
            remedy = 'Let `count` count the targets of the loss, such as (batch["labels"][:, 1:] != -100).sum()'
        raise MisconfigurationException(
            f"{text} {remedy}; use GroupNorm or put BatchNorm into evaluation mode; or accept the difference with "
            'on_mismatch="warn".'
        )


def _count_rows(batch: Any, remark: str = "") -> int:
    if batch is None:
        raise MisconfigurationException(
            "Microbatching cannot cut a batch that `training_step(self, dataloader_iter)` fetches by itself: take the "
            "batch as an argument, `training_step(self, batch)`."
        )
    try:
        return batches.count_rows(batch)
    except ValueError as error:
        raise MisconfigurationException(f"Microbatching: {remark}{error}") from error
