"""What only a machine with a GPU can show, in one file, of which docs/support.md and docs/benchmarks.md are written.

`make gpu` runs the tests that are marked `gpu`, with them the row CUDA of the contract, then all GPUs together
(NCCL), then the benchmarks. What fails is in the file too. `make gpu DRY=1` runs the same commands on any machine: two
of the tests on an emulated GPU, two ranks on the CPU, and of the benchmarks none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from tests.documents.generated import RESULT
from tests.small import same

ROOT = Path(__file__).parents[2]
_IN_COLUMN = re.compile(r"test_contract::test_promise_in_setting\[(\w+)-\w+-CUDA\]")


def run_tests(paths: list[str]) -> dict[str, str]:
    """Return how each test of a GPU ended: test -> passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, *paths], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    ends = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (ends[part.tag] for part in case if part.tag in ends), "passed"
        )
        for case in cases
    }


def column(by_test: dict[str, str]) -> dict[str, str]:
    """Return the row CUDA of the contract: callback -> passed or failed; one that was skipped is not in it."""
    found: dict[str, set[str]] = {}
    for test, outcome in by_test.items():
        if match := _IN_COLUMN.search(test):
            found.setdefault(match[1], set()).add(outcome)
    return {name: "failed" if "failed" in ends else "passed" for name, ends in found.items() if "skipped" not in ends}


def run_on_all(accelerator: str, devices: int) -> str:
    """Train on several devices, and return "passed" or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ALL_GPUS_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        for run in ("whole", "stopped", "resumed"):
            command = [sys.executable, "-m", "tests.gpu.all_gpus", accelerator, str(devices), run]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode:
                return f"{run}: exit status {done.returncode}\n{done.stderr[-2000:]}"
        ends = {
            run: [torch.load(file) for file in sorted(Path(folder).glob(f"{run}-*.pt"))] for run in ("whole", "resumed")
        }
    ranks = ends["whole"]
    if len(ranks) < 2 or len(ranks) != ranks[0][0] or len(ends["resumed"]) != len(ranks):
        return f"{len(ranks)} and {len(ends['resumed'])} of {ranks[0][0] if ranks else 'no'} ranks ended"
    if not all(same(weights, ranks[0][1]) for _, weights, _ in ranks):
        return "the ranks end with other weights than one another"
    return "passed" if same(ends["resumed"], ranks) else "the resumed run ends with other weights or metrics"


def run_benchmarks(scripts: list[Path]) -> dict[str, Any]:
    """Return the ratios of benchmarks by claim; of one that fails, the end of what it said."""
    found: dict[str, Any] = {}
    for script in scripts:
        with tempfile.TemporaryDirectory() as out:
            done = subprocess.run(
                [sys.executable, str(script), "--out", out], cwd=script.parent, capture_output=True, text=True
            )
            for file in Path(out).glob("*.json"):
                found[file.stem] = json.loads(file.read_text())
        if done.returncode:
            found[script.stem] = {"failed": done.stderr[-2000:]}
    return found


def main() -> None:
    """Run all and write the file; the exit status says whether something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="try the commands on a machine without a GPU")
    parser.add_argument("--result", type=Path, default=RESULT, help="the file (%(default)s)")
    given = parser.parse_args()
    if not given.dry and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --dry tries the commands without one (make gpu DRY=1)")
    if given.dry and given.result.resolve() == RESULT.resolve():
        parser.error("what --dry writes is no evidence: give it another file with --result")
    some = [str(ROOT / "tests" / name) for name in ("lr_schedules/test_builders.py", "seeding/test_functional.py")]
    by_test = run_tests(some if given.dry else [str(ROOT / "tests")])
    several = given.dry or torch.cuda.device_count() > 1
    result = {
        "device": "emulated" if given.dry else torch.cuda.get_device_name(),
        "gpus": 0 if given.dry else torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "callbacks": column(by_test),
        "tests": dict(sorted(by_test.items())),
        "all_gpus": run_on_all(*(("cpu", 2) if given.dry else ("cuda", -1))) if several else "there is one GPU",
        "benchmarks": run_benchmarks([] if given.dry else sorted((ROOT / "benchmarks").glob("[a-z]*.py"))),
    }
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    failed = [claim for claim, found in result["benchmarks"].items() if "failed" in found]
    ends = f"{dict(Counter(by_test.values()))}, all GPUs: {result['all_gpus']}, benchmarks that failed: {failed}"
    sys.stdout.write(f"{ends}\nwritten to {given.result}\n")
    sys.exit(bool(failed) or "failed" in by_test.values() or (several and result["all_gpus"] != "passed"))


if __name__ == "__main__":
    main()
