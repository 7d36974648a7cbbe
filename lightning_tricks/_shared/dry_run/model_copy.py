"""Stand-ins: copies of a model and its inputs that may be run and thrown away, while the originals stay as they are."""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
_COPIES = (torch.ops.aten._unsafe_view.default, torch.ops.aten.clone.default)


class NoDataError(NotImplementedError):
    """A real run was asked for, and there is no data, or a part of it only."""


class ModelCopier(TorchFunctionMode):
    """Copies modules and values; each tensor in them becomes `convert(tensor)`, once.

    It does not call the copied classes' constructors or `__getstate__`: parametrized, compiled, wrapped and sharded
    modules are copied, too, as the plain modules that they stand for. What cannot be copied (a lock, an open file) is
    shared.

    Args:
        convert: Makes the tensor that takes a tensor's place.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._convert = convert
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept alive: the memo goes by their identity

    def module(self, model: nn.Module) -> nn.Module:
        """Return a copy of a module with all its submodules; it does not share their state."""
        parts = {part: unwrap_model(part) for part in model.modules()}
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in parts):
            raise NotImplementedError(
                "FullyShardedDataParallel keeps flattened shards, of which no copy can be made: count before the model "
                "is wrapped, or shard it with fully_shard (ModelParallelStrategy)."
            )
        for part in dict.fromkeys(parts.values()):
            self._remember(part, copy.deepcopy(part) if _is_scripted(part) else object.__new__(_unsharded_class(part)))
        for wrapper, part in parts.items():
            self._memo[id(wrapper)] = self._memo[id(part)]
        for part in dict.fromkeys(parts.values()):
            if not _is_scripted(part):
                self._fill(self._memo[id(part)], part)
        model_copy: nn.Module = self._memo[id(model)]
        return model_copy

    def value(self, value: Any) -> Any:
        """Return a copy of any value."""
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, Tensor):
            return self._remember(value, self._convert(value))
        if type(value) in (dict, OrderedDict):
            new = self._remember(value, type(value)())
            new.update((self.value(key), self.value(part)) for key, part in value.items())
            return new
        if type(value) is list:
            new = self._remember(value, [])
            new.extend(map(self.value, value))
            return new
        if type(value) in (tuple, set):
            return self._remember(value, type(value)(map(self.value, value)))
        if isinstance(value, torch.Generator):
            return self._remember(value, value.clone_state())
        if isinstance(value, types.FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return self._function(value)
        try:
            with self:
                return copy.deepcopy(value, self._memo)
        except Exception:
            return self._remember(value, value)

    def replace(self, value: Any, new: Any) -> None:
        """Put `new` in the place of a value."""
        self._remember(value, new)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the tensors that `copy.deepcopy` comes upon."""
        if func is Tensor.__deepcopy__:
            return self.value(args[0])
        if func is torch._C.TensorBase.clone:  # nn.Parameter.__deepcopy__
            return self._convert(args[0])
        return func(*args, **(kwargs or {}))

    def _remember(self, value: Any, new: Any) -> Any:
        self._memo[id(value)] = new
        self._originals.append(value)
        return new

    def _fill(self, model_copy: nn.Module, part: nn.Module) -> None:
        for name, value in vars(part).items():
            if type(value) in (dict, OrderedDict) and not value:  # most attributes of most modules
                vars(model_copy)[name] = type(value)()
                continue
            if name.endswith("_hooks") and isinstance(value, dict):
                value = OrderedDict((key, hook) for key, hook in value.items() if not _is_sharding_hook(hook))
            elif name in ("_trainer", "_fabric", "_compiled_call_impl"):  # a stand-in belongs to no Trainer
                value = None
            vars(model_copy)[name] = self.value(value)
        if isinstance(model_copy, nn.RNNBase):  # they would still point at the original's weights
            model_copy._flat_weight_refs = [weakref.ref(weight) for weight in model_copy._flat_weights]  # type: ignore[arg-type]

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """Copy a function with its defaults and the values that it closes over: the module, or a list to fill."""
        cells = [types.CellType() for _ in function.__closure__ or ()]
        new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
        self._remember(function, new)
        new.__defaults__ = self.value(function.__defaults__)
        new.__kwdefaults__ = self.value(function.__kwdefaults__)
        new.__dict__.update(function.__dict__)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.value(old.cell_contents)
            except ValueError:  # an empty cell stays one
                continue
        return new


