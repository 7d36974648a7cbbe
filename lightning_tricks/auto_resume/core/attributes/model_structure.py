"""What hooks change of a model's structure while it trains: what is frozen, in which mode, in which group, or masked.

No state dict holds these. `ModelStructure` notes them when a fit begins, and returns what is other than then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune


class ModelStructure:
    """What of modules and optimizers is other than at the moment when this was made.

    Args:
        modules: By the names under which they are found again.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._initial_flags = {name: _module_flags(module) for name, module in modules.items()}
        self._buffers = {name: set(dict(module.named_buffers())) for name, module in modules.items()}
        self._parameters = {name: set(dict(module.named_parameters())) for name, module in modules.items()}
        self._groups: list[list[list[str]]] = []

    def record_groups(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """Note which parameters the groups of the optimizers have, when these exist."""
        self._groups = param_group_names(module, optimizers)

    def changes(self, modules: Mapping[str, nn.Module], module: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
        """Return what is other than before, as tensors and plain values."""
        groups, masks = param_group_names(module, optimizers), pruning_masks(module)
        # a masked module registers its parameters in another order, in which a fresh process gives them to optimizers
        has_other_groups = groups != self._groups or bool(masks)
        return {
            "flags": {
                name: {
                    key: now
                    for key, now in _module_flags(part).items()
                    if self._initial_flags.get(name, {}).get(key) != now
                }
                for name, part in modules.items()
            },
            "groups": groups if has_other_groups else None,
            "masks": masks,
            "buffers": [name for name, _ in module.named_buffers() if name not in self._buffers[""]],
        }

    def new_parameters(self, module: nn.Module) -> list[str]:
        """Return the parameters that came since, which a resumed run's module lacks when weights are loaded."""
        masked = {f"{name}_orig" for name in pruning_masks(module)}
        return [name for name, _ in module.named_parameters() if name not in self._parameters[""] | masked]


def restore_flags(modules: Mapping[str, nn.Module], changes: Mapping[str, Any]) -> None:
    """Put back what takes gradients and what is in training mode."""
    for name, module in modules.items():
        flags = changes["flags"].get(name, {})
        for parameter_name, parameter in module.named_parameters():
            if (wanted := flags.get(f"{parameter_name}.requires_grad")) is not None:
                parameter.requires_grad_(wanted)
        for part_name, part in module.named_modules():
            if (wanted := flags.get(f"{part_name}.training")) is not None:
                part.training = wanted


def param_group_names(module: nn.Module, optimizers: Sequence[Any]) -> list[list[list[str]]]:
    """Return the names of the parameters in each group of each optimizer; a parameter of somebody else is ""."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [[names.get(id(one), "").removesuffix("_orig") for one in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def restore_param_groups(
    module: nn.Module, optimizers: Sequence[Any], groups: Sequence[Sequence[Sequence[str]]]
) -> None:
    """Give the groups of optimizers the parameters that they had; their values come with the optimizers' states."""
    parameters = {name.removesuffix("_orig"): one for name, one in module.named_parameters()}
    for optimizer, wanted in zip(optimizers, groups, strict=False):
        if any(name not in parameters for names in wanted for name in names):
            continue  # parameters of somebody else: the optimizer's own state says whether the groups agree
        for number, names in enumerate(wanted):
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] = [parameters[name] for name in names]
            else:
                options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
                optimizer.param_groups.append({**options, "params": [parameters[name] for name in names]})
        del optimizer.param_groups[len(wanted) :]


def pruning_masks(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the masks of `torch.nn.utils.prune` and the values that they mask: parameter -> "mask", "original"."""
    return {
        f"{prefix}{name}": {"mask": getattr(part, f"{name}_mask"), "original": getattr(part, f"{name}_orig").detach()}
        for prefix, part, name in _masked_parameters(module)
    }


def restore_pruning_masks(module: nn.Module, masks: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Mask parameters as they were, those that are masked already included."""
    present = {f"{prefix}{name}" for prefix, _, name in _masked_parameters(module)}
    for path, saved in masks.items():
        prefix, _, name = path.rpartition(".")
        part = module.get_submodule(prefix)
        mask = saved["mask"].to(module_device(part))
        with torch.no_grad():
            if path in present:
                getattr(part, f"{name}_mask").copy_(mask)
            else:
                prune.custom_from_mask(part, name, mask)
            getattr(part, f"{name}_orig").copy_(saved["original"])
            setattr(part, name, getattr(part, f"{name}_orig") * mask)


def resize_to_state_dict(module: nn.Module, state_dict: Mapping[str, Any], new_buffers: Sequence[str]) -> None:
    """Let a state dict be loaded whose buffers grew, came or were masks: give the module such buffers.

    Args:
        module: That is about to load it.
        state_dict: With the shapes that are wanted.
        new_buffers: That came while it trained.
    """
    masked = [name.removesuffix("_mask") for name in state_dict if name.endswith("_mask")]
    present = dict(module.named_parameters(remove_duplicate=False))
    for path in masked:
        if path in present and f"{path}_orig" in state_dict:
            prefix, _, name = path.rpartition(".")
            prune.custom_from_mask(module.get_submodule(prefix), name, torch.ones_like(present[path]))
    for path, value in state_dict.items():
        prefix, _, name = path.rpartition(".")
        owner: Any = _submodule(module, prefix)
        if owner is None or not isinstance(value, Tensor) or name in owner._parameters:
            continue
        if name in owner._buffers and _shape(owner._buffers[name]) != value.shape:
            resize_buffer(module, owner, name, value)
        elif path in new_buffers and name not in owner._buffers:
            owner.register_buffer(name, torch.empty_like(value, device=module_device(owner)))


def resize_buffer(module: nn.Module, owner: Any, name: str, value: Tensor) -> None:
    """Bind a buffer to a new tensor like `value`, wherever the module has the same one."""
    old = owner._buffers[name]
    new = torch.empty_like(value, device=module_device(owner) if old is None else old.device)
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is old and (old is not None or (part is owner and key == name)):
                part._buffers[key] = new


def module_device(module: nn.Module) -> torch.device:
    """Return where a module's first parameter or buffer is."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def capture_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that parameters hold."""
    return {name: one.grad.detach() for name, one in module.named_parameters() if one.grad is not None}


def restore_gradients(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Give parameters the gradients that they held."""
    for name, parameter in module.named_parameters():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device)


def _module_flags(module: nn.Module) -> dict[str, bool]:
    flags = {f"{name}.requires_grad": one.requires_grad for name, one in module.named_parameters()}
    return flags | {f"{name}.training": part.training for name, part in module.named_modules()}


def _masked_parameters(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the parameters that are masked: prefix of the name, module, name in it."""
    for part_name, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, prune.BasePruningMethod):
                yield f"{part_name}." if part_name else "", part, str(getattr(hook, "_tensor_name", ""))


def _shape(buffer: Tensor | None) -> torch.Size | None:
    return None if buffer is None else buffer.shape


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None
