"""Install modules of others, train each with and without the callbacks, and write what came out as a table.

    python -m tests.foreign.run --folder .venv/foreign --result tests/foreign/result.md [--only SCRIPT ...]

Each project has an environment of its own, which sees the packages of the one that this runs in behind its own. It is
made in the folder, unless it is there. What was found lies there too: `--only` examines some scripts anew, and the
table is of all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.flavor.copied import copy
from tests.foreign.projects import SCRIPTS, Project

SECONDS = 600  # of a script


def environment(project: Project, folder: Path) -> Path:
    """Make the environment of a project, unless it is there; return its interpreter."""
    place = folder.resolve() / re.split(r"[=\[]", project.package)[0]
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        packages = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        Path(packages, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wanted = [project.package, *project.needs, f"torch=={torch.__version__.partition('+')[0]}"]
    done = place / "installed.txt"
    if not (done.exists() and {*wanted} <= {*done.read_text().split()}):
        options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, *wanted], check=True)
        done.write_text("\n".join(wanted))
    return python


@cache
def copied_source(folder: Path) -> Path:
    """Return a folder with the tests as programs that import `pytorch_lightning` have them."""
    source = folder.resolve() / "source"
    copy(source)
    return source


def examine(name: str, folder: Path) -> dict[str, Any]:
    """Train a module in its environment; return what `train.py` found."""
    place = (folder / "runs" / name).resolve()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    found: dict[str, Any] = {"name": name, "project": SCRIPTS[name].package}
    try:
        python = environment(SCRIPTS[name], folder)
        source = copied_source(folder) if SCRIPTS[name].other_import else Path.cwd()
        with (place / "output.txt").open("w") as output:
            subprocess.run(
                [python, "-m", "tests.foreign.train", name, place],
                cwd=place,  # some write where they run
                env={**os.environ, "PYTHONPATH": str(source)},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=True,
            )
    except subprocess.SubprocessError as error:
        return found | {"not examined": f"{type(error).__name__} ({str(error)[:200]})"}
    result: dict[str, Any] = json.loads((place / "result.json").read_text())
    for run in filter(Path.is_dir, place.iterdir()):
        shutil.rmtree(run)
    return result


def table(results: Sequence[dict[str, Any]]) -> str:
    head = "project", "version", "module", "steps", "same with the callbacks", "stopped twice, resumed at: same"
    lines = [" | ".join((*head, "host reads of an epoch: bare, with"))]
    lines.append(" | ".join("---" for _ in lines[0].split(" | ")))
    lines += [" | ".join(_row(result)) for result in results]
    notes = [f"\n**{result['name']}**\n{_notes(result)}" for result in results if _notes(result)]
    return "\n".join([f"| {line} |" for line in lines] + notes) + "\n"


def _row(one: dict[str, Any]) -> list[str]:
    cells = [one["project"], one.get("version", ""), f"{one.get('module', '')} (`{one['name']}`)"]
    if "not examined" in one:
        return [*cells, "", "not examined", "", ""]
    if "bare" in one:
        return [*cells, "", "does not train without the callbacks either", "", ""]
    same = "stops with an error" if "with" in one else "no" if one["differs"] else "yes"
    same += ", but neither is a second run without them" if one.get("differs from itself") else ""
    cells += [str(one["steps"]), f"{same} ({one['logged']} logged values)"]
    if "with" in one:
        return [*cells, "", ""]
    resumed = "no (an error)" if "resume" in one else "no" if one["resume differs"] else "yes"
    resumed += ", with allow_pickle=True" if "refused without allow_pickle" in one else ""
    reads = one["reads"] if isinstance(one["reads"], list) else ["not counted"]
    return [*cells, f"{one.get('resumed at', '')}: {resumed}", ", ".join(map(str, reads))]


def _notes(one: dict[str, Any]) -> str:
    said = [f"- {SCRIPTS[one['name']].note}"] if SCRIPTS[one["name"]].note else []
    said += [f"- error: {_short(one[key])}" for key in ("not examined", "bare", "with", "resume") if key in one]
    said += [
        f"- {key}: {', '.join(one[key][:8])}"
        for key in ("differs", "differs from itself", "resume differs")
        if one.get(key)
    ]
    said += [f"- reads: {one['reads']}"] if isinstance(one.get("reads"), str) else []
    texts = [*one.get("warnings", ()), *one.get("resume warnings", ())]
    return "\n".join(said + sorted({f"- warns: {_short(text)}" for text in texts}))


def _short(text: str) -> str:
    """A warning without paths, and without the numbers in which processes differ."""
    text = re.sub(r"/\S+/", ".../", " ".join(text.split()))
    return re.sub(r"batch \d+", "batch N", text)[:300]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS))
    arguments = parser.parse_args()
    for name in arguments.only:
        found = examine(name, arguments.folder)
        (arguments.folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    files = [arguments.folder / f"{script}.json" for script in SCRIPTS]
    results = [json.loads(file.read_text()) for file in files if file.exists()]
    about = "Written by `make foreign`: modules of others, with `callbacks=[...]` as the only change.\n\n"
    arguments.result.write_text(f"# Other people's modules\n\n{about}{table(results)}")


if __name__ == "__main__":
    main()