def unwrap_model(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`, DistributedDataParallel and DataParallel."""
    while True:
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return module


class RealTensorCopies:
    """Stand-ins with data: copies of the originals."""

    def entered(self) -> AbstractContextManager[Any]:
        """Return the context in which a stand-in is to run."""
        return nullcontext()

    def convert(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Return a copy of a tensor, on `device` where one is given.

        Raises:
            NoDataError: If there is nothing to copy, or a part of it only.
        """
        if is_lazy(tensor):
            return copy.deepcopy(tensor)
        if tensor.is_meta or is_sharded(tensor) or isinstance(tensor, FakeTensor):
            kind = "sharded" if is_sharded(tensor) else "on the meta device" if tensor.is_meta else "fake"
            raise NoDataError(f"there is no data to copy: some tensors are {kind}")
        copied = tensor.detach().clone()
        if device is not None:
            copied = copied.to(device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def call(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on stand-ins."""
        return operator(*args, **kwargs)


class FakeTensorCopies:
    """Stand-ins without data: `FakeTensor`s, which have all that a tensor has but that."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._kinds: dict[Any, str] = {}
        self._results: dict[Any, Any] = {}

    def entered(self) -> AbstractContextManager[Any]:
        """Return the context in which a stand-in is to run."""
        return self._mode

    def convert(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Return a tensor without data, on `device` where one is given.

        A meta tensor becomes a fake CPU tensor, and a sharded one gets its full shape.
        """
        place = device or tensor.device
        if place.type == "meta":
            place = torch.device("cpu")
        if is_sharded(tensor):
            elem = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        elif tensor.layout != torch.strided:
            raise NotImplementedError(f"a tensor without data has no elements to skip, as {tensor.layout} does")
        elif type(tensor) in (Tensor, nn.Parameter, FakeTensor) and not tensor.is_quantized:
            elem = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        else:
            return self._mode.from_tensor(tensor)
        fake = FakeTensor(self._mode, elem, place)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True  # what isinstance(fake, nn.Parameter) looks at
        return fake.requires_grad_(tensor.requires_grad)

    def call(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on stand-ins as the mode would, and faster than it where an operator came before."""
        if operator is torch.ops.prim.device.default:
            return args[0].fake_device
        kind = self._kinds.get(operator)
        if kind is None:
            kind = self._kinds[operator] = _operator_kind(operator)
        if kind == "view" and type(args[0]) is FakeTensor:  # the mode would look it up, which takes longer
            device = args[0].fake_device
            with in_kernel_invocation_manager(self._mode):
                out = operator(*args, **kwargs)
            return _map_result(out, lambda part: FakeTensor(self._mode, part, device))
        key = (operator, _key_of(args), _key_of(tuple(kwargs.items()))) if kind == "pure" else None
        try:
            known = self._results.get(key) if key is not None else None
        except TypeError:  # an argument has no hash
            key = known = None
        if known is not None:
            with in_kernel_invocation_manager(self._mode):
                return _map_result(known, self._from_layout)
        out = operator(*args, **kwargs)
        if key is not None:
            self._results[key] = _map_result(out, _layout_of)
        return out

    def _from_layout(self, layout: _Layout) -> Tensor:
        shape, stride, dtype, device = layout
        return FakeTensor(self._mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


class _Layout(NamedTuple):
    """All that a tensor without data is."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this rank may hold a part only."""
    return hasattr(tensor, "placements")


def common_device(model: nn.Module) -> torch.device | None:
    """Return the device of all parameters and buffers, or None where there are several devices or no tensors."""
    devices = {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    return devices.pop() if len(devices) == 1 else None


def _unsharded_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, without what `fully_shard` made of it."""
    cls = type(module)
    return cls.__bases__[1] if cls.__bases__[0].__name__ == "FSDPModule" else cls


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_sharding_hook(hook: Any) -> bool:
    """Whether a hook is one of FSDP's, which would gather the shards of the original."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")


def _operator_kind(operator: Any) -> str:
    """Say whether an operator makes views (or a copy), new tensors from its arguments alone, or anything else."""
    if not isinstance(operator, torch._ops.OpOverload):
        return "other"
    if operator.is_view or operator in _COPIES:
        return "view"
    schema = operator._schema
    aliases = schema.is_mutable or any(value.alias_info is not None for value in schema.returns)
    return "other" if aliases else "pure"


def _key_of(value: Any) -> Any:
    """Return what the layout of an operator's results depends on."""
    if type(value) is FakeTensor:
        if value.constant is not None:
            return []  # has no hash: what follows from its value is not to be looked up
        return _layout_of(value)
    if isinstance(value, Tensor):
        return []
    if isinstance(value, tuple | list):
        return (type(value), *map(_key_of, value))
    return type(value), value  # True is not 1, nor is 1.0


def _layout_of(tensor: Any) -> _Layout:
    return _Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device)


def _map_result(out: Any, build: Callable[[Any], Any]) -> Any:
    """Apply a function to the tensor, or the layout, or each of several, that an operator returned."""
    if isinstance(out, Tensor | _Layout):
        return build(out)
    if isinstance(out, list | tuple):
        return type(out)(_map_result(part, build) for part in out)
    return out
