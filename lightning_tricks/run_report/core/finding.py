"""`Finding`: something that was unusual in a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_tricks._shared.report_parts import ClippedSteps
from lightning_tricks.run_report.core.curves import KeyParts, metric_pictures, sign_of_better
from lightning_tricks.run_report.core.record import Point, RunRecord


@dataclass(frozen=True)
class Finding:
    """Something that was unusual.

    Attributes:
        level: "warning" if it may make the result worthless or costs much, else "note".
        text: The sentence.
    """

    level: Literal["warning", "note"]
    text: str


Check: TypeAlias = Callable[[RunRecord], Sequence[Finding]]


def warn(text: str) -> list[Finding]:
    """Return a list with one warning."""
    return [Finding("warning", text)]


def note(text: str) -> list[Finding]:
    """Return a list with one note."""
    return [Finding("note", text)]


def median(values: Sequence[float]) -> float:
    """Return the median of numbers, of which there is at least one."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def steps_of(record: RunRecord, part: ClippedSteps) -> str:
    """Return the steps of an optimizer in words, which say so where they are not those of the axes."""
    kind = "optimizer steps" if 0 < record.step < part.steps else "steps"
    whose = f" of optimizer {part.optimizer}" * (len(record.parts_of(ClippedSteps)) > 1)
    return f"{part.steps:,} {kind}{whose}"


def finite(points: Sequence[Point]) -> list[Point]:
    """Return the points whose value is finite."""
    return [point for point in points if math.isfinite(point.value)]


def losses(record: RunRecord, stage: str) -> list[tuple[str, list[Point]]]:
    """Return the keys and the curves of the losses of a stage; of one in steps and epochs that of the steps."""
    found: dict[str, tuple[KeyParts, str]] = {}
    for picture in metric_pictures(record):
        if "loss" not in picture.name.lower() or sign_of_better(picture.name) >= 0:
            continue
        for parts, key in picture.curves:
            if parts.stage == stage and (picture.name not in found or parts.kind == "step"):
                found[picture.name] = parts, key
    return [(key, record.curve(key)) for _, key in found.values()]


def watched(record: RunRecord) -> list[tuple[str, int, list[Point]]]:
    """Return the values of validation that tell how good a model is: the loss, or else the first such metric.

    Returns:
        Key, sign of better, and curve of each.
    """
    of_validation = [
        (key, sign_of_better(picture.name), record.curve(key))
        for picture in metric_pictures(record)
        for parts, key in picture.curves
        if parts.stage == "val" and parts.kind != "step" and sign_of_better(picture.name)
    ]
    return of_validation[:1]
