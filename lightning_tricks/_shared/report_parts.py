"""What a callback knows about a run, as plain values that a report can show and a file can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Names and texts under a title.

    Attributes:
        title: What they are about, such as "Seed".
        facts: Name and text of each.
        sentences: What else is to be said.
        warnings: What went wrong, for the findings of the report.
        section: Where they stand in the report.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    sentences: Sequence[str] = ()
    warnings: Sequence[str] = ()
    section: Literal["metrics", "cost", "reproducibility"] = "reproducibility"


@dataclass(frozen=True, kw_only=True)
class ClippedSteps:
    """What was done to the gradients of one optimizer.

    Attributes:
        optimizer: The index of the optimizer.
        steps: Its steps.
        clipped: The steps in which gradients were clipped.
        skipped: The steps that were skipped.
        max_norm: The largest norm allowed, or None where there is no such number.
    """

    optimizer: int
    steps: int
    clipped: int
    skipped: int
    max_norm: float | None


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix:
    """The counts of targets and predictions in one epoch of a stage.

    Attributes:
        stage: The stage, such as "val".
        epoch: The epoch, counted from 0.
        classes: The names of the classes.
        counts: A row for each class of the targets.
    """

    stage: str
    epoch: int
    classes: Sequence[str]
    counts: Sequence[Sequence[int]]

    @property
    def is_square(self) -> bool:
        """Whether each class has a name, a row and a column."""
        return all(len(part) == len(self.counts) for part in (self.classes, *self.counts))

    @property
    def recalls(self) -> list[float]:
        """The share of the samples of each class that were recognized; NaN where a class has none."""
        found = [row[place] if place < len(row) else 0 for place, row in enumerate(self.counts)]
        totals = map(sum, self.counts)
        return [right / total if total else math.nan for right, total in zip(found, totals, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """How often predictions of some confidence are right, in one epoch of a stage.

    Attributes:
        stage: The stage, such as "val".
        epoch: The epoch, counted from 0.
        label: What the share is: "accuracy" or "share of positives".
        confidence: The mean confidence in each bin with samples.
        share: The accuracy, or the share of positives, in each.
        weight: The share of the samples in each.
    """

    stage: str
    epoch: int
    label: str
    confidence: Sequence[float]
    share: Sequence[float]
    weight: Sequence[float]

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: the mean distance of confidence and share."""
        bins = zip(self.confidence, self.share, self.weight, strict=False)
        return sum(abs(confidence - share) * weight for confidence, share, weight in bins)


@dataclass(frozen=True, kw_only=True)
class ClassValues:
    """The metrics of single classes in one epoch of a stage.

    Attributes:
        stage: The stage, such as "val".
        epoch: The epoch, counted from 0.
        classes: The names of the classes.
        metrics: The names of the metrics.
        values: A row of the metrics' values for each class; None where there is none.
        keys: The keys under which they are logged.
    """

    stage: str
    epoch: int
    classes: Sequence[str]
    metrics: Sequence[str]
    values: Sequence[Sequence[float | None]]
    keys: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Small pictures with captions.

    Attributes:
        title: What they show.
        captions: A line for each.
        pictures: Each as the base64 of a PNG file.
        note: What else is to be said, or "".
        mistakes: Whether each shows a mistake; none does beyond the end of the list.
    """

    title: str
    captions: Sequence[str]
    pictures: Sequence[str] = field(repr=False)
    note: str = ""
    mistakes: Sequence[bool] = ()


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """What one rank's devices did in training.

    Attributes:
        rank: The global rank.
        data_wait: The share of the time in which it waited for data, in percent, or None.
        rows: Device, quantity, mean and maximum, as texts.
        verdict: What the run waited for, in sentences.
        keeps_up: Whether the loader keeps up with the device, although the host may wait; None if it is unknown.
        remedy: What would make loading faster, in words, or "".
    """

    rank: int
    data_wait: float | None
    rows: Sequence[tuple[str, str, str, str]] = ()
    verdict: Sequence[str] = ()
    keeps_up: bool | None = None
    remedy: str = ""


ReportPart: TypeAlias = Facts | ClippedSteps | ConfusionMatrix | Reliability | ClassValues | Pictures | DeviceUse
PART_KINDS: dict[str, type[Any]] = {
    "facts": Facts,
    "clipped_steps": ClippedSteps,
    "confusion_matrix": ConfusionMatrix,
    "reliability": Reliability,
    "class_values": ClassValues,
    "pictures": Pictures,
    "device_use": DeviceUse,
}


def part_name(part: ReportPart) -> tuple[str, str]:
    """Return what names a part in its report: a later part of this name replaces it."""
    kind = next(name for name, kind in PART_KINDS.items() if type(part) is kind)
    for attribute in ("title", "stage", "optimizer", "rank"):
        if hasattr(part, attribute):
            return kind, str(getattr(part, attribute))
    return kind, ""
