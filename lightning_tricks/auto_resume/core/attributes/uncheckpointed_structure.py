"""The structure of models, optimizers and schedulers that no checkpoint restores: it is compared instead.

These are hooks, tied weights, precisions, and classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_tricks._torch_compat.modules import hooks_of

# The keys of an outline, and how their entries are named to users
_WORDS = {
    "hooks": "the hooks of",
    "tied": "the tied weights",
    "precisions": "the number of weights in",
    "optimizers": "the class of optimizer",
    "schedulers": "the class of learning rate scheduler",
}
Outline = dict[str, dict[str, Any]]


def outline(modules: Mapping[str, nn.Module], optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Outline:
    """Return the structure that can be compared but not restored, as plain values.

    Args:
        modules: The modules by name; the model itself under "".
        optimizers: The optimizers.
        schedulers: Their schedulers.
    """
    owners = {
        path: owner
        for name, module in modules.items()
        for pairs in (module.named_modules(prefix=name), module.named_parameters(prefix=name))
        for path, owner in pairs
    }
    owners |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)}
    hooks = {path: _hook_names(owner) for path, owner in owners.items()}
    return {
        "hooks": {path or "the module": names for path, names in hooks.items() if names},
        "tied": _tied_weights(modules[""]),
        "precisions": _numbers_by_precision(modules[""]),
        "optimizers": _class_names(optimizers),
        "schedulers": _class_names(schedulers),
    }


def differing_parts(saved: Outline, now: Outline) -> Iterator[str]:
    """Yield the parts of two outlines that differ, in words."""
    for kind, words in _WORDS.items():
        before, present = saved.get(kind, {}), now[kind]
        names = {**before, **present} if kind in saved else {}
        yield from (f"{words} {name}" for name in names if before.get(name) != present.get(name))


def _class_names(objects: Sequence[Any]) -> dict[str, str]:
    return {str(number): type(value).__qualname__ for number, value in enumerate(objects)}


def _tied_weights(module: nn.Module) -> dict[str, str]:
    """Return each further name of a parameter -> its first one."""
    first = dict[int, str]()
    parameters = module.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return {name: known for name, known in names.items() if name != known}


def _numbers_by_precision(module: nn.Module) -> dict[str, int]:
    return dict(Counter(str(parameter.dtype) for _, parameter in module.named_parameters(remove_duplicate=False)))


def _hook_names(owner: Any) -> list[str]:
    """Return the names of an owner's hooks, without those of this package, which its callbacks register again."""
    found = []
    for hook in hooks_of(owner):
        function = getattr(hook, "func", hook)  # of a partial
        named = function if hasattr(function, "__qualname__") else type(function)
        if not str(named.__module__).startswith("lightning_tricks."):
            found.append(str(named.__qualname__))
    return sorted(found)
