"""Guards for private symbols: where a Lightning has other ones, an error says so, for what is read and what is set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

_OURS = {"contextlib", "importlib", "lightning", "lightning_tricks", "torch"}


@contextmanager
def needs_private(trick: str, *also: type[Exception]) -> Iterator[None]:
    """Turn the error of a private symbol that is not there into one that names the trick; also as a decorator.

    Args:
        trick: What does not work without it.
        also: More exceptions that tell of another Lightning, beside AttributeError and ImportError.

    Raises:
        RuntimeError: With the trick, the version and the remedy.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (AttributeError, ImportError, *also)) or _passed_through_other_code(error):
            raise
        raise unknown_lightning(trick, error) from error


def _passed_through_other_code(error: Exception) -> bool:
    """Whether a user's code was running (a hook, a dataset), whose errors do not tell of another Lightning."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS for frame in frames)


def unknown_lightning(trick: str, error: Exception) -> RuntimeError:
    """Return an error that names the trick, the version and the remedy."""
    import lightning

    return RuntimeError(
        f"{trick} does not work with lightning {lightning.__version__} ({error}): install a version from 2.5 to 2.6."
    )


def set_private(owner: Any, **values: Any) -> None:
    """Set attributes that an object has already; none is added.

    Raises:
        AttributeError: If the object lacks one of them; none is set then.
    """
    for name in values:
        getattr(owner, name)
    for name, value in values.items():
        setattr(owner, name, value)


@contextmanager
def overriding(owner: Any, **methods: Any) -> Iterator[None]:
    """Override methods of one object, and take the overrides out again on leaving.

    Raises:
        AttributeError: If the object lacks one of them; none is overridden then.
    """
    set_private(owner, **methods)
    try:
        yield
    finally:
        for name in methods:
            vars(owner).pop(name, None)
