"""Networks whose parts are registered under the names of any project."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

HIDDEN, HEADS, LAYERS = 32, 4, 3
Parts = Mapping[str, Any]  # by role, a module, parameter or buffer, or a list with one of each layer
_FUSED = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}


class Worded(nn.Module):
    """A network whose parts have the names of a project, in its order of registration.

    Args:
        parts: The parts, of which those are taken that have names.
        names: Roles and their names, with commas or lines between them; `{i}` is the number of the layer, `{n}` the one
            after it, and `{r}` the number counted from the end. What follows a slash stands before all names after it.
        forward: Called with the parts and the inputs.
    """

    def __init__(self, parts: Parts, names: str, forward: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.parts = SimpleNamespace()
        self.compute = forward
        prefix = ""
        for entry in filter(str.strip, re.split("[,\n]", names)):
            *start, role, name = entry.split()
            prefix = start[0].removeprefix("/") if start else prefix
            part = deepcopy(parts[role])
            setattr(self.parts, role, part)
            several = part if isinstance(part, list) else [part]
            for i, one in enumerate(several):
                _register(self, (prefix + name).format(i=i, n=i + 1, r=len(several) - 1 - i).split("."), one)
        for module in self.modules():
            if all(map(str.isdecimal, module._modules)):  # in a ModuleList numbers never step back
                module._modules = dict(sorted(module._modules.items(), key=lambda item: int(item[0])))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.compute(self.parts, *inputs)

    def by_role(self) -> dict[tuple[str, int, str], torch.Tensor]:
        """Return each tensor by its role, the number of its layer and its own name; what is fused is taken apart."""
        found = {}
        for role, part in vars(self.parts).items():
            for i, one in enumerate(part if isinstance(part, list) else [part]):
                tensors = one.state_dict() if isinstance(one, nn.Module) else {"": one}
                for leaf, tensor in tensors.items():
                    roles = _FUSED.get(role, (role,))
                    pieces = tensor.detach().chunk(len(roles)) if len(roles) > 1 else [tensor.detach()]
                    found |= {(each, i, leaf): piece for each, piece in zip(roles, pieces, strict=True)}
        return found


def _register(module: nn.Module, path: list[str], part: nn.Module | torch.Tensor) -> None:
    for name in path[:-1]:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    if isinstance(part, nn.Module):
        module.add_module(path[-1], part)
    elif isinstance(part, nn.Parameter):
        module.register_parameter(path[-1], part)
    else:
        module.register_buffer(path[-1], part)


class Named:
    """One network under the names of several projects, whose tensors are compared one by one."""

    def __init__(self, parts: Parts, projects: Mapping[str, str]) -> None:
        self.sides = {project: partial(Worded, parts, names) for project, names in projects.items()}

    def difference(self, origin: str, source: Worded, project: str, target: Worded) -> float:
        """Return how much the tensors of a role differ at most."""
        one, other = source.by_role(), target.by_role()
        assert one.keys() == other.keys()
        return max((one[key] - other[key]).abs().nan_to_num(torch.inf).max().item() for key in one)


@dataclass(frozen=True)
class Architecture:
    """One network as several projects compute it, whose outputs are compared.

    Attributes:
        inputs: What all of them take.
        sides: Who has it, with what builds it.
        call: How a model is called, where this is more than `model(inputs)`; by project.
    """

    inputs: torch.Tensor
    sides: dict[str, Callable[[], nn.Module]]
    call: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = field(default_factory=dict)

    def outputs(self, project: str, model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return self.call.get(project, nn.Module.__call__)(model, self.inputs)

    def difference(self, origin: str, source: nn.Module, project: str, target: nn.Module) -> float:
        """Return how much the outputs differ at most."""
        return (self.outputs(origin, source) - self.outputs(project, target)).abs().max().item()


def linear(inputs: int = HIDDEN, outputs: int = HIDDEN, bias: bool = True) -> list[nn.Linear]:
    """Return a linear layer for each block."""
    return [nn.Linear(inputs, outputs, bias) for _ in range(LAYERS)]


def layer_norms(size: int = HIDDEN) -> list[nn.LayerNorm]:
    return [nn.LayerNorm(size) for _ in range(LAYERS)]


def convs(inputs: int, outputs: int, size: Any = 3, bias: bool = True, count: int = LAYERS) -> list[nn.Conv2d]:
    return [nn.Conv2d(inputs, outputs, size, bias=bias) for _ in range(count)]


def batch_norms(size: int) -> list[nn.BatchNorm2d]:
    return [nn.BatchNorm2d(size) for _ in range(LAYERS)]


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Return what several heads attend to; keys of fewer heads are shared."""
    size = query.shape[-1] // HEADS
    split = [part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (query, key, value)]
    mixed = F.scaled_dot_product_attention(*split, is_causal=causal, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def token_ids(length: int = 7) -> torch.Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(0))


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
