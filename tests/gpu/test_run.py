"""`make gpu` tried without a GPU: its commands run, and the pages say what its file says."""

import json
import subprocess
import sys

import pytest

from tests.contract.cases import CASES
from tests.documents.generated import support_page
from tests.gpu.run import RESULT, ROOT, column
from tests.small import cases


def _run(*arguments):
    command = [sys.executable, "-m", "tests.gpu.run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.thorough
def test_the_dry_run_writes_what_it_found(tmp_path):
    done = _run("--dry", "--result", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["device"] == "emulated"
    assert {*found["tests"].values()} == {"passed"}
    assert len(found["tests"]) == 2
    assert found["all_gpus"] == "passed"


@cases("arguments, words", ((), "torch sees no CUDA device here"), (("--dry",), "is no evidence"))
def test_nothing_else_is_written_without_a_gpu(arguments, words):
    done = _run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert not RESULT.exists() or "emulated" not in RESULT.read_text()


def test_the_page_says_what_the_file_says():
    name, other = list(CASES)[:2]
    prefix = "tests.contract.test_contract::test_promise_in_setting"
    outcomes = {f"{prefix}[{name}-works-CUDA]": "passed", f"{prefix}[{name}-neutral_is_absence-CUDA]": "passed"}
    outcomes |= {f"{prefix}[{other}-works-CUDA]": "failed", f"{prefix}[{other}-works-fp32]": "passed"}
    found = column(outcomes)
    assert found == {name: "passed", other: "failed"}
    page = support_page({"device": "NVIDIA H100", "torch": "2.9", "callbacks": found})
    head, row = (
        [line.split(" | ") for line in page.splitlines() if line.startswith(f"| {start} ")] for start in ["|", "CUDA"]
    )
    cells = dict(zip(head[0], row[0], strict=True))
    assert (cells["Tested"], cells["Fails |"]) == (f"`{name}`", f"`{other}` |")
    assert "all but" in cells["Untested"]
    assert "NVIDIA H100" in cells["Setting"]
    assert "| CUDA | fp16 on a GPU |  |  | all |" in support_page(None)
