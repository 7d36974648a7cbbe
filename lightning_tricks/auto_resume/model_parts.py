"""The parts of a fit's state that its model holds, and the modules of its callbacks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._lightning_compat.results import named_callbacks
from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.attribute_parts import AttributeOwners
from lightning_tricks.auto_resume.core.attributes.model_structure import (
    ModelStructure,
    capture_gradients,
    module_list_types,
    resize_to_state_dict,
    restore_flags,
    restore_gradients,
    restore_module_lists,
    restore_param_groups,
    restore_pruning_masks,
)
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.attributes.uncheckpointed_structure import Outline, differing_parts, outline
from lightning_tricks.auto_resume.core.attributes.user_code import reads_gradients
from lightning_tricks.auto_resume.parts import (
    ComparedPart,
    Part,
    Phase,
    SavedState,
    move_to_device,
    state_dict_tensors,
)

# An attribute of DDP: whether the next step broadcasts rank zero's buffers; it does unless a validation came before
_SYNC_ATTRIBUTE = "require_forward_param_sync"
# Batch normalization changes these without another version of the tensor
_RUNNING_STATISTICS = ("running_mean", "running_var")
_TensorVersion = tuple["ref[Tensor]", int]  # an id alone may belong to another tensor later


def modules_of(trainer: Trainer, module: LightningModule) -> dict[str, nn.Module]:
    """Return the module that is trained under "", and the modules that callbacks hold, such as metrics, by paths."""
    found: dict[str, nn.Module] = {"": module}
    for path, callback in named_callbacks(trainer).items():
        held = {f"{path}.{name}": value for name, value in vars(callback).items() if isinstance(value, nn.Module)}
        found |= {name: value for name, value in held.items() if value is not module}
    return found


class Structure(Part):
    """Pruning masks, parameter groups, training modes, which parameters require gradients, and lists that grow."""

    name = "structure"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self._structure = ModelStructure(modules_of(trainer, module))

    def note(self, phase: Phase) -> None:
        """Note the groups of the optimizers as soon as there are some, and what hooks changed."""
        if phase is Phase.FIT_START:
            self._structure.record_groups(self.module, self.trainer.optimizers)
        elif phase in (Phase.BEFORE_HOOKS, Phase.AFTER_HOOKS):
            self._changes()

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is other than at first, or was so at an earlier call."""
        lists = module_list_types(modules_of(self.trainer, self.module))
        return {**dict(move_to_device(self._changes(), "cpu")), "lists": lists}

    def unsaved(self, captured: Mapping[str, Any]) -> list[str]:
        """Return the parameters that were added."""
        return [f"the parameter {name}" for name in self._structure.new_parameters(self.module)]

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the groups before the states of the optimizers are loaded, and later all of it."""
        groups = saved.shared["groups"]
        if phase is not Phase.FIT_START:
            self._structure.note(saved.shared)
            modules = modules_of(self.trainer, self.module)
            restore_module_lists(modules, saved.shared["lists"])
            restore_pruning_masks(self.module, saved.shared["masks"])
            restore_flags(modules, saved.shared)
        if groups:  # after the masks, which replace parameters
            restore_param_groups(self.module, self.trainer.optimizers, groups)

    def _changes(self) -> dict[str, Any]:
        modules = modules_of(self.trainer, self.module)
        return self._structure.changes(modules, self.module, self.trainer.optimizers)


class LeftOutTensors(Part):
    """Parameters and buffers that changed and that a hook such as `on_save_checkpoint` left out of the state dict."""

    name = "left_out"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self._initial: dict[str, _TensorVersion] = {}

    def note(self, phase: Phase) -> None:
        """Note what there is at the fit's start."""
        if phase is Phase.FIT_START:
            self._initial = _versions(_tensors(self.module))

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors by name; those in the state dict may have other names there."""
        in_checkpoint = {value.data_ptr() for value in checkpoint["state_dict"].values() if _has_data(value)}
        names = {*dict(self.module.named_parameters()), *nn.Module.state_dict(self.module)}  # others: see Buffers
        found = {
            name: value
            for name, value in _tensors(self.module).items()
            if name in names
            and _has_data(value)
            and value.data_ptr() not in in_checkpoint
            and not _is_unchanged(name, value, self._initial.get(name))
        }
        return {"left_out": move_to_device(found, "cpu")}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the tensors; at the fit's start, weights that were loaded in another precision."""
        if phase is not Phase.FIT_START:
            _restore_tensors(self.module, saved.shared.get("left_out", {}))
            return
        with torch.no_grad():
            for name, value in state_dict_tensors(self.module.state_dict()).items():
                if name in saved.weights:
                    value.copy_(saved.weights[name])


