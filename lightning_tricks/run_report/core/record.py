"""`RunRecord`: the facts about one run, as plain data, and its files `run.json` and `values.jsonl`."""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import NotAFileError, atomic_write, open_file
from lightning_tricks._shared.read_budget import Budget, parse_json
from lightning_tricks._shared.report_parts import PART_KINDS, ClippedSteps, ReportPart, part_name

Status = Literal["running", "finished", "stopped", "failed"]
Part = TypeVar("Part")
RUN_FILE, VALUES_FILE, PAGE_FILE = "run.json", "values.jsonl", "report.html"
_FORMAT, _VERSION = "lightning_tricks.run_report", 2
Made = TypeVar("Made")
_LONGEST_LIST = 30_000  # a page of more is slow; what a report has most of are classes
_OUTSIDE_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunReportError(ValueError):
    """The files of a report are missing, damaged, or not files of `RunReport`."""


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
    """An unusual observation about a run.

    Attributes:
        level: "warning" if it may make the result worthless or is expensive, else "note".
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
class RunSetup:
    """What findings and comparisons decide by, of what a record tells people in texts.

    Attributes:
        callbacks: The classes of the callbacks.
        optimizers: The classes of the optimizers.
        schedulers: The classes of the schedulers, or None if they are unknown.
        waits_for_plateau: Whether a scheduler waits until a value no longer improves.
        trainer: What the Trainer was given, by argument, as far as findings ask for it.
        every_n_train_steps: Of callbacks that act every so many steps, the label and that number.
        training_batches: The batches of an epoch that the Trainer expected, or None if they are unknown.
        has_validation: Whether there is data for validation.
        left_out: The limits that leave out a part of the data: the argument, and the stage.
    """

    callbacks: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    schedulers: list[str] | None = None
    waits_for_plateau: bool = False
    trainer: dict[str, int | float | str] = field(default_factory=dict)
    every_n_train_steps: dict[str, int] = field(default_factory=dict)
    training_batches: int | None = None
    has_validation: bool = False
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class RunRecord:
    """The facts about one run.

    Attributes:
        id: The id of the rows up to the first resume, unique to this run.
        module: The name of the module's class.
        status: "running", "finished", "stopped" (by a signal or a key) or "failed".
        message: The error, if the run failed.
        started: The time of the start, in seconds since 1970.
        written: The time at which this was written.
        seconds: The duration of training, over all resumes.
        validation_seconds: The part of it spent in validation.
        batches: The batches that rank zero trained on, over all resumes, including those that a resume repeated.
        samples: The samples in them, or None if the shapes of a batch do not show it.
        ranks: The number of ranks.
        step: The steps done, as loggers count them.
        epochs: The epochs done.
        is_seeded: Whether a seed was set by Lightning or by `SeedEverything`.
        arguments: Name and text of each hyper-parameter.
        trainer: Name and text of each argument of the Trainer.
        data: Name and text of facts about the data.
        setup: What findings and comparisons decide by, of the texts above; those are for people.
        versions: Name and version of libraries.
        settings: Name and text of all other settings, such as the arguments of callbacks.
        defaults: The names of the settings and hyper-parameters that have the default of their argument, or None.
        not_recorded: Settings that may differ between runs and were not recorded, in words.
        git: The git checkout, or None.
        monitors: Of a run that has finished, the callbacks and schedulers that monitor a value: the name, the key,
            whether it was logged, and the steps of a scheduler.
        schedules: Of a run that has finished, the classes of schedulers, "step" or "epoch", the steps that they made,
            and those that they were made for.
        resumes: The resumes of the run.
        parts: The report parts of the callbacks.
        rows: The logged values.
        keys_left_out: The number of keys beyond the first 1,000.
        saved_rows: The number of rows when the last checkpoint was saved.
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
    setup: RunSetup = field(default_factory=RunSetup)
    versions: list[tuple[str, str]] = field(default_factory=list)
    settings: list[tuple[str, str]] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    not_recorded: list[str] = field(default_factory=list)
    git: GitState | None = None
    monitors: list[tuple[str, str, bool, int]] = field(default_factory=list)
    schedules: list[tuple[str, str, int, int]] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    parts: list[ReportPart] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    keys_left_out: int = 0
    saved_rows: int = 0

    @property
    def samples_per_second(self) -> float | None:
        """The samples per second that a rank trained on in the fit, or None if unknown."""
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
        places = zip(segments, ends, strict=True)
        return any(name == position.id and start <= position.rows <= end for (name, start), end in places)

    def logged_keys(self) -> list[str]:
        """Return the keys of all rows, in order of appearance."""
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
        """Return the parts of a type."""
        return [part for part in self.parts if isinstance(part, kind)]

    def describe_steps(self, part: ClippedSteps) -> str:
        """Return the steps of an optimizer as text, which points out steps that are not those of the axes."""
        kind = "optimizer steps" if 0 < self.step < part.steps else "steps"
        whose = f" of optimizer {part.optimizer}" if len(self.parts_of(ClippedSteps)) > 1 else ""
        return f"{part.steps:,} {kind}{whose}"

    def add_parts(self, parts: Iterable[ReportPart]) -> None:
        """Add parts; each replaces the part of the same name."""
        named = {part_name(part): part for part in (*self.parts, *parts)}
        self.parts = list(named.values())


