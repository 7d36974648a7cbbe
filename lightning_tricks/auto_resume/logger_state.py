"""The loggers of a fit: which version each one continues, and which rows its files have."""

from __future__ import annotations

import csv
import io
import locale
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_tricks._lightning_compat.flavor import rank_zero_warn
from lightning_tricks._lightning_compat.loggers import (
    close_tensorboard_logger,
    discard_unwritten_rows,
    is_logger_started,
    log_dir_for_version,
    logger_kind,
    logger_version,
    open_csv_logger,
    set_logger_version,
)
from lightning_tricks._shared.checks import is_address
from lightning_tricks._shared.files import open_file
from lightning_tricks.auto_resume.core.durable_writing import write_atomically

# A version becomes a part of a path (`log_dir`), and a checkpoint names no path: not "..", not "/" in front.
_PLAIN_VERSION = re.compile(r"([\w.=+,@: -]{1,255}(/[\w.=+,@: -]{1,255})*)?")
_ON_DISK = ("csv", "tensorboard")


class LoggerState:
    """Lets the loggers of a resumed fit continue where those of the stopped one were, row by row.

    What CSVLogger and TensorBoardLogger wrote after the save is removed, as the run logs it again; so is what a resumed
    start logged before the fit, as the first one did. WandbLogger and MLFlowLogger continue the same run, in which such
    rows stay.

    Args:
        loggers: The loggers of the Trainer.
        private: A folder for copies, in which nobody else writes.
        processes: The processes that trained in this run, this one last: "pid" and "host" of each.
        own: A folder in which only this run writes, on whatever machine; None if there is none.
    """

    def __init__(
        self, loggers: Sequence[Any], private: Path, processes: Iterable[Mapping[str, Any]], own: Path | None = None
    ) -> None:
        self._own = own and own.absolute()
        # At an address nothing can be truncated.
        local = [logger for logger in loggers if not is_address(getattr(logger, "root_dir", ""))]
        self.loggers = [logger for logger in local if logger_kind(logger)]
        self._csv = [CsvRows(private / f"rows-{number}.csv") for number in range(len(self.loggers))]
        # TensorBoard names its files `events.out.tfevents.<seconds>.<host>.<pid>.<n>` (event_file_writer.py): so it is
        # known whose they are, and files of another run in the same folder are left alone.
        self._process_marks = [f".{process.get('host')}.{process.get('pid')}." for process in processes]

    def restore_versions(self, records: object, *, is_writer: bool) -> list[str]:
        """Set the versions of the loggers to those of records, before they begin; `is_writer` is True on rank zero.

        Returns:
            A phrase for each logger that writes to another version than its record has.
        """
        others = []
        for number, logger, record in self._loggers_with_records(records):
            kind, version = record["kind"], record["version"]
            if kind not in _ON_DISK:
                set_logger_version(logger, version)
            elif self._is_same_directory(number, logger, record):
                # The Trainer reads `experiment` before `setup` (trainer/call.py, `_call_setup_hook`), and so does code
                # before the fit: the next free version has a folder then.
                is_started = is_writer and is_logger_started(logger)
                begun_in = log_dir_for_version(logger, logger_version(logger) if is_started else version)
                set_logger_version(logger, version)
                if begun_in != log_dir_for_version(logger, version):
                    self._remove_beginning(logger, begun_in)
                if kind == "csv" and is_writer:
                    open_csv_logger(logger)
            if (now := logger_version(logger)) != version:
                others.append(f"{type(logger).__name__} writes to version {now!r}, not to version {version!r}")
        return others

    def versions(self) -> list[int | str | None]:
        """Return the versions of the loggers."""
        return [logger_version(logger) for logger in self.loggers]

    def set_versions(self, versions: Iterable[Any]) -> None:
        """Set the versions of the loggers."""
        for logger, version in zip(self.loggers, versions, strict=True):
            set_logger_version(logger, version)

    def records(self) -> list[dict[str, Any]]:
        """Return the positions of the loggers, which are flushed; on rank zero."""
        found = []
        for number, logger in enumerate(self.loggers):
            kind, version = logger_kind(logger), logger_version(logger)
            record: dict[str, Any] = {"kind": kind, "version": version}
            if kind in _ON_DISK:
                folder = log_dir_for_version(logger, version)
                # A folder that was deleted and made again by another run has the same name.
                record["inode"] = folder.stat().st_ino if folder.is_dir() else 0
                if kind == "csv":
                    # CSVLogger writes every `flush_logs_every_n_steps` rows, and TensorBoard every two minutes.
                    logger.save()
                    record["rows"] = self._csv[number].update(folder / "metrics.csv")
                else:
                    logger.experiment.flush()
                    record["files"] = {name: path.stat().st_size for name, path in self._event_files(folder).items()}
            found.append(record)
        return found

    def restore(self, records: object) -> None:
        """Remove what was logged after records of another process, on rank zero; warn of what cannot be restored."""
        for number, logger, record in self._loggers_with_records(records):
            problem = ""
            try:
                if record["kind"] == "csv":
                    problem = self._csv[number].restore(open_csv_logger(logger), record["rows"])
                    open_csv_logger(logger)  # with the columns that are there now
                    discard_unwritten_rows(logger)
                elif record["kind"] == "tensorboard":
                    close_tensorboard_logger(logger)
                    folder = log_dir_for_version(logger, logger_version(logger))
                    problem = self._truncate_event_files(folder, record["files"])
            except OSError as error:
                problem = f"rows that were logged after the save could not be removed ({error})."
            if problem:
                rank_zero_warn(f"AutoResume: {problem}")

    def _loggers_with_records(self, records: object) -> list[tuple[int, Any, Mapping[str, Any]]]:
        """Return number, logger and record: the n-th logger of a kind has the n-th record of that kind."""
        # By kind, as a start may have other loggers, or the same in another order.
        left = [record for record in records if _is_valid(record)] if isinstance(records, list) else []
        found = []
        for number, logger in enumerate(self.loggers):
            record = next((known for known in left if known["kind"] == logger_kind(logger)), None)
            if record is not None:
                left.remove(record)
                found.append((number, logger, record))
        return found

    def _is_same_directory(self, number: int, logger: Any, record: Mapping[str, Any]) -> bool:
        """Whether the version of a record is what the run logged, and not what another run put in its place."""
        folder = log_dir_for_version(logger, record["version"])
        if record["kind"] == "tensorboard":
            return folder.is_dir() and self._event_files(folder).keys() >= record["files"].keys()
        if not folder.is_dir() or (self._own is not None and folder.is_relative_to(self._own)):
            return True
        present, own = _read_rows(folder / "metrics.csv")[1], _read_rows(self._csv[number].copy)[1][: record["rows"]]
        if present and own:  # there may be fewer rows, but none of another run
            return all(row == other for row, other in zip(own, present, strict=False))
        return bool(folder.stat().st_ino == record.get("inode"))

    def _remove_beginning(self, logger: Any, folder: Path) -> None:
        """Remove what this process has logged to another version: it repeats what the first start logged."""
        if logger_kind(logger) == "tensorboard":
            close_tensorboard_logger(logger)
        else:
            (folder / "metrics.csv").unlink(missing_ok=True)  # the logger deleted that of others, if there was one
        for path in self._event_files(folder).values():
            if self._process_marks[-1] in path.name:
                path.unlink()
        # Removed if nothing else is in it: else each start would leave an empty version behind.
        if folder.is_dir() and {path.name for path in folder.iterdir()} <= {"hparams.yaml"}:
            (folder / "hparams.yaml").unlink(missing_ok=True)
            folder.rmdir()

    def _event_files(self, folder: Path) -> dict[str, Path]:
        """Return the files of TensorBoard that a process of the run wrote: path from the folder -> path.

        `add_scalars` writes to subfolders.
        """
        files = (path for pattern in ("*tfevents*", "*/*tfevents*") for path in folder.glob(pattern))
        return {
            path.relative_to(folder).as_posix(): path
            for path in files
            if path.is_file() and not path.is_symlink() and any(mark in path.name for mark in self._process_marks)
        }

    def _truncate_event_files(self, folder: Path, sizes: Mapping[str, int]) -> str:
        """Remove what was logged after a record of sizes; return a problem, or an empty string.

        Records are only appended to these files: truncated to the size of then, a file is what it was.
        """
        present = self._event_files(folder)
        lost = [name for name in sizes if name not in present or present[name].stat().st_size < sizes[name]]
        for name, path in present.items():
            if name not in sizes:
                path.unlink()
            elif path.stat().st_size > sizes[name]:
                os.truncate(path, sizes[name])
        if present:  # files are read in the order of the seconds in their names
            time.sleep(1 - time.time() % 1)
        return f"{folder} lacks values that were logged before the save, in {', '.join(sorted(lost))}." if lost else ""


