"""What one rank knows in the middle of a fit and a checkpoint of the Trainer does not hold."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_tricks._lightning_compat.results import capture_loop_state, named_callbacks, restore_loop_state
from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks.auto_resume.attribute_owners import AttributeOwners
from lightning_tricks.auto_resume.callback_state import (
    capture_callback_states,
    restore_callback_states,
    restore_model_checkpoints,
)
from lightning_tricks.auto_resume.core.attributes.attribute_access import set_attribute
from lightning_tricks.auto_resume.core.attributes.model_structure import (
    ModelStructure,
    capture_gradients,
    module_list_types,
    optimizer_extras,
    restore_flags,
    restore_gradients,
    restore_module_lists,
    restore_optimizer_extras,
    restore_param_groups,
    restore_pruning_masks,
)
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeTracker, all_values
from lightning_tricks.auto_resume.core.attributes.uncheckpointed_structure import Outline, differing_parts, outline
from lightning_tricks.auto_resume.core.attributes.unseeded_values import unseeded_values
from lightning_tricks.auto_resume.core.attributes.user_code import reads_gradients
from lightning_tricks.auto_resume.module_state import (
    buffer_digests,
    move_to_device,
    rank_specific_buffers,
    restore_buffers,
    restore_tensors,
    tensor_versions,
    tensors_left_out,
    unsaved_buffer_versions,
)
from lightning_tricks.auto_resume.trainer_settings import TrainerSettings

# An attribute of DDP: whether the next step broadcasts rank zero's buffers; it does unless a validation came before
_SYNC_ATTRIBUTE = "require_forward_param_sync"
REPLACED_MODULE_SUFFIX = "in the fit)"  # of entries of `unsaved_names` for modules that hooks may create again


class RankState:
    """Captures and restores the state of a rank: random numbers, logged values, attributes, buffers, callbacks.

    What has changed is relative to the moment when this object was created, before the hooks of the fit.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.

    Attributes:
        settings: What callbacks may change of the Trainer.
        failed: What could not be restored, and why.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self._structure = ModelStructure(self._modules())
        self._owners = AttributeOwners(trainer, module)
        self._attributes = AttributeTracker(
            self._owners.module_and_callbacks, skipped=self._owners.skipped_names, with_generators=True
        )
        self._optimizer_attributes: AttributeTracker | None = None  # once there are optimizers
        self._had_optimizer_extras = False
        self.settings = TrainerSettings(trainer)
        self._initial_callbacks = set(named_callbacks(trainer))
        self._initial_tensors: dict[str, Any] = {}
        self._unsaved_buffers: dict[str, Any] = {}
        self._reads_gradients, self._known_code = False, dict[int, Any]()
        self.failed: list[str] = []

    def on_fit_start(self, shared_state: Mapping[str, Any]) -> None:
        """Note the optimizers' groups, or restore those of `shared_state`, before the optimizers' states are loaded."""
        self._unsaved_buffers = {name: unsaved_buffer_versions(part) for name, part in self._modules().items()}
        self._initial_tensors = tensor_versions(self.module)
        self.settings.on_fit_start()
        self._structure.record_groups(self.module, self.trainer.optimizers)
        skipped = self._owners.skipped_names_in_optimizers
        self._optimizer_attributes = AttributeTracker(
            self._owners.optimizer_attributes, skipped=skipped, with_code=False
        )
        self._have_optimizers_extras()
        if shared_state.get("groups"):
            restore_param_groups(self.module, self.trainer.optimizers, shared_state["groups"])

    def shared_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is the same on all ranks and a checkpoint lacks, as tensors on the CPU and plain values."""
        changes = self._shared_changes()
        changes["lists"] = module_list_types(self._modules())
        changes["left_out"] = tensors_left_out(self.module, checkpoint["state_dict"], self._initial_tensors)
        return dict(move_to_device(changes, "cpu"))

    def _shared_changes(self) -> dict[str, Any]:
        changes = self._structure.changes(self._modules(), self.module, self.trainer.optimizers)
        return changes | self.settings.changes()

    def note_changes(self, *, after_hooks: bool = False) -> dict[str, Any]:
        """Return `attribute_changes`; all that has changed now is saved from here on, even if it is changed back.

        With `after_hooks`, the hooks were called that a resumed fit calls again before it restores attributes.
        """
        self._shared_changes()
        return self.attribute_changes(after_hooks=after_hooks)

    def attribute_changes(self, *, after_hooks: bool = False) -> dict[str, Any]:
        """Return the attributes that changed, as tensors and plain values."""
        changes = self._attributes.changes(after_hooks=after_hooks)
        if self._optimizer_attributes is not None and self._have_optimizers_extras():
            optimizer_changes = self._optimizer_attributes.changes()
            changes = {
                "values": changes["values"] | self._optimizer_values() | optimizer_changes["values"],
                "lost": changes["lost"] | optimizer_changes["lost"],
            }
        return dict(changes)

    def _have_optimizers_extras(self) -> bool:
        """Whether optimizers hold something beside their state dicts, or did so since the fit started."""
        now = any(vars(extras) for extras in optimizer_extras(self.trainer.optimizers).values())
        self._had_optimizer_extras |= now
        return self._had_optimizer_extras

    def _optimizer_values(self) -> dict[str, Any]:
        """Return what optimizers hold beside their state dicts, also what did not change, such as slow weights.

        Another process creates the optimizers from the weights that it resumes.
        """
        owners, skipped = self._owners.optimizer_attributes(), self._owners.skipped_names_in_optimizers
        values = all_values(owners, skipped=skipped, with_code=False)["values"]
        return {path: one for path, one in values.items() if path.startswith("optimizers.")}

    def capture(self, datasets: Sequence[object] = ()) -> dict[str, Any]:
        """Return the state as tensors on the CPU and plain values; all ranks have to call it.

        Args:
            datasets: The data sets of the training loaders: which attributes hold them is part of the state.
        """
        rng, walk = capture_rng_state(), self._owners.walk()
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
            "gradients": capture_gradients(self.module, self._cleared(walk)),
            "callbacks": capture_callback_states(self.trainer, per_rank=is_distributed),
            "outline": self.outline(),
            "data_held_by": [[path for path, slot in walk.slots.items() if slot.value is one] for one in datasets],
        }
        attributes = {"attributes": self.attribute_changes(), "drawable": self._drawable_values()}
        return {**move_to_device(state, "cpu"), **attributes}

    def outline(self) -> Outline:
        """Return what can be compared and not restored: hooks, tied weights, classes of optimizers and schedulers."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return outline(self._modules(), self.trainer.optimizers, schedulers)

    def unsaved_names(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of what changed and cannot be saved."""
        found = [f"{path} ({kind})" for path, kind in state["attributes"]["lost"].items()]
        initial, now = self._initial_callbacks, {*named_callbacks(self.trainer)}
        for what, names in {"added": now - initial, "removed": initial - now}.items():
            found += [f"{name} (a callback that was {what} {REPLACED_MODULE_SUFFIX}" for name in sorted(names)]
        return found + [f"the parameter {name}" for name in self._structure.new_parameters(self.module)]

    def unrestored(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of what could not be restored of a saved state."""
        return [*self.failed, *saved["not_saved"], *differing_parts(saved.get("outline", {}), self.outline())]

    def drawn_anew(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the attributes that had other values in the saved run, and were not saved, as they did not change."""
        before, now = saved.get("drawable", {}), self._drawable_values()
        restored = (*saved["attributes"]["values"], *saved["attributes"]["lost"])
        others = [path for path in before if path in now and before[path] != now[path]]
        return [path for path in others if not any(path == one or path.startswith(f"{one}.") for one in restored)]

    def _drawable_values(self) -> dict[str, int]:
        """Return digests of the attributes that random numbers may have made."""

        def skipped(owner: object) -> Collection[str]:
            # hyper-parameters are part of the run's identity, and modules of the collection restore what they need
            is_ours = any(base.__module__.startswith("lightning_tricks.") for base in type(owner).__mro__)
            own = [name for name in vars(owner) if name.startswith("_")] if is_ours else ()
            return (*self._owners.skipped_names(owner), "_hparams", "_hparams_initial", *own)

        return unseeded_values(self._owners.module_and_callbacks(), skipped=skipped)

    def detach(self, objects: Sequence[object], holders: Sequence[Sequence[str]]) -> None:
        """Give a copy to each attribute that holds one of the objects, but did not hold it in the stopped run.

        It was set to another object after the loaders had been created. What is restored in it must not change what
        the loaders read.
        """
        slots = self._owners.walk().slots
        for one, known in zip(objects, holders, strict=False):
            others = [slot for path, slot in slots.items() if slot.value is one and path not in known]
            replacement = copy.copy(one) if others else one
            for slot in others:
                set_attribute(slot.owner, slot.name, replacement)

    def restore_attributes(self, changes: Mapping[str, Any], *, before_hooks: bool = False) -> None:
        """Restore attributes.

        With `before_hooks`, attributes of an object of which others could not be saved are left out: a flag which says
        that something was created would keep the hooks from creating it.
        """
        if before_hooks:
            incomplete = {path.rpartition(".")[0] for path in changes["lost"]}
            incomplete |= {one["of"] for one in changes["values"].values() if "by_hooks" in one}
            values = {path: one for path, one in changes["values"].items() if one["of"] not in incomplete}
            changes = {**changes, "values": values}
        self._attributes.note(changes)
        owners, extras = self._owners.module_and_callbacks(), optimizer_extras(self.trainer.optimizers)
        failed = restore_changes({**owners, **extras}, changes, skipped=self._owners.skipped_names)
        restore_optimizer_extras(self.trainer.optimizers, extras)
        removed_callbacks = {
            path for path in failed if path.startswith("callbacks.") and path not in owners and path.count(".") == 1
        }
        self.failed = [f"{path} ({why})" for path, why in failed.items() if path not in removed_callbacks]

    def restore_structure(self, shared_state: Mapping[str, Any]) -> None:
        """Restore pruning masks, parameter groups, training modes, and which parameters require gradients."""
        if shared_state:
            self._structure.note(shared_state)
            self.settings.restore(shared_state)
            restore_module_lists(self._modules(), shared_state["lists"])
            restore_pruning_masks(self.module, shared_state["masks"])
            if shared_state["groups"]:
                restore_param_groups(self.module, self.trainer.optimizers, shared_state["groups"])
            restore_flags(self._modules(), shared_state)
            restore_tensors(self.module, shared_state.get("left_out", {}))

    def restore_epoch_results(self, state: Mapping[str, Any]) -> None:
        """Restore logged values, attributes with metrics, buffers, and the memory of ModelCheckpoint."""
        restore_loop_state(self.trainer, move_to_device(state["trainer"], self.trainer.strategy.root_device))
        self.restore_attributes(state["attributes"])
        for name, module in self._modules().items():
            if name in state["buffers"]:
                restore_buffers(module, state["buffers"][name])
        restore_model_checkpoints(self.trainer, state["callbacks"], self.module.device)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore everything; the random state last."""
        self.restore_epoch_results(state)
        restore_gradients(self.module, state["gradients"])
        self._reads_gradients |= bool(state["gradients"])
        if state["syncs_buffers"] is not None and hasattr(self.trainer.model, _SYNC_ATTRIBUTE):
            setattr(self.trainer.model, _SYNC_ATTRIBUTE, state["syncs_buffers"])
        restore_callback_states(self.trainer, state["callbacks"], self.module.device)
        restore_rng_state(state["rng"])

    def _keeps_gradients(self, walk: ObjectWalk) -> bool:
        """Whether the next step may read the gradients, or add to them, before it clears them."""
        if not self.module.automatic_optimization or is_overridden("optimizer_zero_grad", self.module):
            return True
        if callbacks_of_type(self.trainer, StochasticWeightAveraging):
            return True  # its epoch for batch statistics ends with a step by the gradients of the epoch before
        # optimizers of torch call the closure first, which clears gradients; another one may climb along them before
        is_unknown = any(not type(one).__module__.startswith("torch.optim.") for one in self.trainer.optimizers)
        self._reads_gradients = (
            self._reads_gradients or is_unknown or reads_gradients(self._owners.called_in_steps(walk), self._known_code)
        )
        return self._reads_gradients

    def _cleared(self, walk: ObjectWalk) -> set[int]:
        """Return the ids of the parameters whose gradients the next step clears."""
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        return set() if self._keeps_gradients(walk) else {id(one) for group in groups for one in group["params"]}

    def _modules(self) -> dict[str, nn.Module]:
        """Return the module that is trained, and the modules that callbacks hold, such as metrics."""
        found: dict[str, nn.Module] = {"": self.module}
        for where, callback in named_callbacks(self.trainer).items():
            held = {f"{where}.{name}": value for name, value in vars(callback).items() if isinstance(value, nn.Module)}
            found |= {name: value for name, value in held.items() if value is not self.module}
        return found
