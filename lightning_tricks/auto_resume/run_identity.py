"""What distinguishes a run from another: its module, and the arguments of that."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_tricks.auto_resume.core.configuration import plain


def run_identity(module: LightningModule) -> dict[str, Any]:
    """Return what distinguishes a run: class of the module, names and shapes of parameters, and arguments."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters() if not is_lazy(parameter)}
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}".replace("__main__.", ""),
        "parameters": hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16],
        "arguments": plain(dict(module.hparams_initial)),  # a learning rate finder does not change these
    }


def shape_differences(module: nn.Module, saved: Mapping[str, Any], max_names: int = 5) -> list[str]:
    """Return a phrase for each parameter in which a module differs from a saved state dict."""
    own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    found = [
        f"{name} has shape {shape} in this run and {tuple(saved[name].shape) if name in saved else 'is missing'} "
        "in the checkpoint"
        for name, shape in own.items()
        if name not in saved or tuple(saved[name].shape) != shape
    ]
    mine = module.state_dict().keys()
    found += [f"{name} is in the checkpoint only" for name in saved if name not in mine]
    return [*found[:max_names], *([f"and {len(found) - max_names} more"] if len(found) > max_names else [])]
