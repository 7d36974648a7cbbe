"""The parts of a fit's state that its model holds, and the modules of its callbacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_tricks._lightning_compat.ddp import rebuilding_ddp
from lightning_tricks._lightning_compat.flavor import LightningModule, StochasticWeightAveraging, Trainer, is_overridden
from lightning_tricks._lightning_compat.results import named_callbacks
from lightning_tricks._lightning_compat.trainer import callbacks_of_type, model_averager
from lightning_tricks._shared.patterns import name_as_in_, strip_compile_prefix
from lightning_tricks._shared.tensors import is_sharded, local_part, named_tensors
from lightning_tricks._torch_compat.distributed import bucket_order, set_bucket_order
from lightning_tricks._torch_compat.modules import communication_hooks, hooks_of
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.attributes.attribute_access import attributes
from lightning_tricks.auto_resume.core.attributes.model_structure import (
    module_flags,
    param_group_names,
    pruning_masks,
    resize_to_state_dict,
    restore_flags,
    restore_param_groups,
    restore_pruning_masks,
    restore_tracker_steps,
    tracker_steps,
)
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.parts import (
    ChangedValues,
    ComparedPart,
    Part,
    Phase,
    SavedState,
    SavePoint,
    move_to_device,
    state_dict_tensors,
)

# An attribute of DDP: whether the next step broadcasts rank zero's buffers; it does unless a validation came before
_SYNC_ATTRIBUTE = "require_forward_param_sync"
# Batch normalization changes these without another version of the tensor
# pytorch #13402: the kernels write into them directly.
_RUNNING_STATISTICS = ("running_mean", "running_var")
# The keys of an outline, and how their entries are named to users
_OUTLINE_WORDS = {
    "hooks": "the hooks of",
    "tied": "the tied weights",
    "precisions": "the number of weights in",
    "optimizers": "the class of optimizer",
    "schedulers": "the class of learning rate scheduler",
}
ORDER_OF_SUMS = "the order in which DDP adds the first gradients"
_OPTIMIZER = "optimizer "  # begins the name of an optimizer
_INTEGERS = {1: torch.int8, 2: torch.int16}  # by the size of elements that do not have four bytes, or eight
_CHUNK = 2**18  # elements that are summed at once, in a cache
_TensorVersion = tuple["ref[Tensor]", int]  # an id alone may belong to another tensor later


def modules_of(trainer: Trainer, module: LightningModule) -> dict[str, nn.Module]:
    """Return the module that is trained under "", and the modules that callbacks hold, such as metrics, by paths."""
    found: dict[str, nn.Module] = {"": module}
    for path, callback in named_callbacks(trainer).items():
        # Lightning saves the state dict of the trained module alone: metrics that a callback holds would begin anew.
        held = {f"{path}.{name}": value for name, value in vars(callback).items() if isinstance(value, nn.Module)}
        found |= {name: value for name, value in held.items() if value is not module}
    return found


class Structure(Part):
    """Pruning masks, parameter groups, training modes, which parameters require gradients, and tracked metrics."""

    name = "structure"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        modules = modules_of(trainer, module)
        # Only what is changed after this is saved, so that what the next start's script sets otherwise holds there.
        self._flags = {path: ChangedValues(module_flags(part)) for path, part in modules.items()}
        self._buffers = {name for name, _ in module.named_buffers()}
        self._parameters = {name for name, _ in module.named_parameters()}
        self._groups: list[list[list[str]]] = []
        self._has_other_groups = False

    def note(self, phase: Phase) -> None:
        """Note the groups of the optimizers as soon as there are some, and what hooks changed."""
        if phase is Phase.FIT_START:
            self._groups = param_group_names(self.module, self.trainer.optimizers)
            self._parameters = {
                name for name, _ in self.module.named_parameters()
            }  # configure_optimizers may make some
        elif phase in (Phase.BEFORE_HOOKS, Phase.AFTER_HOOKS):
            self.capture_shared({})

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is other than at first, or was so at an earlier call."""
        modules, masks = modules_of(self.trainer, self.module), pruning_masks(self.module)
        groups = param_group_names(self.module, self.trainer.optimizers)
        # a masked module registers its parameters in another order, in which a fresh process gives them to optimizers
        self._has_other_groups |= groups != self._groups or bool(masks)
        return {
            "flags": {path: self._flags_of(path).changes(module_flags(part)) for path, part in modules.items()},
            "groups": groups if self._has_other_groups else None,
            "masks": move_to_device(masks, "cpu"),
            "buffers": [name for name, _ in self.module.named_buffers() if name not in self._buffers],
            "trackers": tracker_steps(modules),
        }

    def unsaved(self, captured: Mapping[str, Any]) -> list[str]:
        """Return the parameters that were added, which a resumed run's module lacks when weights are loaded."""
        # torch.nn.utils.prune renames what it masks; that is restored with the masks, and not lost.
        known = self._parameters | {f"{name}_orig" for name in pruning_masks(self.module)}
        return [f"the parameter {name}" for name, _ in self.module.named_parameters() if name not in known]

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the groups before the states of the optimizers are loaded, and later all of it."""
        groups = saved.shared["groups"]
        if phase is not Phase.FIT_START:
            modules, flags = modules_of(self.trainer, self.module), saved.shared["flags"]
            self._has_other_groups |= groups is not None
            for path, names in flags.items():
                self._flags_of(path).note(names)
            restore_tracker_steps(modules, saved.shared["trackers"])
            restore_pruning_masks(self.module, saved.shared["masks"])
            restore_flags(modules, flags)
        if groups:  # after the masks, which replace parameters
            restore_param_groups(self.module, self.trainer.optimizers, groups)

    def _flags_of(self, path: str) -> ChangedValues:
        return self._flags.setdefault(path, ChangedValues({}))


class LeftOutTensors(Part):
    """Parameters and buffers that changed and that a hook such as `on_save_checkpoint` left out of the state dict."""

    name = "left_out"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self._initial: dict[str, _TensorVersion] = {}

    def note(self, phase: Phase) -> None:
        """Note what there is at the fit's start."""
        if phase is Phase.FIT_START:
            self._initial = _versions(named_tensors(self.module))

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors by name; those in the state dict may have other names there."""
        # By their memory: a hook may rename entries, and `state_dict` detaches, so that no object is the same.
        in_checkpoint = {_place(value) for value in checkpoint["state_dict"].values() if _has_data(value)}
        names = {*dict(self.module.named_parameters()), *nn.Module.state_dict(self.module)}  # others: see RankTensors
        found = {
            name: value
            for name, value in named_tensors(self.module).items()
            if name in names
            and _has_data(value)
            and _place(value) not in in_checkpoint
            and not _is_unchanged(name, value, self._initial.get(name))
        }
        return {"left_out": move_to_device(found, "cpu")}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the tensors; at the fit's start, weights that were loaded in another precision."""
        if phase is not Phase.FIT_START:
            _copy_tensors(named_tensors(self.module), saved.shared["left_out"])
            return
        with torch.no_grad():
            # `load_state_dict` casts to the precision that parameters have then, and hooks may change it later: bits
            # would be lost.
            for name, value in state_dict_tensors(self.module.state_dict()).items():
                if name in saved.weights:
                    value.copy_(saved.weights[name])


