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
from lightning_tricks._lightning_compat.checkpoints import checkpoint_callback_state, restore_checkpoint_callback_state
from lightning_tricks._lightning_compat.results import capture_loop_state, named_callbacks, restore_loop_state
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks.auto_resume.core.attributes.model_structure import (
    ModelStructure,
    capture_gradients,
    restore_flags,
    restore_gradients,
    restore_param_groups,
    restore_pruning_masks,
)
from lightning_tricks.auto_resume.core.attributes.module_lists import module_list_types, restore_module_lists
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeTracker
from lightning_tricks.auto_resume.core.attributes.unsaved_states import optimizer_extras, restore_optimizer_extras
from lightning_tricks.auto_resume.lottery_tickets import capture_lottery_tickets, restore_lottery_tickets
from lightning_tricks.auto_resume.module_state import (
    buffer_digests,
    move_to_device,
    rank_specific_buffers,
    restore_buffers,
    unsaved_buffer_versions,
)

# Whose attributes are of the process, or are restored by their own part of this room
_EXCLUDED_CALLBACKS = (
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
_SYNC_ATTRIBUTE = "require_forward_param_sync"
REPLACED_MODULE_SUFFIX = "in the fit)"  # ends what `unsaved_names` says of modules that hooks may make again
_TRAINER_SETTINGS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "limit_val_batches")


