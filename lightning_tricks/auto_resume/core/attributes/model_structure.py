"""The structure of a model that hooks change: frozen parameters, modes, groups, pruning masks, tracked metrics.

No state dict holds these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torchmetrics import MetricTracker

from lightning_tricks._shared.patterns import name_as_in_, strip_compile_prefix
from lightning_tricks._torch_compat.modules import own_buffers, own_modules, own_parameters, pruned_parameters

_OWN_FLAGS = frozenset({"automatic_optimization"})  # of a LightningModule


def module_flags(module: nn.Module) -> dict[str, bool]:
    """Return which parameters require gradients, which modules are in training mode, and who optimizes."""
    flags = {f"{name}.requires_grad": parameter.requires_grad for name, parameter in module.named_parameters()}
    flags |= {name: getattr(module, name) for name in _OWN_FLAGS if hasattr(module, name)}
    return flags | {f"{name}.training": part.training for name, part in module.named_modules()}


def restore_flags(modules: Mapping[str, nn.Module], saved: Mapping[str, Mapping[str, bool]]) -> None:
    """Restore flags, given by the names of the modules."""
    for path, module in modules.items():
        flags, present = dict(saved.get(path, {})), module_flags(module)
        name_as_in_(flags, present)
        owners: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_modules())}
        for name in flags.keys() & present.keys():
            owner, _, flag = name.rpartition(".")
            setattr(owners[owner], flag, flags[name])


def param_group_names(module: nn.Module, optimizers: Sequence[Any]) -> list[list[list[str]]]:
    """Return the names of the parameters in each group of each optimizer; "" for one that is not the module's."""
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    return [
        [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def _plain(name: str) -> str:
    """Return the name of a parameter as it is where the parameter is neither masked nor in a compiled module."""
    return strip_compile_prefix(name).removesuffix("_orig")


def restore_param_groups(
    module: nn.Module, optimizers: Sequence[Any], groups: Sequence[Sequence[Sequence[str]]]
) -> None:
    """Restore the parameters of the groups of optimizers; the options of groups are restored with optimizer states."""
    parameters = {_plain(name): parameter for name, parameter in module.named_parameters()}
    for optimizer, saved in zip(optimizers, groups, strict=False):
        wanted = [[_plain(name) for name in names] for names in saved]
        if any(name not in parameters for names in wanted for name in names):
            continue  # parameters that are not the module's: loading the optimizer's state checks its groups
        for number, names in enumerate(wanted):
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] = [parameters[name] for name in names]
            else:
                options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
                optimizer.param_groups.append({**options, "params": [parameters[name] for name in names]})
        del optimizer.param_groups[len(wanted) :]


def pruning_masks(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the masks of `torch.nn.utils.prune` and what they mask: parameter -> {"mask": ..., "original": ...}."""
    return {
        f"{prefix}{name}": {"mask": getattr(part, f"{name}_mask"), "original": getattr(part, f"{name}_orig").detach()}
        for prefix, part, name in _masked_parameters(module)
    }


def restore_pruning_masks(module: nn.Module, masks: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give parameters the masks that they had, in the place of those that they have."""
    for _, part, name in list(_masked_parameters(module)):
        getattr(part, f"{name}_mask").fill_(1)  # what is left is the whole parameter
        prune.remove(part, name)
    for path, saved in masks.items():
        prefix, _, name = path.rpartition(".")
        part = module.get_submodule(prefix)
        prune.custom_from_mask(part, name, saved["mask"].to(module_device(part)))
        with torch.no_grad():
            getattr(part, f"{name}_orig").copy_(saved["original"])
            setattr(part, name, getattr(part, f"{name}_orig") * getattr(part, f"{name}_mask"))


def resize_to_state_dict(module: nn.Module, state_dict: Mapping[str, Any], new_buffers: Sequence[str]) -> None:
    """Give a module buffers like those of a state dict, in which buffers grew, were added or are masks.

    Args:
        module: The module that is about to load the state dict.
        state_dict: The state dict with the shapes of the buffers.
        new_buffers: Names of the buffers that were added while the model trained.
    """
    masked = [name.removesuffix("_mask") for name in state_dict if name.endswith("_mask")]
    present = dict(module.named_parameters(remove_duplicate=False))
    for path in masked:
        if path in present and f"{path}_orig" in state_dict:
            prefix, _, name = path.rpartition(".")
            prune.custom_from_mask(module.get_submodule(prefix), name, torch.ones_like(present[path]))
    modules = dict(module.named_modules(remove_duplicate=False))
    for path, value in state_dict.items():
        prefix, _, name = path.rpartition(".")
        owner: Any = modules.get(prefix)
        if owner is None or not isinstance(value, Tensor) or name in own_parameters(owner):
            continue
        buffers = own_buffers(owner)
        if name in buffers and getattr(buffers[name], "shape", None) != value.shape:  # it may be None
            resize_buffer(module, owner, name, value)
        elif path in new_buffers and name not in buffers:
            owner.register_buffer(name, torch.empty_like(value, device=module_device(owner)))


def resize_buffer(module: nn.Module, owner: Any, name: str, value: Tensor) -> None:
    """Replace a buffer by a new tensor like `value`, wherever modules share it."""
    old = own_buffers(owner)[name]
    new = torch.empty_like(value, device=module_device(owner) if old is None else old.device)
    for part in module.modules():
        buffers = own_buffers(part)
        for key, buffer in buffers.items():
            if buffer is old and (old is not None or (part is owner and key == name)):
                buffers[key] = new


def module_device(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter or buffer; the CPU without any."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def _masked_parameters(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the masked parameters: prefix of the name, module, name in the module."""
    for part_name, part in module.named_modules():
        for name in pruned_parameters(part):
            yield f"{part_name}." if part_name else "", part, name


def names_in_state_of(optimizer: Any) -> list[str]:
    """Return the names of an optimizer's attributes that its state dict covers, or that are functions.

    Others are from classes that are not torch's, such as slow weights or an inner optimizer.
    """
    known = _torch_attributes()
    return [name for name, value in vars(optimizer).items() if name in known or callable(value)]


@cache
def _torch_attributes() -> frozenset[str]:
    """Return the names of the attributes that every torch optimizer has."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called", "_step_count"}


def tracker_steps(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return how often each MetricTracker inside some modules was incremented, by its path."""
    return {path: tracker.n_steps for path, tracker in _trackers(modules)}


def restore_tracker_steps(modules: Mapping[str, nn.Module], saved: Mapping[str, int]) -> None:
    """Give MetricTrackers as many metrics as they had; the states of these are restored afterwards, as attributes."""
    for path, tracker in _trackers(modules):
        wanted = saved.get(path, tracker.n_steps)
        while tracker.n_steps < wanted:
            tracker.increment()
        registered = own_modules(tracker)
        for name in list(registered)[1 + wanted :]:  # the first is the base metric, which `del tracker[...]` renames
            del registered[name]


def _trackers(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, MetricTracker]]:
    for path, module in modules.items():
        for name, part in module.named_modules():
            if isinstance(part, MetricTracker):
                yield f"{path}:{name}", part
