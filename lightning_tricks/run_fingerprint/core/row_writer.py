"""A writer of rows of fingerprints, which stay on the device until a block of them is copied to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks.run_fingerprint.core.fingerprint import fingerprint
from lightning_tricks.run_fingerprint.core.record import (
    Column,
    FingerprintRecord,
    FingerprintRecordError,
    IncompleteResume,
    RecordHeader,
)
from lightning_tricks.run_fingerprint.core.record_file import append_resume, append_rows, read_record, write_record

_ROWS = 128  # in a block


class RowWriter:
    """Collects the fingerprints of one rank and writes them to its file.

    Args:
        path: The file; `start_file` replaces an existing one.
        header: How the run is recorded.

    Attributes:
        num_rows: How many rows were ended, written or not.
    """

    def __init__(self, path: Path, header: RecordHeader) -> None:
        self.path, self.header = path, header
        self.num_rows = 0
        self._columns: dict[Column, None] = {}  # in the order of a step
        self._written_columns: tuple[Column, ...] = ()
        self._keys: list[tuple[int, int, int]] = []
        self._block: list[Tensor] = []
        self._key: tuple[int, int, int] | None = None
        self._values: dict[Column, Tensor] = {}
        self._calls: Counter[tuple[str, str]] = Counter()  # how often each kind and name came in the row

    def start_file(self) -> None:
        """Write a new file without rows."""
        write_record(self.path, FingerprintRecord(self.header))

    def resume_file(self, rows: int) -> bool:
        """Keep the first rows of the file and continue after them; return False if the file does not have them."""
        try:
            record = read_record(self.path)
        except (OSError, FingerprintRecordError):
            return False
        if record.header != self.header or len(record) < rows:
            return False
        record = record.first(rows)
        write_record(self.path, record)
        self.num_rows = rows
        self._written_columns = record.blocks[-1][0] if record.blocks else ()
        self._columns = dict.fromkeys(self._written_columns)
        return True

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
        append_rows(self.path, columns, table, self._written_columns)
        self._written_columns = columns

    def add_resume(self, step: int, epoch: int, not_restored: Sequence[str]) -> None:
        """Append what a resume could not restore.

        Raises:
            OSError: If that fails.
        """
        append_resume(self.path, IncompleteResume(self.num_rows, step, epoch, tuple(not_restored)))

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
