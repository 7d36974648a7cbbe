"""The rules of thop for module classes, applied to a copy of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def thop_macs(model_copy: nn.Module, run: Callable[[], None], custom: Mapping[type, Any]) -> dict[nn.Module, float]:
    """Return the MACs that `thop.profile` counts for each module.

    Args:
        model_copy: A copy of a model; after an exception thop leaves buffers in it.
        run: Runs the copy.
        custom: Rules by module class, as for `thop.profile(custom_ops=...)`.
    """
    adapter = _RunAdapter(model_copy, run)
    with torch.device("cpu"):  # where its rules count, whatever the default device is
        _, _, layers = load_thop().profile(adapter, (), dict(custom), verbose=False, ret_layer_info=True)
    macs: dict[nn.Module, float] = {}

    def visit(module: nn.Module, children: dict[str, Any]) -> None:
        for name, (operations, _, below) in children.items():
            child = module.get_submodule(name)
            macs[child] = operations
            visit(child, below)

    macs[model_copy], _, below = layers["model"]
    visit(model_copy, below)
    return macs


def has_thop_rule(module: nn.Module, custom: Mapping[type, Any]) -> bool:
    """Whether there is a rule for the class of a module, in thop or among the custom ones."""
    load_thop()
    from thop.profile import register_hooks

    return type(module) in custom or type(module) in register_hooks


def load_thop() -> Any:
    """Import thop without the deprecation warnings of `distutils`, which it uses to compare versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import thop
    return thop


class _RunAdapter(nn.Module):
    """Lets thop run a function; thop can call only modules, and only with positional arguments."""

    def __init__(self, model: nn.Module, run: Callable[[], None]) -> None:
        super().__init__()
        self.model = model
        self._run = run
        self._default_device = torch.get_default_device()

    def forward(self) -> None:
        with self._default_device:
            self._run()
