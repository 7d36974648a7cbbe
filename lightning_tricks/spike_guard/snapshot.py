"""Snapshots of a fit, to which it goes back."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import Callback, Checkpoint, Trainer
from lightning_tricks._lightning_compat.left_out_steps import restore_step_progress, step_progress
from lightning_tricks._lightning_compat.results import capture_loop_state, named_callbacks, restore_loop_state
from lightning_tricks._lightning_compat.trainer import active_scaler
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks.spike_guard.core import state_copies as copies


def take_snapshot(trainer: Trainer, guard: Callback, *, with_steps: bool) -> dict[str, Any]:
    """Return the state of a fit between two optimizer steps as copied tensors and plain values.

    Args:
        trainer: The Trainer.
        guard: The callback that takes the snapshot, which is no part of it.
        with_steps: Whether to copy also what optimizer steps change: weights, optimizers, schedules, averaged weights.
    """
    module, others = trainer.lightning_module, _others(trainer, guard)
    snapshot: dict[str, Any] = {
        "tensors": copies.copy_tensors(module, parameters=with_steps),
        "metrics": copies.copy_metrics(module),
        "gradients": copies.copy_gradients(module) if not module.automatic_optimization else {},
        "progress": step_progress(trainer),
        "loop": capture_loop_state(trainer),
        "in_epoch": {name: c.mid_epoch_state() for name, c in others.items() if isinstance(c, TrickCallback)},
        "random": capture_rng_state(),
    }
    if with_steps:
        scaler, averages = active_scaler(trainer), {name: _averages(callback) for name, callback in others.items()}
        snapshot |= {
            "optimizers": [copies.copy_optimizer(optimizer) for optimizer in trainer.optimizers],
            "schedulers": [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
            "scaler": scaler.state_dict() if scaler is not None else {},
            "callbacks": {name: deepcopy(c.state_dict()) for name, c in others.items() if _counts_steps(c)},
            "averages": {
                name: {key: copies.copy_tensors(average, parameters=True) for key, average in found.items()}
                for name, found in averages.items()
            },
        }
    return snapshot


def go_back(trainer: Trainer, guard: Callback, snapshot: dict[str, Any]) -> None:
    """Go back to a snapshot, which stays as it is."""
    module, others = trainer.lightning_module, _others(trainer, guard)
    copies.restore_tensors(module, snapshot["tensors"])
    copies.restore_metrics(module, snapshot["metrics"])
    copies.restore_gradients(module, snapshot["gradients"])
    restore_step_progress(trainer, snapshot["progress"])
    now = capture_loop_state(trainer)  # what is not taken back: that the batch has begun, and wishes to stop
    restore_loop_state(trainer, now | {key: snapshot["loop"][key] for key in ("logged", "current_fx", "results")})
    for name, state in snapshot["in_epoch"].items():
        others[name].load_mid_epoch_state(state)  # type: ignore[attr-defined]
    if "optimizers" in snapshot:
        for optimizer, copied in zip(trainer.optimizers, snapshot["optimizers"], strict=True):
            copies.restore_optimizer(optimizer, copied)
        for config, state in zip(trainer.lr_scheduler_configs, snapshot["schedulers"], strict=True):
            config.scheduler.load_state_dict(deepcopy(state))
        if (scaler := active_scaler(trainer)) is not None:
            scaler.load_state_dict(dict(snapshot["scaler"]))
        for name, state in snapshot["callbacks"].items():
            others[name].load_state_dict(deepcopy(state))
        for name, found in snapshot["averages"].items():
            for key, copied in found.items():
                copies.restore_tensors(vars(others[name])[key], copied)
    restore_rng_state(snapshot["random"])


def _others(trainer: Trainer, guard: Callback) -> dict[str, Callback]:
    """Return the callbacks that may take part in training: those that average weights, and tricks that change it."""
    return {
        name: callback
        for name, callback in named_callbacks(trainer).items()
        if callback is not guard and (_averages(callback) or bool(getattr(callback, "training_arguments", None)))
    }


def _counts_steps(callback: Callback) -> bool:
    hook = "on_before_optimizer_step"
    return bool(_averages(callback)) or getattr(type(callback), hook) is not getattr(Callback, hook)


def _averages(callback: Callback) -> dict[str, nn.Module]:
    """Return the modules with weights that a callback itself holds, such as averages of those that are trained."""
    found = {} if isinstance(callback, Checkpoint) else vars(callback)
    return {key: value for key, value in found.items() if isinstance(value, nn.Module) and [*value.parameters()]}
