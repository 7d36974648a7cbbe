"""Other runs: the one before, all in a folder, and a table of them, sorted by a metric.

Links between folders are not followed, and the work is bounded.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.text import counted, format_number, format_seconds, format_time, printable
from lightning_tricks.run_report.core import record as on_disk
from lightning_tricks.run_report.core.curves import best_point, metric_curves, sign_of_better, split_key, watched
from lightning_tricks.run_report.core.record import Point, Row, RunRecord, RunReportError

if TYPE_CHECKING:
    from lightning_tricks._shared.fitting_table import FittingTable

_MOST_NEIGHBOURS, _MOST_READ, _MOST_SECONDS = 1000, 20, 2.0  # names that are looked at, records, processor time
_LARGEST = {on_disk.RUN_FILE: 8 << 20, on_disk.VALUES_FILE: 32 << 20}  # bytes; RunReport writes less
_MOST_ENTRIES, _DEEPEST = 20_000, 6
_MOST_OTHERS = 3  # metrics beside the one that sorts
_JSON_FIELDS = ("module", "status", "epochs", "started", "seconds", "samples_per_second")
_NARROWEST = {"run": 12, "started": 16}  # of a column whose text is folded, and of one whose text is not


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
    cousins = [other / folder.name for other in _folders_in(folder.parent.parent)]
    found = [(_time_of(place), place) for place in (*_folders_in(folder.parent), *cousins) if place != folder]
    end = time.thread_time() + _MOST_SECONDS
    before, latest = None, 0.0
    for _, place in sorted((one for one in found if one[0]), reverse=True)[:_MOST_READ]:
        if time.thread_time() > end:
            break
        with suppress(OSError, RunReportError):  # it is broken, or no record
            other = on_disk.read_run(place / on_disk.RUN_FILE)
            is_one = (other.module, other.status) == (record.module, "finished") and other.id != record.id
            if is_one and latest < other.started < record.started:
                before, latest = place, other.started
    if before is not None:
        name = before.name if before.parent == folder.parent else f"{before.parent.name}/{before.name}"
        with suppress(OSError, RunReportError):
            return name, ends_of(on_disk.read_record(before))
    return None


def _folders_in(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        known = islice(entries, _MOST_NEIGHBOURS)
        return [folder / entry.name for entry in known if entry.is_dir(follow_symlinks=False)]
    return []


def _time_of(folder: Path) -> float:
    """Return when the record in a folder was written, or 0 if there is none, or one that RunReport has not written."""
    with suppress(OSError):
        found = {name: (folder / name).lstat() for name in _LARGEST}
        if all(stat.S_ISREG(one.st_mode) and one.st_size <= _LARGEST[name] for name, one in found.items()):
            return found[on_disk.RUN_FILE].st_mtime
    return 0.0


_OTHERS = ("earlier-", ".auto_resume")  # what a later fit moved aside; AutoResume has a run.json of its own


def runs_in(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder, at most six levels deep, without those that a later fit moved aside.

    Raises:
        RunReportError: If there are more than 20,000 names in it.
    """
    left = _MOST_ENTRIES
    waiting = [(folder, 0)]
    while waiting:
        here, depth = waiting.pop()
        if (here / on_disk.RUN_FILE).is_file():
            yield here
        inner = []
        with suppress(OSError), os.scandir(here) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    raise RunReportError(
                        f"{folder} contains more than {_MOST_ENTRIES:,} entries: pass folders inside it."
                    )
                if depth < _DEEPEST and entry.is_dir(follow_symlinks=False) and not entry.name.startswith(_OTHERS):
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
        rows += [Row("epoch", point.step, point.epoch, {key: point.value}) for _, point in sorted(kept.items())]
    record.rows = rows
    return record


