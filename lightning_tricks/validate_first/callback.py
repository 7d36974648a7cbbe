"""The callback `ValidateFirst`."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import call_after_train_hook, validate_unseen
from lightning_tricks._lightning_compat.flavor import (
    Checkpoint,
    EarlyStopping,
    LightningModule,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.validate_first.functional import unseen_iteration


class ValidateFirst(TrickCallback):
    """Run one whole validation before the first training step of a fit, and log it at step 0.

    It is a validation as those that follow: its values go to the loggers, at step 0 and epoch 0, to
    `trainer.callback_metrics` and to the progress bar, and all callbacks see its hooks. Only those that compare
    validations do not count it: `EarlyStopping`, `ModelCheckpoint` and each callback with a `monitor`, such as
    `RestoreBest`, are not called at its end.

    Afterwards the global random states, those of the generators of the validation loaders, and their persistent workers
    are as before, so the rest of the run is bit-identical to a run without it. A fit that continues does not run it:
    one that was resumed by `AutoResume` or `ckpt_path`, or a second `fit` of the same Trainer, which counts on.

    Without validation it has nothing to do and says why. `limit_val_batches` and `fast_dev_run` limit it as any other;
    `check_val_every_n_epoch` and `val_check_interval` do not.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ValidateFirst()], accelerator="cpu", logger=False, num_sanity_val_steps=0)
    """

    _has_run = False  # in the fit that a checkpoint was saved in

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Be called after the last hook of the start of a fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._has_run = False
            self._installed.enter_context(call_after_train_hook(trainer, "start", partial(self._validate, trainer)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say why nothing will be validated, if that is known."""
        if not trainer.enable_validation:
            off = "limit_val_batches=0" if trainer.limit_val_batches == 0 else "no validation_step or validation loader"
            self.say(f"runs no validation before the first step: {off}")
        super().on_train_start(trainer, pl_module)

    def _validate(self, trainer: Trainer) -> None:
        is_tuning = id(self) not in map(id, callbacks_of(trainer))  # a tuner trains without the callbacks
        has_begun = self._has_run or trainer.fit_loop.total_batch_idx >= 0
        if is_tuning or has_begun or not trainer.enable_validation:
            return
        others = [
            c for c in callbacks_of(trainer) if isinstance(c, Checkpoint | EarlyStopping) or hasattr(c, "monitor")
        ]
        with isolated_rng():  # loaders may be created
            self._has_run = validate_unseen(trainer, others, unseen_iteration)
        if not self._has_run:
            rank_zero_warn("ValidateFirst: the validation loaders have no batches, so nothing was validated.")

    def state_dict(self) -> dict[str, Any]:
        """Return whether it has run, which the number of batches does not say before the first one."""
        return {"has_run": self._has_run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._has_run = state_dict["has_run"]
