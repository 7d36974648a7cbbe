"""Conflicts between the names of values, and which names belong to single classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def find_name_conflict(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two of the names that are equal, or of which one is a folder of the other; or None.

    Loggers that keep a file for each name, such as MLflow's, cannot have `val/acc` beside `val/acc/cat`.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name, name
        seen.add(name)
    for name in seen:
        parts = name.split("/")
        for length in range(1, len(parts)):
            if (folder := "/".join(parts[:length])) in seen:
                return folder, name
    return None


def name_conflict_message(one: str, other: str) -> str:
    """Return the message of an error for two names that exclude each other."""
    if one == other:
        return f"metrics has two values with the name {one!r}: rename one of them."
    return (
        f"metrics has the values {one!r} and {other!r}, which loggers with a file per value cannot both keep: rename "
        "one of them."
    )


def per_class_names(names: Iterable[str], class_names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the names that belong to a single class: name -> metric and class.

    Args:
        names: The names of values, such as `f1` and `f1_cat`.
        class_names: The names of the classes; a metric has a value for each of them, or for none.
    """
    there = set(names)
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        if not class_names or not name.endswith(f"_{class_names[0]}"):
            continue
        metric = name.removesuffix(f"_{class_names[0]}")
        of_classes = {f"{metric}_{part}": (metric, part) for part in class_names}
        if of_classes.keys() <= there:
            found |= of_classes
    return found
