"""What was unusual in a run, in sentences with numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_tricks.run_report.core.record import RunRecord


@dataclass(frozen=True)
class Finding:
    """Something that was unusual.

    Attributes:
        level: "warning" if it may make the result worthless or costs much, else "note".
        text: The sentence.
    """

    level: Literal["warning", "note"]
    text: str


def find_all(record: RunRecord) -> list[Finding]:
    """Return what was unusual, warnings first."""
    return []
