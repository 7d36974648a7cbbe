"""The loggers of a fit: which version each one continues, and which rows it has."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_tricks._lightning_compat.loggers import (
    close_tensorboard_logger,
    discard_unwritten_rows,
    is_logger_started,
    log_dir_for_version,
    logger_kind,
    logger_version,
    move_csv_logger,
    open_csv_logger,
    set_logger_version,
)
from lightning_tricks._shared.checks import is_address
from lightning_tricks.auto_resume.core.logged_rows import (
    CsvRowsCopy,
    csv_header,
    event_file_sizes,
    event_files,
    newest_event_second,
    truncate_event_files,
)

_PLAIN_VERSION = re.compile(r"[\w.=+,@: -]{1,255}(/[\w.=+,@: -]{1,255})*")


class LoggerState:
    """Lets the loggers of a resumed fit continue where those of the stopped one were, row by row.

    What CSVLogger and TensorBoardLogger wrote after the save is removed, as the run logs it again. WandbLogger and
    MLFlowLogger continue the same run, in which such rows stay.

    Args:
        loggers: The loggers of the Trainer.
        private: A folder for copies, in which nobody else writes.
        processes: The processes that trained in this run, this one included: "pid" and "host" of each.
    """

    def __init__(self, loggers: Sequence[Any], private: Path, processes: Iterable[Mapping[str, Any]]) -> None:
        local = [logger for logger in loggers if not is_address(getattr(logger, "root_dir", ""))]
        self.loggers = [logger for logger in local if logger_kind(logger)]
        self.private = private
        self._csv = [CsvRowsCopy(private / f"rows-{number}.csv") for number in range(len(self.loggers))]
        self._moved_event_files: set[Path] = set()  # what this process logged before the fit
        self._process_marks = [f".{process.get('host')}.{process.get('pid')}." for process in processes]
        self._process_marks.append(f".{socket.gethostname()}.{os.getpid()}.")

    def restore_versions(self, records: Sequence[Any], *, is_writer: bool) -> None:
        """Set the versions of the loggers to those of records, before they begin; `is_writer` is True on rank zero."""
        for number, logger, record in self._loggers_with_records(records):
            version, kind = record["version"], record["kind"]
            if kind in ("csv", "tensorboard"):
                if not self._is_same_directory(number, logger, record):
                    continue
                new_dir = (
                    log_dir_for_version(logger, logger_version(logger))
                    if is_writer and is_logger_started(logger)
                    else None
                )
                if new_dir == log_dir_for_version(logger, version):
                    new_dir = None
                set_logger_version(logger, version)
                if kind == "csv" and is_writer:
                    open_csv_logger(logger, csv_header(move_csv_logger(logger, new_dir)))
                elif is_writer:
                    self._move_event_files(logger, new_dir)
                if new_dir is not None and new_dir.is_dir() and not any(new_dir.iterdir()):
                    new_dir.rmdir()
            else:
                set_logger_version(logger, version)

    def records(self) -> list[dict[str, Any]]:
        """Return the positions of the loggers, whose rows must have been written; on rank zero."""
        return [self._record(number, logger) for number, logger in enumerate(self.loggers)]

    def restore(self, records: Sequence[Any], *, before_fit: bool = False) -> list[str]:
        """Remove what was logged after the records; return a sentence for each problem. On rank zero.

        Args:
            records: What `records` returned, in another process.
            before_fit: Whether rows that this process has logged already are kept, as they precede the fit.
        """
        problems = []
        if not before_fit:
            self._moved_event_files.clear()
        for number, logger, record in self._loggers_with_records(records):
            if record["kind"] == "csv":
                path = open_csv_logger(logger)
                problems.append(self._csv[number].restore(path, record))
                open_csv_logger(logger, csv_header(path))
                if not before_fit:
                    discard_unwritten_rows(logger)
            elif record["kind"] == "tensorboard":
                close_tensorboard_logger(logger)
                folder = log_dir_for_version(logger, logger_version(logger))
                problems.append(truncate_event_files(folder, record["files"], self._is_own))
                _wait_until_after(newest_event_second(folder))
        return [sentence for sentence in problems if sentence]

    def version_mismatches(self, records: Sequence[Any]) -> list[str]:
        """Return a phrase for each logger that writes to another version than its record has."""
        pairs = [(logger, record["version"]) for _, logger, record in self._loggers_with_records(records)]
        return [
            f"{type(logger).__name__} writes to version {present!r}, and not to version {version!r} as before"
            for logger, version in pairs
            if (present := logger_version(logger)) != version
        ]

    def _record(self, number: int, logger: Any) -> dict[str, Any]:
        kind, version = logger_kind(logger), logger_version(logger)
        record: dict[str, Any] = {"kind": kind, "version": version}
        if kind in ("csv", "tensorboard"):
            folder = log_dir_for_version(logger, version)
            record |= {"directory": str(folder), "from_here": _relative_path(folder, self.private)}
            record["inode"] = folder.stat().st_ino if folder.is_dir() else 0
            if kind == "csv":
                record |= self._csv[number].update(folder / "metrics.csv")
            else:
                record["files"] = event_file_sizes(folder, self._is_own)
        return record

    def _loggers_with_records(self, records: Sequence[Any]) -> list[tuple[int, Any, Mapping[str, Any]]]:
        """Return number, logger and record: the n-th logger of a kind has the n-th record of that kind."""
        left = [record for record in records if _is_valid_record(record)]
        found = []
        for number, logger in enumerate(self.loggers):
            record = next((known for known in left if known["kind"] == logger_kind(logger)), None)
            if record is not None:
                left.remove(record)
                found.append((number, logger, record))
        return found

    def _is_same_directory(self, number: int, logger: Any, record: Mapping[str, Any]) -> bool:
        """Whether the logger would write to the directory of a record if it had the record's version."""
        folder = log_dir_for_version(logger, record["version"])
        kind: str = record["kind"]
        inode: object = record.get("inode")
        here = (str(folder), _relative_path(folder, self.private))
        if not ({record.get("directory"), record.get("from_here")} & set(here)):
            return False
        if not folder.is_dir():
            return kind == "csv"
        if kind == "tensorboard":
            mine = [name for name, size in record["files"].items() if size is not None]
            return {path.relative_to(folder).as_posix() for path in event_files(folder)}.issuperset(mine)
        if not record.get("rows"):
            return folder.stat().st_ino == inode
        return self._csv[number].matches(folder / "metrics.csv", record)

    def _move_event_files(self, logger: Any, new_dir: Path | None) -> None:
        """Move the events of a TensorBoardLogger that began before the fit from `new_dir` to its directory."""
        close_tensorboard_logger(logger)
        folder = log_dir_for_version(logger, logger_version(logger))
        for path in [] if new_dir is None else list(new_dir.glob("*tfevents*")):
            if self._process_marks[-1] in path.name:  # of this process
                folder.mkdir(parents=True, exist_ok=True)
                self._moved_event_files.add(path.replace(folder / path.name))

    def _is_own(self, path: Path) -> bool:
        return path not in self._moved_event_files and any(mark in path.name for mark in self._process_marks)


def _is_valid_record(record: object) -> bool:
    """Whether a record that was read is complete, and its version names nothing outside of the logger's directory."""
    if not isinstance(record, dict):
        return False
    version, header, files = record.get("version"), record.get("header"), record.get("files", {})
    plain = type(version) is int and version >= 0
    if isinstance(version, str):
        plain = _PLAIN_VERSION.fullmatch(version) is not None and ".." not in version.split("/")
    rows = record.get("rows", 0)
    return (
        plain
        and record.get("kind") in ("csv", "tensorboard", "wandb", "mlflow")
        and type(rows) is int
        and rows >= 0
        and (header is None or (isinstance(header, list) and all(isinstance(name, str) for name in header)))
        and isinstance(files, dict)
        and all(size is None or (type(size) is int and size >= 0) for size in files.values())
    )


def _relative_path(folder: Path, private: Path) -> str:
    try:
        return os.path.relpath(folder, private)
    except ValueError:  # on another drive
        return ""


def _wait_until_after(second: int) -> None:
    """Wait until a second is over, as TensorBoard reads files in the order of the seconds in their names."""
    for _ in range(40):
        if int(time.time()) > second or second > time.time() + 2:  # the clock was set back
            return
        time.sleep(0.05)
