"""Packages that only an extra of this package installs."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def import_extra(module: str, extra: str, need: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: The module, such as "psutil".
        extra: The extra that installs it.
        need: What needs which package, for the error, such as "Plots need matplotlib".

    Raises:
        ModuleNotFoundError: If it is not installed; the message names the extra.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:  # something that the package needs itself
            raise
        message = f"{need}, from the extra '{extra}': pip install \".[{extra}]\""
        raise ModuleNotFoundError(message, name=package) from None
