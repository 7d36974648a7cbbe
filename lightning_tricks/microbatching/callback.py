"""The callback `Microbatching`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.ddp import ddp_wrapper, synchronize_buffers
from lightning_tricks._lightning_compat.fit import is_tuning
from lightning_tricks._lightning_compat.flavor import (
    DeepSpeedStrategy,
    FSDPStrategy,
    LightningModule,
    MisconfigurationException,
    ModelParallelStrategy,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.microbatches import BatchStep, LogQueue, batches_run_by
from lightning_tricks._shared.checks import check_choice, check_optional_count
from lightning_tricks._shared.memory_errors import memory_that_ran_out
from lightning_tricks._shared.report_parts import Facts
from lightning_tricks._shared.tensors import detach_tensors
from lightning_tricks._shared.text import describe_error, list_names
from lightning_tricks.microbatching.core.batch_state import BatchState, StatefulParts
from lightning_tricks.microbatching.core.batches import count_rows, cut_batch, join_rows, merge_logged, take_rows
from lightning_tricks.microbatching.core.comparison import (
    Comparison,
    batch_norm_names,
    compare_with_parts,
    part_weights,
)

_FITS = 2**62  # a size that no rank needs to shrink


class Microbatching(TrickCallback):
    """Train on each batch in microbatches that fit in memory, with the loss and the gradient of the whole batch.

    `training_step` is called once for each microbatch; everything else happens once for a batch: hooks, the optimizer
    step, progress, and what is logged. Microbatches count by their rows. Before the first batch is cut, loss and
    gradient of some of its rows are compared with those of two parts of them; a loss that is neither a mean nor a sum
    over the rows, such as a contrastive one, is an error. With dropout, this is done with the modules in evaluation
    mode; each microbatch draws random numbers of its own later.

    With `size=None` nothing changes until memory runs out in a training batch. What the attempt has changed is then
    undone (gradients, random state, buffers, metrics, logged values), and the batch is tried again in microbatches of
    half the rows, and so on. All ranks agree on the size, which is kept for the run and saved in checkpoints. To do
    so, DDP averages the gradients after the backward passes, not meanwhile. A number of rows costs less; DDP then
    averages them in the backward pass of a batch's last microbatch.

    Args:
        size: The largest number of rows of a microbatch, at least 1; None finds it when memory runs out. A number that
            is at least the batch size changes nothing.
        on_mismatch: "raise" raises an error where the comparison shows another loss or another gradient, as BatchNorm
            in training mode does; "warn" warns, and trains with the mean over the rows.

    Raises:
        TypeError: If `size` is not a whole number.
        ValueError: If it is less than 1, or `on_mismatch` is unknown.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[Microbatching()], accelerator="cpu", logger=False)
    """

    training_arguments = ("size", "on_mismatch")

    def __init__(self, size: int | None = None, *, on_mismatch: Literal["raise", "warn"] = "raise") -> None:
        self.size = check_optional_count("size", size)
        self.on_mismatch = check_choice("on_mismatch", on_mismatch, ("raise", "warn"))
        self._reset()
        self._installed = ExitStack()  # what is overridden in one fit

    def _reset(self) -> None:
        self._found: int | None = None  # by running out of memory
        self._reduction: str | None = None  # of the loss over the rows
        self._cut_batches = 0

    @property
    def current_size(self) -> int | None:
        """The largest number of rows of a microbatch now; None while batches are whole."""
        return self._found if self.size is None else self.size

    def __getstate__(self) -> dict[str, Any]:
        # a copy that is made in the middle of a fit takes neither parameters nor loops along
        of_one_fit = ("_parts", "_logs", "_group", "_trainer")
        kept = {name: value for name, value in super().__getstate__().items() if name not in of_one_fit}
        return kept | {"_installed": ExitStack()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error for what is optimized in another way, or where ranks could not agree; forget the last fit."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._installed.close()
        self._reset()
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "Microbatching needs automatic optimization: under manual optimization it does not know which backward "
                "passes belong to a batch. Remove `self.automatic_optimization = False`, or cut the batch in "
                "`training_step`."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
            raise MisconfigurationException(
                f"Microbatching does not work under {type(trainer.strategy).__name__}: use DDP, or the "
                "`train_micro_batch_size_per_gpu` of DeepSpeed's own configuration."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over what automatic optimization does with a batch."""
        if self.size is None and trainer.world_size > 1 and (reason := _no_agreement(pl_module)):
            raise MisconfigurationException(
                f"Microbatching(size=None): ranks cannot agree on a size with {reason}, which exchange values in the "
                "forward or backward pass: where memory ran out on one rank, the others would wait for ever. Give a "
                "number of rows, as Microbatching(size=8)."
            )
        if (wrapper := ddp_wrapper(trainer)) is not None and wrapper.static_graph:
            raise MisconfigurationException(
                "Microbatching does not work with DDPStrategy(static_graph=True), whose first backward pass has to "
                "average gradients. Leave static_graph out."
            )
        self._trainer = trainer
        self._group = _cpu_group(trainer) if self.size is None else None
        self._parts: StatefulParts | None = None
        self._logs = LogQueue(trainer)
        self._installed.enter_context(self._logs.installed())
        self._installed.enter_context(batches_run_by(trainer, self._run))
        self.say(
            "cuts a batch where it runs out of memory"
            if self.size is None
            else f"cuts batches into microbatches of at most {self.size:,} rows"
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how many batches were cut."""
        size = "" if self.current_size is None else f" into microbatches of at most {self.current_size:,} rows"
        self.say(f"{self._count(trainer)} batches cut{size}")
        super().on_fit_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the Trainer run batches as before."""
        self._installed.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the Trainer run batches as before."""
        self._installed.close()
        for name in ("_parts", "_logs", "_group", "_trainer"):
            vars(self).pop(name, None)

    def report_parts(self, trainer: Trainer) -> list[Facts]:
        """Return the size and the number of batches that were cut."""
        size = "whole batches" if self.current_size is None else f"{self.current_size:,}"
        return [Facts(title="Microbatches", facts=[("rows at most", size), ("batches cut", self._count(trainer))])]

    def _count(self, trainer: Trainer) -> str:
        return f"{self._cut_batches:,} of {trainer.fit_loop.total_batch_idx + 1:,}"

    def state_dict(self) -> dict[str, Any]:
        """Return the size that was found, what the loss is over the rows, and how many batches were cut."""
        return {"found": self._found, "reduction": self._reduction, "cut_batches": self._cut_batches}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the size that was found, what the loss is over the rows, and how many batches were cut."""
        self._found, self._reduction = state_dict["found"], state_dict["reduction"]
        self._cut_batches = state_dict["cut_batches"]

    def _run(self, step: BatchStep) -> Any:
        """Do the work of a closure."""
        if not step.trains or is_tuning(self._trainer):
            return step.run_whole()
        if self._parts is None:
            self._parts = StatefulParts(self._trainer.lightning_module)
        if self.size is None:
            return self._run_what_fits(step, self._parts)
        parts, sizes = self._cut(step, self.size)
        if len(parts) == 1:
            return step.run_whole()
        with self._logs.keeping() as log:
            loss, extra = self._train(step, parts, sizes, step.zero_grad, lambda: log(merge_logged))
        return step.result(loss, extra)

    def _run_what_fits(self, step: BatchStep, parts: StatefulParts) -> Any:
        """Run a batch in parts that fit on all ranks, which try it again as long as memory runs out on one of them."""
        synchronize_buffers(self._trainer)  # or a rank without memory would leave the others alone with it
        state = BatchState(parts)
        is_alone = self._trainer.world_size == 1
        is_begun = False

        def begin() -> None:
            nonlocal is_begun
            if not is_begun:
                step.zero_grad()
            is_begun = True
            state.note_gradients()

        while True:
            with self._logs.keeping() as log:
                outcome, limit, error = self._attempt(step, begin, (lambda: None) if is_alone else None)
                limit = limit if is_alone else _smallest_of_all_ranks(limit, self._group)
                if limit == _FITS:
                    log(merge_logged)
                    loss, extra = outcome
                    if loss is not None and not is_alone:
                        step.end_unsynchronised(loss)
                    return step.result(loss, extra)
            outcome = None
            gc.collect()
            torch.cuda.empty_cache()  # nothing without CUDA
            state.restore()
            step.rewind()
            if limit == 0:
                raise torch.OutOfMemoryError(f"Microbatching: memory runs out with a single row ({error}).")
            self._found = limit
            rank_zero_info(
                f"Microbatching: out of memory; batches are cut into microbatches of {limit:,} rows at most."
            )

    def _attempt(
        self, step: BatchStep, begin: Callable[[], None], end: Callable[[], None] | None
    ) -> tuple[Any, int, str]:
        """Return what came of a batch, the largest size that may fit, and why nothing came of it."""
        try:
            return self._train(step, *self._cut(step, self._found), begin, end), _FITS, ""
        except Exception as caught:
            if not memory_that_ran_out(caught):
                raise
            error = describe_error(caught)
        rows = min(_count_rows(step, "memory ran out. "), self._found or _FITS)
        return None, -(-rows // 2) if rows > 1 else 0, error

    def _cut(self, step: BatchStep, size: int | None) -> tuple[Sequence[Any], list[int]]:
        """Return the microbatches and their numbers of rows; 0 for a batch that need not be cut."""
        if size is None:
            return [step.batch], [0]
        rows = _count_rows(step)
        if rows <= size:
            return [step.batch], [rows]
        if self._reduction is None:
            self._check_loss(step, rows, size)
        self._cut_batches += not step.is_cut
        step.is_cut = True
        return cut_batch(step.batch, -(-rows // size))

    def _train(
        self,
        step: BatchStep,
        parts: Sequence[Any],
        sizes: Sequence[int],
        begin: Callable[[], None],
        end: Callable[[], None] | None,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Add up the gradients of the parts; return their loss and what else `training_step` returned.

        Args:
            step: The batch.
            parts: Its parts.
            sizes: Their numbers of rows.
            begin: Called between the first forward and the first backward pass.
            end: Called before the last backward pass, which averages the gradients of all ranks and has hooks; with
                None, it does neither.
        """
        weights = part_weights(self._reduction, sizes) if len(parts) > 1 else [1.0]
        total: Tensor | None = None
        extras = []
        for number, (part, weight, self._logs.rows) in enumerate(zip(parts, weights, sizes, strict=True), start=1):
            is_last = number == len(parts)
            with nullcontext() if is_last and end is not None else step.without_sync():
                loss, extra = step.training_step(part)
                if number == 1:
                    begin()
                extras.append(detach_tensors(extra) if len(parts) > 1 else extra)
                if number > 1 and (loss is None) != (total is None):
                    raise MisconfigurationException(
                        f"Microbatching: `training_step` returned None for some of {len(parts)} microbatches, and a "
                        "loss for others. Return a loss for each, such as one that is multiplied by 0."
                    )
                if is_last and end is not None:
                    end()
                if loss is None:
                    continue
                loss = loss * weight if len(parts) > 1 else loss
                before, total = total, loss.detach() if total is None else total + loss.detach()
                if is_last and end is not None:  # the hooks see the loss of the whole batch
                    step.backward_with_hooks(loss if before is None else loss + before)
                else:
                    step.backward(loss)
        return total, join_rows(extras, sizes)

    def _check_loss(self, step: BatchStep, rows: int, size: int) -> None:
        """Find out what the loss is over the rows, on as many of them as fit."""
        module = self._trainer.lightning_module
        if names := batch_norm_names(module):
            self._report_mismatch(f"BatchNorm uses the statistics of each microbatch in {list_names(names)}")
        precision = str(self._trainer.precision)
        compared = min(rows, max(size, 2))
        try:
            with self._logs.keeping():
                sample = take_rows(step.batch, rows, slice(0, compared))
                is_half = "16" in precision or "transformer" in precision
                found = compare_with_parts(
                    module, StatefulParts(module), step.loss_alone, sample, compared, half_precision=is_half
                )
        except Exception as error:
            if size > 1 or not memory_that_ran_out(error):
                raise
            found = Comparison(None, "two rows at once run out of memory")
        self._reduction = found.reduction
        if found.reduction is not None or not found.is_final:
            return
        if found.is_refuted:
            self._report_mismatch(found.problem)
        else:
            rank_zero_warn(
                f"Microbatching could not compare microbatches with whole batches, as {found.problem}. It takes the "
                "loss for a mean over the rows: check that it is one."
            )
        self._reduction = "mean"

    def _report_mismatch(self, problem: str) -> None:
        text = f"Microbatching does not train as with whole batches: {problem}."
        if self.on_mismatch == "warn":
            rank_zero_warn(text)
            return
        raise MisconfigurationException(
            f"{text} Let `training_step` return a mean or a sum over the rows (a mean over tokens, pairs or weights is "
            "neither), use GroupNorm or put BatchNorm into evaluation mode, or accept the difference with "
            'on_mismatch="warn".'
        )


def _count_rows(step: BatchStep, remark: str = "") -> int:
    if step.batch is None:
        raise MisconfigurationException(
            "Microbatching cannot cut a batch that `training_step(self, dataloader_iter)` fetches by itself: take the "
            "batch as an argument, `training_step(self, batch)`."
        )
    try:
        return count_rows(step.batch)
    except ValueError as error:
        raise MisconfigurationException(f"Microbatching: {remark}{error}") from error


def _no_agreement(module: nn.Module) -> str:
    """Return what keeps ranks from trying a batch again, or an empty string."""
    kinds = {type(part) for part in module.modules()}
    return "SyncBatchNorm layers" if any(issubclass(kind, nn.SyncBatchNorm) for kind in kinds) else ""


def _cpu_group(trainer: Trainer) -> Any:
    """Return a group of all ranks that exchanges values of the CPU; None if the default one does."""
    if trainer.world_size == 1 or torch.distributed.get_backend() == "gloo":
        return None
    return torch.distributed.new_group(backend="gloo")


def _smallest_of_all_ranks(number: int, group: Any) -> int:
    numbers = torch.tensor([number], device="cpu")
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN, group=group)
    smallest: int = numbers.tolist()[0]
    return smallest
