"""`ValueRecorder`: logged values, which stay on the device until a block of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.run_report.core.record import MOST_KEYS, Row, RunRecord, thin_rows
from lightning_tricks.run_report.core.record_file import append_rows, write_rows

_PENDING = 256  # rows on the device
_MOST_ROWS = 20_000  # of a kind, on the disk


class ValueRecorder:
    """Adds rows of logged values to a record and to its file.

    Args:
        folder: The folder of the record.
        record: The record, whose rows the file has already.
    """

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self._folder, self._record = folder, record
        self._pending: list[tuple[Row, dict[str, Any]]] = []
        self._keys = dict.fromkeys(record.logged_keys())
        self._keys_left_out: set[str] = set()
        self._rows_of_earlier = sum(row.count for row in record.rows)
        self.most_rows = _MOST_ROWS

    @property
    def num_rows(self) -> int:
        """How many rows were added so far, those of the stopped run included."""
        return self._rows_of_earlier + len(self._pending)

    def add(self, kind: Literal["step", "epoch"], step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Add a row; its values are numbers or tensors of one element, which nobody changes in place."""
        known = {name: value for name, value in values.items() if self._is_known(name)}
        if known:
            self._pending.append((Row(kind, step, epoch, {}), known))
        if len(self._pending) >= _PENDING:
            self.flush()

    def flush(self) -> None:
        """Read the pending rows from their devices, all at once, and append them to the file.

        Raises:
            OSError: If they cannot be written; then they are in the record alone.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        numbers = _read([value for _, values in pending for value in values.values()])
        rows = [replace(row, values={name: next(numbers) for name in values}) for row, values in pending]
        self._rows_of_earlier += len(rows)
        self._record.rows += rows
        self._record.keys_left_out = len(self._keys_left_out)
        thinned = thin_rows(self._record.rows, self.most_rows)
        if len(thinned) == len(self._record.rows):
            append_rows(self._folder, rows)
        else:
            self._record.rows = thinned
            write_rows(self._folder, thinned)

    def _is_known(self, name: str) -> bool:
        if name not in self._keys:
            if len(self._keys) >= MOST_KEYS:
                self._keys_left_out.add(name)
                return False
            self._keys[name] = None
        return True


def _read(values: list[Any]) -> Any:
    """Return an iterator of floats, which reads once from each device."""
    devices: dict[Any, list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor):
            devices.setdefault(value.device, []).append(to_double(value.detach().reshape(-1)[:1]))
    read = {device: iter(torch.cat(tensors).tolist()) for device, tensors in devices.items()}
    return iter([next(read[value.device]) if isinstance(value, Tensor) else float(value) for value in values])


def keep_first_rows(rows: list[Row], count: int) -> list[Row]:
    """Return the rows of a record that hold the first so many that were added, as some may have been merged."""
    kept, left = [], count
    for row in rows:
        if left < row.count:
            break
        kept.append(row)
        left -= row.count
    return kept
