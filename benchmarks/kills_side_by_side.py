"""At how many of 20 kills a program ends as if it had not been killed, under each of the ways to resume it."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from _killed_programs import KILLS, count, under_lightning
from _ratios import be_quiet, environment
from rich.console import Console
from rich.table import Table


def composer(python: Path) -> tuple[str, dict[str, int]]:
    """Return what Composer is called and does, run by the interpreter of an environment that has it."""
    command = [python, Path(__file__).with_name("_killed_programs.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    return f"Composer {found['version']}, `autoresume=True` and its sampler (torch {found['torch']})", found["counts"]


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--composer", type=Path, help="python of an environment with mosaicml; without it, it is left out"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    given = parser.parse_args()
    be_quiet()
    counts = {
        'Lightning, `ckpt_path="last"`': count(under_lightning(with_auto_resume=False)),
        "AutoResume": count(under_lightning(with_auto_resume=True)),
    }
    if given.composer:
        name, found = composer(given.composer)
        counts[name] = found
    table = Table("", *counts["AutoResume"], title=f"ends as undisturbed, of {len(KILLS)} kills")
    for name, found in counts.items():
        table.add_row(name, *map(str, found.values()))
    Console(width=120).print(table)
    given.out.mkdir(parents=True, exist_ok=True)
    result = {
        "claim": "kills_side_by_side",
        "rounds": len(KILLS),
        "environment": {**environment(), "device": "CPU"},
        "counts": counts,
    }
    (given.out / "kills_side_by_side.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
