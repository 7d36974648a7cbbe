"""Lists of modules that grow while a model is trained, as those of a MetricTracker do at each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import nn
from torchmetrics import MetricTracker


def module_list_types(modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return what the lists inside modules hold: name -> types.

    Args:
        modules: By the names under which they are found again.
    """
    return {name: [_type_name(part) for part in module_list] for name, module_list in _module_lists(modules)}


def restore_module_lists(modules: Mapping[str, nn.Module], saved: Mapping[str, list[str]]) -> list[str]:
    """Give lists the lengths that they had, with copies of what is there; return the names of those that lack parts.

    What the copies remember is restored like everything else. Nothing with parameters is copied, as no optimizer would
    know of it.

    Args:
        modules: Whose lists were saved, under the same names.
        saved: Of `module_list_types`.
    """
    incomplete = []
    for name, module_list in _module_lists(modules):
        saved_types = saved.get(name, [_type_name(part) for part in module_list])
        # `del module_list[...]` would rename what a MetricTracker keeps beside
        for key in list(module_list._modules)[len(saved_types) :]:
            del module_list._modules[key]
        for kind in saved_types[len(module_list) :]:
            template = _template(module_list, kind)
            if template is None:
                incomplete.append(name)
                break
            module_list.append(deepcopy(template))
    return incomplete


def _module_lists(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    for name, module in modules.items():
        parts = [(part_name, part) for part_name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
        yield from ((f"{name}:{part_name}", part) for part_name, part in parts)


def _template(module_list: Any, kind: str) -> nn.Module | None:
    """Return what a new part of a list is a copy of."""
    known = [module_list._base_metric] if isinstance(module_list, MetricTracker) else list(module_list)
    return next((part for part in known if _type_name(part) == kind and not [*part.parameters()]), None)


def _type_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
