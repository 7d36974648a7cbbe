"""A run whose rank is killed under torchrun is started again by torchrun alone, and ends as the undisturbed one."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.auto_resume import torchrun_program
from tests.auto_resume.torchrun_program import train
from tests.small import fork, same

_ROOT = Path(__file__).parents[2]
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")


def _ends(folder):
    """Return for each rank: which attempt ended, its weights, its random state."""
    return [torch.load(folder / f"end{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.thorough)])
def test_torchrun_resumes_a_run_whose_rank_was_killed(name, tmp_path):
    def undisturbed(rank):
        warnings.simplefilter("ignore")
        train(tmp_path, "none")

    fork(undisturbed, 2)
    whole = _ends(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or gloo finds addresses of the attempt before
    folder = tmp_path / name
    folder.mkdir()
    command = [sys.executable, *_TORCHRUN, torchrun_program.__file__, str(folder), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(attempt > 0 for attempt, *_ in _ends(folder))
    assert same([ends for _, *ends in _ends(folder)], [ends for _, *ends in whole])
