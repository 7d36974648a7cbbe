"""Kill runs of all kinds in all phases, chain after chain, and compare each with the undisturbed run.

`python -m tests.auto_resume.soak --kills 400` is what `make soak` runs; it ends with status 1 at the first difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.auto_resume.killing import PHASES, STOPPED, differences, random_kill, resumed_at, run


def random_options(chance: random.Random) -> dict[str, object]:
    """Choose a way to train."""
    workers = chance.choice((0, 0, 2))
    return {
        "workers": workers,
        "persistent": bool(workers) and chance.random() < 0.5,
        "ranks": chance.choice((1, 1, 1, 2)),
        "strategy": "ddp_fork",
        "accumulate": chance.choice((1, 2, 3)),
        "validate": chance.choice(("none", 3, 4, "epoch")),
        "precision": chance.choice(("32-true", "32-true", "bf16-mixed", "16-mixed")),
        "iterable": chance.choice(("", "", "", "sized", "unsized")),
        "samples": 28,
    }


def chain(folder: Path, options: dict[str, object], chance: random.Random, counts: Counter[str], goal: int) -> None:
    """Kill one run several times, take it to its end, and compare."""
    whole, killed = folder / "whole", folder / "killed"
    if run(whole, {**options, "guarded": False}) != 0:
        sys.exit((whole / "output.txt").read_text()[-3000:])
    for _ in range(3):
        kill = random_kill(options, chance)
        short = [phase for phase in PHASES if counts[phase] < goal]
        while short and kill["phase"] not in short and chance.random() < 0.9:
            kill = random_kill(options, chance)
        status = run(killed, {**options, "kill": kill["kill"]})
        if status in (-9, STOPPED) or (status == 1 and options["ranks"] == 2):
            counts[kill["phase"]] += 1
    if run(killed, options) != 0:
        sys.exit((killed / "output.txt").read_text()[-3000:])
    found = differences(killed, whole)
    if found:
        sys.exit(f"{options}: {found[:10]}")


def main() -> None:
    """Run chains until there were enough kills, in each phase as well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--each", type=int, default=25, help="kills in each phase at least (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chance, counts, number, resumed = random.Random(arguments.seed), Counter(), 0, 0
    while counts.total() < arguments.kills or min(counts[phase] for phase in PHASES) < arguments.each:
        number += 1
        with tempfile.TemporaryDirectory() as folder:
            chain(Path(folder), random_options(chance), chance, counts, arguments.each)
            resumed += len(resumed_at(Path(folder) / "killed"))
        if number % 10 == 0:
            sys.stdout.write(f"{number} runs, {counts.total()} kills, {resumed} times taken up within a run\n")
            sys.stdout.flush()
    sys.stdout.write(f"{number} runs as undisturbed, bit for bit; kills: {dict(counts)}\n")


if __name__ == "__main__":
    main()
