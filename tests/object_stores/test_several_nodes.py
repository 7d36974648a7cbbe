"""A run whose shards are on several nodes, each with a disk of its own: killed, resumed elsewhere, unable to send."""

import random
import shutil
import signal

import pytest
import torch
from packaging.version import Version

from lightning_tricks.auto_resume import CheckpointFolder
from tests.auto_resume.killing import STOPPED, resumed_at, run, start, wait_for
from tests.auto_resume.training import train
from tests.object_stores.machines import SCRATCH, at, kill_all, kill_sender, on, output, senders, wait_until
from tests.object_stores.nodes import (
    SHARDED,
    assert_complete,
    assert_equal,
    kill_and_resume,
    run_nodes,
    said,
)

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"), reason="FSDP2 of torch 2.6 needs an accelerator"
)
STOP = {"kill": ["on_train_batch_start", 11, "SIGTERM", 1]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed run on one node leaves."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, {**SHARDED, "guarded": False}) == 0, output(folder)
    return folder


@pytest.fixture
def machines(tmp_path):
    return [tmp_path / "machine0", tmp_path / "machine1"]


@pytest.mark.parametrize("lost", [(), (0,), (1,), (0, 1)])
def test_stopped_and_resumed(lost, folder_store, machines, whole):
    """By a signal to the other node, with any of the disks lost."""
    assert run_nodes(machines, folder_store.address, **STOP) == [STOPPED] * 2, said(machines)
    newest = max(assert_complete(folder_store))
    for number in lost:
        shutil.rmtree(machines[number] / SCRATCH)
    assert run_nodes(machines, folder_store.address) == [0, 0], said(machines)
    assert set(resumed_at(machines[0])) == {11}
    assert newest.endswith("step=11")
    assert "AutoResume: the " not in said(machines).replace("AutoResume: the run resumes", "")
    assert_equal(machines, whole)
    names = assert_complete(folder_store)
    assert len(names) == 2
    for folder in (machines[0] / SCRATCH, machines[1] / SCRATCH / "node-1"):
        kept = sorted(path.name for path in CheckpointFolder(folder).private.iterdir() if path.is_dir())
        assert len(kept) == 2
        assert kept[-1] == max(names)
    assert {name.split("/")[1] for name in folder_store.names() if "-epoch=" in name} == names


def test_killed_at_random_moments(folder_store, tmp_path, whole, monkeypatch):
    monkeypatch.setenv("TESTS_SECONDS_TO_SEND", "0.3")
    machines, _ = kill_and_resume(tmp_path, folder_store, 2, random.Random(1))
    assert_equal(machines, whole)
