"""The status file of a run: how far it is, for `lightning-tricks resume status`."""

from __future__ import annotations

import math
import time
from contextlib import suppress

from lightning.pytorch import Trainer

from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder

_SECONDS_BETWEEN_WRITES = 10.0


class RunStatus:
    """Writes the status of a fit at most every ten seconds.

    Args:
        trainer: The Trainer of the fit.
        folder: The folder of this fit's checkpoints.
    """

    def __init__(self, trainer: Trainer, folder: CheckpointFolder) -> None:
        self.trainer, self.folder = trainer, folder
        self._written_at = -math.inf

    def write_if_due(self) -> None:
        """Write that the run is running, if the last write is long enough ago."""
        if time.monotonic() - self._written_at > _SECONDS_BETWEEN_WRITES:
            self.write("running")

    def write(self, state: str) -> None:
        """Write the status file, on rank zero: "running", "stopped" or "finished"."""
        self._written_at = time.monotonic()
        trainer = self.trainer
        if not trainer.is_global_zero:
            return
        with suppress(OSError):  # a full disk is reported by the checkpoint that is lost
            self.folder.write_status(
                state=state,
                epoch=trainer.current_epoch,
                step=trainer.global_step,
                max_epochs=trainer.max_epochs,
                max_steps=trainer.max_steps,
            )
