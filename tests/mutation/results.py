"""The file of results: how many faults of each core were found, and what is to be said of each that was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.mutation.sampling import Mutant

UNREAD = "nobody has looked at it yet"
_HOW = (
    "A fault counts as found where a test fails with it: in the run, or, for one that survived it, alone in a copy of "
    "the repository, with a test that takes longer or was written for it."
)


def verdicts_in(path: Path) -> dict[str, str]:
    """What was said of each survivor."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line.removeprefix("- ").partition("`: ") for line in lines if line.startswith("- `"))
    return {f"{key}`": verdict for key, _, verdict in found}


def report(mutants: Iterable[Mutant], found: Mapping[str, bool], verdicts: Mapping[str, str]) -> str:
    """Write the results anew, with the verdicts that are there."""
    mutants = [mutant for mutant in mutants if mutant.key in found]
    made = Counter(mutant.file for mutant in mutants)
    killed = Counter(mutant.file for mutant in mutants if found[mutant.key])
    lines = ["# Faults put into the cores by `make mutants`", "", _HOW, ""]
    lines += ["| core | faults | found |", "| --- | ---: | ---: |"]
    lines += [f"| {file.removeprefix('lightning_tricks/')} | {made[file]} | {killed[file]} |" for file in made]
    lines += [f"| all | {made.total()} | {killed.total()} |", "", "## Those that no test finds, and why", ""]
    alive = dict.fromkeys(mutant.file for mutant in mutants if not found[mutant.key])
    for file in alive:
        lines += [f"### {file.removeprefix('lightning_tricks/')}", ""]
        keys = dict.fromkeys(mutant.key for mutant in mutants if mutant.file == file and not found[mutant.key])
        lines += [*(f"- {key}: {verdicts.get(key, UNREAD)}" for key in keys), ""]
    return "\n".join(lines)
