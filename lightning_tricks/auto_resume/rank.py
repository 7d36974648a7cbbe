"""What one rank remembers of a fit and a checkpoint of the Trainer does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch import nn

from lightning_tricks._lightning_compat.checkpoints import memory_of_checkpointing, restore_memory_of_checkpointing
from lightning_tricks._lightning_compat.fit import forget_restart
from lightning_tricks._lightning_compat.results import place_in_fit, return_to_place
from lightning_tricks.auto_resume.progress import (
    buffer_digests,
    buffers_beyond,
    metric_states,
    on_device,
    restore_buffers,
    restore_metric_states,
    versions_of_unsaved,
)
from lightning_tricks.seeding.functional import capture_rng_state, restore_rng_state


class RankState:
    """Collects and restores random streams, logged values, metrics, buffers and callbacks of a rank.

    Args:
        trainer: That fits, right before its first step.
        module: That is fitted.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self._unsaved = {name: versions_of_unsaved(part) for name, part in self._modules().items()}

    def collect(self) -> dict[str, Any]:
        """Return the state as tensors on the CPU and plain values; all ranks have to call it."""
        rng = capture_rng_state()
        modules, several = self._modules(), self.trainer.world_size > 1
        digests = {name: buffer_digests(module) for name, module in modules.items()} if several else {}
        rank_zeros = self.trainer.strategy.broadcast(digests)
        state = {
            "rng": rng,
            "trainer": place_in_fit(self.trainer),
            "modules": {
                name: {
                    "metrics": metric_states(module),
                    "buffers": buffers_beyond(module, self._unsaved.get(name, {}), rank_zeros.get(name, {})),
                }
                for name, module in modules.items()
            },
            "callbacks": self._states_of_callbacks(of_each_rank=several),
        }
        return dict(on_device(state, "cpu"))

    def restore_results(self, state: Mapping[str, Any]) -> None:
        """Put logged values, metrics and buffers back."""
        return_to_place(self.trainer, on_device(state["trainer"], self.trainer.strategy.root_device))
        for name, module in self._modules().items():
            if name in state["modules"]:
                restore_metric_states(module, state["modules"][name]["metrics"])
                restore_buffers(module, state["modules"][name]["buffers"])
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelCheckpoint):
                memory = state["callbacks"].get(callback.state_key, {}).get("in_epoch", {})
                restore_memory_of_checkpointing(callback, on_device(memory, self.module.device))

    def restore(self, state: Mapping[str, Any], *, in_epoch: bool) -> None:
        """Put all back and let the loops go on; `in_epoch` says that the epoch which runs began before the save."""
        forget_restart(self.trainer)
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if in_epoch and isinstance(callback, StochasticWeightAveraging):
                _start_averaging(self.trainer, self.module, callback)
        self.restore_results(state)
        for callback in callbacks:
            states = on_device(state["callbacks"].get(callback.state_key, {}), self.module.device)
            if states.get("state_dict"):
                callback.load_state_dict(states["state_dict"])
            if states.get("in_epoch") and not isinstance(callback, ModelCheckpoint):
                callback.go_on_in_epoch(states["in_epoch"])
        restore_rng_state(state["rng"])

    def _modules(self) -> dict[str, nn.Module]:
        """Return the module that is trained and those that callbacks hold, such as metrics and averaged weights."""
        found: dict[str, nn.Module] = {"": self.module}
        for number, callback in enumerate(self.trainer.callbacks):  # type: ignore[attr-defined]
            held = {f"{number}.{name}": value for name, value in vars(callback).items() if isinstance(value, nn.Module)}
            found |= {name: value for name, value in held.items() if value is not self.module}
        return found

    def _states_of_callbacks(self, of_each_rank: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            state = {
                "in_epoch": _state_beside(callback),
                "state_dict": callback.state_dict() if of_each_rank else {},
            }
            if any(state.values()):
                found[callback.state_key] = state
        return found


def _state_beside(callback: Callback) -> dict[str, Any]:
    """Return what a callback remembers beside its state dict."""
    if isinstance(callback, ModelCheckpoint):
        return memory_of_checkpointing(callback)
    tells = getattr(callback, "state_in_epoch", None)
    return tells() if tells is not None else {}


def _start_averaging(trainer: Trainer, module: LightningModule, averaging: StochasticWeightAveraging) -> None:
    """Let it put its scheduler in place of the module's, which it does at the start of an epoch only."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    before = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    averaging.on_train_epoch_start(trainer, module)
    for group, values in zip(groups, before, strict=True):
        group.update(values)  # a new scheduler sets the learning rate
