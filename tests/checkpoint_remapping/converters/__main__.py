"""Load files in the formats that timm and transformers convert, and count: right, refused, or WRONG.

`python -m tests.checkpoint_remapping.converters --folder FOLDER --result FILE` installs transformers 4, whose scripts 5
has no more, into the folder, examines what both convert, each in a process of its own, and writes a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.checkpoint_remapping.converters.cases import DIRECTIONS, OUTCOMES, REFUSED, RIGHT, WRONG, Case

# Of the newest that has the scripts; without what it needs beside these and is here already
REQUIREMENTS = ("transformers==4.46.3", "tokenizers==0.20.3", "huggingface_hub==0.36.2")
SEEDS = (None, 0)  # of orders of the names in the file


def examine(library: str, word: str = "") -> list[tuple[str, str, str, str, str]]:
    """Return (converter, direction, outcome, outcome with all accepted, reason) of a library's pairs.

    Args:
        library: Its name.
        word: What the name of a converter contains.
    """
    rows = []
    for which in importlib.import_module(f"tests.checkpoint_remapping.converters.of_{library}").CONVERTERS:
        if word not in which.name:
            continue
        case = Case(which)
        if case.lacking:
            raise RuntimeError(f"{which.name}: the function makes no {case.lacking[:3]} of {[*case.original][:3]}.")
        for direction in DIRECTIONS:
            verdict, why = _worst([case.outcome(direction, seed) for seed in SEEDS])
            accepted, reason = (
                (verdict, why)
                if verdict == RIGHT
                else _worst([case.outcome(direction, seed, accept="*") for seed in SEEDS])
            )
            rows.append((which.name, direction, verdict, accepted, reason if accepted == WRONG else why))
            sys.stderr.write(f"{': '.join(rows[-1])[:200]}\n")
    return rows


def _worst(ends: list[tuple[str, str]]) -> tuple[str, str]:
    verdicts = {verdict for verdict, _ in ends}
    order = "depends on the order: " * (len(verdicts) > 1)
    verdict = WRONG if WRONG in verdicts else REFUSED if REFUSED in verdicts else RIGHT
    return verdict, order + next(why for end, why in ends if end == verdict)


def main() -> int:
    """Examine both libraries, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(".venv/converters"), help="where transformers 4 is installed"
    )
    parser.add_argument("--result", type=Path, help="the file that is written")
    parser.add_argument("--word", default="", help="a part of the names of what is examined")
    parser.add_argument("--library", help="examine one library, and print the pairs as JSON")
    options = parser.parse_args()
    if options.library:
        sys.stdout.write(json.dumps(examine(options.library, options.word)))
        return 0
    if not options.folder.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target"]
        subprocess.run([*install, options.folder, *REQUIREMENTS], check=True)
    rows = []
    for library in ("timm", "transformers"):
        paths = [str(options.folder.resolve())] * (library == "transformers") + [os.environ.get("PYTHONPATH", "")]
        found = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.checkpoint_remapping.converters",
                "--library",
                library,
                "--word",
                options.word,
            ],
            check=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        rows += json.loads(found.stdout)
    counts, accepted = (Counter(row[column] for row in rows) for column in (2, 3))
    for part, how in ((counts, "without accept"), (accepted, "with all accepted")):
        summary = ", ".join(f"{part[verdict]} {verdict}" for verdict in OUTCOMES)
        sys.stdout.write(f"{len(rows)} pairs {how}: {summary}\n")
    if options.result:
        options.result.write_text(_table(rows, counts, accepted), encoding="utf-8")
    return int(counts[WRONG] > 0)


def _table(rows: list[list[str]], counts: Counter[str], accepted: Counter[str]) -> str:
    order = sum(why.startswith("depends") for *_, why in rows)
    lines = [
        "# What files load that timm and transformers convert",
        "",
        f"{len(rows)} pairs of a file and a model; {REQUIREMENTS[0]}.",
        f"**{counts[WRONG]} wrong, {counts[RIGHT]} right without a rule ({counts[RIGHT] / len(rows):.1%}), "
        f"{counts[REFUSED]} refused**, {order} of them for some orders of the names alone.",
        f'With all that is suggested accepted (`accept="*"`): {accepted[WRONG]} wrong, {accepted[RIGHT]} right '
        f"({accepted[RIGHT] / len(rows):.1%}), {accepted[REFUSED]} refused.",
        "",
        "The function that another project has for its file says what is right. A file is loaded in two orders of "
        "its names; *right* is one that is right in all.",
        "",
        "| converter | direction | outcome | with all accepted | why |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join([*row[:4], _short(row[4])])} |" for row in rows)]) + "\n"


def _short(reason: str) -> str:
    text = reason.replace("|", " ").replace("the checkpoint does not load into Module: ", "")
    return text.replace("the checkpoint does not fit Module, which was not modified. ", "")[:160]


if __name__ == "__main__":
    sys.exit(main())
