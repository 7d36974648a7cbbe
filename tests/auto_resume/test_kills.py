"""Real processes, killed by real signals and started again: they end where the undisturbed run does, bit for bit."""

import os
import random
import resource
import signal
import time

import pytest

from lightning_tricks.auto_resume import CheckpointFolder
from tests.auto_resume.killing import (
    PHASES,
    STOPPED,
    differences,
    kill_at,
    one_in_three_with_the_oldest,
    resumed_at,
    run,
    start_on_terminal,
)

SMALL = {"samples": 28}  # 7 batches of 4
FEW_FORKS = {"sanity": 0, "val_loaders": 1}  # in each epoch each loader forks its workers anew


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "killed", tmp_path / "whole"


def assert_as_undisturbed(folders, options, kills):
    """Chain the kills, start once more, and compare."""
    killed, whole = folders
    assert run(whole, {**options, "guarded": False}) == 0
    statuses = [run(killed, {**options, "kill": kill}) for kill in kills]
    assert run(killed, options) == 0, (killed / "output.txt").read_text()[-3000:]
    assert differences(killed, whole) == []
    assert not list((killed / "resume").glob(".*.partial"))
    return statuses


@pytest.mark.parametrize("phase", [phase for phase in PHASES if not phase.startswith("after the")])
def test_stopped_at_each_phase(folders, phase):
    """SIGTERM ends the run with the exit code that asks for another start, wherever it comes."""
    options = {"validate": 3, "accumulate": 2, "epochs": 2, **SMALL}
    assert assert_as_undisturbed(folders, options, [kill_at(phase, "SIGTERM", options)]) == [STOPPED]


@pytest.mark.oldest
@pytest.mark.trap("resume: a mid-epoch checkpoint repeats and misses samples, with new random numbers")
@pytest.mark.parametrize(
    "options",
    one_in_three_with_the_oldest(
        {"workers": 2, "persistent": True, "validate": 3},
        {"loader": "generator", "workers": 2},
        {"accumulate": 3, "validate": "none"},
        {"ranks": 2, "strategy": "ddp_fork", "accumulate": 3, "validate": 4},
        {"iterable": "unsized"},
        {"iterable": "sized", "workers": 2},
        {"asks": True, "loader": "stateful"},
        {"loader": "stateful generator"},
        {"loader": "torchdata"},
        {"loader": "mixed"},
        {"loader": "torchdata", "ranks": 2, "strategy": "ddp_fork"},
        {"iterable": "unsized", "workers": 2, "persistent": True},
        {"loader": "streams", "workers": 2},
        {"workers": 2, "persistent": True, "limit": 5},
        {"asks": True, "early": 1},
        {"loader": "streams"},
        {"asks": True, "workers": 2, "ranks": 2, "strategy": "ddp_fork"},
        {"workers": 2, "accumulate": 3, "validate": "none"},
    ),
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.sampled(3)
def test_every_way_to_train(folders, options):
    """Killed in the middle of an epoch, resumed, and killed at its end."""
    options = {**SMALL, **(FEW_FORKS if options.get("workers") else {}), **options}
    kills = [kill_at("in the middle of an epoch", "SIGKILL", options), ["on_train_epoch_end", 1, "SIGKILL", 0]]
    assert_as_undisturbed(folders, options, kills)
    assert all(step > 0 for step in resumed_at(folders[0]))


def test_one_rank_of_three_dies_alone(folders):
    """As when the kernel kills it for memory: the job ends with an error, and the next one resumes exactly."""
    options = {**SMALL, "ranks": 3, "strategy": "ddp_fork", "validate": "none"}
    died = assert_as_undisturbed(folders, options, [kill_at("in the middle of a step", "SIGKILL", options, 1)])
    assert died == [1]


def test_killed_at_random_moments(folders):
    """Whatever it does just then."""
    killed, whole = folders
    options = {"workers": 2, "validate": 3, "epochs": 3}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert run(whole, {**options, "guarded": False}) == 0
    takes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    chance = random.Random(11)
    statuses = [run(killed, options, cpu_seconds=chance.uniform(0.1, takes)) for _ in range(5)]
    assert set(statuses) <= {-signal.SIGPROF, 0}
    assert -signal.SIGPROF in statuses
    assert run(killed, options) == 0
    assert differences(killed, whole) == []


def test_more_epochs_continue_where_the_run_ended(folders):
    killed, whole = folders
    options = {"workers": 2, "persistent": True}
    assert run(whole, {**options, "epochs": 4, "guarded": False}) == 0
    assert [run(killed, {**options, "epochs": epochs}) for epochs in (2, 4)] == [0, 0]
    assert [line for line in differences(killed, whole) if "logged" not in line] == []


def test_a_terminal_that_is_gone(tmp_path):
    """As when an SSH session drops: the terminal is closed, its session gets SIGHUP, and training goes on."""
    process, terminal = start_on_terminal(tmp_path, {"epochs": 15, "validate": "none"})
    folder = CheckpointFolder(tmp_path / "resume")
    while not folder.manifests():
        time.sleep(0.02)
        assert os.waitpid(process, os.WNOHANG) == (0, 0), os.read(terminal, 3000).decode()
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert folder.read_status()["state"] == "finished"
    assert "max_epochs=15` reached" in (folder.path / "train.log").read_text()


def test_signals_to_the_whole_process_group(folders):
    """Ctrl-C, or a scheduler, reaches DataLoader workers as well: the step is finished with them."""
    killed, whole = folders
    options = {"workers": 2, "validate": 3}
    assert run(whole, {**options, "guarded": False}) == 0
    for name in ("SIGINT", "SIGTERM"):
        assert run(killed, {**options, "kill": ["on_train_batch_start", 4, name, "group"]}) == STOPPED
    assert run(killed, options) == 0
    assert differences(killed, whole) == []
