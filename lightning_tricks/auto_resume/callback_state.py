"""What callbacks remember beside the state dicts that the Trainer saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelPruning

from lightning_tricks._lightning_compat.checkpoints import checkpoint_callback_state, restore_checkpoint_callback_state
from lightning_tricks._lightning_compat.model_pruning import capture_lottery_tickets, restore_lottery_tickets
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type
from lightning_tricks.auto_resume.module_state import move_to_device


def capture_callback_states(trainer: Trainer, *, per_rank: bool) -> dict[str, Any]:
    """Return the states of callbacks by their `state_key`.

    Args:
        trainer: The Trainer of the fit.
        per_rank: Whether state dicts are included, as the Trainer saves those of rank zero only.
    """
    found: dict[str, Any] = {}
    for callback in callbacks_of(trainer):
        state = {"in_epoch": _mid_epoch_state(callback), "state_dict": callback.state_dict() if per_rank else {}}
        if any(state.values()):
            found[callback.state_key] = state
    return found


def restore_model_checkpoints(trainer: Trainer, states: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `capture_callback_states` returned for each ModelCheckpoint, except its state dict."""
    for callback in callbacks_of_type(trainer, ModelCheckpoint):
        state = states.get(callback.state_key, {}).get("in_epoch", {})
        restore_checkpoint_callback_state(callback, move_to_device(state, device))


def restore_callback_states(trainer: Trainer, states: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `capture_callback_states` returned, except what `restore_model_checkpoints` restores."""
    callbacks: list[Any] = callbacks_of(trainer)
    for callback in callbacks:
        state = states.get(callback.state_key, {})
        if state.get("state_dict"):
            callback.load_state_dict(state["state_dict"])
        if isinstance(callback, ModelPruning):
            restore_lottery_tickets(callback, move_to_device(state.get("in_epoch", {}), device))
        elif state.get("in_epoch") and not isinstance(callback, ModelCheckpoint):
            callback.load_mid_epoch_state(move_to_device(state["in_epoch"], device))


def _mid_epoch_state(callback: Callback) -> dict[str, Any]:
    if isinstance(callback, ModelCheckpoint):
        return checkpoint_callback_state(callback)
    if isinstance(callback, ModelPruning):
        return capture_lottery_tickets(callback)
    get_state = getattr(callback, "mid_epoch_state", None)
    return get_state() if get_state is not None else {}
