"""The file of a fingerprint: lines of JSON, to which blocks of rows are appended."""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._shared.files import replacing

_FORMAT = "lightning_tricks.run_fingerprint"
_KEY = 3  # numbers that say which row it is: step, epoch, batch
_INTEGER = np.dtype("<i8")


class RecordError(ValueError):
    """A file is not of RunFingerprint, or two are not of a kind."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Of which run a record is.

    Attributes:
        detail: "step" or "layer".
        every_n_train_steps: Of how many steps one was recorded.
        rank: Whose batches and gradients these are.
        world_size: Of how many ranks.
        version: Of the format.
    """

    detail: str
    every_n_train_steps: int = 1
    rank: int = 0
    world_size: int = 1
    version: int = 1


class Column(NamedTuple):
    """What was looked at.

    Attributes:
        kind: "data", "forward", "loss", "gradient" or "weights".
        name: Of the part, layer or parameter; "" for all together.
        call: The n-th of that kind and name at one batch.
    """

    kind: str
    name: str = ""
    call: int = 1


@dataclass(frozen=True)
class Row:
    """The fingerprints of a batch.

    Attributes:
        step: Optimizer steps that were done when the batch began.
        epoch: Its epoch.
        batch: Its number in the epoch; -1 for the weights with which a fit began.
        columns: What is looked at in a step, in this order.
        values: A fingerprint for each of them; 0 where there was none.
    """

    step: int
    epoch: int
    batch: int
    columns: tuple[Column, ...]
    values: NDArray[np.int64]

    @property
    def key(self) -> tuple[int, int, int]:
        """Step, epoch and batch."""
        return self.step, self.epoch, self.batch

    def as_dict(self) -> dict[Column, int]:
        """Return the fingerprints that there are."""
        return {column: int(value) for column, value in zip(self.columns, self.values, strict=True) if value}


@dataclass(frozen=True)
class Record:
    """What was recorded of a rank: its origin and, in blocks of equal columns, its rows."""

    origin: Origin
    blocks: list[tuple[tuple[Column, ...], NDArray[np.int64]]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(table) for _, table in self.blocks)

    def __iter__(self) -> Iterator[Row]:
        for columns, table in self.blocks:
            for line in table:
                step, epoch, batch = (int(number) for number in line[:_KEY])
                yield Row(step, epoch, batch, columns, line[_KEY:])

    def first(self, rows: int) -> Record:
        """Return the record as it was after so many rows."""
        blocks, left = [], rows
        for columns, table in self.blocks:
            if left > 0:
                blocks.append((columns, table[:left]))
                left -= len(table)
        return replace(self, blocks=blocks)


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Return where a rank records: rank zero in the file itself, rank 1 of `run.jsonl` in `run.rank1.jsonl`."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def write_record(path: Path, record: Record) -> None:
    """Write a record whole, in place of what is there.

    Raises:
        OSError: If it cannot be written; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as staged, staged.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format": _FORMAT, **asdict(record.origin)}) + "\n")
        before: tuple[Column, ...] = ()
        for columns, table in record.blocks:
            file.write(_lines(columns, table, before))
            before = columns


def append_rows(path: Path, columns: tuple[Column, ...], table: NDArray[np.int64], before: tuple[Column, ...]) -> None:
    """Append a block of rows; its columns are written where they are others than those `before`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_lines(columns, table, before))


def read_record(path: Path) -> Record:
    """Read what was recorded of one rank; a last line that was cut off is left out.

    Raises:
        OSError: If there is no such file.
        RecordError: If it is no fingerprint, or of a later version.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        record = Record(_origin(path, file.readline()))
        columns: tuple[Column, ...] = ()
        for number, line in enumerate(file, 2):
            if not line.endswith("\n"):
                break
            try:
                content = json.loads(line)
                if "columns" in content:
                    columns = tuple(Column(*column) for column in content["columns"])
                else:
                    table = np.frombuffer(b64decode(content["rows"], validate=True), _INTEGER)
                    record.blocks.append((columns, table.reshape(-1, _KEY + len(columns))))
            except (ValueError, TypeError, KeyError) as error:
                raise RecordError(f"{path} is damaged in line {number}: {error}.") from error
    return record


def read_ranks(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of all ranks of a run.

    Raises:
        OSError: If a file is missing.
        RecordError: If one is no fingerprint.
    """
    first = read_record(Path(path))
    return [first, *(read_record(path_of_rank(path, rank)) for rank in range(1, first.origin.world_size))]


def _lines(columns: tuple[Column, ...], table: NDArray[np.int64], before: tuple[Column, ...]) -> str:
    rows = json.dumps({"rows": b64encode(table.astype(_INTEGER).tobytes()).decode()}) + "\n"
    return rows if columns == before else json.dumps({"columns": columns}) + "\n" + rows


def _origin(path: Path, line: str) -> Origin:
    try:
        header: dict[str, Any] = json.loads(line)
        if header.pop("format") != _FORMAT:
            raise ValueError
        version = header["version"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RecordError(f"{path} is no file of RunFingerprint.") from None
    if version > Origin.version:
        raise RecordError(f"{path} is of version {version}, this reads {Origin.version}: update lightning_tricks.")
    return Origin(**header)