class RankTensors(ComparedPart):
    """The tensors that a rank cannot get from rank zero's checkpoint.

    These are buffers that are not in the state dict and were changed, and, on other ranks, what differs from rank
    zero's: without SyncBatchNorm each rank has statistics of its own; parameters that DDP ignores and the replicas of
    local SGD are trained by each rank for itself, with their states in the optimizers.
    """

    name = "rank_tensors"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self._initial: dict[str, dict[str, _TensorVersion]] = {}

    def note(self, phase: Phase) -> None:
        """Note what there is at the fit's start."""
        if phase is Phase.FIT_START:
            modules = modules_of(self.trainer, self.module)
            self._initial = {path: _versions(_buffers_not_saved(module)) for path, module in modules.items()}

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return tensors of the module and of modules that callbacks hold, and of the optimizers."""
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
            own = {path: named_tensors(module) for path, module in modules.items()} | self._optimizer_tensors()
            # A number for each tensor is sent instead of all weights, which are equal as a rule.
            sums = {path: checksums(tensors) for path, tensors in own.items()}
            of_rank_zero = self.trainer.strategy.broadcast(sums)
            for path, known in sums.items():
                first = of_rank_zero.get(path, {})
                others = {name: own[path][name] for name, value in known.items() if first.get(name) != value}
                found[path] = found.get(path, {}) | others
        # torch's DDP sets it in each forward pass (`_post_forward`), to False in one without gradients: after a
        # validation, the next step does not send rank zero's buffers.
        syncs = getattr(self.trainer.model, _SYNC_ATTRIBUTE, None)
        return {self.name: move_to_device(found, "cpu"), "syncs_buffers": syncs}

    def _optimizer_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the optimizers' states, by the names of their parameters."""
        names = {id(value): strip_compile_prefix(name) for name, value in self.module.named_parameters()}
        return {
            f"{_OPTIMIZER}{number}": {
                f"{names[id(parameter)]}:{key}": value
                for parameter, state in optimizer.state.items()
                if id(parameter) in names and isinstance(state, dict)
                for key, value in state.items()
                if isinstance(value, Tensor) and isinstance(key, str)
            }
            for number, optimizer in enumerate(self.trainer.optimizers)
            if not hasattr(optimizer, "consolidate_state_dict")  # ZeRO's, of which each rank has a part
        }

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the tensors, also buffers that were added or have another shape; reset the metrics of a new rank."""
        own: Mapping[str, Any] = saved.rank[self.name]
        for path, module in modules_of(self.trainer, self.module).items():
            tensors = dict(own.get(path, {}))
            name_as_in_(tensors, named_tensors(module))
            # Lists of metrics grow in an epoch: torch refuses to load tensors of another shape, even with
            # `strict=False`.
            resize_to_state_dict(module, tensors, list(tensors))
            _copy_tensors(named_tensors(module), tensors)
            # A rank that is new has no samples of this epoch; its metric would count those of the rank whose state it
            # took.
            is_counted_elsewhere = self.trainer.global_rank >= saved.world_size and phase is not Phase.RESULTS
            for part in module.modules() if is_counted_elsewhere else ():
                if isinstance(part, Metric):
                    part.reset()
        parameters = {strip_compile_prefix(name): value for name, value in self.module.named_parameters()}
        for number, optimizer in enumerate(self.trainer.optimizers):
            for place, value in own.get(f"{_OPTIMIZER}{number}", {}).items():
                name, _, key = place.rpartition(":")
                if name in parameters:  # counts of steps are on the CPU
                    state, device = optimizer.state[parameters[name]], parameters[name].device
                    state[key] = value.to(state[key].device if key in state else device if value.dim() else "cpu")
        syncs = saved.rank["syncs_buffers"]
        if phase is not Phase.RESULTS and syncs is not None and hasattr(self.trainer.model, _SYNC_ATTRIBUTE):
            setattr(self.trainer.model, _SYNC_ATTRIBUTE, syncs)


class Communication(ComparedPart):
    """The numbers that DDP's communication hooks and averages of replicas count, such as their iterations."""

    name = "communication"

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the numbers of each object."""
        # torch saves none of it: PowerSGD, for one, compresses from iteration 1,000 on (`start_powerSGD_iter`), and
        # would begin to count anew.
        counting = map(attributes, self._objects())
        return {self.name: [{name: value for name, value in own if _is_number(value)} for own in counting]}

    def unsaved(self, captured: Mapping[str, Any]) -> list[str]:
        """Return the states of hooks that hold more, by bucket: a process that begins has other buckets."""
        return [
            f"the {type(state).__name__} of a communication hook"
            for state in self._objects()
            if any(_may_change(value) for _, value in attributes(state))
        ]

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the numbers."""
        for counting, numbers in zip(self._objects(), saved.rank[self.name], strict=False):
            for name, value in numbers.items():
                setattr(counting, name, value)

    def _objects(self) -> list[Any]:
        found = [state for _, state in communication_hooks(self.trainer.model)]
        return [value for value in (*found, model_averager(self.trainer)) if value is not None]


