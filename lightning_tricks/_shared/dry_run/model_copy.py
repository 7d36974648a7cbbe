"""Copies of a model and of its inputs, which can be run and discarded while the originals stay as they are."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode

from lightning_tricks._shared.tensors import unsharded_class
from lightning_tricks._torch_compat.modules import COMPILED_CALL, compiled_module, refer_to_own_weights

_IMMUTABLE = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)


class ModelCopier(TorchFunctionMode):
    """Copies modules and values, with each tensor in them replaced by `copy_tensor(tensor)`.

    A tensor that occurs several times is copied once. Neither constructors nor `__getstate__` are called, so that
    parametrized, compiled, wrapped and sharded modules can be copied as well; the copy is the plain module inside. An
    object that cannot be copied (a lock, an open file) is shared with the original.

    Args:
        copy_tensor: Returns the replacement of a tensor.
    """

    def __init__(self, copy_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._copy_tensor = copy_tensor
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept alive, because the memo knows them by their id

    def copy_module(self, model: nn.Module) -> nn.Module:
        """Return a copy of a module and of all its submodules, which shares no state with it.

        Raises:
            NotImplementedError: If a submodule is wrapped in `FullyShardedDataParallel`.
        """
        parts = {part: unwrap_model(part) for part in model.modules()}
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in parts):
            raise NotImplementedError(
                "FullyShardedDataParallel keeps flattened shards, which cannot be copied: count before you wrap the "
                "model, or shard it with fully_shard (ModelParallelStrategy)."
            )
        for part in dict.fromkeys(parts.values()):
            self._remember(part, copy.deepcopy(part) if _is_scripted(part) else object.__new__(unsharded_class(part)))
        for wrapper, part in parts.items():
            self._memo[id(wrapper)] = self._memo[id(part)]
        for part in dict.fromkeys(parts.values()):
            if not _is_scripted(part):
                self._fill(self._memo[id(part)], part)
        model_copy: nn.Module = self._memo[id(model)]
        return model_copy

    def copy_value(self, value: Any) -> Any:
        """Return a copy of any value."""
        if isinstance(value, _IMMUTABLE):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, Tensor):
            return self._remember(value, self._copy_tensor(value))
        if type(value) in (dict, OrderedDict):
            new = self._remember(value, type(value)())
            new.update((self.copy_value(key), self.copy_value(part)) for key, part in value.items())
            return new
        if type(value) is list:
            new = self._remember(value, [])
            new.extend(map(self.copy_value, value))
            return new
        if type(value) in (tuple, set):
            return self._remember(value, type(value)(map(self.copy_value, value)))
        if isinstance(value, torch.Generator):
            return self._remember(value, value.clone_state())
        if isinstance(value, types.FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return self._function(value)
        try:
            with self:
                return copy.deepcopy(value, self._memo)
        except Exception:
            return self._remember(value, value)

    def substitute(self, value: Any, new: Any) -> None:
        """Use `new` as the copy of `value`."""
        self._remember(value, new)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the tensors that `copy.deepcopy` finds inside other objects."""
        if func is Tensor.__deepcopy__:
            return self.copy_value(args[0])
        if func is Tensor.clone:  # called by nn.Parameter.__deepcopy__
            return self._copy_tensor(args[0])
        return func(*args, **(kwargs or {}))

    def _remember(self, value: Any, new: Any) -> Any:
        self._memo[id(value)] = new
        self._originals.append(value)
        return new

    def _fill(self, module_copy: nn.Module, part: nn.Module) -> None:
        for name, value in vars(part).items():
            if type(value) in (dict, OrderedDict) and not value:  # fast path: true of most attributes
                vars(module_copy)[name] = type(value)()
                continue
            if name.endswith("_hooks") and isinstance(value, dict):
                value = OrderedDict((key, hook) for key, hook in value.items() if not _is_sharding_hook(hook))
            elif name in ("_trainer", "_fabric", COMPILED_CALL):  # the copy belongs to no Trainer
                value = None
            vars(module_copy)[name] = self.copy_value(value)
        if isinstance(module_copy, nn.RNNBase):  # the references still point to the weights of the original
            refer_to_own_weights(module_copy)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """Copy a function with its defaults and the values in its closure, which may be the module itself."""
        cells = [types.CellType() for _ in function.__closure__ or ()]
        new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
        self._remember(function, new)
        new.__defaults__ = self.copy_value(function.__defaults__)
        new.__kwdefaults__ = self.copy_value(function.__kwdefaults__)
        new.__dict__.update(function.__dict__)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.copy_value(old.cell_contents)
            except ValueError:  # an empty cell stays empty
                continue
        return new


def unwrap_model(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`, DistributedDataParallel and DataParallel."""
    while True:
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif (compiled := compiled_module(module)) is not None:
            module = compiled
        else:
            return module


def common_device(model: nn.Module) -> torch.device | None:
    """Return the device of all parameters and buffers, or None if there are several devices or no tensors."""
    devices = {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    return devices.pop() if len(devices) == 1 else None


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_sharding_hook(hook: Any) -> bool:
    """Whether a hook is one of FSDP, which would gather the shards of the original."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")
