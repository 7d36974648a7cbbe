"""Figures of models over paired seeds, with 95 % intervals; shared by the benchmarks that compare no times."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _ratios import environment
from rich.console import Console
from rich.table import Table
from scipy.stats import t

Figure = dict[str, float]  # mean, and the lower and upper end of its 95 % interval


def interval(values: Sequence[float]) -> Figure:
    """Return the mean and its 95 % interval, by Student's t."""
    mean = statistics.mean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "lower": mean - half, "upper": mean + half}


def figures(
    seeds: Mapping[str, Sequence[Mapping[str, float]]], pairs: Iterable[tuple[str, str]]
) -> dict[str, dict[str, Figure]]:
    """Return what each contestant is, and by how much it differs from another in the same seeds.

    Args:
        seeds: The values of each contestant, of one seed after another.
        pairs: A contestant, and what is subtracted from it.
    """
    found = {name: {key: interval([run[key] for run in runs]) for key in runs[0]} for name, runs in seeds.items()}
    for name, peer in pairs:
        both = list(zip(seeds[name], seeds[peer], strict=True))
        keys = [key for key in both[0][0] if key in both[0][1]]
        found[f"{name} - {peer}"] = {key: interval([own[key] - other[key] for own, other in both]) for key in keys}
    return found


def report_figures(claim: str, found: Mapping[str, Mapping[str, Figure]], seeds: int, out: Path) -> None:
    """Print the figures as a table and write them, with the environment, to `<out>/<claim>.json`."""
    columns = columns_of(found)
    table = Table("", *columns, title=f"{claim}, means of {seeds} seeds and their 95 % intervals")
    for name, row in found.items():
        table.add_row(name, *(shown(row[column]) if column in row else "" for column in columns))
    Console(width=200).print(table)
    out.mkdir(parents=True, exist_ok=True)
    rounded = {name: {key: {k: round(v, 5) for k, v in row[key].items()} for key in row} for name, row in found.items()}
    text = json.dumps({"claim": claim, "rounds": seeds, "environment": environment(), "figures": rounded}, indent=2)
    (out / f"{claim}.json").write_text(text + "\n", encoding="utf-8")


def columns_of(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of all values that some row has."""
    return list(dict.fromkeys(key for row in found.values() for key in row))


def shown(figure: Mapping[str, float]) -> str:
    """Return a figure and its interval with two digits of the width of the interval."""
    width = figure["upper"] - figure["lower"]
    digits = max(0, 1 - math.floor(math.log10(width))) if width else 2
    mean, lower, upper = (f"{round(figure[key], digits) + 0:.{digits}f}" for key in ("mean", "lower", "upper"))
    return f"{mean} ({lower} to {upper})"
