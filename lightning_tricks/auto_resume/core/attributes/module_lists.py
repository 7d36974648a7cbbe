"""Lists of modules that grow while a model is trained, as those of a MetricTracker do at each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import nn
from torchmetrics import MetricTracker


def lists_of_modules(modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return what the lists inside modules hold: name -> types.

    Args:
        modules: By the names under which they are found again.
    """
    return {name: [_kind(part) for part in one] for name, one in _lists(modules)}


def restore_lists(modules: Mapping[str, nn.Module], saved: Mapping[str, list[str]]) -> list[str]:
    """Give lists the lengths that they had, with copies of what is there; return the names of those that lack parts.

    What the copies remember is restored like everything else. Nothing with parameters is copied, as no optimizer would
    know of it.

    Args:
        modules: Whose lists were saved, under the same names.
        saved: Of `lists_of_modules`.
    """
    lacking = []
    for name, one in _lists(modules):
        wanted = saved.get(name, [_kind(part) for part in one])
        for key in list(one._modules)[len(wanted) :]:  # `del one[...]` would rename what a MetricTracker keeps beside
            del one._modules[key]
        for kind in wanted[len(one) :]:
            pattern = _pattern(one, kind)
            if pattern is None:
                lacking.append(name)
                break
            one.append(deepcopy(pattern))
    return lacking


def _lists(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    for name, module in modules.items():
        parts = [(part_name, part) for part_name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
        yield from ((f"{name}:{part_name}", part) for part_name, part in parts)


def _pattern(one: Any, kind: str) -> nn.Module | None:
    """Return what a new part of a list is a copy of."""
    known = [one._base_metric] if isinstance(one, MetricTracker) else list(one)
    return next((part for part in known if _kind(part) == kind and not [*part.parameters()]), None)


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
