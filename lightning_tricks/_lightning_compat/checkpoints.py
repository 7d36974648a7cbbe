"""What a ModelCheckpoint writes and removes, and what it remembers beside its state dict."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch.callbacks import ModelCheckpoint

_STATE_ATTRIBUTES = ("_last_global_step_saved", "_last_checkpoint_saved", "current_score")
_STATE_ATTRIBUTES_SINCE_2_6 = ("_defer_save_until_validation",)


@needs_private("AutoResume")
def checkpoint_callback_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return what a ModelCheckpoint remembers and does not restore from its state dict."""
    return {name: getattr(callback, name) for name in _state_attributes(callback)}


@needs_private("AutoResume")
def restore_checkpoint_callback_state(callback: ModelCheckpoint, state: dict[str, Any]) -> None:
    """Restore what `checkpoint_callback_state` returned."""
    set_private(callback, **{name: state[name] for name in _state_attributes(callback) if name in state})


def _state_attributes(callback: ModelCheckpoint) -> tuple[str, ...]:
    newer = [name for name in _STATE_ATTRIBUTES_SINCE_2_6 if name in vars(callback)]
    return (*_STATE_ATTRIBUTES, *newer)


@contextmanager
def observe_checkpoint_files(
    callback: ModelCheckpoint, before_change: Callable[[Path], None], before_link: Callable[[Path, str], None]
) -> Iterator[None]:
    """Call a function before a ModelCheckpoint writes or removes a file, until the context is left.

    Args:
        callback: The ModelCheckpoint that is observed.
        before_change: Called with the path of the file.
        before_link: Called before a symbolic link is created, with its path and its target.
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

    with overriding(
        callback,
        _save_checkpoint=save_checkpoint,
        _remove_checkpoint=remove_checkpoint,
        _link_checkpoint=link_checkpoint,
    ):
        yield


def value_in_checkpoint(path: str | os.PathLike[str], key: str) -> Any:
    """Return a value of a checkpoint that lies in a file, or in a folder with shards.

    Args:
        path: The path; nothing is found behind an address of the network.
        key: The key of the value.

    Returns:
        The value; None if there is none, or if the checkpoint is not made of tensors and plain values.
    """
    import pickle

    import torch

    with needs_private("GradualUnfreezing under FSDP"):
        from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA

    file = Path(path) / METADATA if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return None
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True).get(key)
    except (pickle.UnpicklingError, RuntimeError):
        return None
