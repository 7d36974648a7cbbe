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
from lightning_tricks._shared.step_state import copy_gradients, copy_step_state, restore_gradients, restore_step_state
from lightning_tricks._shared.tensors import clone_tensors
from lightning_tricks.gradient_clipping.core.step_skipping import copy_group_options, restore_group_options
from lightning_tricks.spike_guard.core.optimizer_copies import copy_optimizer, restore_optimizer


def take_snapshot(trainer: Trainer, guard: Callback, *, with_steps: bool) -> dict[str, Any]:
    """Return the state of a fit between two optimizer steps as copied tensors and plain values.

    Args:
        trainer: The Trainer.
        guard: The callback that takes the snapshot, which is no part of it.
        with_steps: Whether to copy also what optimizer steps change: weights, optimizers, schedules, averaged weights.
    """
    module = trainer.lightning_module
    snapshot: dict[str, Any] = {
        "module": copy_step_state(module, weights=with_steps or ()),
        "gradients": copy_gradients(module) if not module.automatic_optimization else {},
        "progress": step_progress(trainer),
        "loop": capture_loop_state(trainer),
        "in_epoch": {name: part.mid_epoch_state() for name, part in _with_memory(trainer, guard).items()},
        "random": capture_rng_state(),
    }
    if with_steps:
        averages, scaler = _averages(trainer), active_scaler(trainer)
        snapshot |= {
            "optimizers": [copy_optimizer(optimizer) for optimizer in trainer.optimizers],
            **_schedules(trainer),
            "scaler": scaler.state_dict() if scaler is not None else {},
            "callbacks": {name: deepcopy(c.state_dict()) for name, c in _step_counters(trainer, guard).items()},
            "averages": {name: copy_step_state(average, weights=True) for name, average in averages.items()},
        }
    return snapshot


def go_back(trainer: Trainer, guard: Callback, snapshot: dict[str, Any]) -> None:
    """Go back to a snapshot, which stays as it is."""
    module = trainer.lightning_module
    restore_step_state(module, snapshot["module"])
    restore_gradients(module, snapshot["gradients"])
    restore_step_progress(trainer, snapshot["progress"])
    now = capture_loop_state(trainer)  # what is not taken back: that the batch has begun, and wishes to stop
    restore_loop_state(trainer, now | {key: snapshot["loop"][key] for key in ("logged", "current_fx", "results")})
    parts = _with_memory(trainer, guard)
    for name, state in snapshot["in_epoch"].items():
        parts[name].load_mid_epoch_state(state)
    observers = _observers(trainer)
    for name, state in snapshot.get("counts", {}).items():
        observers[name].load_epoch_counts(state, trainer.strategy.root_device)
    if "optimizers" in snapshot:
        for optimizer, copied in zip(trainer.optimizers, snapshot["optimizers"], strict=True):
            restore_optimizer(optimizer, copied)
        if (scaler := active_scaler(trainer)) is not None:
            scaler.load_state_dict(dict(snapshot["scaler"]))
        counters, averages = _step_counters(trainer, guard), _averages(trainer)
        for name, state in snapshot["callbacks"].items():
            counters[name].load_state_dict(deepcopy(state))
        for name, copied in snapshot["averages"].items():
            restore_step_state(averages[name], copied)
    if "schedulers" in snapshot:
        for config, state in zip(trainer.lr_scheduler_configs, snapshot["schedulers"], strict=True):
            config.scheduler.load_state_dict(deepcopy(state))
        for optimizer, options in zip(trainer.optimizers, snapshot["options"], strict=True):
            restore_group_options(optimizer, clone_tensors(options))
    restore_rng_state(snapshot["random"])


def add_before_next_batch(trainer: Trainer, snapshot: dict[str, Any]) -> None:
    """Add to a snapshot what changes only after its first batch was run: counts of observers, schedules."""
    if "counts" not in snapshot:
        counts = {name: callback.epoch_counts() for name, callback in _observers(trainer).items()}
        snapshot.update({"counts": counts, **_schedules(trainer), **snapshot})


def _schedules(trainer: Trainer) -> dict[str, Any]:
    return {
        "schedulers": [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "options": [copy_group_options(optimizer) for optimizer in trainer.optimizers],
    }


def _observers(trainer: Trainer) -> dict[str, TrickCallback]:
    """Return all tricks: those that only observe have counts, and the others none."""
    return {
        name: callback for name, callback in named_callbacks(trainer).items() if isinstance(callback, TrickCallback)
    }


def _tricks(trainer: Trainer, guard: Callback) -> dict[str, TrickCallback]:
    """Return the other tricks that change training."""
    return {name: c for name, c in _observers(trainer).items() if c.training_arguments and c is not guard}


def _with_memory(trainer: Trainer, guard: Callback) -> dict[str, Any]:
    """Return what remembers batches of an epoch: other tricks that change training, and the module, if it can tell."""
    module = trainer.lightning_module
    return {**_tricks(trainer, guard), **({"module": module} if hasattr(module, "mid_epoch_state") else {})}


def _averages(trainer: Trainer) -> dict[str, nn.Module]:
    """Return the modules with weights that callbacks themselves hold, such as averages of those that are trained."""
    named = {name: c for name, c in named_callbacks(trainer).items() if not isinstance(c, Checkpoint)}
    held = {f"{name}.{key}": value for name, callback in named.items() for key, value in vars(callback).items()}
    return {name: value for name, value in held.items() if isinstance(value, nn.Module) and [*value.parameters()]}


def _step_counters(trainer: Trainer, guard: Callback) -> dict[str, Callback]:
    """Return the callbacks that average weights, and the tricks that do something before each optimizer step."""
    named, hook = named_callbacks(trainer), "on_before_optimizer_step"
    tricks = {n for n, c in _tricks(trainer, guard).items() if getattr(type(c), hook) is not getattr(Callback, hook)}
    return {name: named[name] for name in tricks | {name.rpartition(".")[0] for name in _averages(trainer)}}