def write_run(folder: Path, record: RunRecord) -> None:
    """Write `run.json`, atomically: all of a record but its rows.

    Raises:
        OSError: If it cannot be written.
    """
    described = asdict(replace(record, rows=[], parts=[]))
    del described["rows"]
    parts = [{"kind": part_name(part)[0], **asdict(part)} for part in record.parts]
    content = {"format": _FORMAT, "version": _VERSION, **described, "parts": parts}
    with atomic_write(folder / RUN_FILE) as staged:
        staged.write_text(json.dumps(_encode(content), indent=1) + "\n", encoding="utf-8")


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write `values.jsonl` anew, atomically.

    Raises:
        OSError: If it cannot be written.
    """
    with atomic_write(folder / VALUES_FILE) as staged:
        staged.write_text("".join(map(_format_row, rows)), encoding="utf-8")


def append_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Append rows to `values.jsonl`.

    Raises:
        OSError: If that fails.
    """
    with (folder / VALUES_FILE).open("a", encoding="utf-8") as file:
        file.write("".join(map(_format_row, rows)))


def read_record(folder: str | os.PathLike[str]) -> RunRecord:
    """Read the record in a folder that `RunReport` wrote; an incomplete last row is ignored.

    Raises:
        OSError: If a file cannot be read.
        RunReportError: If there is no record, or it is damaged, has a later version, or needs far more memory or time
            than its size explains.
    """
    folder = Path(check_path("folder", folder, "a folder"))
    try:
        record = read_run(folder / RUN_FILE)
        record.rows = _read_rows(folder / VALUES_FILE)
    except FileNotFoundError as error:
        raise RunReportError(
            f"{folder} holds no report: {Path(str(error.filename)).name} is missing. Pass the dirpath of a RunReport."
        ) from None
    except NotAFileError as error:
        raise RunReportError(f"{error}.") from error
    return record


def read_run(path: Path) -> RunRecord:
    """Read a `run.json`: a record without its rows.

    Raises:
        OSError: If it cannot be read.
        RunReportError: As `read_record`.
    """
    with open_file(path) as stream:
        data = stream.read()
    try:
        content = _decode(parse_json(data, Budget(len(data))))
        if content.pop("format") != _FORMAT:
            raise ValueError("it has another format")
        version = content.pop("version")
        if version != _VERSION:
            raise ValueError(f"it has version {version!r}, and this lightning_tricks reads version {_VERSION}")
        parts = [dict(part) for part in content.pop("parts")]
        record: RunRecord = from_plain(RunRecord, content)
        record.parts = [from_plain(PART_KINDS[part.pop("kind")], part) for part in parts]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise RunReportError(f"{path} is not a file of RunReport: {str(error)[:200]}.") from error
    return record


def _read_rows(path: Path) -> list[Row]:
    rows = []
    with open_file(path) as stream:
        budget = Budget(os.fstat(stream.fileno()).st_size)
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                break
            try:
                budget.spend(512)
                row: Row = from_plain(Row, _decode(parse_json(line, budget)))
                if row.count < 1:
                    raise ValueError("it is not a row")
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                raise RunReportError(f"{path} is damaged in line {number}: {str(error)[:200]}.") from error
            rows.append(row)
    return rows


def _format_row(row: Row) -> str:
    content = {name: value for name, value in vars(row).items() if value not in ({}, 1) or name in ("step", "epoch")}
    return json.dumps(_encode({"values": {}, **content})) + "\n"


def _encode(value: Any) -> Any:
    """Replace numbers that JSON lacks by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, dict):
        return {str(name): _encode(part) for name, part in value.items()}
    return [_encode(part) for part in value] if isinstance(value, list | tuple) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"number"} and isinstance(name := value["number"], str) and name in _OUTSIDE_JSON:
            return _OUTSIDE_JSON[name]
        return {name: _decode(part) for name, part in value.items()}
    if isinstance(value, list) and len(value) > _LONGEST_LIST:
        raise ValueError(f"it has a list of {len(value):,} entries, and at most {_LONGEST_LIST:,} are read")
    return [_decode(part) for part in value] if isinstance(value, list) else value


def from_plain(kind: type[Made], content: dict[str, Any]) -> Made:
    """Make a dataclass of a dict of its fields.

    Raises:
        TypeError: If a field is missing or unknown, or its value is of another type.

    Examples:
        >>> from lightning_tricks.run_report.core.record import Resume
        >>> from_plain(Resume, {"step": 3, "epoch": 0, "time": 1.5})
        Resume(step=3, epoch=0, time=1.5, not_restored=[], id='', rows=0)
    """
    declared: Any = kind
    hints = _hints(declared)
    unknown = content.keys() - hints.keys()
    if unknown:
        raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
    return kind(**{name: _checked(hints[name], value, name) for name, value in content.items()})


_hints = cache(get_type_hints)


def _checked(hint: Any, value: Any, name: str) -> Any:
    if type(value) is int and abs(value) >= 1 << 63:  # Python counts on, and then no float holds it
        raise TypeError(f"{name} must be below 2**63 in size, got a number of {value.bit_length():,} bits")
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for inner in arguments:
            with suppress(TypeError):
                return _checked(inner, value, name)
    is_fitting = (origin is Literal and value in arguments) or (hint in (int, str, bool) and type(value) is hint)
    if is_fitting or hint is Any or (value is None and hint in (None, type(None))):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return from_plain(hint, value)
    if origin is dict and isinstance(value, dict):
        return {str(key): _checked(arguments[1], part, name) for key, part in value.items()}
    if isinstance(value, list | tuple) and origin is tuple and len(value) == len(arguments):
        return tuple(_checked(inner, part, name) for inner, part in zip(arguments, value, strict=True))
    if isinstance(value, list | tuple) and origin in (list, Sequence):
        return [_checked(arguments[0], part, name) for part in value]
    raise TypeError(f"{name} must be {getattr(hint, '__name__', hint)}, got {type(value).__name__}")