class BucketOrder(Part):
    """The order in which DDP adds gradients over ranks: a process that begins has another one in its first step."""

    name = "buckets"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self._is_restored = False

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the order of the next step."""
        wrapper = rebuilding_ddp(self.trainer)
        order = bucket_order(wrapper) if wrapper is not None else []
        return {self.name: order} if self.trainer.is_global_zero else {}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the order, at an epoch's start before the hooks, which may let DDP wrap the module anew."""
        is_before_hooks, is_epoch_start = phase is Phase.BEFORE_HOOKS, saved.save_point is SavePoint.EPOCH_START
        if phase is not Phase.CONTINUED and is_before_hooks != is_epoch_start:
            return
        wrapper, order = rebuilding_ddp(self.trainer), saved.rank_zero.get(self.name)
        if wrapper is not None and not saved.world_size_changed and order is not None:
            self._is_restored = not order or set_bucket_order(wrapper, order)

    def differences(self, saved: SavedState, now: Mapping[str, Any]) -> Iterable[str]:
        """Return a name for the order if it is another one than in a run that was not stopped."""
        if self._is_restored or saved.world_size_changed or not self.trainer.global_step:
            return []
        # what a hook keeps by buckets on two ranks is named by `Communication`
        return [ORDER_OF_SUMS] if self.trainer.world_size > 2 and rebuilding_ddp(self.trainer) is not None else []


