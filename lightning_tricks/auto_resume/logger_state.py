"""The loggers of a fit: which version each one continues, and which rows its files have."""

from __future__ import annotations

import csv
import io
import locale
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from lightning_tricks.auto_resume.core.durable_writing import write_durably

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


class CsvRowsCopy:
    """A copy of a CSV file's rows, which is updated at each save.

    Lightning deletes the file when a version is given, and truncates it to write it again with another header: a kill
    then leaves no rows. Only new rows are copied, so that a save takes no longer in a long run.

    Args:
        copy: Path of the copy, which no other program writes.
    """

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        self._source: Path | None = None  # the file that was copied
        self._header = b""
        self._bytes = self._rows = 0

    def update(self, source: Path) -> dict[str, Any]:
        """Copy new rows; return the record for `restore`: number of rows and header, which is None without a file."""
        try:
            with source.open("rb") as file:
                header = file.readline()
                is_continuation = source == self._source and header == self._header and self.copy.is_file()
                is_continuation = is_continuation and self._bytes <= os.fstat(file.fileno()).st_size
                file.seek(self._bytes if is_continuation else 0)
                new = file.read()
        except FileNotFoundError:
            return {"rows": 0, "header": None}
        if not is_continuation:
            self._bytes, self._rows = 0, -1  # the header is not a row
            write_durably(self.copy, lambda stream: stream.write(new))
        elif new:
            with self.copy.open("r+b") as file:
                file.seek(self._bytes)
                file.write(new)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        self._source, self._header = source, header
        self._bytes += len(new)
        self._rows += sum(1 for _ in csv.reader(io.StringIO(new.decode(), newline="")))
        return {"rows": self._rows, "header": next(csv.reader([header.decode()]), [])}

    def restore(self, target: Path, record: Mapping[str, Any]) -> str:
        """Write the rows of a record to a file, or remove it if there was none; return a problem, empty if none."""
        header, count = record.get("header"), int(record.get("rows", 0))
        self._source = None
        if header is None:
            target.unlink(missing_ok=True)
            return ""
        for source in (self.copy, target):
            rows = _rows_in(source)
            if len(rows) >= count:
                break
        else:
            return f"{target} has {len(rows)} of the {count} rows that were logged before the save."
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=header, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows[:count])
        target.parent.mkdir(parents=True, exist_ok=True)
        write_durably(target, lambda stream: stream.write(text.getvalue().encode()))
        return ""

    def matches(self, target: Path, record: Mapping[str, Any]) -> bool:
        """Whether the rows of a file are those of the record: it may hold fewer, but none of another run."""
        own_rows, present = _rows_in(self.copy)[: record.get("rows")], _rows_in(target)
        shared = set(record.get("header") or ())
        return all(
            {name: row.get(name) for name in shared} == {name: other.get(name) for name in shared}
            for row, other in zip(own_rows, present, strict=False)
        )


def _encoding() -> str:
    """Return the encoding that Lightning's CSVLogger writes with: the default of the process."""
    return locale.getpreferredencoding(False)


def _rows_in(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError, UnicodeDecodeError, csv.Error), path.open(newline="", encoding=_encoding()) as file:
        return list(csv.DictReader(file))
    return []


def csv_header(path: Path) -> list[str]:
    """Return the names of the columns of a CSV file; empty if there is no file."""
    with suppress(OSError, UnicodeDecodeError), path.open(newline="", encoding=_encoding()) as file:
        return next(csv.reader(file), [])
    return []


def event_files(folder: Path) -> Iterator[Path]:
    """Yield TensorBoard's event files in a folder and its subfolders, which `add_scalars` creates."""
    for pattern in ("*tfevents*", "*/*tfevents*"):
        yield from (path for path in folder.glob(pattern) if path.is_file() and not path.is_symlink())


def event_file_sizes(folder: Path, is_own: Callable[[Path], bool]) -> dict[str, int | None]:
    """Return the sizes of a run's event files, which must be flushed: relative path -> bytes; None for other files."""
    files = event_files(folder)
    return {path.relative_to(folder).as_posix(): path.stat().st_size if is_own(path) else None for path in files}


def truncate_event_files(folder: Path, sizes: Mapping[str, int | None], is_own: Callable[[Path], bool]) -> str:
    """Remove what was logged after a record of `event_file_sizes`; return a problem, or an empty string.

    Records are only appended to these files: truncated to the size of then, a file is what it was.
    """
    present = {path.relative_to(folder).as_posix(): path for path in event_files(folder)}
    for name, path in present.items():
        size = sizes.get(name)
        if size is not None and path.stat().st_size > size:
            os.truncate(path, size)
        elif name not in sizes and is_own(path):
            path.unlink()
    lost = [
        name
        for name, size in sizes.items()
        if size is not None and (name not in present or present[name].stat().st_size < size)
    ]
    return f"{folder} lacks what was logged before the save to {', '.join(sorted(lost))}." if lost else ""


def newest_event_second(folder: Path) -> int:
    """Return the largest time in the names of event files, in seconds since the Unix epoch; 0 without any."""
    times = [path.name.partition("tfevents.")[2].partition(".")[0] for path in event_files(folder)]
    return max((int(time) for time in times if time.isdecimal() and len(time) < 12), default=0)


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
