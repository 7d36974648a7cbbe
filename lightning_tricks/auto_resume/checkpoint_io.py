"""Durable writes for all checkpoints of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from lightning_tricks.auto_resume.functional import save_durably


class DurableCheckpointIO(TorchCheckpointIO):
    """A `TorchCheckpointIO` whose local files are whole at any moment, wherever TMPDIR is.

    Paths of remote file systems (`s3://...`) are written as `TorchCheckpointIO` does.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; see `save_durably`."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_durably(checkpoint, path)


def install_durable_io(strategy: Strategy) -> Callable[[], None] | None:
    """Put a `DurableCheckpointIO` where the Trainer's innermost is Lightning's own; return what undoes that.

    Others, a user's own for one, stay; then there is nothing to undo.
    """
    owner, name = strategy, "_checkpoint_io"
    inner: Any = strategy.checkpoint_io
    while type(inner) is not TorchCheckpointIO:
        deeper = [key for key in ("_checkpoint_io", "inner") if key in vars(inner)]
        if not deeper:
            return None
        owner, name = inner, deeper[0]
        inner = vars(inner)[name]
    setattr(owner, name, DurableCheckpointIO())

    def undo() -> None:
        setattr(owner, name, inner)

    return undo
