"""Models that are given by name on the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn


def import_model(
    path: str, arguments: Mapping[str, Any] | None = None, device: torch.device | None = None
) -> nn.Module:
    """Import the model that `MODULE:NAME` refers to, or call what it refers to and return the model.

    Modules in the working directory can be imported as well.

    Args:
        path: The module and the name in it, such as `torchvision.models:resnet50`.
        arguments: Keyword arguments for the function or class that makes the model.
        device: Where that is called; the import, which may be a whole script, has the default device in any case.

    Raises:
        ValueError: If `path` has no colon.
        TypeError: If `path` refers neither to a model nor to what makes one.
    """
    module_name, name = split_model_argument(path)
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`
    made: Any = importlib.import_module(module_name)
    for part in name.split("."):
        made = getattr(made, part)
    if not isinstance(made, nn.Module):
        with device or nullcontext():
            made = made(**(arguments or {}))
    if not isinstance(made, nn.Module):
        raise TypeError(f"{path} is neither a torch.nn.Module nor a function that returns one: it gives {made!r}")
    return made


def split_model_argument(path: str) -> tuple[str, str]:
    """Return the module and the name of `MODULE:NAME`.

    Raises:
        ValueError: If `path` has no colon.
    """
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"the model must be MODULE:NAME, such as torchvision.models:resnet50; got {path!r}")
    return module, name
