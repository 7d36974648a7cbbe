"""The file of results: how many faults of a seed were drawn, run and found, and what is said of each that was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutation.sampling import PARTS, Mutant

UNREAD = "nobody has looked at it yet"
_SEED = "\n## Seed "


def verdicts_in(text: str) -> dict[str, str]:
    """What was said of each survivor."""
    found = (line.removeprefix("- ").partition("`: ") for line in text.splitlines() if line.startswith("- `"))
    return {f"{key}`": verdict for key, _, verdict in found}


def write(path: Path, seed: int, drawn: Sequence[Mutant], found: Mapping[str, bool]) -> None:
    """Write the section of a seed anew, with the verdicts that are there; those of other seeds stay."""
    head, *sections = path.read_text().split(_SEED)
    known = {int(section.split(None, 1)[0].rstrip(":")): section for section in sections}
    known[seed] = _section(seed, drawn, found, verdicts_in(known.get(seed, "")))
    path.write_text("".join([head, *(_SEED + known[number] for number in sorted(known))]))


def _section(seed: int, drawn: Sequence[Mutant], found: Mapping[str, bool], verdicts: Mapping[str, str]) -> str:
    counts = {what: Counter[tuple[str, str]]() for what in ("drawn", "run", "found")}
    for mutant in drawn:
        for room in (mutant.room, "all"):
            counts["drawn"][room, mutant.part] += 1
            counts["run"][room, mutant.part] += mutant.key in found
            counts["found"][room, mutant.part] += found.get(mutant.key, False)
    shares = [f"{_share(counts, part)} in the {part}" for part in PARTS]
    columns = [f"{part}: {what}" for part in PARTS for what in counts]
    lines = [f"{seed}: found were {' and '.join(shares)}", ""]
    lines += [f"| room | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for room in [*dict.fromkeys(mutant.room for mutant in drawn), "all"]:
        cells = [str(counts[what][room, part]) for part in PARTS for what in counts]
        lines.append(f"| {room} | {' | '.join(cells)} |")
    alive = dict.fromkeys(mutant.key for mutant in drawn if not found.get(mutant.key, True))
    return "\n".join([*lines, "", *(f"- {key}: {verdicts.get(key, UNREAD)}" for key in alive), ""])


def _share(counts: Mapping[str, Counter[tuple[str, str]]], part: str) -> str:
    run, found = counts["run"]["all", part], counts["found"]["all", part]
    return f"{found} of {run} ({found / max(run, 1):.0%})"
