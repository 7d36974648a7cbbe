"""The check that every module with added parameters is reached in training and in evaluation."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_tricks._lightning_compat.modules import is_compiled_by_lightning
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.adaptation import AdaptationCallback
from lightning_tricks.finetuning.core.adapter_coverage import Reach, is_compiled, watching_reach

_TRAINING = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
_EVALUATION = tuple(
    f"on_{stage}_batch_{edge}" for stage in ("validation", "test", "predict") for edge in ("start", "end")
)


class ReachCheckingCallback(AdaptationCallback):
    """The base of callbacks whose modules are checked in the first batch of training and in that of evaluation.

    A module that is never called, because the one around it reads its weights, is an error; one that the batch did not
    need is named in a warning. The hooks are disabled after these batches.
    Compiled modules are not checked: what is called in them cannot be seen.
    """

    _watch: ExitStack | None = None  # during a batch
    _reach: Reach | None = None

    def adapted(self, module: LightningModule) -> Collection[str]:
        """Return the qualified names of the modules whose `forward` has to run."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the checks of a run."""
        self._watch = self._reach = None
        super().setup(trainer, pl_module, stage)

    def _start(self, pl_module: LightningModule) -> None:
        if is_compiled_by_lightning(pl_module) or is_compiled(pl_module):
            rank_zero_info(
                f"{type(self).__name__}: whether all adapted modules are called is not checked in a compiled module."
            )
            return
        if self._watch is not None:
            self._watch.close()  # a batch that the module skips has no end
        self._watch = self._installed.enter_context(ExitStack())
        self._reach = self._watch.enter_context(watching_reach(pl_module, self.adapted(pl_module)))

    def _end(self, what: str, hooks: tuple[str, ...]) -> None:
        self.skip_hooks(*hooks)
        if self._watch is None or self._reach is None:
            return
        self._watch.close()
        reach, self._watch, self._reach = self._reach, None, None
        trick, count = type(self).__name__, len(reach.reached) + len(reach.bypassed) + len(reach.idle)
        if reach.bypassed:
            raise MisconfigurationException(
                f"{trick}: {len(reach.bypassed)} of {count} adapted modules have no effect in {what}: "
                f"{list_names(reach.bypassed)}. The module around them does not call them, but reads their weights, or "
                "does without them: use LoRA(...), which changes the weights themselves, or leave them out by "
                "target_modules or exclude."
            )
        if reach.idle:
            rank_zero_warn(
                f"{trick}: the first batch of {what} did not use {len(reach.idle)} of {count} adapted modules, nor the "
                f"modules that contain them: {list_names(reach.idle)}."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch which modules are called."""
        self._start(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report what was not called, or has no gradient."""
        self._end("training", _TRAINING)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Watch which modules are called."""
        self._start(pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Report what was not called."""
        self._end("evaluation", _EVALUATION)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
