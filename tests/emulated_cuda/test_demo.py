"""The first command of the README, on a machine with a GPU."""

import json

import pytest

from lightning_tricks.cli import main
from tests.emulated_cuda.device import EmulatedCuda


@pytest.mark.parametrize("precision", ["32-true", pytest.param("16-mixed", marks=pytest.mark.thorough)])
def test_the_demo_runs_on_a_gpu(precision, tmp_path):
    options = ["--max-epochs", "2", "--accelerator", "cuda", "--devices", "1", "--precision", precision, "--no-kill"]
    with EmulatedCuda():
        status = main(["demo", *options, "--out", str(tmp_path)])
    assert status == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert "CUDAAccelerator" in report["training"]["steps"]
