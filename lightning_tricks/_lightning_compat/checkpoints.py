"""What a ModelCheckpoint writes and removes, and what it remembers beside its state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelCheckpoint

_REMEMBERED = ("_last_global_step_saved", "_last_checkpoint_saved", "current_score")
_SINCE_2_6 = ("_defer_save_until_validation",)


@needs_private("AutoResume")
def memory_of_checkpointing(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return what a ModelCheckpoint remembers and does not restore from its state dict."""
    later = [name for name in _SINCE_2_6 if hasattr(callback, name)]
    return {name: getattr(callback, name) for name in (*_REMEMBERED, *later)}


def restore_memory_of_checkpointing(callback: ModelCheckpoint, memory: dict[str, Any]) -> None:
    """Put back what `memory_of_checkpointing` returned."""
    for name in (*_REMEMBERED, *_SINCE_2_6):
        if name in memory:
            setattr(callback, name, memory[name])


def watch_files(
    callback: ModelCheckpoint, touch: Callable[[Path], None], link_to: Callable[[Path, str], None]
) -> Callable[[], None]:
    """Call a function before a ModelCheckpoint writes or removes a file; return what ends that.

    Args:
        callback: That is watched.
        touch: Called with the file.
        link_to: Called before it makes a symbolic link, with its path and what it points to.
    """
    with needs_private("AutoResume"):
        save, remove, link = callback._save_checkpoint, callback._remove_checkpoint, callback._link_checkpoint

    def save_checkpoint(trainer: Any, filepath: str) -> None:
        touch(Path(filepath))
        save(trainer, filepath)

    def remove_checkpoint(trainer: Any, filepath: str) -> None:
        touch(Path(filepath))
        remove(trainer, filepath)

    def link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        touch(Path(linkpath))
        link_to(Path(linkpath), os.path.relpath(filepath, Path(linkpath).parent))
        link(trainer, filepath, linkpath)

    replaced: dict[str, Any] = {
        "_save_checkpoint": save_checkpoint,
        "_remove_checkpoint": remove_checkpoint,
        "_link_checkpoint": link_checkpoint,
    }
    vars(callback).update(replaced)

    def undo() -> None:
        for name in replaced:
            vars(callback).pop(name, None)

    return undo
