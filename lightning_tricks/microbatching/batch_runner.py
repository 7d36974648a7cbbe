"""What is done with a batch in place of a closure of automatic optimization."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.ddp import synchronize_buffers
from lightning_tricks._lightning_compat.fit import is_tuning
from lightning_tricks._lightning_compat.flavor import MisconfigurationException, Trainer, rank_zero_info, rank_zero_warn
from lightning_tricks._lightning_compat.microbatches import BatchStep, LogQueue
from lightning_tricks._shared.memory_errors import memory_that_ran_out
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks._shared.step_state import copy_gradients, copy_step_state, restore_gradients, restore_step_state
from lightning_tricks._shared.tensors import detach_tensors
from lightning_tricks._shared.text import describe_error, list_names
from lightning_tricks.microbatching.core.batches import (
    copy_batch,
    count_rows,
    cut_batch,
    join_rows,
    take_rows,
    versions_in,
)
from lightning_tricks.microbatching.core.comparison import Comparison, batch_norms_in, compare_with_parts, part_weights

_FITS = 2**62  # a size that no rank needs to shrink
_FIRST_REPETITION = 32  # batches after the first comparison, whose rows may have been alike


@dataclass
class Found:
    """What is found out in a fit.

    Attributes:
        found: The number of rows that fit, after memory has run out.
        reduction: What the loss is over the rows, "mean" or "sum", once a batch was compared.
        cut_batches: How many batches were cut.
        compare_at: How many batches are cut before the next comparison; None where there is no other.
        sizes_of_whole: For each logged key, whether parts log the size of the whole batch with it.
    """

    found: int | None = None
    reduction: str | None = None
    cut_batches: int = 0
    compare_at: int | None = 0
    sizes_of_whole: dict[str, bool] = field(default_factory=dict)


class BatchRunner:
    """Runs the batches of a fit, in microbatches where they are too large.

    Args:
        trainer: The Trainer.
        size: The largest number of rows of a microbatch; None finds it when memory runs out.
        on_mismatch: "raise" or "warn", where the comparison shows another loss or gradient.
        found: Filled in meanwhile.
        logs: Takes what the microbatches log.
    """

    def __init__(self, trainer: Trainer, size: int | None, on_mismatch: str, found: Found, logs: LogQueue) -> None:
        self._trainer, self._size, self._on_mismatch, self._found, self._logs = trainer, size, on_mismatch, found, logs
        self._has_ranks = size is None and trainer.world_size > 1  # which have to agree on a size
        needs_group = self._has_ranks and torch.distributed.get_backend() != "gloo"
        self._group: Any = torch.distributed.new_group(backend="gloo") if needs_group else None

    def run(self, step: BatchStep) -> Any:
        """Do the work of a closure."""
        if not step.trains or is_tuning(self._trainer):
            return step.run_whole()
        if self._size is None:
            return self._run_what_fits(step)
        parts, sizes = self._cut(step, self._size)
        if len(parts) == 1:
            return step.run_whole()
        with self._logs.keeping():
            return step.result(*self._train(step, parts, sizes, step.zero_grad))

    def _run_what_fits(self, step: BatchStep) -> Any:
        """Run a batch in parts that fit on all ranks, which try it again as long as memory runs out on one of them."""
        synchronize_buffers(self._trainer)  # or a rank without memory would leave the others alone with it
        module = self._trainer.lightning_module
        state, random_state = copy_step_state(module), capture_rng_state()
        batch, versions = _copied(step.batch), versions_in(step.batch)
        gradients: dict[str, Tensor] | None = None

        def begin() -> None:
            nonlocal gradients
            if gradients is None:
                step.zero_grad()
                gradients = copy_gradients(module)

        while True:
            limit, reason = _FITS, "on another rank"
            with self._logs.keeping():
                try:
                    loss, extra = self._train(step, *self._cut(step, self._found.found), begin)
                except Exception as error:
                    if not memory_that_ran_out(error):
                        raise
                    rows = min(_count_rows(batch, "memory ran out. "), self._found.found or _FITS)
                    limit, reason = -(-rows // 2) if rows > 1 else 0, describe_error(error)
                limit = self._smallest_of_all_ranks(limit)
                if limit == _FITS:
                    self._logs.flush()
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
            step.batch = _copied(batch)
            if versions_in(batch) != versions:
                raise MisconfigurationException(
                    f"Microbatching: memory ran out ({reason}), and the batch cannot be tried again, as "
                    "`training_step` has changed its tensors in place. Let it change copies, or give a number of rows "
                    "that fit, as Microbatching(size=8)."
                )
            if limit == 0:
                raise torch.OutOfMemoryError(f"Microbatching: memory runs out with a single row ({reason}).")
            self._found.found = limit
            rank_zero_info(
                f"Microbatching: out of memory; batches are cut into microbatches of {limit:,} rows at most."
            )

    def _smallest_of_all_ranks(self, number: int) -> int:
        if not self._has_ranks:
            return number
        numbers = torch.tensor([number], device="cpu")
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN, group=self._group)
        return int(numbers)

    def _cut(self, step: BatchStep, size: int | None) -> tuple[Sequence[Any], list[int]]:
        """Return the microbatches and their numbers of rows; 1 for a batch that need not be cut."""
        if size is None or (rows := _count_rows(step.batch)) <= size:
            return [step.batch], [1]
        if self._found.compare_at is not None and self._found.cut_batches >= self._found.compare_at:
            self._compare(step, rows, size)
        self._found.cut_batches += not step.is_cut
        step.is_cut = True
        return cut_batch(step.batch, -(-rows // size))

    def _train(
        self, step: BatchStep, parts: Sequence[Any], sizes: Sequence[int], begin: Callable[[], None]
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Add up the gradients of the parts; return their loss and what else `training_step` returned.

        The last backward pass averages the gradients of all ranks and calls hooks, unless ranks have to agree first.

        Args:
            step: The batch.
            parts: Its parts.
            sizes: Their numbers of rows.
            begin: Called between the first forward and the first backward pass.
        """
        total: Tensor | None = None
        extras: list[dict[str, Any]] = []
        weights = part_weights(self._found.reduction, sizes)
        for part, weight, rows in zip(parts, weights, sizes, strict=True):
            self._logs.rows = rows
            is_last = len(extras) + 1 == len(parts) and not self._has_ranks
            with nullcontext() if is_last else step.without_sync():
                loss, extra = step.training_step(part)
                if not extras:
                    begin()
                elif (loss is None) != (total is None):
                    raise MisconfigurationException(
                        f"Microbatching: `training_step` returned None for some of {len(parts)} microbatches, and a "
                        "loss for others. Return a loss for each, such as one that is multiplied by 0."
                    )
                extras.append(detach_tensors(extra))
                if is_last and self._size is not None:
                    self._logs.flush()  # before gradients are averaged, as on a rank whose batch is not cut
                if loss is None:
                    continue
                loss = loss if weight == 1 else loss * weight
                before, total = total, loss.detach() if total is None else total + loss.detach()
                if is_last:  # the hooks see the loss of the whole batch
                    step.backward_with_hooks(loss if before is None else loss + before)
                else:
                    step.backward(loss)
        return total, join_rows(extras, sizes)

    def _compare(self, step: BatchStep, rows: int, size: int) -> None:
        """Find out, or confirm, what the loss is over the rows, on as many of them at once as fit."""
        module, precision, found = self._trainer.lightning_module, str(self._trainer.precision), self._found
        is_half, compared = "16" in precision or "transf" in precision, max(size, 2)
        outcome, batch_norms = Comparison(), batch_norms_in(module)
        if batch_norms:
            self._report_mismatch(f"BatchNorm uses the statistics of each microbatch in {list_names(batch_norms)}")
        for start in range(0, rows - 1, compared):
            chosen = slice(start, min(start + compared, rows))
            sample, number = take_rows(step.batch, rows, chosen), chosen.stop - start
            try:
                with self._logs.keeping():
                    outcome = compare_with_parts(
                        module, step.loss_alone, sample, number, known=found.reduction, half_precision=is_half
                    )
            except Exception as error:
                may_shrink = size > 1 and self._size is None
                if may_shrink or not memory_that_ran_out(error):
                    raise  # evaluation mode may leave out what saves memory, such as checkpoints of activations
                outcome = Comparison(problem=f"{number:,} rows at once run out of memory")
            found.reduction = found.reduction or outcome.reduction or ("mean" if outcome.problem else None)
            if outcome.problem:
                break
        if outcome.is_refuted:
            self._report_mismatch(outcome.problem)
        elif outcome.problem:
            rank_zero_warn(
                f"Microbatching could not compare microbatches with whole batches, as {outcome.problem}. It takes the "
                f"loss for a {found.reduction} over the rows: check that it is one."
            )
        if batch_norms or outcome.problem:
            found.compare_at = None
        elif found.reduction is not None:
            found.compare_at = max(_FIRST_REPETITION, 2 * found.cut_batches)

    def _report_mismatch(self, problem: str) -> None:
        text = f"Microbatching does not train as with whole batches: {problem}."
        if self._on_mismatch == "warn":
            rank_zero_warn(text)
            return
        raise MisconfigurationException(
            f"{text} Let `training_step` return a mean or a sum over the rows (a mean over tokens, pairs or weights is "
            "neither), use GroupNorm or put BatchNorm into evaluation mode, or accept the difference with "
            'on_mismatch="warn".'
        )


def _copied(batch: Any) -> Any:
    try:
        return copy_batch(batch)
    except Exception:  # a container of its own kind, of which a step takes nothing out, as a rule
        return batch


def _count_rows(batch: Any, remark: str = "") -> int:
    if batch is None:
        raise MisconfigurationException(
            "Microbatching cannot cut a batch that `training_step(self, dataloader_iter)` fetches by itself: take the "
            "batch as an argument, `training_step(self, batch)`."
        )
    try:
        return count_rows(batch)
    except ValueError as error:
        raise MisconfigurationException(f"Microbatching: {remark}{error}") from error
