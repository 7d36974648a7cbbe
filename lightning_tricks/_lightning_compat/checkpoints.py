"""What a ModelCheckpoint writes and removes, and what it remembers beside its state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelCheckpoint

_STATE_ATTRIBUTES = ("_last_global_step_saved", "_last_checkpoint_saved", "current_score")
_SINCE_2_6 = ("_defer_save_until_validation",)


@needs_private("AutoResume")
def checkpoint_callback_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return what a ModelCheckpoint remembers and does not restore from its state dict."""
    newer = [name for name in _SINCE_2_6 if hasattr(callback, name)]
    return {name: getattr(callback, name) for name in (*_STATE_ATTRIBUTES, *newer)}


def restore_checkpoint_callback_state(callback: ModelCheckpoint, state: dict[str, Any]) -> None:
    """Put back what `checkpoint_callback_state` returned."""
    for name in (*_STATE_ATTRIBUTES, *_SINCE_2_6):
        if name in state:
            setattr(callback, name, state[name])


def observe_checkpoint_files(
    callback: ModelCheckpoint, before_change: Callable[[Path], None], before_link: Callable[[Path, str], None]
) -> Callable[[], None]:
    """Call a function before a ModelCheckpoint writes or removes a file; return what ends that.

    Args:
        callback: That is watched.
        before_change: Called with the file.
        before_link: Called before it makes a symbolic link, with its path and what it points to.
    """
    with needs_private("AutoResume"):
        save, remove, link = callback._save_checkpoint, callback._remove_checkpoint, callback._link_checkpoint

    def save_checkpoint(trainer: Any, filepath: str) -> None:
        before_change(Path(filepath))
        save(trainer, filepath)

    def remove_checkpoint(trainer: Any, filepath: str) -> None:
        before_change(Path(filepath))
        remove(trainer, filepath)

    def link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        before_change(Path(linkpath))
        before_link(Path(linkpath), os.path.relpath(filepath, Path(linkpath).parent))
        link(trainer, filepath, linkpath)

    replaced: dict[str, Any] = {
        "_save_checkpoint": save_checkpoint,
        "_remove_checkpoint": remove_checkpoint,
        "_link_checkpoint": link_checkpoint,
    }
    vars(callback).update(replaced)

    def close() -> None:
        for name in replaced:
            vars(callback).pop(name, None)

    return close