class Gradients(ComparedPart):
    """The gradients that the next step may read, or add to, before it clears them."""

    name = "gradients"

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the gradients by the names of the parameters."""
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        is_kept = self._may_be_read()
        # The closure of automatic optimization calls `zero_grad` before the backward pass (automatic.py): these are
        # never read, and are as large as the model.
        cleared = set() if is_kept else {id(parameter) for group in groups for parameter in group["params"]}
        kept = {name: value.grad for name, value in self.module.named_parameters() if id(value) not in cleared}
        found = {name: gradient for name, gradient in kept.items() if gradient is not None}
        return {"gradients": move_to_device(found, "cpu")}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the gradients."""
        gradients = dict(saved.rank["gradients"])
        name_as_in_(gradients, dict(self.module.named_parameters()))
        for name, parameter in self.module.named_parameters():
            # None, not zero: an optimizer leaves a parameter without a gradient alone, and decays one with a gradient
            # of zeros.
            parameter.grad = gradients[name].to(parameter.device) if name in gradients else None

    def _may_be_read(self) -> bool:
        # Then it is the user's code that clears them, or does not.
        if not self.module.automatic_optimization or is_overridden("optimizer_zero_grad", self.module):
            return True
        if callbacks_of_type(self.trainer, StochasticWeightAveraging):
            return True  # its epoch for batch statistics ends with a step by the gradients of the epoch before
        # optimizers of torch, and CombinedOptimizer, call the closure first, which clears gradients; another one may
        # climb along them before
        kinds = [type(optimizer) for optimizer in self.trainer.optimizers]
        return any(not kind.__module__.startswith(("torch.optim.", "lightning_tricks.")) for kind in kinds)


