"""Ratios of wall times, measured alternately in one run; shared by the benchmarks."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from rich.console import Console
from rich.table import Table

Contestants = Mapping[str, Callable[[], Any]]
Ratio = dict[str, Any]  # median, q1, q3 and the peer
ACCELERATOR = "cuda" if torch.cuda.is_available() else "cpu"
# What a Trainer is given that prints and logs nothing
LEAN: dict[str, Any] = {
    "accelerator": ACCELERATOR,
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def now() -> float:
    """Return the time in seconds at which the device has done all that it was given."""
    if ACCELERATOR == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def work() -> float:
    """Return the seconds that this process worked, whatever else the machine did; on a GPU, the time."""
    return now() if ACCELERATOR == "cuda" else time.process_time()


def measure(contestants: Contestants, rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Time each contestant once a round, in an order that rotates from round to round.

    A contestant that returns a float has timed itself, in seconds.
    """
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-warmup, rounds):
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            start = now()
            own = contestants[name]()
            elapsed = own if isinstance(own, float) else now() - start
            if round_ >= 0:
                times[name].append(elapsed)
    return times


def ratios(times: Mapping[str, list[float]], peer: str) -> dict[str, Ratio]:
    """Each contestant's time over the peer's of the same round: median, quartiles and the peer."""
    result = {}
    for name in times:
        if name != peer:
            each = [own / other for own, other in zip(times[name], times[peer], strict=True)]
            low, median, high = statistics.quantiles(each, n=4)
            result[name] = {"median": round(median, 4), "q1": round(low, 4), "q3": round(high, 4), "peer": peer}
    return result


def environment() -> dict[str, Any]:
    """What the ratios were measured on."""
    return {
        "device": torch.cuda.get_device_name() if ACCELERATOR == "cuda" else "CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def arguments(default_rounds: int) -> argparse.Namespace:
    """Parse the command line that the benchmarks share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=default_rounds, help="alternations (%(default)s; at least 15)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    parsed = parser.parse_args()
    if parsed.rounds < 15:
        parser.error(f"--rounds must be at least 15, got {parsed.rounds}")
    return parsed


def be_quiet() -> None:
    """Leave the screen to the table: no warnings, and of Lightning errors alone."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def report(claim: str, results: Mapping[str, Mapping[str, Ratio]], rounds: int, out: Path) -> None:
    """Print the ratios as a table and write them, with the environment, to `<out>/<claim>.json`."""
    where = environment()
    table = Table("case", "contestant", "ratio (median)", "quartiles", title=f"{claim}, {rounds} rounds, {where}")
    for case, by_name in results.items():
        for name, ratio in by_name.items():
            table.add_row(case, name, f"{ratio['median']:.3f}", f"{ratio['q1']:.3f} to {ratio['q3']:.3f}")
    Console().print(table)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"claim": claim, "rounds": rounds, "environment": where, "ratios": results}, indent=2)
    (out / f"{claim}.json").write_text(text + "\n")
