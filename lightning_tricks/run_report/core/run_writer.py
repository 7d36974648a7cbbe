"""`RunWriter`: the record of a run that is going on, its files and its page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lightning_tricks._shared.report_parts import ReportPart
from lightning_tricks.run_report.core.page import run_page
from lightning_tricks.run_report.core.record import Resume, RunRecord, RunReportError, Status
from lightning_tricks.run_report.core.record_file import (
    PAGE_FILE,
    RUN_FILE,
    VALUES_FILE,
    read_record,
    write_page,
    write_rows,
    write_run,
)
from lightning_tricks.run_report.core.secret_values import hide_in_text
from lightning_tricks.run_report.core.value_recorder import ValueRecorder, keep_first_rows

_FILES = (PAGE_FILE, RUN_FILE, VALUES_FILE)
_COST = 0.02  # the share of the time that may be spent on pages


class RunWriter:
    """Writes the record of a run into its folder, and makes its page.

    Args:
        folder: The folder, which exists.
        record: What is known of the run when it starts.

    Attributes:
        record: The record.
        values: Takes what is logged.
        said: What the user should know of how the folder was found, or "".
    """

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self.folder, self.record = folder, record
        self.values = ValueRecorder(folder, record)
        self.said = ""
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
        write_run(self.folder, self.record)
        write_rows(self.folder, [])

    def resume(self, count: int, last_step: int, resume: Resume) -> None:
        """Continue the record that a checkpoint belongs to; start a new one if the folder does not hold it.

        Args:
            count: How many rows had been added when the checkpoint was saved.
            last_step: The step of the last of them, or -1.
            resume: The moment of the resume.

        Raises:
            OSError: If the folder cannot be written.
        """
        rows = None
        with suppress(RunReportError):
            earlier = read_record(self.folder)
            rows = keep_first_rows(earlier.rows, count, last_step)
        if rows is None:
            self.record.resumes = [resume]
            self.start()
            return
        self.record.rows = rows
        self.record.started, self._seconds_before = earlier.started, earlier.seconds
        self.record.resumes = [*earlier.resumes, resume]
        self.record.add_parts(earlier.parts)
        self.values = ValueRecorder(self.folder, self.record)
        write_run(self.folder, self.record)
        write_rows(self.folder, rows)

    def reopen(self, started: float) -> bool:
        """Add to the record of a fit that is over; return whether the folder holds it.

        Args:
            started: When the fit started, as its record says.
        """
        try:
            earlier = read_record(self.folder)
        except (OSError, RunReportError):
            return False
        self.record, self._started = earlier, None
        self.values = ValueRecorder(self.folder, earlier)
        return earlier.started == started

    def position(self) -> tuple[int, int]:
        """Write what was logged so far; return how many rows that are, and the step of the last one.

        Raises:
            OSError: If it cannot be written.
        """
        self.values.flush()
        rows = self.record.rows
        return self.values.num_rows, rows[-1].step if rows else -1

    def is_page_due(self) -> bool:
        """Whether enough time has passed since the last page that pages cost next to nothing."""
        return time.perf_counter() >= self._next_page

    def write(self, status: Status, parts: Sequence[ReportPart], message: str = "") -> None:
        """Write the record and the page.

        Args:
            status: The status of the run.
            parts: What the callbacks know.
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
        write_run(self.folder, record)
        write_page(self.folder / PAGE_FILE, run_page(record))
        ended = time.perf_counter()
        self._next_page = ended + (ended - begun) / _COST

    def _move_aside(self) -> None:
        """Move the files of an earlier run into a folder of their own."""
        files = [self.folder / name for name in _FILES if (self.folder / name).exists()]
        if not files:
            return
        numbers = [int(one.name[8:]) for one in self.folder.glob("earlier-*") if one.name[8:].isdecimal()]
        target = self.folder / f"earlier-{max(numbers, default=0) + 1}"
        target.mkdir()
        for file in files:
            file.replace(target / file.name)
        self.said = f"the report of an earlier fit was moved to {target}"
