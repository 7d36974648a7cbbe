"""What one rank remembers of a fit and a checkpoint of the Trainer does not hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import lightning.pytorch.callbacks
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    Checkpoint,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.checkpoints import memory_of_checkpointing, restore_memory_of_checkpointing
from lightning_tricks._lightning_compat.results import named_callbacks, place_in_fit, return_to_place
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks.auto_resume.core.attributes.model_structure import (
    Structure,
    gradients_of,
    restore_flags,
    restore_gradients,
    restore_groups,
    restore_masks,
)
from lightning_tricks.auto_resume.core.attributes.module_lists import lists_of_modules, restore_lists
from lightning_tricks.auto_resume.core.attributes.restoring import put_back
from lightning_tricks.auto_resume.core.attributes.state_dicts import extras_of, give_extras
from lightning_tricks.auto_resume.core.attributes.tracking import Attributes
from lightning_tricks.auto_resume.module_state import (
    buffer_digests,
    buffers_beyond,
    on_device,
    restore_buffers,
    versions_of_unsaved,
)
from lightning_tricks.auto_resume.pruning_tickets import restore_tickets, tickets_of

# Whose attributes are of the process, or are restored by their own part of this room
_LEFT_ALONE = (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    TrickCallback,
)

# Of DDP: whether the next step takes rank zero's buffers, as it does unless a validation came before
_SYNCS = "require_forward_param_sync"
EXCHANGED = "in the fit)"  # ends what `not_saved` says of modules that hooks may make again
_SETTINGS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "limit_val_batches")


class RankState:
    """Collects and restores what a rank knows: streams, logged values, attributes, buffers, structure, callbacks.

    What changed is told from what was there when this was made, before the hooks of the fit.

    Args:
        trainer: That fits.
        module: That is fitted.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self._structure = Structure(self._modules())
        self._attributes = Attributes(self._owners, skipped=self._skipped)
        self._of_optimizers: Attributes | None = None  # from when there are optimizers
        self._settings = self._settings_of_trainer()
        self._unsaved: dict[str, Any] = {}
        self.failed: list[str] = []  # what could not be put back, and why

    def fit_starts(self, shared: Mapping[str, Any]) -> None:
        """Note the optimizers' groups, or put them back, before their states are loaded; `shared` is of the save."""
        self._unsaved = {name: versions_of_unsaved(part) for name, part in self._modules().items()}
        self._structure.note_groups(self.module, self.trainer.optimizers)
        self._of_optimizers = Attributes(self._extras, skipped=self._skipped_of_extras)
        if shared.get("groups"):
            restore_groups(self.module, self.trainer.optimizers, shared["groups"])

    def shared(self) -> dict[str, Any]:
        """Return what is the same on all ranks, as tensors on the CPU and plain values."""
        changes = self._structure.changes(self._modules(), self.module, self.trainer.optimizers)
        changes["lists"] = lists_of_modules(self._modules())
        now = self._settings_of_trainer()
        changes["settings"] = {name: value for name, value in now.items() if value != self._settings[name]}
        return dict(on_device(changes, "cpu"))

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that changed, as tensors and plain values."""
        changes = self._attributes.changes()
        if self._of_optimizers is not None:
            beside = self._of_optimizers.changes()
            changes = {"values": changes["values"] | beside["values"], "lost": changes["lost"] | beside["lost"]}
        return dict(changes)

    def collect(self) -> dict[str, Any]:
        """Return the state as tensors on the CPU and plain values; all ranks have to call it."""
        rng = capture_rng_state()
        modules, several = self._modules(), self.trainer.world_size > 1
        digests = {name: buffer_digests(module) for name, module in modules.items()} if several else {}
        rank_zeros = self.trainer.strategy.broadcast(digests)
        state = {
            "rng": rng,
            "trainer": place_in_fit(self.trainer),
            "buffers": {
                name: buffers_beyond(module, self._unsaved.get(name, {}), rank_zeros.get(name, {}))
                for name, module in modules.items()
            },
            "syncs_buffers": getattr(self.trainer.model, _SYNCS, None),
            "gradients": gradients_of(self.module) if self._keeps_gradients() else {},
            "callbacks": self._states_of_callbacks(of_each_rank=several),
        }
        return {**on_device(state, "cpu"), "attributes": self.attributes()}

    def not_saved(self, state: Mapping[str, Any]) -> list[str]:
        """Say what changed and cannot be saved."""
        found = [f"{place} ({kind})" for place, kind in state["attributes"]["lost"].items()]
        return found + [f"the parameter {name}" for name in self._structure.new_parameters(self.module)]

    def restore_attributes(self, changes: Mapping[str, Any], *, before_hooks: bool = False) -> None:
        """Put attributes back.

        With `before_hooks`, leave those out that belong to an object which lacks others: a flag that says that
        something was made would keep the hooks from making it.
        """
        if before_hooks:
            lacking = {place.rpartition(".")[0] for place in changes["lost"]}
            values = {place: one for place, one in changes["values"].items() if one["of"] not in lacking}
            changes = {**changes, "values": values}
        owners, extras = self._owners(), extras_of(self.trainer.optimizers)
        failed = put_back({**owners, **extras}, changes, skipped=self._skipped)
        give_extras(self.trainer.optimizers, extras)
        gone = {
            place
            for place in failed
            if place.startswith("callbacks.") and place not in owners and place.count(".") == 1
        }
        self.failed = [f"{place} ({why})" for place, why in failed.items() if place not in gone]  # a callback taken out

    def restore_structure(self, shared: Mapping[str, Any]) -> None:
        """Put back masks, groups, modes, and what takes gradients."""
        if shared:
            restore_lists(self._modules(), shared["lists"])
            restore_masks(self.module, shared["masks"])
            if shared["groups"]:
                restore_groups(self.module, self.trainer.optimizers, shared["groups"])
            restore_flags(self._modules(), shared)
            for name, value in shared["settings"].items():
                setattr(self.trainer, name, value)

    def restore_results(self, state: Mapping[str, Any]) -> None:
        """Put logged values, attributes, metrics among them, and buffers back."""
        return_to_place(self.trainer, on_device(state["trainer"], self.trainer.strategy.root_device))
        self.restore_attributes(state["attributes"])
        for name, module in self._modules().items():
            if name in state["buffers"]:
                restore_buffers(module, state["buffers"][name])
        for callback in callbacks_of(self.trainer):
            if isinstance(callback, ModelCheckpoint):
                memory = state["callbacks"].get(callback.state_key, {}).get("in_epoch", {})
                restore_memory_of_checkpointing(callback, on_device(memory, self.module.device))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put all back; the streams last."""
        self.restore_results(state)
        restore_gradients(self.module, state["gradients"])
        if state["syncs_buffers"] is not None and hasattr(self.trainer.model, _SYNCS):
            setattr(self.trainer.model, _SYNCS, state["syncs_buffers"])
        callbacks: list[Any] = callbacks_of(self.trainer)
        for callback in callbacks:
            states = state["callbacks"].get(callback.state_key, {})
            if states.get("state_dict"):
                callback.load_state_dict(states["state_dict"])
            if isinstance(callback, ModelPruning):
                restore_tickets(callback, on_device(states.get("in_epoch", {}), self.module.device))
            elif states.get("in_epoch") and not isinstance(callback, ModelCheckpoint):
                callback.load_mid_epoch_state(on_device(states["in_epoch"], self.module.device))
        restore_rng_state(state["rng"])

    def _settings_of_trainer(self) -> dict[str, Any]:
        """Return what callbacks set at the Trainer while it runs."""
        return {name: getattr(self.trainer, name) for name in _SETTINGS}

    def _keeps_gradients(self) -> bool:
        """Whether gradients may be added to after a step."""
        return not self.module.automatic_optimization or is_overridden("optimizer_zero_grad", self.module)

    def _modules(self) -> dict[str, nn.Module]:
        """Return the module that is trained and those that callbacks hold, such as metrics and averaged weights."""
        found: dict[str, nn.Module] = {"": self.module}
        for where, callback in named_callbacks(self.trainer).items():
            held = {f"{where}.{name}": value for name, value in vars(callback).items() if isinstance(value, nn.Module)}
            found |= {name: value for name, value in held.items() if value is not self.module}
        return found

    def _owners(self) -> dict[str, object]:
        """Return those whose attributes go on."""
        datamodule = datamodule_of(self.trainer)
        callbacks = {
            name: one for name, one in named_callbacks(self.trainer).items() if not isinstance(one, _LEFT_ALONE)
        }
        return {"module": self.module, **({} if datamodule is None else {"datamodule": datamodule}), **callbacks}

    def _skipped(self, owner: object) -> Collection[str]:
        """Return the names of the attributes that others restore; "state_dict" where they restore the object."""
        others = {id(one) for one in self.trainer.optimizers}
        others |= {id(config.scheduler) for config in self.trainer.lr_scheduler_configs}
        others |= {id(vars(one).get("_average_model")) for one in self._averaging()}
        return (*_of_lightning(owner), *(("state_dict",) if id(owner) in others else ()))

    def _extras(self) -> dict[str, Any]:
        """Return what optimizers keep, beside the module whose parameters that may be."""
        return {"module": self.module, **extras_of(self.trainer.optimizers)}

    def _skipped_of_extras(self, owner: object) -> Collection[str]:
        return (*dir(type(owner)), *vars(owner)) if issubclass(type(owner), nn.Module) else self._skipped(owner)

    def _averaging(self) -> list[Callback]:
        """Return the callbacks of Lightning that save the averages that they hold."""
        kind = getattr(lightning.pytorch.callbacks, "WeightAveraging", ())
        return [one for one in callbacks_of(self.trainer) if isinstance(one, kind)]

    def _states_of_callbacks(self, of_each_rank: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for callback in callbacks_of(self.trainer):
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
    if isinstance(callback, ModelPruning):
        return tickets_of(callback)
    tells = getattr(callback, "mid_epoch_state", None)
    return tells() if tells is not None else {}


def _of_lightning(owner: object) -> Collection[str]:
    """Return the names of the attributes that are Lightning's, or callbacks, which are asked by themselves."""
    kind = type(owner)  # a proxy answers `isinstance` as it likes
    if issubclass(kind, LightningModule):
        callbacks = {name for name, value in vars(owner).items() if _is_callbacks(value)}
        return _own_attributes(LightningModule) | {"forward"} | callbacks  # DDP binds `forward` for each step
    if issubclass(kind, LightningDataModule):
        return _own_attributes(LightningDataModule) | {"state_dict"}
    if issubclass(kind, ModelPruning):
        return ("log", "log_dict", "state_dict", "_original_layers")
    return ("log", "log_dict", "state_dict") if issubclass(kind, Callback) else ()


def _is_callbacks(value: object) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return bool(parts) and all(issubclass(type(part), Callback) for part in parts)


@cache
def _own_attributes(kind: type) -> frozenset[str]:
    return frozenset(vars(kind()))
