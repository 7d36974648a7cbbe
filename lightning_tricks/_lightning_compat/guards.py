"""Guards for Lightning's private symbols: where Lightning renamed one, an error says so, for reads and for writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_tricks._shared.guards import overriding, set_private, translating_missing

__all__ = ["needs_private", "overriding", "set_private", "unknown_lightning"]


@contextmanager
def needs_private(trick: str, *also: type[Exception]) -> Iterator[None]:
    """Turn the error of a missing private symbol into one that names the trick; also usable as a decorator.

    Args:
        trick: What does not work without the symbol.
        also: More exception types that a changed Lightning may cause, beside AttributeError and ImportError.

    Raises:
        RuntimeError: If the symbol is missing; the message names the trick, the version and the remedy.
    """
    with translating_missing(lambda error: unknown_lightning(trick, error), *also):
        yield


def unknown_lightning(trick: str, error: Exception) -> RuntimeError:
    """Return an error that names the trick, the version and the remedy."""
    import lightning

    return RuntimeError(
        f"{trick} does not work with lightning {lightning.__version__} ({error}): install a version from 2.5 to 2.6."
    )
