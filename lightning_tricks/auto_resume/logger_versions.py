"""The loggers of a fit: which version each goes on with, and which rows it has."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_tricks._lightning_compat.loggers import (
    close_tensorboard,
    drop_unwritten_rows,
    give_version,
    has_begun,
    kind_of_logger,
    log_dir_of,
    move_csv,
    open_csv,
    version_of_logger,
)
from lightning_tricks.auto_resume.core.logged_rows import (
    RowsOfCsv,
    cut_event_files,
    event_files,
    event_sizes,
    header_of,
    newest_second,
)

_PLAIN = re.compile(r"[\w.=+,@: -]{1,255}(/[\w.=+,@: -]{1,255})*")


class LoggersOfFit:
    """Lets the loggers of a resumed fit go on where those of the stopped one were, row by row.

    What CSVLogger and TensorBoardLogger wrote after the save is withdrawn: the run logs it again. WandbLogger and
    MLFlowLogger go on with the same run, in which such rows stay.

    Args:
        loggers: Of the Trainer.
        private: Folder for copies, which nobody else writes.
        processes: That trained in this run, this one included: "pid" and "host" of each.
    """

    def __init__(self, loggers: Sequence[Any], private: Path, processes: Iterable[Mapping[str, Any]]) -> None:
        local = [logger for logger in loggers if "://" not in str(getattr(logger, "root_dir", ""))]
        self.loggers = [logger for logger in local if kind_of_logger(logger)]
        self.private = private
        self._csv = [RowsOfCsv(private / f"rows-{number}.csv") for number in range(len(self.loggers))]
        self._moved: set[Path] = set()  # what this process logged before the fit
        self._marks = [f".{process.get('host')}.{process.get('pid')}." for process in processes]
        self._marks.append(f".{socket.gethostname()}.{os.getpid()}.")

    def take_up(self, records: Sequence[Any], *, writes: bool) -> None:
        """Give the loggers the versions of records, before they begin; `writes` says that this is rank zero."""
        for number, logger, record in self._pairs(records):
            version, kind = record["version"], record["kind"]
            if kind in ("csv", "tensorboard"):
                if not self._is_place(number, logger, record):
                    continue
                fresh = log_dir_of(logger, version_of_logger(logger)) if writes and has_begun(logger) else None
                if fresh == log_dir_of(logger, version):
                    fresh = None
                give_version(logger, version)
                if kind == "csv" and writes:
                    open_csv(logger, header_of(move_csv(logger, fresh)))
                elif writes:
                    self._move_events(logger, fresh)
                if fresh is not None and fresh.is_dir() and not any(fresh.iterdir()):
                    fresh.rmdir()
            else:
                give_version(logger, version)

    def records(self) -> list[dict[str, Any]]:
        """Return where the loggers stand; what they were given is on the disk then. On rank zero."""
        return [self._record(number, logger) for number, logger in enumerate(self.loggers)]

    def restore(self, records: Sequence[Any], *, before_fit: bool = False) -> list[str]:
        """Withdraw what was logged after the records; return what is wrong, a sentence each. On rank zero.

        Args:
            records: Of another process.
            before_fit: Whether what this process has logged already stays: it is what precedes the fit.
        """
        said = []
        if not before_fit:
            self._moved.clear()
        for number, logger, record in self._pairs(records):
            if record["kind"] == "csv":
                path = open_csv(logger)
                said.append(self._csv[number].restore(path, record))
                open_csv(logger, header_of(path))
                if not before_fit:
                    drop_unwritten_rows(logger)
            elif record["kind"] == "tensorboard":
                close_tensorboard(logger)
                folder = log_dir_of(logger, version_of_logger(logger))
                said.append(cut_event_files(folder, record["files"], self._is_own))
                _wait_for(newest_second(folder))
        return [sentence for sentence in said if sentence]

    def others(self, records: Sequence[Any]) -> list[str]:
        """Say which loggers go on elsewhere than the records say."""
        pairs = [(logger, record["version"]) for _, logger, record in self._pairs(records)]
        return [
            f"{type(logger).__name__} goes on with {version_of_logger(logger)!r}, and not with {version!r} as before"
            for logger, version in pairs
            if version_of_logger(logger) != version
        ]

    def _record(self, number: int, logger: Any) -> dict[str, Any]:
        kind, version = kind_of_logger(logger), version_of_logger(logger)
        record: dict[str, Any] = {"kind": kind, "version": version}
        if kind in ("csv", "tensorboard"):
            folder = log_dir_of(logger, version)
            record |= {"directory": str(folder), "from_here": _relative(folder, self.private)}
            record["inode"] = folder.stat().st_ino if folder.is_dir() else 0
            if kind == "csv":
                record |= self._csv[number].take(folder / "metrics.csv")
            else:
                record["files"] = event_sizes(folder, self._is_own)
        return record

    def _pairs(self, records: Sequence[Any]) -> list[tuple[int, Any, Mapping[str, Any]]]:
        """Return the loggers with their numbers and records: the n-th of a kind has the n-th record of it."""
        left = [record for record in records if _is_record(record)]
        found = []
        for number, logger in enumerate(self.loggers):
            record = next((one for one in left if one["kind"] == kind_of_logger(logger)), None)
            if record is not None:
                left.remove(record)
                found.append((number, logger, record))
        return found

    def _is_place(self, number: int, logger: Any, record: Mapping[str, Any]) -> bool:
        """Whether the directory that the logger would have with the version of a record is the record's."""
        folder = log_dir_of(logger, record["version"])
        kind: str = record["kind"]
        inode: object = record.get("inode")
        here = (str(folder), _relative(folder, self.private))
        if not ({record.get("directory"), record.get("from_here")} & set(here)):
            return False
        if not folder.is_dir():
            return kind == "csv"
        if kind == "tensorboard":
            mine = [name for name, size in record["files"].items() if size is not None]
            return {path.relative_to(folder).as_posix() for path in event_files(folder)}.issuperset(mine)
        if not record.get("rows"):
            return folder.stat().st_ino == inode
        return self._csv[number].is_of(folder / "metrics.csv", record)

    def _move_events(self, logger: Any, fresh: Path | None) -> None:
        """Let a TensorBoardLogger that began before the fit leave the directory that it made, with its events."""
        close_tensorboard(logger)
        folder = log_dir_of(logger, version_of_logger(logger))
        for path in [] if fresh is None else list(fresh.glob("*tfevents*")):
            if self._is_of_this_process(path):
                folder.mkdir(parents=True, exist_ok=True)
                self._moved.add(path.replace(folder / path.name))

    def _is_own(self, path: Path) -> bool:
        return path not in self._moved and any(mark in path.name for mark in self._marks)

    def _is_of_this_process(self, path: Path) -> bool:
        return self._marks[-1] in path.name


def _is_record(record: object) -> bool:
    """Whether a record of a file has what is needed, and a version that names nothing outside of the logger's place."""
    if not isinstance(record, dict):
        return False
    version, header, files = record.get("version"), record.get("header"), record.get("files", {})
    plain = type(version) is int and version >= 0
    if isinstance(version, str):
        plain = _PLAIN.fullmatch(version) is not None and ".." not in version.split("/")
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


def _relative(folder: Path, private: Path) -> str:
    try:
        return os.path.relpath(folder, private)
    except ValueError:  # on another drive
        return ""


def _wait_for(second: int) -> None:
    """Wait until that second is over: TensorBoard reads files in the order of the seconds in their names."""
    for _ in range(40):
        if int(time.time()) > second or second > time.time() + 2:  # a clock that was put back
            return
        time.sleep(0.05)
