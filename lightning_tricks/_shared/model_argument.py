"""Models that a command line names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn


def import_model(path: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Return the model that `MODULE:NAME` is, or that it makes; modules in the working directory count.

    Args:
        path: Such as `torchvision.models:resnet50`.
        arguments: For what makes the model.

    Raises:
        ValueError: If it is not so written.
        TypeError: If it is no model and makes none.
    """
    module_name, _, name = path.partition(":")
    if not name:
        raise ValueError(f"the model must be MODULE:NAME, such as torchvision.models:resnet50; got {path!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`
    made: Any = importlib.import_module(module_name)
    for part in name.split("."):
        made = getattr(made, part)
    if not isinstance(made, nn.Module):
        made = made(**(arguments or {}))
    if not isinstance(made, nn.Module):
        raise TypeError(f"{path} is no torch.nn.Module and makes none, but {made!r}")
    return made
