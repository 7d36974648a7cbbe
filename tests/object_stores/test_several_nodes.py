"""A run whose shards are on several nodes, each with a disk of its own: killed, resumed elsewhere, unable to send."""

import random
import shutil

import pytest
import torch
from packaging.version import Version

from lightning_tricks.auto_resume import CheckpointFolder
from lightning_tricks.cli import main
from tests.auto_resume.killing import STOPPED, resumed_at, run
from tests.object_stores.kills import unowned
from tests.object_stores.machines import SCRATCH, at, kill_all, kill_sender, on, output, senders, wait_until
from tests.object_stores.nodes import SHARDED, assert_complete, assert_equal, kill_and_resume, run_nodes, said

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


def part_of(machine):
    return CheckpointFolder(machine / SCRATCH / "node-1")


@pytest.mark.parametrize("lost", [(), (0,), (1,), (0, 1)])
@pytest.mark.sampled(3)
def test_stopped_and_resumed(lost, folder_store, machines, whole):
    """By a signal to the other node, with any of the disks lost; no more is left than what belongs to checkpoints."""
    assert run_nodes(machines, folder_store.address, **STOP) == [STOPPED] * 2, said(machines)
    assert max(assert_complete(folder_store)).endswith("step=11")
    for number in lost:
        shutil.rmtree(machines[number] / SCRATCH)
    assert run_nodes(machines, folder_store.address) == [0, 0], said(machines)
    assert set(resumed_at(machines[0])) == {11}
    assert "sent" not in said(machines)
    assert_equal(machines, whole)
    names = assert_complete(folder_store)
    assert len(names) == 2
    assert {name.split("/")[1] for name in folder_store.names() if "-epoch=" in name} == names
    for folder in (CheckpointFolder(machines[0] / SCRATCH), part_of(machines[1])):
        kept = sorted(path.name for path in folder.private.iterdir() if path.is_dir())
        assert len(kept) == 2
        assert kept[-1] == max(names)
    if not lost:  # a run that had finished sends no more
        files = {name for name in folder_store.names() if "-epoch=" in name}
        assert run_nodes(machines, folder_store.address) == [0, 0], said(machines)
        assert {name for name in folder_store.names() if "-epoch=" in name} == files


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.sampled(2)
def test_killed_at_random_moments(seed, folder_store, machines, tmp_path, monkeypatch):
    """Nodes with their senders or without, on disks that are lost or not."""
    monkeypatch.setenv("TESTS_SECONDS_TO_SEND", "0.3")
    kill_and_resume(machines, folder_store, 2, random.Random(seed), epochs=4)
    assert run(tmp_path / "whole", {**SHARDED, "guarded": False, "epochs": 4}) == 0
    assert_equal(machines, tmp_path / "whole")


def test_one_folder_for_all_nodes(folder_store, machines, tmp_path, whole):
    """As those of one machine, or of a disk that they share, may have it."""
    shared = {"resume": {"scratch": tmp_path / "shared"}}
    assert run_nodes(machines, folder_store.address, **shared, **STOP) == [STOPPED] * 2, said(machines)
    assert run_nodes(machines, folder_store.address, **shared) == [0, 0], said(machines)
    assert set(resumed_at(machines[0])) == {11}
    assert_equal(machines, whole)


def test_from_two_nodes_to_one(s3, machines, tmp_path, whole):
    assert run_nodes(machines, s3.address, **STOP) == [STOPPED] * 2, said(machines)
    assert main(["resume", "verify", s3.address]) == 0
    assert main(["resume", "fetch", s3.address, str(tmp_path / "fetched")]) == 0
    assert main(["resume", "verify", str(tmp_path / "fetched")]) == 0
    assert run(machines[0], on(machines[0], s3.address, **SHARDED)) == 0, output(machines[0])[-3000:]
    assert set(resumed_at(machines[0])) == {11}
    assert_equal(machines[:1], whole)


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_from_one_node_that_could_not_send_to_two(strategy, folder_store, machines, whole, monkeypatch):
    """Its checkpoint is sent before the other node needs it."""
    options = {**SHARDED, "strategy": strategy, "resume": {"send_timeout": {"seconds": 2}}}
    monkeypatch.setenv("TESTS_REFUSED", "meta")
    if strategy == "fsdp2":
        kill = ["on_train_batch_start", 11, "SIGTERM", 0]
        assert run(machines[0], on(machines[0], folder_store.address, **options, kill=kill)) == STOPPED
    else:
        assert run_nodes(machines, folder_store.address, **options, **STOP) == [STOPPED] * 2, said(machines)
    assert not assert_complete(folder_store)
    monkeypatch.delenv("TESTS_REFUSED")
    assert run_nodes(machines, folder_store.address, **options) == [0, 0], said(machines)
    assert set(resumed_at(machines[0])) == {11}
    if strategy == "fsdp2":
        assert_equal(machines, whole)


