"""Copies of what a step changes in an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._shared.tensors import clone_tensors, parameters_of


def copy_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Copy the states of an optimizer's parameters, by their number, and other states."""
    states = {number: optimizer.state[p] for number, p in enumerate(parameters_of(optimizer)) if p in optimizer.state}
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    return {"states": clone_tensors(states), "others": clone_tensors(others)}


def restore_optimizer(optimizer: Optimizer, copies: Mapping[str, Any]) -> None:
    """Restore what `copy_optimizer` copied, bit for bit: `load_state_dict` would change the dtype of some states."""
    for number, parameter in enumerate(parameters_of(optimizer)):
        now = optimizer.state.pop(parameter, {})
        if number in copies["states"]:  # on the device of now: AutoResume moves what it restores
            optimizer.state[parameter] = {
                name: clone_tensors(value, getattr(now.get(name), "device", parameter.device))
                for name, value in copies["states"][number].items()
            }
    for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(clone_tensors(copies.get("others", {})))
