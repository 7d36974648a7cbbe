"""AutoResume in a directory that others use: it touches its own folder in it alone, and nobody else does meanwhile."""

import errno
import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks import AutoResume, cli
from lightning_tricks._shared import file_locks as lock
from lightning_tricks._shared.file_locks import DirectoryLock, has_exited, this_process
from lightning_tricks.auto_resume import CheckpointFolder
from tests.auto_resume.killing import run
from tests.auto_resume.test_callback import fit, stop, weights
from tests.contract.processes import run_and_exit
from tests.small import same

pytestmark = pytest.mark.oldest


def tree(folder):
    """All files below a folder with their bytes and times."""
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


NAMES = (
    "best.ckpt",
    "000018-epoch=1-step=2.ckpt.json",
    "000019-epoch=1-step=2/meta.pt",
    "status.json",
    "train.log",
    ".best.ckpt.7.partial",
    "old.ckpt.corrupt",
    "writing/meta.pt",
    "fit2/best.ckpt",
)


def test_only_its_own_folder_is_touched(tmp_path):
    """Whatever else lies beside it, also with names like AutoResume's."""
    folder = tmp_path / "runs"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"mine": true}')
    before = tree(folder)
    stop(AutoResume(folder, every_n_train_steps=3, keep_last=1))
    resumed = fit(AutoResume(folder, every_n_train_steps=3, keep_last=1))
    assert same(weights(resumed), weights(fit()))
    after = {name: what for name, what in tree(folder).items() if not name.startswith(".auto_resume/")}
    assert after == before
    assert len(CheckpointFolder(folder).manifests()) == 1


# -- the lock


@pytest.fixture
def impatient(monkeypatch):
    """Not to wait for the end of a process that goes on."""
    monkeypatch.setattr("lightning_tricks.auto_resume.run_files._SECONDS_TO_END", 0.1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_process_is_refused(tmp_path, capsys, impatient, ranks):
    """It is started on the same directory in the middle of a fit; its logger deletes nothing."""
    options = {"ranks": ranks, "strategy": "ddp_fork", "validate": "none", "loggers": ["csv"], "version": 0}
    statuses = []

    class Starts(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                statuses.append(run(tmp_path, options))

    rows = tmp_path / "logs" / "csv" / "version_0" / "metrics.csv"
    rows.parent.mkdir(parents=True)
    rows.write_text("mine\n")
    fit(AutoResume(tmp_path / "resume"), Starts())
    assert statuses == [1]
    words = (tmp_path / "output.txt").read_text()
    assert f"is in use by process {os.getpid()} on {os.uname().nodename}: two runs would" in words
    assert "Wait until it ends, or choose another dirpath." in words
    assert rows.read_text() == "mine\n"
    assert CheckpointFolder(tmp_path / "resume").read_status()["state"] == "finished"
    assert cli.main(["resume", "status", str(tmp_path / "resume")]) == 0


def test_a_killed_process_that_has_not_ended_yet_is_waited_for(tmp_path):
    """It holds its lock until the operating system has freed its memory."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        CheckpointFolder(tmp_path).prepare()
        DirectoryLock(CheckpointFolder(tmp_path).private / "lock").acquire({})
        os.write(writer, b"held")
        time.sleep(0.5)
        os._exit(0)
    assert os.read(reader, 4) == b"held"
    assert fit(AutoResume(tmp_path), epochs=1).current_epoch == 1
    assert os.waitpid(pid, 0)[1] == 0


def test_two_fits_in_one_process(tmp_path):
    """At the same time: refused; one after the other, with one instance or several in turn: not."""

    class FitsInside(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                with pytest.raises(MisconfigurationException, match="is in use by process"):
                    fit(AutoResume(tmp_path))
                with pytest.raises(MisconfigurationException, match="is in use by process"):
                    fit(AutoResume(tmp_path))

    first, second = AutoResume(tmp_path), AutoResume(tmp_path)
    fit(first, FitsInside(), epochs=1)
    assert fit(second, epochs=2).current_epoch == 2
    assert stop(AutoResume(tmp_path), epochs=4, step=3) == 75
    assert fit(AutoResume(tmp_path), epochs=4).current_epoch == 4
    assert lock.DIRECTORY_LOCKS.held == {}


def test_workers_that_outlive_a_killed_run_do_not_hold_the_directory(tmp_path):
    """The workers are forked from the process that holds it, and wait for a pipe that nobody closes."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = DirectoryLock(tmp_path / "lock")
        held.acquire({})
        if os.fork() == 0:  # a worker
            os.read(reader, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    again = DirectoryLock(tmp_path / "lock")
    assert again.acquire({}) == (True, True)
    again.close()
    os.write(writer, b"x")


def test_a_lock_is_held_until_it_is_released(tmp_path):
    """Neither a second object of the process nor a child takes it or gives it back."""
    held, other = DirectoryLock(tmp_path / "lock"), DirectoryLock(tmp_path / "lock")
    assert held.acquire({}) == (True, True)
    assert other.acquire({}) == (False, True)
    other.close()

    def in_child(action):
        pid = os.fork()
        if pid == 0:
            run_and_exit(lambda: os._exit(action()))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def takes():
        return int(DirectoryLock(tmp_path / "lock").acquire({})[0])

    assert in_child(takes) == 0
    assert in_child(lambda: held.close() or 0) == 0, "what a child inherited is not its own"
    assert in_child(takes) == 0
    held.close()
    assert in_child(takes) == 1


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Then who was there last decides, on the same host."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks here")))
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    parent = {**this_process(), "pid": os.getppid()}
    for last, ours in (
        ({**this_process(), "pid": pid}, True),
        (parent, False),
        ({**parent, "host": "elsewhere"}, True),
        ({}, True),
    ):
        one = DirectoryLock(tmp_path / "lock")
        assert one.acquire(last) == (ours, False)
        one.close()
    words = "does not support locks. A second run in this directory is detected on the same host"
    with pytest.warns(UserWarning, match=words):
        fit(AutoResume(tmp_path / "runs"))


@pytest.mark.parametrize("who", [{}, {"pid": "7"}, {"pid": -1}, {"pid": 1 << 40}, {"pid": True, "host": 3}])
def test_of_whom_nothing_is_known(who):
    assert has_exited({**this_process(), **who} if "host" not in who else who) is None


def test_the_home_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    callback = AutoResume("~/runs", every_n_train_steps=5)
    stop(callback)
    assert callback.dirpath == "~/runs", "stored as given"
    assert CheckpointFolder(tmp_path / "runs").manifests()
    assert cli.main(["resume", "status", "~/runs"]) == 0
    assert "stopped, epoch 1 of 2, step 13" in capsys.readouterr().out
    assert not Path("~").exists()


def test_a_record_that_names_a_logger_elsewhere_is_passed_over(tmp_path):
    """As somebody may have made it: nothing is written where it says."""
    stop(AutoResume(tmp_path / "runs"))
    folder = CheckpointFolder(tmp_path / "runs")
    (tmp_path / "metrics.csv").write_text("mine\n")
    record = {"kind": "csv", "version": "../../..", "rows": 0, "header": None, "directory": str(tmp_path), "inode": 0}
    folder.rewrite_manifest(folder.manifests()[0], loggers=[record, 7, {"kind": []}])
    from lightning.pytorch.loggers import CSVLogger

    fit(AutoResume(tmp_path / "runs"), logger=CSVLogger(tmp_path / "logs" / "a"), log_every_n_steps=1)
    assert (tmp_path / "metrics.csv").read_text() == "mine\n"
