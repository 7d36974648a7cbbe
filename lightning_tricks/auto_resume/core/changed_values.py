"""Named values that changed, and those that were changed back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class ChangedValues:
    """Finds which of some named values are, or were when they were looked at, other than at first.

    One that was changed back counts as well: the hooks of a process that resumes may change it again, and not back.

    Args:
        initial: The values at first, by name.

    Attributes:
        initial: The values at first.

    Examples:
        >>> clipping = ChangedValues({"max_norm": 1.0, "norm_type": 2.0})
        >>> clipping.changes({"max_norm": 0.1, "norm_type": 2.0})
        {'max_norm': 0.1}
        >>> clipping.changes({"max_norm": 1.0, "norm_type": 2.0})
        {'max_norm': 1.0}
    """

    def __init__(self, initial: Mapping[str, Any]) -> None:
        self.initial = dict(initial)
        self._names = set[str]()

    def changes(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the present values that are, or were once, others."""
        self.note(name for name, value in now.items() if name not in self.initial or self.initial[name] != value)
        return {name: value for name, value in now.items() if name in self._names}

    def note(self, names: Iterable[str]) -> None:
        """Count values as changed, such as those that had changed in the process that is resumed."""
        self._names.update(names)
