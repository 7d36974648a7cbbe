"""Kill runs of all kinds in all phases, chain after chain, and compare each with the undisturbed run.

`python -m tests.auto_resume.soak --kills 400` is what `make soak` runs; it ends with status 1 if any run differed, or
did not say what it had to. With `--result FILE` it writes what it found as tables.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; setting it later breaks threads of forks

import lightning
import torch
import torchmetrics

from tests.auto_resume.killing import IN_A_SAVE, PHASES, STOPPED, differences, random_kill, resumed_at, run, warned
from tests.auto_resume.scenarios import BATCHES, SCENARIOS
from tests.auto_resume.training import train

SCRIPT = "the script of training.py"
PLACES = (*PHASES, IN_A_SAVE)
SHARDED = {"fsdp2": 2, "fsdp2 tensor": 4}  # strategies of the script, and ranks
OF_SCENARIOS = {"samples": 4 * BATCHES, "validate": "epoch"}  # options of training.py whose phases they have


@dataclass(frozen=True)
class Task:
    """What is killed: a script with its options, and what it has to say, if anything."""

    name: str
    options: dict[str, Any]
    script: Callable[[Path, dict[str, Any]], Any] = train
    warning: str = ""


@dataclass
class Found:
    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    exact: int = 0
    warned: int = 0
    problems: list[str] = field(default_factory=list)


def random_options(chance: random.Random) -> dict[str, Any]:
    workers = chance.choice((0, 0, 2))
    loader = chance.choice(("shuffled", "shuffled", "stateful", "stateful generator", "torchdata", "mixed"))
    if loader in ("torchdata", "mixed"):  # whose workers' random numbers are in no state
        workers = 0
    return {
        "loader": loader,
        "workers": workers,
        "persistent": bool(workers) and chance.random() < 0.5,
        "ranks": chance.choice((1, 1, 1, 2, 3, 4)),
        "strategy": "ddp_fork",
        "accumulate": chance.choice((1, 2, 3)),
        "validate": chance.choice(("none", 3, 4, "epoch")),
        "precision": chance.choice(("32-true", "32-true", "bf16-mixed", "16-mixed")),
        "iterable": chance.choice(("", "", "", "sized", "unsized")) if loader == "shuffled" else "",
        "samples": 28,
    }


def sharded_tasks(chance: random.Random) -> Iterator[Task]:
    """The script with a model that is sharded, over and over."""
    while True:
        for strategy, ranks in SHARDED.items():
            data = {"iterable": "", "loader": "shuffled", "val_loaders": 1}
            options = {**random_options(chance), "strategy": strategy, "ranks": ranks, **data}
            yield Task(strategy, {**options, "workers": 0, "persistent": False})


def tasks(chance: random.Random) -> Iterator[Task]:
    """Each scenario with each number of ranks and workers in turn, over and over, and other ways to train between."""
    deck = [
        Task(name, {**OF_SCENARIOS, "ranks": ranks, "workers": workers}, one, one.warning)
        for name, one in SCENARIOS.items()
        for ranks in one.ranks
        for workers in one.workers
        if one.is_there
    ]
    while True:
        for task in chance.sample(deck, len(deck)):
            places = {"first": chance.random() < 0.5, "resume": {"every_n_train_steps": chance.choice((1, 2, 3))}}
            yield replace(task, options={**task.options, **places})
            if chance.random() < 0.3:
                yield Task(SCRIPT, random_options(chance))


def chain(folder: Path, task: Task, chance: random.Random, found: Found, short: Callable[[], list[str]]) -> int:
    """Kill one run several times, take it to its end, and compare; return how often it was resumed."""
    whole, killed = folder / "whole", folder / "killed"
    if run(whole, {**task.options, "guarded": False}, script=task.script) != 0:
        sys.exit((whole / "output.txt").read_text()[-3000:])
    kills = []
    for _ in range(3):
        kill = random_kill(task.options, chance)
        while short() and kill["phase"] not in short() and chance.random() < 0.9:
            kill = random_kill(task.options, chance)
        status = run(killed, {**task.options, "kill": kill["kill"]}, script=task.script)
        if status in (-9, 256 - 9, STOPPED) or (status == 1 and task.options["ranks"] > 1):
            found.kills[kill["phase"]] += 1
            kills.append([kill["phase"], kill["kill"][2]])
    found.runs += 1
    problem = ""
    if run(killed, task.options, script=task.script) != 0:
        problem = (killed / "output.txt").read_text()[-1500:]
    elif task.warning and (not resumed_at(killed) or warned(killed, task.warning)):
        found.warned += 1
    elif differing := differences(killed, whole):  # also where it was killed before it came to what is not restored
        problem = f"{differing[:5]}"
    else:
        found.exact += 1
    if problem:
        found.problems.append(f"{task.options}, killed {kills}: {problem}")
        sys.stdout.write(f"{task.name}: {found.problems[-1]}\n")
    return len(resumed_at(killed))


def as_tables(found: dict[str, Found]) -> str:
    versions = f"lightning {lightning.__version__}, torch {torch.__version__}, torchmetrics {torchmetrics.__version__}"
    total = sum(one.kills.total() for one in found.values())
    runs = sum(one.runs for one in found.values())
    lines = [
        "# What `make soak` found",
        "",
        f"{total} kills of {runs} runs, each killed up to three times and taken to its end; {versions}.",
        "*Exact* counts runs that ended as the undisturbed one, bit for bit; *warned* those that cannot, and logged a "
        "warning that says so.",
        "The columns after that count kills by phase:",
        "",
        *(f"{number}. {phase}" for number, phase in enumerate(PLACES, 1)),
        "",
        f"| scenario | runs | exact | warned | {' | '.join(str(number) for number in range(1, len(PLACES) + 1))} |",
        f"|---|{'---:|' * (3 + len(PLACES))}",
    ]
    for name in sorted(found):
        one = found[name]
        counts = " | ".join(str(one.kills[phase]) for phase in PLACES)
        lines.append(f"| {name} | {one.runs} | {one.exact} | {one.warned} | {counts} |")
    sums = [sum(one.kills[phase] for one in found.values()) for phase in PLACES]
    exact, has_warned = sum(one.exact for one in found.values()), sum(one.warned for one in found.values())
    lines.append(f"| **sum** | {runs} | {exact} | {has_warned} | {' | '.join(map(str, sums))} |")
    problems = [f"- {name}: {problem}" for name in sorted(found) for problem in found[name].problems]
    return "\n".join([*lines, *(["", "Problems:", "", *problems] if problems else []), ""])


def main() -> None:
    """Run chains until there were enough kills, in each phase as well, and every scenario had its turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--each", type=int, default=25, help="kills in each phase at least (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="a file for the tables")
    parser.add_argument("--sharded", action="store_true", help="models that are sharded over ranks, and nothing else")
    arguments = parser.parse_args()
    chance, number, resumed = random.Random(arguments.seed), 0, 0
    found: dict[str, Found] = defaultdict(Found)
    turns = sum(len(one.ranks) * len(one.workers) for one in SCENARIOS.values() if one.is_there)
    left = 0 if arguments.sharded else turns

    def kills(phase: str) -> int:
        return sum(one.kills[phase] for one in found.values())

    def short() -> list[str]:
        return [phase for phase in PHASES if kills(phase) < arguments.each]

    for task in sharded_tasks(chance) if arguments.sharded else tasks(chance):
        number += 1
        with tempfile.TemporaryDirectory() as folder:
            resumed += chain(Path(folder), task, chance, found[task.name], short)
        left -= task.name in SCENARIOS
        total = sum(kills(phase) for phase in PLACES)
        if number % 10 == 0:
            sys.stdout.write(f"{number} runs, {total} kills, {resumed} times resumed within a run\n")
            sys.stdout.flush()
        if left <= 0 and not short() and total >= arguments.kills:
            break
    if arguments.result:
        arguments.result.write_text(as_tables(found))
    differing = sum(len(one.problems) for one in found.values())
    sys.stdout.write(f"{number} runs, {total} kills: {differing} not as they must be\n")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