class RankState:
    """Collects and restores what a rank knows: streams, logged values, attributes, buffers, structure, callbacks.

    What changed is told from what was there when this was made, before the hooks of the fit.

    Args:
        trainer: That fits.
        module: That is fitted.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self._structure = ModelStructure(self._modules())
        self._attributes = AttributeTracker(self._owners, skipped=self._skipped_names)
        self._optimizer_attributes: AttributeTracker | None = None  # from when there are optimizers
        self._initial_settings = self._trainer_settings()
        self._unsaved_buffers: dict[str, Any] = {}
        self.failed: list[str] = []  # what could not be put back, and why

    def on_fit_start(self, shared_state: Mapping[str, Any]) -> None:
        """Note the optimizers' groups, or put them back, before their states load; `shared_state` is of the save."""
        self._unsaved_buffers = {name: unsaved_buffer_versions(part) for name, part in self._modules().items()}
        self._structure.record_groups(self.module, self.trainer.optimizers)
        self._optimizer_attributes = AttributeTracker(self._extras, skipped=self._skipped_names_of_extras)
        if shared_state.get("groups"):
            restore_param_groups(self.module, self.trainer.optimizers, shared_state["groups"])

    def shared_state(self) -> dict[str, Any]:
        """Return what is the same on all ranks, as tensors on the CPU and plain values."""
        changes = self._structure.changes(self._modules(), self.module, self.trainer.optimizers)
        changes["lists"] = module_list_types(self._modules())
        now = self._trainer_settings()
        changes["settings"] = {name: value for name, value in now.items() if value != self._initial_settings[name]}
        return dict(move_to_device(changes, "cpu"))

    def attribute_changes(self) -> dict[str, Any]:
        """Return the attributes that changed, as tensors and plain values."""
        changes = self._attributes.changes()
        if self._optimizer_attributes is not None:
            optimizer_changes = self._optimizer_attributes.changes()
            changes = {
                "values": changes["values"] | optimizer_changes["values"],
                "lost": changes["lost"] | optimizer_changes["lost"],
            }
        return dict(changes)

    def capture(self) -> dict[str, Any]:
        """Return the state as tensors on the CPU and plain values; all ranks have to call it."""
        rng = capture_rng_state()
        modules, is_distributed = self._modules(), self.trainer.world_size > 1
        digests = {name: buffer_digests(module) for name, module in modules.items()} if is_distributed else {}
        rank_zero_digests = self.trainer.strategy.broadcast(digests)
        state = {
            "rng": rng,
            "trainer": capture_loop_state(self.trainer),
            "buffers": {
                name: rank_specific_buffers(
                    module, self._unsaved_buffers.get(name, {}), rank_zero_digests.get(name, {})
                )
                for name, module in modules.items()
            },
            "syncs_buffers": getattr(self.trainer.model, _SYNC_ATTRIBUTE, None),
            "gradients": capture_gradients(self.module) if self._accumulates_gradients() else {},
            "callbacks": self._callback_states(per_rank=is_distributed),
        }
        return {**move_to_device(state, "cpu"), "attributes": self.attribute_changes()}

    def unsaved_names(self, state: Mapping[str, Any]) -> list[str]:
        """Say what changed and cannot be saved."""
        found = [f"{path} ({kind})" for path, kind in state["attributes"]["lost"].items()]
        return found + [f"the parameter {name}" for name in self._structure.new_parameters(self.module)]

    def restore_attributes(self, changes: Mapping[str, Any], *, before_hooks: bool = False) -> None:
        """Put attributes back.

        With `before_hooks`, leave those out that belong to an object which lacks others: a flag that says that
        something was made would keep the hooks from making it.
        """
        if before_hooks:
            incomplete = {path.rpartition(".")[0] for path in changes["lost"]}
            values = {path: one for path, one in changes["values"].items() if one["of"] not in incomplete}
            changes = {**changes, "values": values}
        owners, extras = self._owners(), optimizer_extras(self.trainer.optimizers)
        failed = restore_changes({**owners, **extras}, changes, skipped=self._skipped_names)
        restore_optimizer_extras(self.trainer.optimizers, extras)
        removed = {
            path for path in failed if path.startswith("callbacks.") and path not in owners and path.count(".") == 1
        }
        self.failed = [f"{path} ({why})" for path, why in failed.items() if path not in removed]  # a callback taken out

    def restore_structure(self, shared_state: Mapping[str, Any]) -> None:
        """Put back masks, groups, modes, and what takes gradients."""
        if shared_state:
            restore_module_lists(self._modules(), shared_state["lists"])
            restore_pruning_masks(self.module, shared_state["masks"])
            if shared_state["groups"]:
                restore_param_groups(self.module, self.trainer.optimizers, shared_state["groups"])
            restore_flags(self._modules(), shared_state)
            for name, value in shared_state["settings"].items():
                setattr(self.trainer, name, value)

    def restore_epoch_results(self, state: Mapping[str, Any]) -> None:
        """Put logged values, attributes, metrics among them, and buffers back."""
        restore_loop_state(self.trainer, move_to_device(state["trainer"], self.trainer.strategy.root_device))
        self.restore_attributes(state["attributes"])
        for name, module in self._modules().items():
            if name in state["buffers"]:
                restore_buffers(module, state["buffers"][name])
        for callback in callbacks_of(self.trainer):
            if isinstance(callback, ModelCheckpoint):
                checkpoint_state = state["callbacks"].get(callback.state_key, {}).get("in_epoch", {})
                restore_checkpoint_callback_state(callback, move_to_device(checkpoint_state, self.module.device))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put all back; the streams last."""
        self.restore_epoch_results(state)
        restore_gradients(self.module, state["gradients"])
        if state["syncs_buffers"] is not None and hasattr(self.trainer.model, _SYNC_ATTRIBUTE):
            setattr(self.trainer.model, _SYNC_ATTRIBUTE, state["syncs_buffers"])
        callbacks: list[Any] = callbacks_of(self.trainer)
        for callback in callbacks:
            states = state["callbacks"].get(callback.state_key, {})
            if states.get("state_dict"):
                callback.load_state_dict(states["state_dict"])
            if isinstance(callback, ModelPruning):
                restore_lottery_tickets(callback, move_to_device(states.get("in_epoch", {}), self.module.device))
            elif states.get("in_epoch") and not isinstance(callback, ModelCheckpoint):
                callback.load_mid_epoch_state(move_to_device(states["in_epoch"], self.module.device))
        restore_rng_state(state["rng"])

    def _trainer_settings(self) -> dict[str, Any]:
        """Return what callbacks set at the Trainer while it runs."""
        return {name: getattr(self.trainer, name) for name in _TRAINER_SETTINGS}

    def _accumulates_gradients(self) -> bool:
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
            name: one for name, one in named_callbacks(self.trainer).items() if not isinstance(one, _EXCLUDED_CALLBACKS)
        }
        return {"module": self.module, **({} if datamodule is None else {"datamodule": datamodule}), **callbacks}

    def _skipped_names(self, owner: object) -> Collection[str]:
        """Return the names of the attributes that others restore; "state_dict" where they restore the object."""
        others = {id(one) for one in self.trainer.optimizers}
        others |= {id(config.scheduler) for config in self.trainer.lr_scheduler_configs}
        others |= {id(vars(one).get("_average_model")) for one in self._weight_averaging_callbacks()}
        return (*_lightning_attributes(owner), *(("state_dict",) if id(owner) in others else ()))

    def _extras(self) -> dict[str, Any]:
        """Return what optimizers keep, beside the module whose parameters that may be."""
        return {"module": self.module, **optimizer_extras(self.trainer.optimizers)}

    def _skipped_names_of_extras(self, owner: object) -> Collection[str]:
        return (*dir(type(owner)), *vars(owner)) if issubclass(type(owner), nn.Module) else self._skipped_names(owner)

    def _weight_averaging_callbacks(self) -> list[Callback]:
        """Return the callbacks of Lightning that save the averages that they hold."""
        kind = getattr(lightning.pytorch.callbacks, "WeightAveraging", ())
        return [one for one in callbacks_of(self.trainer) if isinstance(one, kind)]

    def _callback_states(self, per_rank: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for callback in callbacks_of(self.trainer):
            state = {
                "in_epoch": _extra_callback_state(callback),
                "state_dict": callback.state_dict() if per_rank else {},
            }
            if any(state.values()):
                found[callback.state_key] = state
        return found


def _extra_callback_state(callback: Callback) -> dict[str, Any]:
    """Return what a callback remembers beside its state dict."""
    if isinstance(callback, ModelCheckpoint):
        return checkpoint_callback_state(callback)
    if isinstance(callback, ModelPruning):
        return capture_lottery_tickets(callback)
    get_state = getattr(callback, "mid_epoch_state", None)
    return get_state() if get_state is not None else {}


def _lightning_attributes(owner: object) -> Collection[str]:
    """Return the names of the attributes that are Lightning's, or callbacks, which are asked by themselves."""
    kind = type(owner)  # a proxy answers `isinstance` as it likes
    if issubclass(kind, LightningModule):
        callbacks = {name for name, value in vars(owner).items() if _contains_callbacks_only(value)}
        return _default_attributes(LightningModule) | {"forward"} | callbacks  # DDP binds `forward` for each step
    if issubclass(kind, LightningDataModule):
        return _default_attributes(LightningDataModule) | {"state_dict"}
    if issubclass(kind, ModelPruning):
        return ("log", "log_dict", "state_dict", "_original_layers")
    return ("log", "log_dict", "state_dict") if issubclass(kind, Callback) else ()


def _contains_callbacks_only(value: object) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return bool(parts) and all(issubclass(type(part), Callback) for part in parts)


@cache
def _default_attributes(kind: type) -> frozenset[str]:
    return frozenset(vars(kind()))
