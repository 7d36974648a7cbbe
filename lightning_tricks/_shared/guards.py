"""Guards for private symbols of other libraries: a missing one raises an error that names the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

_TRUSTED_PACKAGES = {"contextlib", "importlib", "lightning", "lightning_tricks", "torch"}


@contextmanager
def translating_missing(translate: Callable[[Exception], Exception], *also: type[Exception]) -> Iterator[None]:
    """Translate the error of a missing private symbol into one that a user understands.

    Args:
        translate: Makes the new error from the one that was raised.
        also: More exception types that a changed library may cause, beside AttributeError and ImportError.

    Raises:
        Exception: What `translate` returned, from the original error.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (AttributeError, ImportError, *also)) or _passed_through_other_code(error):
            raise
        raise translate(error) from error


def _passed_through_other_code(error: Exception) -> bool:
    """Whether user code was running (a hook, a dataset), whose errors say nothing about the library."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(frame.f_globals.get("__name__", "").partition(".")[0] not in _TRUSTED_PACKAGES for frame in frames)


def set_private(owner: Any, **values: Any) -> None:
    """Set attributes that an object already has; no attribute is added.

    Raises:
        AttributeError: If the object lacks one of the attributes; none of them is set then.
    """
    for name in values:
        getattr(owner, name)
    for name, value in values.items():
        setattr(owner, name, value)


@contextmanager
def overriding(owner: Any, **methods: Any) -> Iterator[None]:
    """Override methods of one object, and remove the overrides on leaving.

    Raises:
        AttributeError: If the object lacks one of the methods; none of them is overridden then.
    """
    set_private(owner, **methods)
    try:
        yield
    finally:
        for name in methods:
            vars(owner).pop(name, None)