class UnsavedOutline(Part):
    """What can be compared and not restored: hooks, tied weights, precisions, classes of optimizers and schedulers."""

    name = "outline"

    def now(self) -> dict[str, dict[str, Any]]:
        """Return the outline of what there is now, as plain values."""
        optimizers = self.trainer.optimizers
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        owners = {
            path: owner
            for name, module in modules_of(self.trainer, self.module).items()
            for pairs in (module.named_modules(prefix=name), module.named_parameters(prefix=name))
            for path, owner in pairs
        }
        owners |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)}
        hooks = {path or "the module": _hook_names(owner) for path, owner in owners.items()}
        # Else torch leaves out the second name of a tied weight.
        parameters = list(self.module.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in reversed(parameters)}
        return {
            "hooks": {path: names for path, names in hooks.items() if names},
            "tied": {name: first[id(value)] for name, value in parameters if first[id(value)] != name},
            "precisions": dict(Counter(str(parameter.dtype) for _, parameter in parameters)),
            "optimizers": {str(number): type(value).__qualname__ for number, value in enumerate(optimizers)},
            "schedulers": {str(number): type(value).__qualname__ for number, value in enumerate(schedulers)},
        }

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the outline."""
        return {"outline": self.now()}

    def differences(self, saved: SavedState, now: Mapping[str, Any]) -> Iterable[str]:
        """Yield what differs, in words."""
        outline, present = saved.rank.get("outline", {}), now["outline"]
        for kind, words in _OUTLINE_WORDS.items():
            names = {**outline[kind], **present[kind]} if kind in outline else {}
            yield from (f"{words} {name}" for name in names if outline[kind].get(name) != present[kind].get(name))


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


def _copy_tensors(present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into those that have the same names and shapes."""
    with torch.no_grad():
        for name, value in saved.items():
            # Into the tensors that are there: optimizers, views and other modules hold these.
            if name in present and present[name].shape == value.shape:
                present[name].copy_(value)


def _has_data(value: Any) -> bool:
    # `data_ptr` of a parameter of a lazy module raises an error, and sparse tensors have none.
    is_plain = isinstance(value, Tensor) and not is_lazy(value) and value.layout is torch.strided
    return is_plain and value.device.type != "meta" and value.numel() > 0


def _place(value: Tensor) -> int:
    return local_part(value).data_ptr()


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return for each tensor a sum of its bits, weighted by their places: other values have, as a rule, another sum.

    Parts of sharded tensors, which differ on each rank, are left out.
    """
    sums: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if _has_data(value) and not (is_sharded(value) or value.is_quantized):
            flat = (torch.view_as_real(value) if value.is_complex() else value).detach().contiguous().reshape(-1)
            # As integers: a sum of floats depends on its order, and NaN is not equal to itself.
            bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int32))
            total = torch.zeros((), dtype=torch.int64, device=bits.device)
            # Odd weights: a sum alone would not see two elements that are exchanged, nor an even weight the top bit.
            places = torch.arange(1, 2 * min(_CHUNK, bits.numel()), 2, dtype=torch.int32, device=bits.device)
            for chunk in bits.split(_CHUNK):
                total = 31 * total + (chunk * places[: chunk.numel()]).sum(dtype=torch.int64)
            sums[name] = total
    devices = dict.fromkeys(total.device for total in sums.values())
    target = next((device for device in devices if device.type != "cpu"), "cpu")  # one read for all
    numbers = torch.stack([total.to(target) for total in sums.values()]).tolist() if sums else []
    return dict(zip(sums, numbers, strict=True))


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _may_change(value: Any) -> bool:
    """Whether a value of a communication hook's state may be another one at each step, and is no number."""
    # What a state holds from its construction on.
    known = (str, type(None), type, torch.dtype, torch.device, torch.distributed.ProcessGroup)
    return not (_is_number(value) or isinstance(value, known) or callable(value))


def _hook_names(owner: Any) -> list[str]:
    """Return the names of an owner's hooks, without those that this package and strategies register again."""
    found = []
    for hook in hooks_of(owner):
        function = getattr(hook, "func", hook)  # of a partial
        named = function if hasattr(function, "__qualname__") else type(function)
        # FSDP2 and DDP register theirs anew in each start, and so do tricks.
        if not str(named.__module__).startswith(("lightning_tricks.", "torch.distributed.")):
            found.append(str(named.__qualname__))
    return sorted(found)
