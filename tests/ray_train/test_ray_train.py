"""A run of Ray Train with all callbacks ends as the undisturbed one after a worker is killed or its node is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.small import same
from tests.together.fits import logged_rows

pytestmark = pytest.mark.thorough  # `make ray` runs it

ROOT = Path(__file__).parents[2]
COMPARED = ("weights", "optimizers", "metrics", "rng")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of three runs, and what they printed."""
    root = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "tests.ray_train.program", root, "undisturbed", "killed", "drained"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    return root, output


def _ends(folder):
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("how", ["killed", "drained"])
def test_the_run_ends_as_the_undisturbed_one(runs, how):
    root, _ = runs
    for whole, again in zip(_ends(root / "undisturbed"), _ends(root / how), strict=True):
        for what in COMPARED:
            assert same(getattr(again, what), getattr(whole, what)), f"{what} differ"
        (norms,) = again.norms.values()  # of the steps since the resume; "drained" saves only when Ray tells it
        assert 0 < len(norms) < 10, "it did not resume in the middle"
        assert how == "drained" or len(norms) == 10 - 6
    assert logged_rows(root / how) == logged_rows(root / "undisturbed")


def test_the_save_before_a_node_is_lost_is_announced_and_fetched_by_the_other_node(runs):
    root, output = runs
    assert len(list((root / "drained").glob("node *"))) == 2
    assert "Ray is about to lose a node of this run: the next step is saved." in output
    assert "main thread" not in output
