"""`RunWriter`: the record of a run that is going on, its files and its page."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lightning_tricks._shared.file_locks import DirectoryLock
from lightning_tricks._shared.report_parts import ReportPart
from lightning_tricks._shared.tensors import read_numbers, tensors_in
from lightning_tricks.run_report.core import record as on_disk
from lightning_tricks.run_report.core.other_runs import find_run_before
from lightning_tricks.run_report.core.page import run_page
from lightning_tricks.run_report.core.record import Position, Resume, Row, RunRecord, RunReportError, Status
from lightning_tricks.run_report.core.rendering import write_page
from lightning_tricks.run_report.core.secret_values import hide_in_text

LOCK_FILE = ".lock"
_FILES = (on_disk.PAGE_FILE, on_disk.RUN_FILE, on_disk.VALUES_FILE)
_EARLIER, _AT_ONCE = "earlier", "at-once"  # folders for other runs: those before, and those at the same time
_PENDING = 256  # rows on the device
_MOST_ROWS = 20_000  # of a kind, on the disk
_MOST_KEYS = 1000
_MOST_TENSORS = 32  # of a batch that are looked at
_COST = 0.02  # the share of the time that may be spent on pages


class RunWriter:
    """Writes the record of a run into its folder, and makes its page.

    One writer at a time writes into a folder: where another one does, in this process or another one, it writes into
    a folder in it. `close` ends that.

    Args:
        folder: The folder, which exists.
        record: The record of the run as it starts.
        loader: What the batches of training come from.

    Attributes:
        folder: The folder that it writes into.
        record: The record.
        values: Takes the logged values.
        meter: Takes the batches.
        said: Sentences that tell the user in which state the folder was found.
    """

    def __init__(self, folder: Path, record: RunRecord, loader: Any = None) -> None:
        self.path, self.record = folder, record
        self.said: list[str] = []
        self.folder, self._lock = self._acquire()
        self.values = ValueRecorder(self.folder, record)
        self.meter = ThroughputMeter(record, loader)
        self._before: tuple[str, RunRecord] | None = None
        self._seconds_before = 0.0
        self._started: float | None = time.perf_counter()  # None where the fit is over
        self._next_page = 0.0

    def start(self) -> None:
        """Start a new record; the files of an earlier run are moved aside.

        Raises:
            OSError: If the folder cannot be written.
        """
        self._move_aside()
        self.record.started = time.time()
        self.record.id = secrets.token_hex(8)
        on_disk.write_run(self.folder, self.record)
        on_disk.write_rows(self.folder, [])

    def resume(self, position: Position, resume: Resume) -> None:
        """Continue the record that a checkpoint belongs to; start a new one if the folder does not hold it.

        Rows of this run that were logged after the checkpoint are dropped, as they are logged again. They are kept
        aside where the run had finished, or had saved a later checkpoint.

        Args:
            position: Where the record was when the checkpoint was saved.
            resume: The moment of the resume.

        Raises:
            OSError: If the folder cannot be written.
        """
        found = self._find(position)
        if found is None:
            self.start()
            self.said.append(f"the values before step {resume.step:,} were not found in {self.path}")
            resume.id = self.record.id
            self.record.resumes = [resume]
            on_disk.write_run(self.folder, self.record)
            return
        folder, earlier = found
        rows = keep_first_rows(earlier.rows, position.rows)
        is_other_branch = earlier.status == "finished" or earlier.saved_rows > position.rows
        if folder != self.folder:
            self._move_aside()
            self.said.append(f"the record of this run was found in {folder}")
        elif is_other_branch and len(rows) < len(earlier.rows):
            self._move_aside()
        self.record.id, self.record.rows = earlier.id, rows
        self.record.started, self._seconds_before = earlier.started, earlier.seconds
        self.record.validation_seconds, self.record.batches = earlier.validation_seconds, earlier.batches
        self.record.samples = earlier.samples if self.record.samples is not None else None
        resume.id, resume.rows = secrets.token_hex(8), position.rows
        for before in earlier.resumes:
            before.id = before.id if before.rows <= position.rows else ""
        self.record.resumes = [*earlier.resumes, resume]
        self.record.add_parts(earlier.parts)
        self.values = ValueRecorder(self.folder, self.record)
        on_disk.write_run(self.folder, self.record)
        on_disk.write_rows(self.folder, rows)

    def reopen(self, rows_id: str) -> bool:
        """Add to the record of a fit that is over; return whether the folder holds it, and nobody writes to it.

        Args:
            rows_id: The id of its last rows.
        """
        try:
            earlier = on_disk.read_record(self.folder)
        except (OSError, RunReportError):
            return False
        self.record, self._started = earlier, None
        self.values = ValueRecorder(self.folder, earlier)
        return earlier.segments()[-1][0] == rows_id

    def close(self) -> None:
        """Let others write into the folder."""
        self._lock.close()

    def position(self) -> Position:
        """Write what was logged so far, and return where the record is then.

        Raises:
            OSError: If it cannot be written.
        """
        self.values.flush()
        self.record.saved_rows = self.values.num_rows
        return self.record.position(self.values.num_rows)

    def is_page_due(self) -> bool:
        """Whether enough time has passed since the last page that pages cost next to nothing."""
        return time.perf_counter() >= self._next_page

    def write(self, status: Status, parts: Sequence[ReportPart], message: str = "") -> None:
        """Write the record and the page.

        Args:
            status: The status of the run.
            parts: The report parts of the callbacks.
            message: The error, if it failed.

        Raises:
            OSError: If they cannot be written.
        """
        begun = time.perf_counter()
        self.values.flush()
        record = self.record
        record.status, record.message, record.written = status, hide_in_text(message[:4000])[:2000], time.time()
        if self._started is not None:
            record.seconds = self._seconds_before + begun - self._started
        record.add_parts(parts)
        on_disk.write_run(self.folder, record)
        if status != "running" and self._before is None:  # looking for it may take a moment
            self._before = find_run_before(self.path, record)
        write_page(self.folder / on_disk.PAGE_FILE, run_page(record, self._before))
        ended = time.perf_counter()
        self._next_page = ended + (ended - begun) / _COST

    def _acquire(self) -> tuple[Path, DirectoryLock]:
        for folder in (self.path, *(self.path / f"{_AT_ONCE}-{number}" for number in range(1, 1000))):
            folder.mkdir(exist_ok=True)
            lock = DirectoryLock(folder / LOCK_FILE)
            if lock.acquire({})[0]:
                if folder != self.path:
                    self.said.append(f"another fit writes to {self.path}: the report of this one is in {folder}")
                return folder, lock
        raise OSError(f"too many fits write to {self.path}")

    def _find(self, position: Position) -> tuple[Path, RunRecord] | None:
        """Return the record that a checkpoint belongs to, and where it is: in the folder or in one in it."""
        patterns = (f"{_EARLIER}-*", f"{_AT_ONCE}-*", f"{_AT_ONCE}-*/{_EARLIER}-*")
        inner = [folder for pattern in patterns for folder in sorted(self.path.glob(pattern))]
        for folder in dict.fromkeys((self.folder, self.path, *inner)):
            with suppress(OSError, RunReportError):
                record = on_disk.read_record(folder)
                if record.has(position):
                    return folder, record
        return None

    def _move_aside(self) -> None:
        """Move the files of an earlier run into a folder of their own."""
        files = [self.folder / name for name in _FILES if (self.folder / name).exists()]
        if not files:
            return
        numbers = [folder.name.rpartition("-")[2] for folder in self.folder.glob(f"{_EARLIER}-*")]
        number = max((int(number) for number in numbers if number.isdecimal()), default=0) + 1
        target = self.folder / f"{_EARLIER}-{number}"
        target.mkdir()
        for file in files:
            file.replace(target / file.name)
        self.said.append(f"the report of an earlier fit was moved to {target}")


def rows_of(batch: Any) -> int | None:
    """Return the number of samples of a batch, the size of all its tensors, or None where these do not agree.

    Examples:
        >>> import torch
        >>> rows_of({"images": torch.zeros(4, 1, 8, 8), "targets": [torch.zeros(4)]}), rows_of([torch.zeros(3, 8)] * 4)
        (4, 3)
        >>> rows_of((torch.zeros(3, 8), torch.zeros(4)))
    """
    sizes = {tensor.shape[0] for tensor in islice(tensors_in(batch), _MOST_TENSORS) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


class ThroughputMeter:
    """Counts batches and samples, and the time in validation, for a record.

    A list of images, whose first sizes are no number of samples, is told by the size of the batches: all but the last
    one of an epoch have it.

    Args:
        record: The record, which has the counts of earlier parts of the run.
        loader: What the batches come from: only those of one loader are counted as samples.
    """

    def __init__(self, record: RunRecord, loader: Any) -> None:
        self._record = record
        size = getattr(loader, "batch_size", None)
        self._batch_size = size if isinstance(size, int) else None
        self._ended_short = False
        self._validation_began: float | None = None
        if isinstance(loader, dict | list | tuple):
            record.samples = None

    def add(self, batch: Any, batch_idx: int) -> None:
        """Count a batch."""
        record = self._record
        record.batches += 1
        if record.samples is None:
            return
        rows, size = None, self._batch_size
        with suppress(Exception):  # objects of users may do anything when they are looked into
            rows = rows_of(batch)
        if rows is None or (size is not None and (rows > size or (self._ended_short and batch_idx > 0))):
            record.samples = None
        else:
            record.samples += rows
            self._ended_short = size is not None and rows < size

    def begin_validation(self) -> None:
        """Note when a validation begins."""
        self._validation_began = time.perf_counter()

    def end_validation(self) -> None:
        """Add the time of the validation that ends, unless it came before training, as that of ValidateFirst."""
        if self._validation_began is not None and self._record.batches:
            self._record.validation_seconds += time.perf_counter() - self._validation_began
        self._validation_began = None


class ValueRecorder:
    """Adds rows of logged values to a record and to its file.

    Args:
        folder: The folder of the record.
        record: The record, whose rows the file has already.
    """

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self._folder, self._record = folder, record
        self._pending: list[tuple[Row, dict[str, Any]]] = []
        self._keys = set(record.logged_keys())
        self._keys_left_out: set[str] = set()
        self._rows_of_earlier = sum(row.count for row in record.rows)

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
        tensors = [value for _, values in pending for value in values.values() if isinstance(value, Tensor)]
        numbers = iter(read_numbers([tensor.reshape(-1)[:1] for tensor in tensors]))

        def number_of(value: Any) -> float:
            return next(numbers)[0] if isinstance(value, Tensor) else float(value)

        rows = [replace(row, values={name: number_of(one) for name, one in values.items()}) for row, values in pending]
        self._rows_of_earlier += len(rows)
        self._record.rows += rows
        self._record.keys_left_out = len(self._keys_left_out)
        thinned = thin_rows(self._record.rows, _MOST_ROWS)
        if len(thinned) == len(self._record.rows):
            on_disk.append_rows(self._folder, rows)
        else:
            self._record.rows = thinned
            on_disk.write_rows(self._folder, thinned)

    def _is_known(self, name: str) -> bool:
        is_known = name in self._keys or len(self._keys) < _MOST_KEYS
        (self._keys if is_known else self._keys_left_out).add(name)
        return is_known


def keep_first_rows(rows: list[Row], count: int) -> list[Row]:
    """Return the rows of a record that hold the first so many that were added, as some may have been merged."""
    ends = accumulate(row.count for row in rows)
    return [row for row, end in zip(rows, ends, strict=True) if end <= count]


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
    thinned: list[Row | None] = list(rows)
    for kind in ("step", "epoch"):
        places = [place for place, row in enumerate(rows) if row.kind == kind]
        if len(places) > most:
            for place, after in zip(places[::2], places[1::2], strict=False):
                thinned[place], thinned[after] = None, merge_rows([rows[place], rows[after]])
    return [row for row in thinned if row is not None]
