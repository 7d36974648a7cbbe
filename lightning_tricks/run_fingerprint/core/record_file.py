"""The file of a record: lines of JSON, to which blocks of rows are appended."""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._shared.checks import check_choice, check_count, check_path
from lightning_tricks._shared.files import NotAFileError, atomic_write, open_file
from lightning_tricks._shared.read_budget import Budget, parse_json
from lightning_tricks.run_fingerprint.core.record import (
    INTEGER,
    KEY_LENGTH,
    Column,
    FingerprintRecord,
    FingerprintRecordError,
    IncompleteResume,
    RecordHeader,
)

_FORMAT = "lightning_tricks.run_fingerprint"
_COLUMN_KINDS = ("data", "forward", "loss", "gradient", "weights")
_LONGEST_HEADER = 10_000  # characters


def rank_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of a rank: `run.jsonl` itself for rank zero, `run.rank1.jsonl` for rank 1."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def earlier_path(path: Path, number: int) -> Path:
    """Return where the record of an earlier run is kept: `run.earlier-1.jsonl` for `run.jsonl`; 0 for itself."""
    return path.with_name(f"{path.stem}.earlier-{number}{path.suffix}") if number else path


def write_record(path: Path, record: FingerprintRecord) -> None:
    """Write a whole record, atomically, in place of an existing file.

    Raises:
        OSError: If it cannot be written; the existing file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as staged, staged.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format": _FORMAT, **asdict(record.header)}) + "\n")
        file.writelines(format_resume(resume) for resume in record.incomplete_resumes)
        before: tuple[Column, ...] = ()
        for columns, table in record.blocks:
            file.write(format_rows(columns, table, before))
            before = columns


def read_record(path: Path) -> FingerprintRecord:
    """Read the record of one rank; an incomplete last line is ignored.

    Raises:
        OSError: If the file cannot be read.
        FingerprintRecordError: If the file is no record, is damaged, has a later version, or needs far more memory or
            time than its size explains.
    """
    try:
        with open_file(path) as stream:
            budget = Budget(os.fstat(stream.fileno()).st_size)
            record = FingerprintRecord(_parse_header(path, stream.readline(_LONGEST_HEADER), budget))
            columns: tuple[Column, ...] = ()
            for number, line in enumerate(stream, 2):
                if not line.endswith(b"\n"):
                    break
                try:
                    columns = _parse_line(line, columns, record, budget)
                except (ValueError, TypeError, KeyError) as error:
                    raise FingerprintRecordError(f"{path} is damaged in line {number}: {str(error)[:200]}.") from error
    except NotAFileError as error:
        raise FingerprintRecordError(f"{error}.") from error
    return record


def read_ranks(path: str | os.PathLike[str]) -> list[FingerprintRecord]:
    """Read the records of all ranks of a run.

    Raises:
        OSError: If a file is missing.
        FingerprintRecordError: If a file is no record, or is damaged.
    """
    first = read_record(Path(check_path("path", path, "a file")))
    return [first, *(read_record(rank_path(path, rank)) for rank in range(1, first.header.world_size))]


def format_rows(columns: tuple[Column, ...], table: NDArray[np.int64], before: tuple[Column, ...]) -> str:
    """Return a block of rows as lines, with its columns if they differ from those of the block before."""
    rows = json.dumps({"rows": b64encode(table.astype(INTEGER).tobytes()).decode()}) + "\n"
    return rows if columns == before else json.dumps({"columns": columns}) + "\n" + rows


def format_resume(resume: IncompleteResume) -> str:
    """Return what a resume could not restore as a line."""
    return json.dumps({"resume": resume}) + "\n"


def _parse_line(
    line: bytes, columns: tuple[Column, ...], record: FingerprintRecord, budget: Budget
) -> tuple[Column, ...]:
    """Add the rows of a line to a record; return the columns of the rows that follow."""
    budget.spend(512)
    content = parse_json(line, budget)
    if "resume" in content:
        record.incomplete_resumes.append(_parse_resume(*content["resume"]))
        return columns
    if "columns" in content:
        return tuple(_parse_column(*column) for column in content["columns"])
    table = np.frombuffer(b64decode(content["rows"], validate=True), INTEGER)
    record.blocks.append((columns, table.reshape(-1, KEY_LENGTH + len(columns))))
    return columns


def _parse_column(kind: Any, name: Any = "", call: Any = 1) -> Column:
    if kind not in _COLUMN_KINDS or not isinstance(name, str) or type(call) is not int:
        raise ValueError("a column is malformed")
    return Column(kind, name, call)


def _parse_resume(rows: Any, step: Any, epoch: Any, not_restored: Any) -> IncompleteResume:
    if not all(type(number) is int for number in (rows, step, epoch)):
        raise ValueError("a resume is malformed")
    return IncompleteResume(rows, step, epoch, tuple(str(place)[:200] for place in not_restored))


def _parse_header(path: Path, line: bytes, budget: Budget) -> RecordHeader:
    try:
        fields = parse_json(line, budget)
        if fields.pop("format") != _FORMAT:
            raise ValueError
        version = fields["version"]
        if type(version) is not int or not all(isinstance(value, str | int) for value in fields.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FingerprintRecordError(f"{path} is not a file of RunFingerprint.") from None
    if version > RecordHeader.version:
        raise FingerprintRecordError(
            f"{path} has version {version}, but this lightning_tricks reads version {RecordHeader.version}: update it."
        )
    try:
        header = RecordHeader(**fields)
        check_choice("detail", header.detail, ("step", "layer"))
        check_count("every_n_train_steps", header.every_n_train_steps)
        check_count("rank", header.rank, minimum=0)
        check_count("world_size", header.world_size, minimum=header.rank + 1)
    except (TypeError, ValueError) as error:
        raise FingerprintRecordError(f"{path} has a damaged header: {str(error)[:200]}") from None
    return header
