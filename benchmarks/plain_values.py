"""Reading plain values beside weights, such as a history of losses: time against `torch.load(weights_only=True)`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from _ratios import arguments, measure, ratios, report

from lightning_tricks import read_checkpoint

COUNT = 1_000_000
VALUES: dict[str, Callable[[], Any]] = {
    "a list of 1,000,000 whole numbers": lambda: list(range(COUNT)),
    "a list of 1,000,000 floating-point numbers": lambda: [number / 7 for number in range(COUNT)],
    "a list of 100,000 strings": lambda: [f"images/{number}.png" for number in range(COUNT // 10)],
    "a list of 30,000 dicts": lambda: [{"epoch": n, "loss": n / 7, "name": f"step {n}"} for n in range(30_000)],
}


def timed(read: Callable[[], Any]) -> Callable[[], float]:
    """Return what reads and returns the processor time of that."""

    def go() -> float:
        start = time.process_time()
        read()
        return time.process_time() - start

    return go


def main() -> None:
    """Measure, print and write."""
    given = arguments(default_rounds=15)
    out = given.out.absolute()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, make in VALUES.items():
            torch.save({"model": {"weight": torch.ones(2)}, "values": make()}, "w.pt")
            assert read_checkpoint("w.pt").metadata == {"values": make()}
            contestants = {
                "read_checkpoint": timed(lambda: read_checkpoint("w.pt")),
                "torch.load(weights_only=True)": timed(lambda: torch.load("w.pt", weights_only=True)),
            }
            times = measure(contestants, given.rounds, warmup=1)
            results[name] = ratios(times, peer="torch.load(weights_only=True)")
        os.chdir(out.parent)
    report("plain_values", results, given.rounds, out)


if __name__ == "__main__":
    main()
