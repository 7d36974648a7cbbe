"""A run whose rank is killed under torchrun is started again by torchrun alone, and ends as the undisturbed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.small import same

_ROOT = Path(__file__).parents[2]
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")


def _ends(folder, name):
    """Run the program, and return for each rank: which attempt ended, its weights, its random state."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or gloo finds addresses of the attempt before
    command = [sys.executable, *_TORCHRUN, str(_ROOT / "tests/auto_resume/torchrun_program.py"), str(folder), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"end{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.thorough)])
def test_torchrun_resumes_a_run_whose_rank_was_killed(name, tmp_path):
    whole, resumed = _ends(tmp_path / "whole", "none"), _ends(tmp_path / name, name)
    assert [attempt for attempt, *_ in whole] == [0, 0]
    assert all(attempt > 0 for attempt, *_ in resumed)
    assert same([ends for _, *ends in resumed], [ends for _, *ends in whole])
