"""Lists of modules that grow while a model is trained, as those of a MetricTracker do at each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from lightning_tricks._torch_compat.modules import own_modules


def module_list_types(modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Return the types of what each list inside some modules holds.

    Args:
        modules: The modules by the names under which they are found again.

    Returns:
        Name of the module and path of the list in it, joined by a colon -> qualified names of types.
    """
    return {name: [_type_name(part) for part in module_list] for name, module_list in _module_lists(modules)}


def restore_module_lists(modules: Mapping[str, nn.Module], saved: Mapping[str, list[str]]) -> list[str]:
    """Restore the lengths of lists, with copies of modules that they hold.

    The attributes of the copies are restored afterwards, as those of all modules. A module with parameters is not
    copied, as no optimizer would have the new parameters.

    Args:
        modules: The modules whose lists were saved, under the same names.
        saved: What `module_list_types` returned.

    Returns:
        The names of lists that still lack modules, as there was nothing to copy.
    """
    incomplete = []
    for name, module_list in _module_lists(modules):
        saved_types = saved.get(name, [_type_name(part) for part in module_list])
        registered = own_modules(module_list)
        # `del module_list[...]` would rename the base metric that a MetricTracker registers among its copies
        for key in list(registered)[len(saved_types) :]:
            del registered[key]
        for kind in saved_types[len(module_list) :]:
            same_type = {key: part for key, part in registered.items() if part is not None and _type_name(part) == kind}
            template = find_template(same_type)
            if not template:
                incomplete.append(name)
                break
            module_list.append(deepcopy(registered[template]))
    return incomplete


def find_template(same_type: Mapping[str, nn.Module]) -> str:
    """Return the name of a module whose copy can stand for a new module of its type; empty if there is none.

    Args:
        same_type: The siblings of the new module, by name, that have its type.
    """
    return next((name for name, part in same_type.items() if not any(True for _ in part.parameters())), "")


def _module_lists(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    for name, module in modules.items():
        parts = [(part_name, part) for part_name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
        yield from ((f"{name}:{part_name}", part) for part_name, part in parts)


def _type_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
