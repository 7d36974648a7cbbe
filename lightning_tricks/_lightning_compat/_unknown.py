"""What is said where a Lightning has other symbols."""

from __future__ import annotations


def unknown_lightning(trick: str, error: Exception) -> RuntimeError:
    """Return an error that names the trick, the version and the remedy."""
    import lightning

    return RuntimeError(
        f"{trick} does not work with lightning {lightning.__version__} ({error}): install a version from 2.5 to 2.6."
    )
