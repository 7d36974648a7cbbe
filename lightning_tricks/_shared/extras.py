"""Packages that only an extra of this package installs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from packaging.requirements import Requirement

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "adl": "az"}


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


def needed_for_address(address: str, error: ImportError) -> str:
    """Return which extra lets fsspec open an address such as `s3://bucket/run`, after an error for want of a package.

    Examples:
        >>> needed_for_address("adl://lake/run", ImportError())[:37]
        "adl:// needs the extra 'az': pip inst"
    """
    protocol = address.partition("://")[0].rpartition("::")[2].strip().lower()
    extra = _EXTRAS.get(protocol)
    return f"{protocol}:// needs the extra '{extra}': {install_command(extra)}" if extra else str(error)


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
