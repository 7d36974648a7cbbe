"""Lists of names in messages."""

from __future__ import annotations

from collections.abc import Iterable


def list_names(names: Iterable[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more
