"""The callback `NvtxRanges`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer
from lightning_tricks._lightning_compat.observers import observe_fetches


class RangeStack:
    """The open ranges of a training loop: a step, a phase in it, and a wait for data, which may interrupt both.

    Each method first closes what has to be closed, so that a boundary that never came leaves nothing open.

    Args:
        push: Opens a range with a name inside the ranges that are open. The default does nothing.
        pop: Closes the range that was opened last.

    Attributes:
        marks: Whether ranges are marked.
    """

    def __init__(self, push: Callable[[str], object] = str, pop: Callable[[], object] = str) -> None:
        self.marks = push is not str
        self._push, self._pop = push, pop
        self._open: list[str] = []
        self._depth_before_wait: int | None = None

    def begin_step(self, name: str) -> None:
        """Close what is open, and open a step."""
        self.close()
        self._begin(name)

    def begin_phase(self, name: str) -> None:
        """Close the phase that is open, if any, and open another; outside of a step this does nothing."""
        if self._open and self._depth_before_wait != 0:
            self._close_to(1)
            self._begin(name)

    def end_phase(self) -> None:
        """Close the phase that is open, if any."""
        self._close_to(1)

    def begin_wait(self, name: str) -> None:
        """Open a wait for data inside of what is open."""
        self.end_wait()
        self._depth_before_wait = len(self._open)
        self._begin(name)

    def end_wait(self) -> None:
        """Close the wait for data, if one is open."""
        if self._depth_before_wait is not None:
            self._close_to(self._depth_before_wait)

    def close(self) -> None:
        """Close all ranges."""
        self._close_to(0)

    def _begin(self, name: str) -> None:
        self._push(name)
        self._open.append(name)

    def _close_to(self, depth: int) -> None:
        while len(self._open) > depth:
            self._open.pop()
            self._pop()
        if self._depth_before_wait is not None and len(self._open) <= self._depth_before_wait:
            self._depth_before_wait = None


class NvtxRanges(TrickCallback):
    """Mark steps and their parts for Nsight Systems with NVTX ranges; without CUDA, it does nothing.

    Record with `nsys profile --trace=cuda,nvtx,osrt python train.py`. The ranges show when the CPU was in a part; its
    GPU work may run later, and Nsight Systems projects the ranges to the GPU.

    * `train data wait`, also `val`, `test`, `predict`: the Trainer waits for the loader. It lies before the step, or in
      it if the step takes a `dataloader_iter`. Copying the batch to the GPU is in none of the ranges.
    * `train step`: from `on_train_batch_start` to `on_train_batch_end`, with these in it:
        * `forward`: until the backward pass begins; `training_step` above all.
        * `backward`: from `on_before_backward` to `on_after_backward`, DDP's communication included.
        * `optimizer`: from `on_before_optimizer_step`, clipping of gradients included, to the end of `Optimizer.step`.
          If the optimizer does not step, as where a GradScaler skips it, or has no hook for the end of its step, until
          the end of the training step. With LBFGS, which runs the training step several times, the forward passes
          after the first are in it too.
    * `val step`, `test step`, `predict step`: the step of one batch.

    In automatic optimization, what the hooks of others do between the backward pass and the optimizer is in the step
    alone. In manual optimization, another `forward` begins after each backward pass and each optimizer step.

    Raises:
        MisconfigurationException: If a Trainer has two of them.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[NvtxRanges()], accelerator="cpu", logger=False)
    """

    def _forget_run(self) -> None:
        self._ranges = RangeStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start to mark the fetches of batches."""
        super().setup(trainer, pl_module, stage)
        if not torch.cuda.is_available():
            return
        ranges = self._ranges = RangeStack(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
        fetches = observe_fetches(
            trainer,
            lambda fetched: ranges.begin_wait(f"{fetched} data wait"),
            lambda fetched: ranges.end_wait(),
            "NvtxRanges",
        )
        self._installed.enter_context(fetches)
        self._installed.callback(ranges.close)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask the optimizers to say when a step has ended."""
        for optimizer in trainer.optimizers if self._ranges.marks else ():
            if hasattr(optimizer, "register_step_post_hook"):  # wrappers of some strategies have none
                hook = optimizer.register_step_post_hook(lambda *_: self._end_phase(pl_module))
                self._installed.callback(hook.remove)
        super().on_train_start(trainer, pl_module)

    def on_train_batch_start(self, *_: Any) -> None:
        """Open the step and its forward pass."""
        self._ranges.begin_step("train step")
        self._ranges.begin_phase("forward")

    def on_before_backward(self, *_: Any) -> None:
        """Open the backward pass."""
        self._ranges.begin_phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the backward pass."""
        self._end_phase(pl_module)

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Open the optimizer's step."""
        self._ranges.begin_phase("optimizer")

    def on_validation_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Open the step of validation, test or prediction."""
        stage = trainer.state.stage
        self._ranges.begin_step(f"{stage.dataloader_prefix if stage else None} step")

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Close the step; at the end of an epoch one that a module's `on_train_batch_start` has ended by -1."""
        self._ranges.close()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_epoch_end = on_train_batch_end

    def _end_phase(self, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            self._ranges.end_phase()
        else:
            self._ranges.begin_phase("forward")