class CsvRows:
    """Counts the rows of a CSV file, and copies what was added since the last save.

    Lightning deletes the file where a version is given and the logger is used before the fit, as `trainer.validate`
    does, and writes it anew where a column is added; a kill then leaves no rows but those of the copy.

    Args:
        copy: Path of the copy, which no other program writes.
    """

    def __init__(self, copy: Path) -> None:
        self.copy, self._header, self._rows = copy, b"", 0

    def update(self, source: Path) -> int:
        """Copy what was added, and return the number of rows."""
        try:
            file = open_file(source)
        except FileNotFoundError:
            return 0
        with file:
            header = file.readline()
            # Lightning writes the whole file anew where a key is new (csv_logs.py, `_rewrite_with_new_header`).
            is_continuation = header == self._header and self.copy.is_file()
            file.seek(self.copy.stat().st_size if is_continuation else 0)
            new = file.read()
        if is_continuation:
            with self.copy.open("ab") as copy:
                copy.write(new)
        else:
            write_atomically(self.copy, lambda stream: stream.write(new))
            self._header, self._rows = header, -1  # the header is not a row
        # Not by line ends: a quoted value may hold some. latin-1 decodes any bytes, and only rows are counted.
        self._rows += sum(1 for _ in csv.reader(io.StringIO(new.decode("latin-1"), newline="")))
        return self._rows

    def restore(self, target: Path, count: int) -> str:
        """Write the first rows to a file, or remove it if there are none; return a problem, or an empty string."""
        self._header = b""
        if not count:
            target.unlink(missing_ok=True)
            return ""
        columns, rows = _read_rows(self.copy)
        if len(rows) < count:
            # The copy lies on the disk of this machine, and the run may have moved: the file itself has the rows then.
            columns, rows = max((columns, rows), _read_rows(target), key=lambda table: len(table[1]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows[:count])
        # As CSVLogger opens its file, without an encoding.
        data = text.getvalue().encode(locale.getpreferredencoding(False))
        write_atomically(target, lambda stream: stream.write(data))
        if len(rows) < count:
            return f"{target} has {len(rows)} of the {count} rows that were logged before the save."
        return ""


def _read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns of a CSV file, and its rows without empty values; nothing if it is unreadable."""
    # A kill may leave half of a row, or of a character.
    with suppress(OSError, UnicodeDecodeError, csv.Error), open_file(path) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, locale.getpreferredencoding(False), newline=""))
        rows = [{name: value for name, value in row.items() if name and value} for row in reader]
        return list(reader.fieldnames or ()), rows
    return [], []


def _is_valid(record: Any) -> bool:
    """Whether a record that was read is complete, and its version names nothing outside of the logger's directory."""
    if not isinstance(record, dict) or record.get("kind") not in (*_ON_DISK, "wandb", "mlflow"):
        return False
    # It comes from a checkpoint: with a version such as "../..", files of others would be truncated.
    version, files, rows = record.get("version"), record.setdefault("files", {}), record.setdefault("rows", 0)
    is_plain = (
        type(version) in (int, str) and _PLAIN_VERSION.fullmatch(str(version)) and ".." not in str(version).split("/")
    )
    counts = [rows, *files.values()] if isinstance(files, dict) else [-1]
    return bool(is_plain) and all(type(count) is int and count >= 0 for count in counts)
