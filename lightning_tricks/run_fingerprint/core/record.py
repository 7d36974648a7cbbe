"""The record of a run's fingerprints, and its file: lines of JSON, to which blocks of rows are appended."""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._shared.checks import check_choice, check_count, check_path
from lightning_tricks._shared.files import NotAFileError, atomic_write, open_file
from lightning_tricks._shared.read_budget import Budget, parse_json

INTEGER = np.dtype("<i8")
_KEY_LENGTH = 3  # numbers that identify a row: step, epoch, batch
_FORMAT = "lightning_tricks.run_fingerprint"
_COLUMN_KINDS = ("data", "forward", "loss", "rate", "gradient", "replicated", "dataset", "weights")
_LONGEST_HEADER = 10_000  # characters


class FingerprintRecordError(ValueError):
    """Raised for a file that is not a record of RunFingerprint, and for two records that cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class RecordHeader:
    """How a run was recorded, and on which rank.

    Attributes:
        detail: "step" or "layer".
        every_n_train_steps: One of so many steps was recorded.
        rank: The rank whose batches and gradients were recorded.
        world_size: How many ranks the run had.
        version: The version of the file's format and of the fingerprints.
    """

    detail: str
    every_n_train_steps: int = 1
    rank: int = 0
    world_size: int = 1
    version: int = 2


class Column(NamedTuple):
    """The source of the fingerprints of a column.

    Attributes:
        kind: "data", "forward", "loss", "gradient" or "weights"; where ranks are compared, also "rate", the learning
            rates, and "replicated" and "dataset", the weights and the data that all ranks should have.
        name: The name of the part of the batch, of the layer, the parameter or the stage; "" for all of them together.
        call: 1 for the first value of that kind and name within a batch, 2 for the second, ...
    """

    kind: str
    name: str = ""
    call: int = 1


@dataclass(frozen=True)
class Row:
    """The fingerprints of a batch.

    Attributes:
        step: The number of optimizer steps before the batch.
        epoch: The batch's epoch.
        batch_idx: The batch's index in the epoch; -1 for the initial weights of a fit.
        columns: The sources of the fingerprints, in the order of a step.
        values: The fingerprint of each column, int64; 0 where there was no value.
    """

    step: int
    epoch: int
    batch_idx: int
    columns: tuple[Column, ...]
    values: NDArray[np.int64]

    @property
    def key(self) -> tuple[int, int, int]:
        """Step, epoch and batch index."""
        return self.step, self.epoch, self.batch_idx

    def as_dict(self) -> dict[Column, int]:
        """Return column -> fingerprint, without the columns that have no value."""
        return {column: int(value) for column, value in zip(self.columns, self.values, strict=True) if value}


class IncompleteResume(NamedTuple):
    """A resume that could not restore everything.

    Attributes:
        rows: How many rows were recorded before it.
        step: How many optimizer steps were done.
        epoch: The epoch that was resumed.
        not_restored: The names of state that differs from the saved one, such as "module.history".
    """

    rows: int
    step: int
    epoch: int
    not_restored: tuple[str, ...]


@dataclass(frozen=True)
class FingerprintRecord:
    """What was recorded of a rank: its header, in blocks of equal columns its rows, and the incomplete resumes."""

    header: RecordHeader
    blocks: list[tuple[tuple[Column, ...], NDArray[np.int64]]] = field(default_factory=list)
    incomplete_resumes: list[IncompleteResume] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(table) for _, table in self.blocks)

    def __iter__(self) -> Iterator[Row]:
        for columns, table in self.blocks:
            for line in table:
                step, epoch, batch = (int(number) for number in line[:_KEY_LENGTH])
                yield Row(step, epoch, batch, columns, line[_KEY_LENGTH:])

    @property
    def compare_ranks(self) -> bool:
        """Whether it has what ranks are compared by."""
        return any(column.kind in ("rate", "replicated") for columns, _ in self.blocks for column in columns)

    def digest(self) -> Any:
        """Return a hash of all rows, to which more may be added."""
        found = hashlib.sha256()
        for _, table in self.blocks:
            found.update(table.astype(INTEGER).tobytes())
        return found

    def first(self, rows: int) -> FingerprintRecord:
        """Return the record as it was after its first rows."""
        blocks, left = [], rows
        for columns, table in self.blocks:
            if left > 0:
                blocks.append((columns, table[:left]))
                left -= len(table)
        return replace(
            self, blocks=blocks, incomplete_resumes=[resume for resume in self.incomplete_resumes if resume.rows < rows]
        )


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
        FingerprintRecordError: If the file is not a record, is damaged, has a later version, or needs far more memory
            or time than its size explains.
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
        FingerprintRecordError: If a file is not a record, or is damaged.
    """
    first = read_record(Path(check_path("path", path, "a file")))
    return [first, *(read_record(rank_path(path, rank)) for rank in range(1, first.header.world_size))]


def read_first_rows(path: Path, header: RecordHeader, rows: int, digest: str = "") -> FingerprintRecord | None:
    """Return the first rows of a file, if they are those of a run.

    Args:
        path: The file.
        header: How the run was recorded.
        rows: How many rows the run had when a checkpoint was saved.
        digest: The digest of these rows, or "" if it is not known.
    """
    try:
        record = read_record(path)
    except (OSError, FingerprintRecordError):
        return None
    if record.header != header or len(record) < rows:
        return None
    record = record.first(rows)
    return record if digest in ("", record.digest().hexdigest()) else None


def format_rows(columns: tuple[Column, ...], table: NDArray[np.int64], before: tuple[Column, ...]) -> str:
    """Return a block of rows as lines, with its columns if they differ from those of the block before."""
    rows = json.dumps({"rows": b64encode(table.astype(INTEGER).tobytes()).decode()}) + "\n"
    return rows if columns == before else json.dumps({"columns": columns}) + "\n" + rows


def parse_rows(lines: bytes) -> tuple[tuple[Column, ...], NDArray[np.int64]]:
    """Return the columns and the rows of a block that `format_rows` has made whole."""
    record = FingerprintRecord(RecordHeader(detail="step"))
    columns: tuple[Column, ...] = ()
    for line in lines.splitlines():
        columns = _parse_line(line, columns, record, Budget(len(lines)))
    return record.blocks[0]


def format_resume(resume: IncompleteResume) -> str:
    """Return an incomplete resume as a line."""
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
    record.blocks.append((columns, table.reshape(-1, _KEY_LENGTH + len(columns))))
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
