"""A writer of rows of fingerprints, which stay on the device until a block of them is copied to the host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks.run_fingerprint.core.fingerprint import fingerprint
from lightning_tricks.run_fingerprint.core.record import (
    INTEGER,
    Column,
    FingerprintRecord,
    FingerprintRecordError,
    IncompleteResume,
    RecordHeader,
)
from lightning_tricks.run_fingerprint.core.record_file import format_resume, format_rows, read_record, write_record

_ROWS = 128  # in a block


class RowWriter:
    """Collects the fingerprints of one rank and writes them to its file.

    Args:
        path: The file.
        header: How the run is recorded.

    Attributes:
        num_rows: How many rows were ended, written or not.
    """

    def __init__(self, path: Path, header: RecordHeader) -> None:
        self.path, self.header = path, header
        self.num_rows = 0
        self._file: IO[str] | None = None  # stays this run's where another one moves it aside
        self._digest = FingerprintRecord(header).digest()
        self._columns: dict[Column, None] = {}  # in the order of a step
        self._written_columns: tuple[Column, ...] = ()
        self._keys: list[tuple[int, int, int]] = []
        self._block: list[Tensor] = []
        self._key: tuple[int, int, int] | None = None
        self._values: dict[Column, Tensor] = {}
        self._calls: Counter[tuple[str, str]] = Counter()  # how often each kind and name came in the row

    def start_file(self) -> None:
        """Write a new file without rows in place of an existing one.

        Raises:
            OSError: If it cannot be written.
        """
        self.continue_record(FingerprintRecord(self.header))

    def find_record(self, path: Path, rows: int, digest: str) -> FingerprintRecord | None:
        """Return the first rows of a file, if they are those of this run.

        Args:
            path: The file.
            rows: How many rows the run had when a checkpoint was saved.
            digest: What `digest` returned then, or "" if that is not known.
        """
        try:
            record = read_record(path)
        except (OSError, FingerprintRecordError):
            return None
        if record.header != self.header or len(record) < rows:
            return None
        record = record.first(rows)
        return record if digest in ("", record.digest().hexdigest()) else None

    def continue_record(self, record: FingerprintRecord) -> None:
        """Write a record in place of the file, and continue after it.

        Raises:
            OSError: If it cannot be written.
        """
        self.close()
        write_record(self.path, record)
        self._file = self.path.open("a", encoding="utf-8")
        self._digest = record.digest()
        self.num_rows = len(record)
        self._written_columns = record.blocks[-1][0] if record.blocks else ()
        self._columns = dict.fromkeys(self._written_columns)

    def digest(self) -> str:
        """Return a hash of the rows that were written."""
        return str(self._digest.hexdigest())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    @property
    def has_open_row(self) -> bool:
        """Whether a row was started and not ended."""
        return self._key is not None

    def start_row(self, step: int, epoch: int, batch: int) -> None:
        """Start the row of a batch, and drop a row that was not ended."""
        self._key, self._values, self._calls = (step, epoch, batch), {}, Counter()

    def add(self, kind: str, value: Any, name: str = "") -> None:
        """Add the fingerprint of a value to the row; the second one of a kind and name is recorded as call 2."""
        call = self._calls[kind, name] = self._calls[kind, name] + 1
        self._values[Column(kind, name, call)] = fingerprint(value)

    def has(self, kind: str) -> bool:
        """Whether the row has a fingerprint of a kind, without a name."""
        return Column(kind) in self._values

    def end_row(self) -> None:
        """Keep the row; write the block if it is full or if the row has new columns."""
        if self._key is None:
            return
        if not self._values.keys() <= self._columns.keys():
            self.flush()
            self._columns = dict.fromkeys(_merged(self._columns, self._values))
        self._keys.append(self._key)
        self._block.append(self._stacked())
        self.num_rows += 1
        self._key, self._values = None, {}
        if len(self._block) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Copy the rows that are not written yet to the host, and append them to the file.

        Raises:
            OSError: If that fails; the rows are lost.
        """
        keys, block, columns = self._keys, self._block, tuple(self._columns)
        if not block:
            return
        self._keys, self._block = [], []
        table = np.concatenate([np.array(keys, np.int64), torch.stack(block).cpu().numpy()], axis=1)
        self._append(format_rows(columns, table, self._written_columns))
        self._digest.update(table.astype(INTEGER).tobytes())
        self._written_columns = columns

    def add_resume(self, step: int, epoch: int, not_restored: Sequence[str]) -> None:
        """Append what a resume could not restore.

        Raises:
            OSError: If that fails.
        """
        self._append(format_resume(IncompleteResume(self.num_rows, step, epoch, tuple(not_restored))))

    def _append(self, lines: str) -> None:
        if self._file is None or os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError("another fit has replaced it")
        self._file.write(lines)
        self._file.flush()

    def _stacked(self) -> Tensor:
        devices = {value.device for value in self._values.values()}
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        absent = torch.zeros((), dtype=torch.int64, device=device)
        values = (self._values.get(column, absent) for column in self._columns)
        return torch.stack([value.to(device, non_blocking=True) for value in values])


def _merged(known: Iterable[Column], row: Iterable[Column]) -> list[Column]:
    """Insert the new columns of a row into the known ones, each after its predecessor in the row."""
    new: dict[Column | None, list[Column]] = {column: [] for column in (None, *known)}
    before = None
    for column in row:
        if column in new:
            before = column
        else:
            new[before].append(column)
    return new[None] + [each for column in known for each in (column, *new[column])]
