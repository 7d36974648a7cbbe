"""The first command of the README, on a machine with a GPU."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda.device import EmulatedCuda

_FOLDER = Path(__file__).parents[2] / "examples" / "demo"


@pytest.mark.parametrize("precision", ["32-true", pytest.param("16-mixed", marks=pytest.mark.thorough)])
def test_the_demo_runs_on_a_gpu(precision, tmp_path, monkeypatch, capsys):
    options = ["--max-epochs", "2", "--accelerator", "cuda", "--devices", "1", "--precision", precision]
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.syspath_prepend(_FOLDER)
    monkeypatch.setattr(sys, "argv", ["every_trick.py", *options, "--out", str(tmp_path)])
    with EmulatedCuda():
        runpy.run_path(str(_FOLDER / "every_trick.py"), run_name="__main__")
    assert "1 x CUDAAccelerator" in capsys.readouterr().out
