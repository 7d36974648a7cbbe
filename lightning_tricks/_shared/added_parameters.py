"""Modules with parameters that were added to a pretrained model, which no file of its weights has."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class AddedParameters(nn.Module):
    """The base of modules that hold parameters which were added to a pretrained model."""


def added_modules(model: nn.Module) -> Iterator[tuple[str, AddedParameters]]:
    """Yield the modules with added parameters and their qualified names; a shared one comes once."""
    for name, module in model.named_modules():
        if isinstance(module, AddedParameters):
            yield name, module


def added_names(model: nn.Module) -> set[str]:
    """Return the names in a model's state dict that belong to added parameters, also repeated names of shared ones."""
    modules = [(name, part) for name, part in model.named_modules(remove_duplicate=False) if name]
    prefixes = [f"{name}." for name, part in modules if isinstance(part, AddedParameters)]
    return (
        {name for name in model.state_dict(keep_vars=True) if name.startswith(tuple(prefixes))} if prefixes else set()
    )
