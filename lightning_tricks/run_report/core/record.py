"""`RunRecord`: the facts about one run, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from lightning_tricks._shared.report_parts import ClippedSteps, ReportPart, part_name

MOST_KEYS = 1000
Status = Literal["running", "finished", "stopped", "failed"]
Part = TypeVar("Part")


class RunReportError(ValueError):
    """The files of a report are missing, damaged, or no files of `RunReport`."""


@dataclass(frozen=True)
class Row:
    """The values that were logged together.

    Attributes:
        kind: "step" for the values of a training step, "epoch" for those at the end of an epoch.
        step: The step under which a logger shows them.
        epoch: The epoch, counted from 0.
        values: Key -> value; of rows that were merged, the mean.
        count: How many rows were merged into this one.
        low: Of merged rows, key -> the smallest value.
        high: Of merged rows, key -> the largest value.
    """

    kind: Literal["step", "epoch"]
    step: int
    epoch: int
    values: dict[str, float]
    count: int = 1
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """Something that was unusual in a run.

    Attributes:
        level: "warning" if it may make the result worthless or costs much, else "note".
        text: The sentence.
    """

    level: Literal["warning", "note"]
    text: str


def warning(text: str) -> Finding:
    """Return a finding that may make the result worthless or costs much."""
    return Finding("warning", text)


def note(text: str) -> Finding:
    """Return any other finding."""
    return Finding("note", text)


class Point(NamedTuple):
    """A value of a curve, with the smallest and the largest one that were merged into it."""

    step: int
    epoch: int
    value: float
    low: float
    high: float


@dataclass
class Resume:
    """A moment at which the run was resumed.

    Attributes:
        step: The steps done by then, as loggers count them: of several in one batch, as of several optimizers, one.
        epoch: The epoch, counted from 0.
        time: The time, in seconds since 1970.
        not_restored: The names of state that was not restored as it was saved, as far as `AutoResume` says so.
        id: The id of the rows that follow; "" if a later resume went back to a checkpoint before them.
        rows: How many rows were kept.
    """

    step: int
    epoch: int
    time: float
    not_restored: list[str] = field(default_factory=list)
    id: str = ""
    rows: int = 0


class Position(NamedTuple):
    """A place in a record, which a checkpoint keeps.

    Attributes:
        id: The id of the rows that were written last; "" before there are any.
        rows: How many rows the record has.
    """

    id: str = ""
    rows: int = 0


@dataclass
class GitState:
    """The state of the working folder's git checkout.

    Attributes:
        commit: The hash of the commit.
        branch: The branch, or "" if there is none.
        changed: The names of changed files, as `git status --short` prints them.
        diff: The differences to the commit.
        is_cut: Whether only the beginning of the differences is kept.
        not_compared: Files whose changes git tells only by running another program; "." where it did not answer.
    """

    commit: str
    branch: str = ""
    changed: list[str] = field(default_factory=list)
    diff: str = ""
    is_cut: bool = False
    not_compared: list[str] = field(default_factory=list)


@dataclass
class RunRecord:
    """The facts about one run.

    Attributes:
        id: The id of the rows up to the first resume, which no other run has.
        module: The name of the module's class.
        status: "running", "finished", "stopped" (by a signal or a key) or "failed".
        message: The error, if it failed.
        started: When it started, in seconds since 1970.
        written: When this was written.
        seconds: How long it trained, over all resumes.
        validation_seconds: How much of that it spent in validation.
        batches: The batches that rank zero trained on, over all resumes, those that a resume repeated included.
        samples: The samples in them, or None if the shapes of a batch do not tell it.
        ranks: The number of ranks.
        step: The steps done, as loggers count them.
        epochs: The epochs done.
        is_seeded: Whether a seed was set by Lightning or by `SeedEverything`.
        arguments: Name and text of each hyper-parameter.
        trainer: Name and text of each argument of the Trainer.
        data: Name and text of facts about the data.
        versions: Name and version of libraries.
        settings: Name and text of all other settings, such as the arguments of callbacks.
        not_recorded: Settings that may differ between runs and were not recorded, in words.
        git: The git checkout, or None.
        resumes: When it was resumed.
        parts: The report parts of the callbacks.
        rows: The logged values.
        keys_left_out: How many keys there were beyond the first 1,000.
        saved_rows: How many rows there were when a checkpoint was saved last.
    """

    id: str = ""
    module: str = ""
    status: Status = "running"
    message: str = ""
    started: float = 0.0
    written: float = 0.0
    seconds: float = 0.0
    validation_seconds: float = 0.0
    batches: int = 0
    samples: int | None = 0
    ranks: int = 1
    step: int = 0
    epochs: int = 0
    is_seeded: bool = True
    arguments: list[tuple[str, str]] = field(default_factory=list)
    trainer: list[tuple[str, str]] = field(default_factory=list)
    data: list[tuple[str, str]] = field(default_factory=list)
    versions: list[tuple[str, str]] = field(default_factory=list)
    settings: list[tuple[str, str]] = field(default_factory=list)
    not_recorded: list[str] = field(default_factory=list)
    git: GitState | None = None
    resumes: list[Resume] = field(default_factory=list)
    parts: list[ReportPart] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    keys_left_out: int = 0
    saved_rows: int = 0

    @property
    def samples_per_second(self) -> float | None:
        """The samples that a rank trained on in a second of the fit, or None if it is not known."""
        return self.samples / self.seconds if self.samples and self.seconds > 0 else None

    def segments(self) -> list[tuple[str, int]]:
        """Return the ids of the rows, each with the number of rows before them."""
        return [(self.id, 0), *((resume.id, resume.rows) for resume in self.resumes if resume.id)]

    def position(self, rows: int) -> Position:
        """Return the place after the first rows, of which there are so many: all, or as many as a resume has kept."""
        ids = [self.id, *(name for name, start in self.segments() if start < rows)]
        return Position(ids[-1], rows)

    def has(self, position: Position) -> bool:
        """Whether the first rows are those that a run had when it saved a checkpoint."""
        segments = self.segments()
        ends = [start for _, start in segments[1:]] + [position.rows]
        return any(
            name == position.id and start <= position.rows <= end
            for (name, start), end in zip(segments, ends, strict=True)
        )

    def logged_keys(self) -> list[str]:
        """Return the keys of all rows, in the order in which they came."""
        known: dict[str, None] = {}
        for row in self.rows:
            if not row.values.keys() <= known.keys():  # a tenth of the time of adding them all
                known.update(dict.fromkeys(row.values))
        return list(known)

    def curve(self, key: str) -> list[Point]:
        """Return the values of a key."""
        return [
            Point(row.step, row.epoch, value, row.low.get(key, value), row.high.get(key, value))
            for row in self.rows
            if (value := row.values.get(key)) is not None
        ]

    def parts_of(self, kind: type[Part]) -> list[Part]:
        """Return the parts of a kind."""
        return [part for part in self.parts if isinstance(part, kind)]

    def describe_steps(self, part: ClippedSteps) -> str:
        """Return the steps of an optimizer in words, which say so where they are not those of the axes."""
        kind = "optimizer steps" if 0 < self.step < part.steps else "steps"
        whose = f" of optimizer {part.optimizer}" if len(self.parts_of(ClippedSteps)) > 1 else ""
        return f"{part.steps:,} {kind}{whose}"

    def add_parts(self, parts: Iterable[ReportPart]) -> None:
        """Add parts; each replaces the one of the same name."""
        named = {part_name(part): part for part in (*self.parts, *parts)}
        self.parts = list(named.values())


def merge_rows(rows: Sequence[Row]) -> Row:
    """Merge neighbouring rows of one kind: means, weighted, with the smallest and the largest value of each key."""
    last = rows[-1]
    values, low, high = {}, {}, {}
    for key in dict.fromkeys(key for row in rows for key in row.values):
        having = [row for row in rows if key in row.values]
        total = sum(row.count for row in having)
        values[key] = sum(row.values[key] * row.count for row in having) / total
        low[key] = _extreme(min, [row.low.get(key, row.values[key]) for row in having])
        high[key] = _extreme(max, [row.high.get(key, row.values[key]) for row in having])
    return Row(last.kind, last.step, last.epoch, values, sum(row.count for row in rows), low, high)


def _extreme(choose: Any, values: Sequence[float]) -> float:
    return float(choose((value for value in values if not math.isnan(value)), default=math.nan))


def thin_rows(rows: Sequence[Row], most: int) -> list[Row]:
    """Merge pairs of neighbouring rows of each kind of which there are more than `most`."""
    waiting: dict[str, Row] = {}
    crowded = {kind for kind in ("step", "epoch") if sum(row.kind == kind for row in rows) > most}
    thinned: list[tuple[int, Row]] = []
    for place, row in enumerate(rows):
        if row.kind not in crowded:
            thinned.append((place, row))
        elif row.kind in waiting:
            thinned.append((place, merge_rows([waiting.pop(row.kind), row])))
        else:
            waiting[row.kind] = row
    last = [(len(rows), row) for row in waiting.values()]
    return [row for _, row in sorted([*thinned, *last], key=lambda pair: pair[0])]
