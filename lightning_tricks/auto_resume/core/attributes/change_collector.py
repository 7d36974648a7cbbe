"""The changes of attributes as they are found, within a limit of their size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict

from lightning_tricks.auto_resume.core.attributes.object_walk import AttributeSlot

MAX_BYTES = 64 * 2**20  # of all changed attributes


class AttributeChanges(TypedDict):
    """The changes of attributes.

    Attributes:
        values: Path -> the change as tensors and JSON, for `restore_changes`.
        lost: Path -> the type that is no plain data, or why the value is not saved.
    """

    values: dict[str, Any]
    lost: dict[str, str]


@dataclass
class ChangeCollector:
    """Collects changes.

    Attributes:
        lost: Path -> why a change cannot be saved.
        stateful: Paths of objects whose states are saved.
        values: Path -> change.
        sizes: Path -> size of the change in bytes.
        copied: Paths of modules that are restored as copies of others.
    """

    lost: dict[str, str]
    stateful: set[str]
    values: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)

    def add(
        self,
        path: str,
        slot: AttributeSlot,
        value: Any,
        size: int = 0,
        in_place: bool = False,
        by_hooks: bool = False,
    ) -> None:
        """Add the new value of an attribute, encoded as plain data, with holes that hooks fill if `by_hooks`."""
        self.values[path] = {"of": slot.owner_path, "name": slot.name, "value": value, "in_place": in_place}
        if by_hooks:
            self.values[path]["by_hooks"] = True
        self.sizes[path] = size

    def is_copied(self, path: str) -> bool:
        """Whether an object belongs to a module that is restored as a copy."""
        return any(path == copy or path.startswith(f"{copy}.") for copy in self.copied)

    def within_limit(self, max_bytes: int) -> AttributeChanges:
        """Return the changes, without the largest ones as long as they exceed a number of bytes together."""
        total = sum(self.sizes.values())
        for path in sorted(self.sizes, key=self.sizes.__getitem__, reverse=True):
            if total <= max_bytes:
                break
            total -= self.sizes[path]
            self.lost[path] = too_large_reason(f"{self.sizes[path] / 2**20:.0f} MiB")
            del self.values[path]
        return {"values": self.values, "lost": self.lost}


def too_large_reason(size: str) -> str:
    """Return why a change of some size is not saved."""
    return f"{size}, with all attributes more than {MAX_BYTES >> 20} MiB"
