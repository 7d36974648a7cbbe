"""The names that a model and its optimizers give to tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._shared.patterns import strip_compile_prefix

_DEPTH = 3  # of containers in attributes
_REGISTRIES = frozenset(vars(nn.Module()))


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
