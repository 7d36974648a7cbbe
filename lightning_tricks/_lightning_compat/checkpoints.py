"""Checkpoints: their contents, the chain of CheckpointIOs that write them, and what ModelCheckpoint remembers."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import import_lightning
from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private
from lightning_tricks._lightning_compat.sharded import is_sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_tricks._lightning_compat.flavor import CheckpointIO, ModelCheckpoint, Strategy, Trainer


# `ModelCheckpoint.state_dict` lacks the first two, `load_state_dict` drops the third (2.6.6): a resumed run would save
# a step twice (`_should_skip_saving_checkpoint`), or write `last.ckpt` whole where it is to be a link.
_STATE_ATTRIBUTES = ("_last_global_step_saved", "_last_checkpoint_saved", "current_score")
# A save that is due and waits for the metrics of the next validation (#21106); a resumed run would leave it out.
_STATE_ATTRIBUTES_SINCE_2_5_5 = ("_defer_save_until_validation",)


@needs_private("AutoResume")
def checkpoint_callback_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return what a ModelCheckpoint remembers and does not restore from its state dict."""
    return {name: getattr(callback, name) for name in _state_attributes(callback)}


@needs_private("AutoResume")
def restore_checkpoint_callback_state(callback: ModelCheckpoint, state: dict[str, Any]) -> None:
    """Restore what `checkpoint_callback_state` returned."""
    set_private(callback, **{name: state[name] for name in _state_attributes(callback) if name in state})


def _state_attributes(callback: ModelCheckpoint) -> tuple[str, ...]:
    newer = [name for name in _STATE_ATTRIBUTES_SINCE_2_5_5 if name in vars(callback)]
    return (*_STATE_ATTRIBUTES, *newer)


@needs_private("AutoResume")
def writes_folders(strategy: Strategy) -> bool:
    """Whether a strategy writes a checkpoint as a folder of shards."""
    untyped: Any = strategy
    return is_sharding(strategy) and bool(untyped._save_distributed_checkpoint)


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
        metadata_name = import_lightning("fabric.utilities.load")._METADATA_FILENAME
    file = Path(path) / metadata_name if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return None
    try:
        # Mapped: the weights of a large file are not read for one value. RuntimeError: files that cannot be mapped.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True).get(key)
    except (pickle.UnpicklingError, RuntimeError):
        return None


# The first is that of Lightning's `_WrappingCheckpointIO` (AsyncCheckpointIO), the second that of this package's.
_INNER_NAMES = ("_checkpoint_io", "inner")  # the attributes in which a CheckpointIO may hold the one that it wraps


def checkpoint_ios(strategy: Strategy) -> list[Any]:
    """Return the CheckpointIOs of a strategy, from the outermost to the innermost."""
    return [checkpoint_io for _, _, checkpoint_io in _slots(strategy)]


@contextmanager
def checkpoint_io_inserted(
    strategy: Strategy, make: Callable[[Any], CheckpointIO], *, innermost: bool = False
) -> Iterator[None]:
    """Insert a CheckpointIO into the chain of a strategy, and take it out again when the context is left.

    Several may be inserted and taken out in any order: what the inserted one wraps then takes its place, also if that
    was replaced in the meantime.

    Args:
        strategy: The strategy of a Trainer.
        make: Returns the CheckpointIO; it gets the outermost one of the chain to wrap it in its attribute `inner`.
        innermost: Whether the CheckpointIO takes the place of the innermost one instead, which `make` gets.
    """
    owner, name, replaced = _slots(strategy)[-1 if innermost else 0]
    inserted = make(replaced)
    with needs_private("AutoResume or CheckpointRemapping"):
        set_private(owner, **{name: inserted})
    try:
        yield
    finally:
        # Looked for anew: others may have wrapped it since, and putting back what was found before would drop theirs.
        for owner, name, checkpoint_io in _slots(strategy):
            if checkpoint_io is inserted:
                inner = _inner_name(inserted)
                set_private(owner, **{name: replaced if inner is None else vars(inserted)[inner]})


@needs_private("AutoResume or CheckpointRemapping", KeyError)
def _slots(strategy: Strategy) -> list[tuple[Any, str, Any]]:
    """Return for each CheckpointIO the object that holds it, the name of the attribute, and the CheckpointIO."""
    # The property makes a TorchCheckpointIO when it is first read (strategies/strategy.py); the attribute is None
    # before.
    _ = strategy.checkpoint_io  # creates the innermost one
    slots: list[tuple[Any, str, Any]] = [(strategy, "_checkpoint_io", vars(strategy)["_checkpoint_io"])]
    while (name := _inner_name(slots[-1][2])) is not None:
        owner = slots[-1][2]
        slots.append((owner, name, vars(owner)[name]))
    return slots


def _inner_name(checkpoint_io: Any) -> str | None:
    from lightning_tricks._lightning_compat.flavor import CheckpointIO

    held = vars(checkpoint_io)
    return next((name for name in _INNER_NAMES if isinstance(held.get(name), CheckpointIO)), None)


@contextmanager
def checkpoint_contents_changed(
    trainer: Trainer, after_dump: Callable[[dict[str, Any]], object], before_restore: Callable[[dict[str, Any]], object]
) -> Iterator[None]:
    """Let functions change the contents of checkpoints until the context is left, whoever writes and reads the files.

    Args:
        trainer: The Trainer.
        after_dump: Called with each checkpoint when all hooks have made their changes to it, on each rank.
        before_restore: Called with a checkpoint that was read before the module's hook sees it and its weights are
            loaded, on each rank.
    """
    with needs_private("TrainableCheckpoint"):
        # Neither a hook nor a CheckpointIO would do: callbacks' hooks come before the module's own `on_save_checkpoint`
        # (`dump_checkpoint`), and ModelParallelStrategy writes and reads shards past the CheckpointIO.
        connector: Any = trainer._checkpoint_connector
        dump, restore = connector.dump_checkpoint, connector.restore_model

    def dump_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = dump(*args, **kwargs)
        after_dump(checkpoint)
        return checkpoint

    def restore_model() -> None:
        with needs_private("TrainableCheckpoint"):
            checkpoint: dict[str, Any] = connector._loaded_checkpoint
        # An empty dict where nothing is resumed.
        if checkpoint:
            before_restore(checkpoint)
        restore()

    with overriding(connector, dump_checkpoint=dump_checkpoint, restore_model=restore_model):
        yield