@dataclass(frozen=True)
class Overview:
    """Runs in the order of a metric.

    Attributes:
        runs: The name and the record of each, of which `ends_of` may have kept only a few rows.
        key: The key of the metric, or "" if there is none.
        sign: 1 if the highest value is the best, -1 if the lowest is, 0 if that is unknown.
    """

    runs: Sequence[tuple[str, RunRecord]]
    key: str
    sign: int

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of plain values for each run, as in a JSON file."""
        return [
            {
                "run": name,
                **{field: getattr(record, field) for field in _JSON_FIELDS},
                "steps": record.step,
                "metrics": {key: self._ends(record, key) for _, key in metric_curves(record)},
            }
            for name, record in self.runs
        ]

    def sign_of(self, key: str) -> int:
        """Return 1 if a high value of a key is good, -1 if a low one is, 0 if that is unknown."""
        return self.sign if key == self.key else sign_of_better(split_key(key).name)

    def _ends(self, record: RunRecord, key: str) -> dict[str, Any]:
        points = record.curve(key)
        best = best_point(points, self.sign_of(key))
        return {
            "last": points[-1].value,
            "best": None if best is None else best.value,
            "epoch": None if best is None else best.epoch,
        }

    def table(self) -> FittingTable:
        """Return a row for each run; narrow terminals leave out the columns that matter least."""
        from rich import box
        from rich.text import Text

        from lightning_tricks._shared.fitting_table import FittingTable, FoldedName

        order = {1: "the highest first", -1: "the lowest first", 0: "the highest last value first"}[self.sign]
        title = counted(len(self.runs), "run") + (f", by {printable(self.key)}, {order}" if self.key else "")
        columns = self._columns()
        table = FittingTable(
            title=Text(title),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
            drop=[printable(name) for name in reversed(columns)][:-2],
        )
        for name in columns:
            is_text = name in ("run", "status", "started", "module")
            table.add_column(printable(name), justify="left" if is_text else "right", min_width=_NARROWEST.get(name))
        names, *others = columns.values()
        for name, *cells in zip(names, *others, strict=True):
            table.add_row(FoldedName(name), *map(Text, cells))
        return table

    def _columns(self) -> dict[str, list[str]]:
        """Return name -> cells of all columns, those that matter most first."""
        records = [record for _, record in self.runs]
        columns = {"run": [printable(name) for name, _ in self.runs]}
        if self.key:
            curves = [record.curve(self.key) for record in records]
            if self.sign:
                columns["best"] = [_shown(best_point(points, self.sign)) for points in curves]
            columns["last"] = [_shown(points[-1] if points else None) for points in curves]
        columns |= {
            # that of a killed run says "running", too
            "status": ["not ended" if record.status == "running" else record.status for record in records],
            "epochs": [f"{record.epochs:,}" for record in records],
            "started": [format_time(record.started, zone="") for record in records],
        }
        for key in self._others():
            columns[f"best {key}"] = [_shown(best_point(record.curve(key), self.sign_of(key))) for record in records]
        columns["steps"] = [f"{record.step:,}" for record in records]
        columns["took"] = [format_seconds(record.seconds) for record in records]
        columns["samples/s"] = [format_number(record.samples_per_second) for record in records]
        if len({record.module for record in records}) > 1:
            columns["module"] = [printable(record.module) for record in records]
        return columns

    def _others(self) -> list[str]:
        """Return the keys of validation that most runs have, beside the one that sorts."""
        counts = Counter(
            key
            for _, record in self.runs
            for parts, key in metric_curves(record)
            if parts.stage in ("val", "test") and parts.kind != "step" and key != self.key and self.sign_of(key)
        )
        return [key for key, _ in counts.most_common(_MOST_OTHERS)]


def make_overview(runs: Sequence[tuple[str, RunRecord]], key: str = "", sign: int = 0) -> Overview:
    """Return runs in the order of a metric, the best first; those that do not have it are the last.

    Args:
        runs: The name and the record of each.
        key: The key of the metric; "" takes the first loss or metric of validation of most runs.
        sign: 1 for the highest value first, -1 for the lowest; 0 for the best, as the name tells it.

    Raises:
        ValueError: If no run has logged the key.
    """
    if key:
        check_choice("sort", key, dict.fromkeys(name for _, record in runs for _, name in metric_curves(record)))
    else:
        usual = Counter(name for _, record in runs for name, _, _ in watched(record)).most_common(1)
        key = usual[0][0] if usual else ""
    sign = sign or sign_of_better(split_key(key).name)

    def rank(run: tuple[str, RunRecord]) -> tuple[bool, float]:
        points = run[1].curve(key) if key else []
        point = best_point(points, sign) if sign else points[-1] if points else None
        if not key:
            return False, -run[1].started
        return point is None or math.isnan(point.value), 0.0 if point is None else -(sign or 1) * point.value

    return Overview(sorted(runs, key=rank), key, sign)


def _shown(point: Point | None) -> str:
    return format_number(None if point is None else point.value)
