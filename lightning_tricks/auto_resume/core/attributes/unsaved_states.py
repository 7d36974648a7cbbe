"""The states of modules, optimizers and schedulers that an object holds and the Trainer does not save.

Examples: a teacher in a list, averaged weights in a callback, an optimizer that a module creates for itself, the inner
optimizer of a wrapper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.auto_resume.core.attributes.value_types import MISSING, CannotRestoreError, is_subclass


class UnsavedModuleState:
    """The parameters and buffers of a module that are saved nowhere else.

    Args:
        module: The module.
        saved: Ids of tensors that are saved elsewhere.
    """

    def __init__(self, module: nn.Module, saved: Collection[int]) -> None:
        self._module, self._saved = module, frozenset(saved)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors, including non-persistent buffers."""
        return {name: one.detach() for name, one in self.tensors().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy saved values into the tensors.

        Raises:
            CannotRestoreError: If a tensor is missing or has another shape.
        """
        own = self.tensors()
        for name, value in state.items():
            if name not in own or own[name].shape != value.shape:
                raise CannotRestoreError(f"it has no tensor {name} of shape {tuple(value.shape)}")
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors themselves: name -> tensor."""
        tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        return {name: one for name, one in tensors.items() if self._is_unsaved(one)}

    def _is_unsaved(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._saved and not is_lazy(tensor) and tensor.device.type != "meta"


class InPlaceOptimizerState:
    """An optimizer whose state is replaced in place, as other objects may share it.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the dicts that the optimizer has, where `Optimizer.load_state_dict` would set new ones."""
        optimizer = self._optimizer
        groups, kept = optimizer.param_groups, optimizer.state
        optimizer.load_state_dict(state)
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        loaded_state = dict(optimizer.state)
        kept.clear()
        kept.update(loaded_state)
        optimizer.param_groups, optimizer.state = groups, kept


def optimizer_extras(optimizers: Sequence[Any]) -> dict[str, SimpleNamespace]:
    """Return the attributes of optimizers that are not from torch, such as slow weights or an inner optimizer."""
    return {f"optimizers.{number}": SimpleNamespace(**_own_extras(one)) for number, one in enumerate(optimizers)}


def restore_optimizer_extras(optimizers: Sequence[Any], extras: Mapping[str, SimpleNamespace]) -> None:
    """Set the attributes of `optimizer_extras` in the optimizers, with the values that they have now."""
    for number, optimizer in enumerate(optimizers):
        vars(optimizer).update(vars(extras[f"optimizers.{number}"]))


def _own_extras(optimizer: Any) -> dict[str, Any]:
    known = _torch_attributes()
    return {name: value for name, value in vars(optimizer).items() if name not in known and not callable(value)}


@cache
def _torch_attributes() -> frozenset[str]:
    """Return the names of the attributes that every torch optimizer has."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called", "_step_count"}


def has_own_state_dict(kind: type) -> bool:
    """Whether objects of a type are tracked by their states alone: optimizers and schedulers."""
    return is_subclass(kind, Optimizer, LRScheduler)


def as_stateful(value: Any) -> Any:
    """Return an object that captures and loads the state of an optimizer or a scheduler."""
    return InPlaceOptimizerState(value) if is_subclass(type(value), Optimizer) else value


def get_state(stateful: Any) -> Any:
    """Return the state of an object; `MISSING` if it raises."""
    try:
        return stateful.state_dict()
    except Exception:  # user code
        return MISSING
