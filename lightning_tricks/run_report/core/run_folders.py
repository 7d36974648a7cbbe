"""Folders of other runs: the run before, and all runs in a folder; links are not followed, and the work is bounded."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from lightning_tricks.run_report.core.curves import metric_curves
from lightning_tricks.run_report.core.record import Row, RunRecord, RunReportError
from lightning_tricks.run_report.core.record_file import RUN_FILE, VALUES_FILE, read_record, read_run

_MOST_NEIGHBOURS, _MOST_READ, _MOST_SECONDS = 1000, 20, 2.0  # names that are looked at, records, processor time
_LARGEST = {RUN_FILE: 8 << 20, VALUES_FILE: 32 << 20}  # bytes; RunReport writes less
_MOST_ENTRIES, _DEEPEST = 20_000, 6


def find_run_before(folder: Path, record: RunRecord) -> tuple[str, RunRecord] | None:
    """Return the finished run of the same module that started last before this one, and its name.

    It lies beside the folder or, as with `runs/a/report` and `runs/b/report`, in a folder beside that one under the
    same name. What is broken or too large is passed over.

    Args:
        folder: The folder of the run.
        record: Its record.

    Returns:
        The name of the folder, and its record with few rows, as `ends_of` makes it; or None.
    """
    folder = folder.absolute()
    places = [
        *((name, folder.parent / name) for name in _folders_in(folder.parent)),
        *((f"{name}/{folder.name}", folder.parent.parent / name / folder.name)
          for name in _folders_in(folder.parent.parent)),
    ]  # fmt: skip
    found = [(_time_of(place), name, place) for name, place in places if place != folder]
    end = time.thread_time() + _MOST_SECONDS
    before, latest = None, 0.0
    for _, name, place in sorted((one for one in found if one[0]), reverse=True)[:_MOST_READ]:
        if time.thread_time() > end:
            break
        with suppress(OSError, RunReportError):  # it is broken, or no record
            other = read_run(place / RUN_FILE)
            is_one = (other.module, other.status) == (record.module, "finished") and other.id != record.id
            if is_one and latest < other.started < record.started:
                before, latest = (name, place), other.started
    if before is None:
        return None
    with suppress(OSError, RunReportError):
        return before[0], ends_of(read_record(before[1]))
    return None


def _folders_in(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, _MOST_NEIGHBOURS) if entry.is_dir(follow_symlinks=False)]
    return []


def _time_of(folder: Path) -> float:
    """Return when the record in a folder was written, or 0 if there is none, or one that RunReport has not written."""
    with suppress(OSError):
        found = {name: (folder / name).lstat() for name in _LARGEST}
        if all(stat.S_ISREG(one.st_mode) and one.st_size <= _LARGEST[name] for name, one in found.items()):
            return found[RUN_FILE].st_mtime
    return 0.0


def runs_in(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder, at most six levels deep, without those that a later fit moved aside.

    Raises:
        RunReportError: If there are more than 20,000 names in it.
    """
    left = _MOST_ENTRIES
    waiting = [(folder, 0)]
    while waiting:
        here, depth = waiting.pop()
        if (here / RUN_FILE).is_file():
            yield here
        inner = []
        with suppress(OSError), os.scandir(here) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    raise RunReportError(f"{folder} holds more than {_MOST_ENTRIES:,} names: name folders inside it.")
                if depth < _DEEPEST and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("earlier-"):
                    inner.append(here / entry.name)
        waiting += [(one, depth + 1) for one in sorted(inner, reverse=True)]


def ends_of(record: RunRecord) -> RunRecord:
    """Keep of each curve of a record the lowest, the highest and the last value alone, and return it."""
    rows = []
    for _, key in metric_curves(record):
        points = record.curve(key)
        known = [point for point in points if math.isfinite(point.value)] or points
        extremes = (choose(known, key=lambda point: point.value) for choose in (min, max))
        kept = {point.step: point for point in (*extremes, points[-1])}
        kept[points[-1].step] = points[-1]
        rows += [Row("epoch", point.step, point.epoch, {key: point.value}) for _, point in sorted(kept.items())]
    record.rows = rows
    return record
