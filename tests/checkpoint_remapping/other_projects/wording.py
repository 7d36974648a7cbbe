"""Networks whose parts are registered under the names of any project."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

HIDDEN, HEADS, LAYERS = 32, 4, 3


@dataclass(frozen=True)
class Architecture:
    """One network under the names of several projects.

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


class Worded(nn.Module):
    """A network whose parts have the names of a project, in its order of registration.

    Args:
        parts: By role, a module, parameter or buffer, or a list with one of each layer.
        names: Lines of roles and their names; `{i}` is the number of the layer, `{n}` the one after it, `{r}` the
            number counted from the end, and `{e}` that of the expert.
        forward: Called with the parts and the inputs.
    """

    def __init__(self, parts: Mapping[str, Any], names: str, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.parts = SimpleNamespace()  # of the parts, only those that have names
        self.compute = forward
        for line in names.split("\n"):
            if line.strip():
                role, name = line.split()
                part = parts[role]
                setattr(self.parts, role, part)
                several = part if isinstance(part, list | nn.ModuleList) else [part]
                for i, one in enumerate(several):
                    for e, expert in enumerate(one if "{e}" in name else [one]):
                        _register(self, name.format(i=i, n=i + 1, r=len(several) - 1 - i, e=e).split("."), expert)
        for module in self.modules():
            if all(map(str.isdecimal, module._modules)):  # in a ModuleList numbers never step back
                module._modules = dict(sorted(module._modules.items(), key=lambda item: int(item[0])))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.compute(self.parts, *inputs)


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


def worded(
    make_parts: Callable[[], Mapping[str, Any]], forward: Callable[..., torch.Tensor], **projects: str
) -> dict[str, Callable[[], nn.Module]]:
    """Return the sides of an architecture that differ in names alone."""
    return {
        project: partial(lambda text: Worded(make_parts(), text, forward), names) for project, names in projects.items()
    }


def linear(inputs: int = HIDDEN, outputs: int = HIDDEN, bias: bool = True) -> list[nn.Linear]:
    """Return a linear layer for each block."""
    return [nn.Linear(inputs, outputs, bias) for _ in range(LAYERS)]


def layer_norms(size: int = HIDDEN, eps: float = 1e-5) -> list[nn.LayerNorm]:
    return [nn.LayerNorm(size, eps) for _ in range(LAYERS)]


def convs(inputs: int, outputs: int, size: int = 3, bias: bool = True, count: int = LAYERS) -> list[nn.Conv2d]:
    return [nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=bias) for _ in range(count)]


def batch_norms(size: int, count: int = LAYERS) -> list[nn.BatchNorm2d]:
    return [nn.BatchNorm2d(size) for _ in range(count)]


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False, heads: int = HEADS
) -> torch.Tensor:
    """Return what several heads attend to; keys of fewer heads are shared."""
    size = query.shape[-1] // heads
    split = [part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (query, key, value)]
    mixed = F.scaled_dot_product_attention(*split, is_causal=causal, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def token_ids(length: int = 7) -> torch.Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(0))


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
