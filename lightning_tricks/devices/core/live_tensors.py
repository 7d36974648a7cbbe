"""The storages of all tensors that Python knows, each once, with their names, found without reading a value."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._torch_compat.memory import as_plain_tensors, parts_of_sparse, storage_id

_DEPTH = 3  # of containers in attributes
_REGISTRIES = frozenset(vars(nn.Module()))
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class NamedTensor(NamedTuple):
    """A tensor with one of its names.

    Attributes:
        name: The name, such as "gradient of net.0.weight".
        kind: "parameters", "gradients", "buffers", "attributes" or "optimizer states".
        tensor: The tensor.
    """

    name: str
    kind: str
    tensor: Tensor


def named_tensors(model: nn.Module | None, optimizers: Iterable[Optimizer]) -> Iterator[NamedTensor]:
    """Yield parameters, gradients, buffers, attributes of modules, and optimizer states, once for each name."""
    names: dict[int, str] = {}
    if model is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), strip_compile_prefix(name))
            yield from _parameter(strip_compile_prefix(name), parameter)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            yield NamedTensor(strip_compile_prefix(name), "buffers", buffer)
        for path, module in model.named_modules():
            prefix = strip_compile_prefix(f"{path}.") if path else ""
            for attribute, value in list(vars(module).items()):
                if attribute not in _REGISTRIES:
                    for name, tensor in _tensors_in(value, prefix + attribute):
                        yield NamedTensor(name, "attributes", tensor)
    for optimizer in optimizers:
        yield from _of_optimizer(optimizer, names)


def _parameter(name: str, parameter: Tensor) -> Iterator[NamedTensor]:
    yield NamedTensor(name, "parameters", parameter)
    if parameter.is_leaf and parameter.grad is not None:  # torch warns where the gradient of others is asked for
        yield NamedTensor(f"gradient of {name}", "gradients", parameter.grad)


def _of_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[NamedTensor]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            owner = names.get(id(parameter), "")
            if not owner:
                owner = f"parameter {index} of group {number}"
                yield from _parameter(owner, parameter)
            state = optimizer.state.get(parameter, {})
            states = dict.items(state) if isinstance(state, dict) else [("state", state)]
            for key, value in states:
                for name, tensor in _tensors_in(value, str(key)):
                    yield NamedTensor(f"{name} of {owner}", "optimizer states", tensor)


def _tensors_in(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in plain containers with their names; no other object is looked into."""
    kind = type(value)
    if issubclass(kind, Tensor):
        yield name, value
    elif depth and kind in (list, tuple, deque):
        for index, part in enumerate(list(value)):
            yield from _tensors_in(part, f"{name}[{index}]", depth - 1)
    elif depth and issubclass(kind, dict):
        for key, part in list(dict.items(value)):
            yield from _tensors_in(part, f"{name}[{key!r}]" if type(key) in (str, int) else name, depth - 1)


@dataclass
class LiveStorage:
    """A storage, described by the tensor in it that has a name, or else by the largest.

    Attributes:
        bytes: The size of the whole storage.
        shape: The shape of that tensor.
        dtype: Its dtype, such as "float32".
        names: The names of the tensors that lie in it.
        kind: What the first of them is, see `NamedTensor`; "other" if none has a name.
        in_graph: Whether one of them is the result of an operation that autograd recorded.
    """

    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    names: list[str] = field(default_factory=list)
    kind: str = "other"
    in_graph: bool = False
    _elements: int = -1

    def add(self, tensor: Tensor, name: str, kind: str) -> None:
        """Take a tensor that lies in the storage into account; those with names come first."""
        fits = tensor.numel() * tensor.element_size() <= self.bytes  # unless it is expanded
        elements = tensor.numel() if fits else 0
        if elements > self._elements and (name or not self.names):
            self.shape, self.dtype, self._elements = _shape(tensor), str(tensor.dtype).removeprefix("torch."), elements
        if name and name not in self.names:
            self.kind = self.kind if self.names else kind
            self.names.append(name)
        self.in_graph = self.in_graph or (tensor.requires_grad and not tensor.is_leaf)


def live_storages(device: torch.device, named: Iterable[NamedTensor] = ()) -> list[LiveStorage]:
    """Return the storages on a device.

    They are those of tensors that the garbage collector tracks. What only C++ holds is not among them: gradients that
    Python has never asked for, and what autograd has saved for the backward pass. Nothing is kept alive, and of
    an object that is not a tensor only the type is read.

    Args:
        device: The device, with an index if there are several of its type.
        named: More tensors to look at, which may not be tracked because of `gc.freeze`, with their names.
    """
    found: dict[int, LiveStorage] = {}
    with as_plain_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when the data of a fake tensor are asked for
        for name, kind, tensor in named:
            _add(found, device, tensor, name, kind)
        for tensor in _tracked_tensors():
            _add(found, device, tensor)
    return list(found.values())


def _add(found: dict[int, LiveStorage], device: torch.device, tensor: Tensor, name: str = "", kind: str = "") -> None:
    with suppress(Exception):  # a subclass may raise anything, and torch does for kinds that have no storage
        for part in _dense_parts(tensor, inner=bool(name)):
            storage = part.untyped_storage()
            if storage.device == device and storage.nbytes():
                found.setdefault(storage_id(storage), LiveStorage(storage.nbytes())).add(part, name, kind)


def _dense_parts(tensor: Tensor, inner: bool) -> Iterator[Tensor]:
    """Yield the tensors with a storage of their own that a tensor consists of.

    Args:
        tensor: The tensor.
        inner: Whether to look into subclasses that wrap others, such as DTensor; those are tracked themselves.
    """
    kind = type(tensor)
    if kind in _PLAIN_TYPES:
        if tensor.layout is torch.strided:
            yield tensor
        yield from parts_of_sparse(tensor)
    elif not hasattr(kind, "__tensor_flatten__"):
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":  # of a fake tensor, which warns where it is asked for its data
            storage.data_ptr()  # raises for a wrapper, whose storage is a pretence
            yield tensor
    elif inner:
        parts = (getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        for part in parts:
            if issubclass(type(part), Tensor):
                yield from _dense_parts(part, inner)


def _tracked_tensors() -> list[Tensor]:
    """Return the tensors that the garbage collector tracks; `isinstance` would ask proxies for their `__class__`."""
    return [value for value in gc.get_objects() if issubclass(type(value), Tensor)]


def _shape(tensor: Tensor) -> tuple[int, ...]:
    try:
        return tuple(map(int, tensor.shape))
    except RuntimeError:  # of a nested tensor
        return (tensor.numel(),)
