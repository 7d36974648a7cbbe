"""The packages of the extra `devices`."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(module: str, package: str, what: str) -> Any:
    """Import a module of the extra `devices`.

    Args:
        module: The module, such as "psutil".
        package: The package that it is in.
        what: What needs it, for the error.

    Raises:
        ModuleNotFoundError: If it is not installed; the message names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        message = f"{what} needs {package}, from the extra 'devices': pip install \".[devices]\""
        raise ModuleNotFoundError(message, name=module) from None