class Buffers(ComparedPart):
    """The buffers that a rank cannot get from rank zero's checkpoint.

    These are buffers that are not in the state dict and were changed, and, on other ranks, those that differ from rank
    zero's: without SyncBatchNorm each rank has statistics of its own.
    """

    name = "buffers"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self._initial: dict[str, dict[str, _TensorVersion]] = {}

    def note(self, phase: Phase) -> None:
        """Note what there is at the fit's start."""
        if phase is Phase.FIT_START:
            modules = modules_of(self.trainer, self.module)
            self._initial = {path: _versions(_buffers_not_saved(module)) for path, module in modules.items()}

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the buffers of the module and of modules that callbacks hold."""
        modules = modules_of(self.trainer, self.module)
        found = {
            path: {
                name: value
                for name, value in _buffers_not_saved(module).items()
                if not _is_unchanged(name, value, self._initial.get(path, {}).get(name))
            }
            for path, module in modules.items()
        }
        if self.trainer.world_size > 1:
            own = {path: dict(module.named_buffers()) for path, module in modules.items()}
            digests = {path: {name: _digest(value) for name, value in buffers.items()} for path, buffers in own.items()}
            of_rank_zero = self.trainer.strategy.broadcast(digests)
            for path, buffers in own.items():
                known = of_rank_zero.get(path, {})
                differing = [name for name in buffers if digests[path][name] != known.get(name, digests[path][name])]
                found[path] |= {name: buffers[name] for name in differing}
        syncs = getattr(self.trainer.model, _SYNC_ATTRIBUTE, None)
        return {"buffers": move_to_device(found, "cpu"), "syncs_buffers": syncs}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the buffers, also those that were added or have another shape."""
        for path, module in modules_of(self.trainer, self.module).items():
            buffers = saved.rank["buffers"].get(path, {})
            resize_to_state_dict(module, buffers, list(buffers))
            _restore_tensors(module, buffers)
        syncs = saved.rank["syncs_buffers"]
        if phase is not Phase.RESULTS and syncs is not None and hasattr(self.trainer.model, _SYNC_ATTRIBUTE):
            setattr(self.trainer.model, _SYNC_ATTRIBUTE, syncs)


class Gradients(ComparedPart):
    """The gradients that the next step may read, or add to, before it clears them.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.
        owners: The objects whose code a step may call.
    """

    name = "gradients"

    def __init__(self, trainer: Trainer, module: LightningModule, owners: AttributeOwners) -> None:
        super().__init__(trainer, module)
        self._owners = owners
        self._are_read, self._known_code = False, dict[int, Any]()

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the gradients by the names of the parameters."""
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        is_kept = self._may_be_read(walk)
        cleared = set() if is_kept else {id(parameter) for group in groups for parameter in group["params"]}
        return {"gradients": move_to_device(capture_gradients(self.module, cleared), "cpu")}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the gradients, and that they are read."""
        restore_gradients(self.module, saved.rank["gradients"])
        self._are_read |= bool(saved.rank["gradients"])

    def _may_be_read(self, walk: ObjectWalk) -> bool:
        if not self.module.automatic_optimization or is_overridden("optimizer_zero_grad", self.module):
            return True
        if callbacks_of_type(self.trainer, StochasticWeightAveraging):
            return True  # its epoch for batch statistics ends with a step by the gradients of the epoch before
        # optimizers of torch call the closure first, which clears gradients; another one may climb along them before
        kinds = [type(optimizer) for optimizer in self.trainer.optimizers]
        is_unknown = any(not kind.__module__.startswith("torch.optim.") for kind in kinds)
        self._are_read = (
            self._are_read or is_unknown or reads_gradients(self._owners.called_in_steps(walk), self._known_code)
        )
        return self._are_read


class UnsavedOutline(Part):
    """What can be compared and not restored: hooks, tied weights, classes of optimizers and schedulers."""

    name = "outline"

    def now(self) -> Outline:
        """Return the outline of what there is now."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return outline(modules_of(self.trainer, self.module), self.trainer.optimizers, schedulers)

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the outline."""
        return {"outline": self.now()}

    def differences(self, saved: SavedState, now: Mapping[str, Any]) -> Iterable[str]:
        """Return what differs, in words."""
        return differing_parts(saved.rank.get("outline", {}), now["outline"])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _buffers_not_saved(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict().keys()
    return {name: value for name, value in module.named_buffers() if name not in saved}


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, _TensorVersion]:
    """Return what tells later whether tensors changed."""
    return {name: (ref(value), tensor_version(value)) for name, value in tensors.items()}


def _is_unchanged(name: str, value: Tensor, version: _TensorVersion | None) -> bool:
    if name.rpartition(".")[2] in _RUNNING_STATISTICS:
        return False
    return version is not None and version[0]() is value and version[1] == tensor_version(value)


def _restore_tensors(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy saved parameters and buffers into those that have the same names and shapes."""
    own = _tensors(module)
    with torch.no_grad():
        for name, value in saved.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)


def _has_data(value: Any) -> bool:
    is_plain = isinstance(value, Tensor) and not is_lazy(value) and value.layout is torch.strided
    return is_plain and value.device.type != "meta" and value.numel() > 0


def _digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha1(flat.view(torch.uint8).numpy().tobytes(), usedforsecurity=False).hexdigest()
