"""The files of a record: `run.json` with the description of the run, `values.jsonl` with the logged values."""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import NotAFileError, atomic_write, open_file
from lightning_tricks._shared.read_budget import Budget, parse_json
from lightning_tricks._shared.report_parts import PART_KINDS, part_name
from lightning_tricks.run_report.core.record import Row, RunRecord, RunReportError

PAGE_MARK = "lightning_tricks.run_report"  # stands in the head of each page
RUN_FILE, VALUES_FILE, PAGE_FILE = "run.json", "values.jsonl", "report.html"
_FORMAT, _VERSION = "lightning_tricks.run_report", 2
Made = TypeVar("Made")
_LONGEST_LIST = 30_000  # a page of more is slow; what a report has most of are classes
_OUTSIDE_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def write_run(folder: Path, record: RunRecord) -> None:
    """Write `run.json`, atomically: all of a record but its rows.

    Raises:
        OSError: If it cannot be written.
    """
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        **{known.name: getattr(record, known.name) for known in fields(record) if known.name not in ("rows", "parts")},
        "git": record.git and asdict(record.git),
        "resumes": [asdict(resume) for resume in record.resumes],
        "parts": [{"kind": part_name(part)[0], **asdict(part)} for part in record.parts],
    }
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


def write_page(path: Path, page: str) -> None:
    """Write a page, atomically; a file that is not a page of a report is not replaced.

    Raises:
        OSError: If it cannot be written.
        RunReportError: If the path is another file.
    """
    if path.exists():
        with open_file(path) as stream:
            if PAGE_MARK.encode() not in stream.read(2000):
                raise RunReportError(f"{path} is not a page of a report, so it is not replaced: give another path.")
    with atomic_write(path) as staged:
        staged.write_text(page, encoding="utf-8", errors="replace")  # a path may have what UTF-8 lacks


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
            f"{folder} holds no report: {Path(str(error.filename)).name} is missing. Name a folder that was the path "
            "of a RunReport."
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
        raise ValueError(f"it has a list of {len(value):,} entries, and {_LONGEST_LIST:,} are read")
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


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked(hint: Any, value: Any, name: str) -> Any:
    if type(value) is int and abs(value) >= 1 << 63:  # Python counts on, and then no float holds it
        raise TypeError(f"{name} must be below 2**63 in size, got a number of {value.bit_length():,} bits")
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_fitting(arguments, value, name)
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


def _first_fitting(hints: Sequence[Any], value: Any, name: str) -> Any:
    for hint in hints:
        try:
            return _checked(hint, value, name)
        except TypeError:
            continue
    raise TypeError(f"{name} must be {' or '.join(map(str, hints))}, got {type(value).__name__}")
