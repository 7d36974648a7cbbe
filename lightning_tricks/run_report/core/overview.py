"""A table of many runs, sorted by a metric."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.text import counted, printable
from lightning_tricks.run_report.core.curves import best_point, metric_curves, sign_of_better, split_key, watched
from lightning_tricks.run_report.core.numbers import format_number, format_seconds, format_time
from lightning_tricks.run_report.core.record import Point, RunRecord

if TYPE_CHECKING:
    from lightning_tricks._shared.fitting_table import FittingTable

_MOST_OTHERS = 3  # metrics beside the one that sorts
_NARROWEST = {"run": 12, "started": 16}  # of a column whose text is folded, and of one whose text is not


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
                "module": record.module,
                "status": record.status,
                "epochs": record.epochs,
                "steps": record.step,
                "started": record.started,
                "seconds": record.seconds,
                "samples_per_second": record.samples_per_second,
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
            "started": [format_time(record.started).removesuffix(" UTC") for record in records],
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