def test_what_a_disk_has_is_not_fetched_again(folder_store, machines, whole):
    """After a kill before the first save: the store could not give it any more."""
    assert run_nodes(machines, folder_store.address, **STOP) == [STOPPED] * 2, said(machines)
    killed = {"more": [at("on_train_start", 1, kill_all)]}
    assert run_nodes(machines, folder_store.address, **killed) == [-9, -9], said(machines)
    for name in folder_store.names():
        if ".distcp" in name:
            folder_store.remove(name)
    assert run_nodes(machines, folder_store.address) == [0, 0], said(machines)
    assert_equal(machines, whole)


@pytest.mark.parametrize("on_failed_save", ["warn", "raise"])
def test_a_node_that_cannot_send(on_failed_save, folder_store, machines, tmp_path):
    """No checkpoint of it counts, whatever an earlier start has left under its names; all ranks know."""
    earlier, resume = type(folder_store)(tmp_path / "earlier"), {"every_n_train_steps": 3, "keep_last": 9}
    assert run_nodes(machines, earlier.address, epochs=1, resume=resume) == [0, 0], said(machines)
    for machine in machines:
        shutil.rmtree(machine)

    def leave_stale():
        for name in earlier.names():
            if "__1_" in name:
                data = earlier.read(name)
                folder_store.write(name, data[: len(data) // 2])
                folder_store.write(f"{name.rpartition('/')[0]}/__1_0.distcp", data[::-1])

    def wait():
        wait_until(lambda: part_of(machines[1]).read_private("mirror.json").get("problem"))

    first = {"more": [at("on_train_start", 1, leave_stale)]}
    other = {"more": [at("on_train_batch_start", 6, wait)], "environment": {"TESTS_REFUSED": "__1"}}
    resume |= {"on_failed_save": on_failed_save, "send_timeout": {"seconds": 2}}
    statuses = run_nodes(machines, folder_store.address, first, other, epochs=1, resume=resume)
    assert statuses == ([0, 0] if on_failed_save == "warn" else [1, 1]), said(machines)
    assert "AutoResume: the checkpoint before step 6 was not sent: the store refuses it" in output(machines[0])
    if on_failed_save == "warn":
        assert f"the last save is only in {part_of(machines[1]).path}: the store refuses it" in output(machines[0])
    else:
        assert "OSError: AutoResume: the checkpoint" in output(machines[1])
    assert any("__1_" in name for name in folder_store.names())
    assert not assert_complete(folder_store)


def test_the_sender_of_another_node_is_killed(folder_store, machines, whole):
    """It is said at the next save, and training and sending go on; nothing is left of the checkpoint in between."""

    def kill():
        kill_sender()
        wait_until(lambda: not senders())

    other = {"more": [at("on_train_batch_start", 3, kill)], "environment": {"TESTS_SECONDS_TO_SEND": "1"}}
    assert run_nodes(machines, folder_store.address, {}, other, **STOP) == [STOPPED] * 2, said(machines)
    assert "the process that sends ended with status -9. Another one was started" in output(machines[0])
    assert max(assert_complete(folder_store)).endswith("step=11")
    assert not unowned(folder_store.names())
    for machine in machines:
        shutil.rmtree(machine / SCRATCH)
    assert run_nodes(machines, folder_store.address) == [0, 0], said(machines)
    assert_equal(machines, whole)


def test_a_disk_that_cannot_be_used(folder_store, machines):
    """It is an error on all ranks, before training."""
    part_of(machines[1]).path.parent.mkdir(parents=True)
    part_of(machines[1]).path.touch()
    assert run_nodes(machines, folder_store.address) == [1, 1]
    words = f"MisconfigurationException: AutoResume: the directory {part_of(machines[1]).path} cannot be written"
    assert all(words in output(machine) for machine in machines), said(machines)
