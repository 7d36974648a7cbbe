"""Find out which modules with added parameters a batch calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_tricks._torch_compat.guards import overriding
from lightning_tricks._torch_compat.modules import compiled_module, compiles_in_place


@dataclass
class AdapterCoverage:
    """Records which modules a batch used.

    Attributes:
        called: The names of the modules whose `forward` ran.
        bypassed: The names of those whose `forward` did not run while that of the module around them did, such as in a
            fused layer, or one that reads the weights of its parts.
        idle: The names of those that lie in a module whose `forward` did not run either: the batch did not use it.
    """

    called: list[str] = field(default_factory=list)
    bypassed: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


@contextmanager
def watching_coverage(model: nn.Module, names: Iterable[str]) -> Iterator[AdapterCoverage]:
    """Watch which modules run while the context is entered; the lists are filled when it is left.

    Hooks are not used: some fused layers take another path where there is one. Nothing else of the modules changes.

    Args:
        model: The model.
        names: Qualified names of modules of it.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> with watching_coverage(model, ["0", "1"]) as coverage:
        ...     out = model[0](torch.ones(1, 2))
        >>> coverage
        AdapterCoverage(called=['0'], bypassed=[], idle=['1'])
    """
    names, ran = list(names), set[int]()
    around = {name: _module_around(model, name) for name in names}
    watched = {id(part): part for name in names for part in (model.get_submodule(name), around[name])}
    coverage = AdapterCoverage()
    with ExitStack() as stack:
        for part in watched.values():
            if "forward" not in vars(part):  # an override of the user stays
                stack.enter_context(overriding(part, forward=_noting(part, ran)))
        yield coverage
    for name in names:
        if id(model.get_submodule(name)) in ran:
            coverage.called.append(name)
        elif id(around[name]) in ran:
            coverage.bypassed.append(name)
        else:
            coverage.idle.append(name)


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled, so that an override in it would be compiled as well."""
    return any(compiled_module(part) is not None or compiles_in_place(part) for part in model.modules())


def _module_around(model: nn.Module, name: str) -> nn.Module:
    """Return the smallest module around a named one that has a `forward`; the model if there is none."""
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if type(module).forward is not nn.Module.forward:  # lists and dicts of modules have none
            return module
    return model


def _noting(module: nn.Module, ran: set[int]) -> Any:
    forward = module.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        ran.add(id(module))
        return forward(*args, **kwargs)

    return noting
