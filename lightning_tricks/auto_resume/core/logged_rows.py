"""Rows that loggers wrote to files: their state at a save, and how it is restored."""

from __future__ import annotations

import csv
import io
import locale
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_tricks.auto_resume.core.durable_writing import write_durably


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
