"""Snapshots of a fit, to which it goes back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import Callback, Checkpoint, Trainer
from lightning_tricks._lightning_compat.left_out_steps import is_without_steps, restore_step_progress, step_progress
from lightning_tricks._lightning_compat.results import hold_loop_state, named_callbacks, restore_loop_state
from lightning_tricks._lightning_compat.trainer import active_scaler
from lightning_tricks._shared.rng import HeldRngState, restore_rng_state
from lightning_tricks._shared.step_state import copy_gradients, copy_step_state, restore_gradients, restore_step_state
from lightning_tricks._shared.tensors import clone_tensors, parameters_of
from lightning_tricks.gradient_clipping.core.step_skipping import copy_group_options, restore_group_options


class Snapshots:
    """Takes the state of a fit between two optimizer steps, of which `plain` makes plain values, and goes back to it.

    Args:
        trainer: The Trainer.
        guard: The callback that takes the snapshots, which is no part of them.
        with_steps: Whether to copy also what optimizer steps change: weights, optimizers, schedules, averaged weights.
    """

    def __init__(self, trainer: Trainer, guard: Callback, *, with_steps: bool) -> None:
        self._trainer, self._module, self._with_steps = trainer, trainer.lightning_module, with_steps
        self._random: HeldRngState | None = None  # the last one
        self._named = named_callbacks(trainer)
        # Those that only observe have counts, and the others none
        self._tricks = {name: c for name, c in self._named.items() if isinstance(c, TrickCallback)}
        changing = {name: c for name, c in self._tricks.items() if c.training_arguments and c is not guard}
        hook = "on_before_optimizer_step"
        self._stepping = {n for n, c in changing.items() if getattr(type(c), hook) is not getattr(Callback, hook)}
        self._with_memory: dict[str, Any] = {**changing}  # of batches of an epoch
        if hasattr(self._module, "mid_epoch_state"):
            self._with_memory["module"] = self._module

    def take(self) -> dict[str, Any]:
        """Return a snapshot."""
        module, trainer = self._module, self._trainer
        with_steps = self._with_steps and not is_without_steps(trainer)
        snapshot: dict[str, Any] = {
            "module": copy_step_state(module, weights=with_steps or ()),
            "gradients": copy_gradients(module) if not module.automatic_optimization else {},
            "progress": step_progress(trainer),
            "loop": hold_loop_state(trainer),
            "in_epoch": {name: part.mid_epoch_state() for name, part in self._with_memory.items()},
            "random": self.random_state(),
        }
        if with_steps:
            averages, scaler = self._averages(), active_scaler(trainer)
            counters = self._step_counters(averages)
            snapshot |= {
                "optimizers": [copy_optimizer(optimizer) for optimizer in trainer.optimizers],
                **self._schedules(),
                "scaler": scaler.state_dict() if scaler is not None else {},
                "callbacks": {name: deepcopy(counter.state_dict()) for name, counter in counters.items()},
                "averages": {name: copy_step_state(average, weights=True) for name, average in averages.items()},
            }
        return snapshot

    def random_state(self) -> HeldRngState:
        """Return the state of the random number generators."""
        self._random = HeldRngState(self._random)
        return self._random

    def add_before_next_batch(self, snapshot: dict[str, Any]) -> None:
        """Add to a snapshot what changes only after its first batch was run: counts of observers, schedules."""
        if "counts" not in snapshot:
            counts = {name: trick.epoch_counts() for name, trick in self._tricks.items()}
            snapshot.update({"counts": counts, **self._schedules(), **snapshot})

    def go_back(self, snapshot: Mapping[str, Any]) -> None:
        """Go back to a snapshot, which stays as it is."""
        module, trainer, snapshot = self._module, self._trainer, plain(snapshot)
        restore_step_state(module, snapshot["module"])
        restore_gradients(module, snapshot["gradients"])
        restore_step_progress(trainer, snapshot["progress"])
        now = hold_loop_state(trainer)()  # what is not taken back: that the batch has begun, and wishes to stop
        restore_loop_state(trainer, now | {key: snapshot["loop"][key] for key in ("logged", "current_fx", "results")})
        for name, state in snapshot["in_epoch"].items():
            self._with_memory[name].load_mid_epoch_state(state)
        for name, state in snapshot.get("counts", {}).items():
            self._tricks[name].load_epoch_counts(state, trainer.strategy.root_device)
        if "optimizers" in snapshot:
            self._take_back_steps(snapshot)
        if "schedulers" in snapshot:
            for config, state in zip(trainer.lr_scheduler_configs, snapshot["schedulers"], strict=True):
                config.scheduler.load_state_dict(deepcopy(state))
            for optimizer, options in zip(trainer.optimizers, snapshot["options"], strict=True):
                restore_group_options(optimizer, clone_tensors(options))
        restore_rng_state(snapshot["random"])
        self._random = None  # what numpy has now may have been captured before

    def _take_back_steps(self, snapshot: Mapping[str, Any]) -> None:
        for optimizer, copied in zip(self._trainer.optimizers, snapshot["optimizers"], strict=True):
            restore_optimizer(optimizer, copied)
        if (scaler := active_scaler(self._trainer)) is not None:
            scaler.load_state_dict(dict(snapshot["scaler"]))
        averages = self._averages()
        counters = self._step_counters(averages)
        for name, state in snapshot["callbacks"].items():
            counters[name].load_state_dict(deepcopy(state))
        for name, copied in snapshot["averages"].items():
            restore_step_state(averages[name], copied)

    def _schedules(self) -> dict[str, Any]:
        return {
            "schedulers": [deepcopy(config.scheduler.state_dict()) for config in self._trainer.lr_scheduler_configs],
            "options": [copy_group_options(optimizer) for optimizer in self._trainer.optimizers],
        }

    def _averages(self) -> dict[str, nn.Module]:
        """Return the modules with weights that callbacks hold themselves, such as averages of what is trained."""
        named = {name: c for name, c in self._named.items() if not isinstance(c, Checkpoint)}
        held = {f"{name}.{key}": value for name, callback in named.items() for key, value in vars(callback).items()}
        return {name: value for name, value in held.items() if isinstance(value, nn.Module) and [*value.parameters()]}

    def _step_counters(self, averages: Mapping[str, nn.Module]) -> dict[str, Callback]:
        """Return the callbacks that average weights, and the tricks that do something before each optimizer step."""
        return {name: self._named[name] for name in self._stepping | {name.rpartition(".")[0] for name in averages}}


def plain(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot as copied tensors and plain values: parts may be functions that make them of what they hold."""
    return {name: part() if callable(part) else part for name, part in snapshot.items()}


def copy_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Copy the states of an optimizer's parameters, by their number, and other states."""
    states = {number: optimizer.state[p] for number, p in enumerate(parameters_of(optimizer)) if p in optimizer.state}
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    return {"states": clone_tensors(states), "others": clone_tensors(others)}


def restore_optimizer(optimizer: Optimizer, copies: Mapping[str, Any]) -> None:
    """Restore what `copy_optimizer` copied, bit for bit: `load_state_dict` would change the dtype of some states."""
    before, parameters = dict(optimizer.state), parameters_of(optimizer)
    optimizer.state.clear()
    for number, states in copies["states"].items():
        now = before.get(parameters[number], {})
        optimizer.state[parameters[number]] = {  # on the device of now: AutoResume moves what it restores
            name: clone_tensors(value, getattr(now.get(name), "device", parameters[number].device))
            for name, value in states.items()
        }
    optimizer.state.update(clone_tensors(copies.get("others", {})))
