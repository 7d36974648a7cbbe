"""Durable writes for all checkpoints of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from lightning_tricks._lightning_compat.checkpoint_io import checkpoint_ios, replace_checkpoint_io
from lightning_tricks.auto_resume.core.checkpoint_files import save_durably


class DurableCheckpointIO(TorchCheckpointIO):
    """A `TorchCheckpointIO` whose local files are whole at any moment, wherever TMPDIR is.

    Paths of remote file systems (`s3://...`) are written as `TorchCheckpointIO` does.

    Args:
        before_replace: Called with a local file and its SHA-256 right before it takes the place of an old one.
    """

    def __init__(self, before_replace: Callable[[Path, str], object] | None = None) -> None:
        self._before_replace = before_replace

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; see `save_durably`."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        before_replace = self._before_replace
        save_durably(
            checkpoint, path, before_replace and (lambda staged, digest, size: before_replace(Path(path), digest))
        )


def install_durable_checkpoint_io(
    strategy: Strategy, before_replace: Callable[[Path, str], object] | None = None
) -> Callable[[], None]:
    """Put a `DurableCheckpointIO(note)` where the Trainer's innermost is Lightning's own; return what undoes that.

    Others, a user's own for one, stay; then there is nothing to undo.
    """
    *_, innermost = checkpoint_ios(strategy)
    if type(innermost) is not TorchCheckpointIO:
        return lambda: None
    durable = DurableCheckpointIO(before_replace)
    replace_checkpoint_io(strategy, innermost, durable)
    return lambda: replace_checkpoint_io(strategy, durable, innermost)
