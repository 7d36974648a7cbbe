"""The files of a record: `run.json` for what describes the run, `values.jsonl` for what was logged."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import NotAFileError, atomic_write, open_file
from lightning_tricks._shared.read_budget import Budget, parse_json
from lightning_tricks._shared.report_parts import PART_KINDS, part_name
from lightning_tricks.run_report.core.plain_fields import from_plain
from lightning_tricks.run_report.core.record import STATUSES, Row, RunRecord, RunReportError

PAGE_MARK = "lightning_tricks.run_report"  # stands in the head of each page
RUN_FILE, VALUES_FILE, PAGE_FILE = "run.json", "values.jsonl", "report.html"
_FORMAT, _VERSION = "lightning_tricks.run_report", 2  # since 2, rows have ids
_OUTSIDE_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def write_run(folder: Path, record: RunRecord) -> None:
    """Write `run.json`, atomically: all of a record but its rows.

    Raises:
        OSError: If it cannot be written.
    """
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        **{one.name: getattr(record, one.name) for one in fields(record) if one.name not in ("rows", "parts")},
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
    """Write a page, atomically; a file that is no page of a report is not replaced.

    Raises:
        OSError: If it cannot be written.
        RunReportError: If the path is another file.
    """
    if path.exists():
        with open_file(path) as stream:
            if PAGE_MARK.encode() not in stream.read(2000):
                raise RunReportError(f"{path} is no page of a report, and is not replaced: give another path.")
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
        record = _read_run(folder / RUN_FILE)
        record.rows = _read_rows(folder / VALUES_FILE)
    except FileNotFoundError as error:
        raise RunReportError(
            f"{folder} holds no report: {Path(str(error.filename)).name} is missing. Name a folder that was the path "
            "of a RunReport."
        ) from None
    except NotAFileError as error:
        raise RunReportError(f"{error}.") from error
    return record


def _read_run(path: Path) -> RunRecord:
    with open_file(path) as stream:
        data = stream.read()
    try:
        content = _decode(parse_json(data, Budget(len(data))))
        if content.pop("format") != _FORMAT:
            raise ValueError("it has another format")
        version = content.pop("version")
        if version not in range(1, _VERSION + 1):
            raise ValueError(f"it has version {version!r}, but this lightning_tricks reads versions up to {_VERSION}")
        parts = [_read_part(dict(part)) for part in content.pop("parts")]
        record: RunRecord = from_plain(RunRecord, content)
        if record.status not in STATUSES:
            raise ValueError(f"{record.status!r} is no status")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunReportError(f"{path} is not a file of RunReport: {str(error)[:200]}.") from error
    record.parts = parts
    return record


def _read_part(content: dict[str, Any]) -> Any:
    return from_plain(PART_KINDS[content.pop("kind")], content)


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
                if row.kind not in ("step", "epoch") or row.count < 1:
                    raise ValueError("it is no row")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
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
    return [_decode(part) for part in value] if isinstance(value, list) else value
