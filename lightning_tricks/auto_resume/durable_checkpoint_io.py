"""Durable writes for all checkpoints of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from lightning_tricks._lightning_compat.checkpoints import checkpoint_io_inserted, checkpoint_ios
from lightning_tricks._shared.checks import check_path
from lightning_tricks.auto_resume.core.durable_writing import save_durably


class DurableCheckpointIO(TorchCheckpointIO):
    """Write checkpoints as `TorchCheckpointIO` does, but atomically: a local file is complete at any moment.

    Paths of remote file systems (`s3://...`) are written as `TorchCheckpointIO` does.

    Args:
        before_replace: Called with the path of a local file and its SHA-256 right before the new file replaces the old.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[DurableCheckpointIO()], accelerator="cpu", logger=False)
    """

    def __init__(self, before_replace: Callable[[Path, str], object] | None = None) -> None:
        self._before_replace = before_replace

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint with `save_durably`."""
        check_path("path", path, "a checkpoint", takes_address=True)
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        before_replace = self._before_replace
        save_durably(
            checkpoint, path, before_replace and (lambda staged, digest, size: before_replace(Path(path), digest))
        )


@contextmanager
def durable_checkpoints(
    strategy: Strategy, before_replace: Callable[[Path, str], object] | None = None
) -> Iterator[None]:
    """Let a strategy write its checkpoints by a `DurableCheckpointIO` until the context is left.

    It takes the place of Lightning's own `TorchCheckpointIO`; another innermost CheckpointIO, such as a user's, stays.
    """
    if type(checkpoint_ios(strategy)[-1]) is not TorchCheckpointIO:
        yield
        return
    with checkpoint_io_inserted(strategy, lambda _: DurableCheckpointIO(before_replace), innermost=True):
        yield
