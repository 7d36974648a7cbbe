"""What is said where a Lightning has other symbols."""

from __future__ import annotations


def unknown_lightning(trick: str, error: Exception) -> RuntimeError:
    import lightning

    return RuntimeError(
        f"{trick} does not work with lightning {lightning.__version__} ({error}): install a version from 2.5 to 2.6."
    )
