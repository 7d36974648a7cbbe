"""Copies of what a training step changes: tensors of a module, states of its metrics and of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_tricks._shared.tensors import clone_tensors, outside_inference_mode
from lightning_tricks._torch_compat.modules import own_buffers
from lightning_tricks.gradient_clipping.core.step_skipping import copy_group_options, restore_group_options

_OF_METRIC = ("_update_count", "_computed", "_forward_cache")


def copy_tensors(module: nn.Module, *, parameters: bool) -> dict[str, Tensor]:
    """Copy the buffers of a module, also those that no checkpoint has, and its parameters if they are asked for."""
    named = [*module.named_buffers(), *(module.named_parameters() if parameters else ())]
    return {name: tensor.detach().clone() for name, tensor in named}


def restore_tensors(module: nn.Module, copies: Mapping[str, Tensor]) -> None:
    """Restore what `copy_tensors` copied, in place; a buffer of another shape than then is replaced."""
    with outside_inference_mode():
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            if name in copies and copies[name].shape == tensor.shape:
                tensor.copy_(copies[name])
            elif name in copies:
                owner, _, own_name = name.rpartition(".")
                own_buffers(module.get_submodule(owner))[own_name] = copies[name].clone()


def copy_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients of a module's parameters, by name."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def restore_gradients(module: nn.Module, copies: Mapping[str, Tensor]) -> None:
    """Restore what `copy_gradients` copied; parameters that had no gradient then have none."""
    for name, parameter in module.named_parameters():
        parameter.grad = copies[name].clone() if name in copies else None


def copy_metrics(module: nn.Module) -> dict[str, Any]:
    """Copy the states of the metrics of torchmetrics in a module, by name."""
    metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
    return {
        name: {key: _copied(getattr(metric, key, None)) for key in (*metric.metric_state, *_OF_METRIC)}
        for name, metric in metrics.items()
    }


def restore_metrics(module: nn.Module, copies: Mapping[str, Any]) -> None:
    """Restore what `copy_metrics` copied."""
    for name, state in copies.items():
        for key, value in state.items():
            setattr(module.get_submodule(name), key, _copied(value))


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, or of a list, to which tensors are only appended."""
    return value.detach().clone() if isinstance(value, Tensor) else copy(value)


def copy_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Copy the states of an optimizer's parameters, by their number, and the options of its groups."""
    states = {number: optimizer.state[p] for number, p in enumerate(_parameters(optimizer)) if p in optimizer.state}
    return {"states": clone_tensors(states), "options": copy_group_options(optimizer)}


def restore_optimizer(optimizer: Optimizer, copies: Mapping[str, Any]) -> None:
    """Restore what `copy_optimizer` copied, bit for bit: `load_state_dict` would change the dtype of some states."""
    for number, parameter in enumerate(_parameters(optimizer)):
        now = optimizer.state.pop(parameter, {})
        if number in copies["states"]:  # on the device of now: AutoResume moves what it restores
            optimizer.state[parameter] = {
                name: clone_tensors(value, getattr(now.get(name), "device", parameter.device))
                for name, value in copies["states"][number].items()
            }
    restore_group_options(optimizer, clone_tensors(copies["options"]))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
