"""Packages that only an extra of this package installs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from packaging.requirements import Requirement


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
        message = f"{need}, from the extra '{extra}': {install_command(extra)}"
        raise ModuleNotFoundError(message, name=package) from None


def install_command(extra: str) -> str:
    """Return a command that installs what an extra consists of, wherever it is run.

    Examples:
        >>> install_command("finetune")
        'pip install "peft>=0.21"'
    """
    try:
        declared = [Requirement(line) for line in requires("lightning-tricks") or ()]
    except PackageNotFoundError:  # its source on the path alone
        declared = []
    packages = []
    for requirement in declared:
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            packages.append(f'"{requirement}"')
    return f"pip install {' '.join(packages) or f'.[{extra}]'}"
