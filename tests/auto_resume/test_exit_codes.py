"""The exit status of a run and its last line, in processes of their own: a scheduler starts it again at 75 alone."""

import os
import pickle
import resource
import signal
import sys
import time

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_tricks import AutoResume, seed_everything
from tests.auto_resume.killing import STOPPED, resumed_at, run
from tests.small import QUIET, Net, cases, fork, loader

trainers = []
HANDS_ON = {"arguments": {"signals": ["SIGTERM", "SIGUSR2"]}}


class Does(Callback):
    def __init__(self, what):
        self._what = what

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.world_size > 1:
            time.sleep(0.05)  # so that ranks agree every other step
        if trainer.global_step != 5 or trainer.global_rank != trainer.world_size - 1:
            return
        if "full disk" in self._what:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        if "raises" in self._what:
            raise ZeroDivisionError("of the user")
        for name in self._what.split(" and "):
            if hasattr(signal, name):
                os.kill(os.getpid(), getattr(signal, name))
        if "to the launcher" in self._what:
            os.kill(os.getppid(), signal.SIGUSR2)
            time.sleep(1)  # until it has noted it


def install_handler(kind):
    """Install a handler of SIGUSR2, as a launcher does that starts a job again."""

    def handle(number, frame):
        pickle.dumps(trainers)  # as submitit does with a job that has them
        os.write(1, f"handed to {os.getpid()}\n".encode())
        if kind == "exits":
            sys.exit(44)
        if kind == "raises":
            raise OSError("not requeued")

    signal.signal(signal.SIGUSR2, handle)


def script(folder, options):
    options = {"what": "", "hidden": 16, "ranks": 1, "strategy": "ddp_fork", "handler": "", **options}
    if options["handler"]:
        install_handler(options["handler"])
    seed_everything(3, verbose=False)
    guard = AutoResume(folder / "resume", every_n_train_steps=2, **options.get("arguments", {}))
    if options["what"] == "SIGUSR1 before":
        os.kill(os.getpid(), signal.SIGUSR1)
    ranks = {"strategy": options["strategy"], "devices": options["ranks"]} if options["ranks"] > 1 else {}
    trainer = Trainer(max_epochs=2, callbacks=[guard, Does(options["what"])], **QUIET, **ranks)
    trainers.append(trainer)
    trainer.fit(Net(hidden=options["hidden"], dropout=0.2), loader(shuffle=True))


def last_line(folder):
    return (folder / "output.txt").read_text().strip().splitlines()[-1]


@cases(
    "options, code, said",
    ({}, 0, "`Trainer.fit` stopped: `max_epochs=2` reached"),
    ({"what": "SIGTERM"}, STOPPED, "stopped by SIGTERM at step 5. Run the same command again to resume"),
    ({"what": "SIGUSR1 before"}, STOPPED, "stopped by SIGUSR1 before the first batch. Run the same command again"),
    (
        {"what": "full disk and SIGTERM", "arguments": {"asynchronous": False}},
        STOPPED,
        "stopped by SIGTERM at step 5. Run the same command again",
    ),
    (
        {"what": "full disk and SIGTERM", "arguments": {"asynchronous": False, "on_failed_save": "raise"}},
        1,
        "could not be saved in",
    ),
    ({"what": "raises"}, 1, "ZeroDivisionError: of the user"),
    ({"what": "raises", "ranks": 2}, 1, "ZeroDivisionError: of the user"),
    ({"what": "SIGINT"}, STOPPED, "stopped by SIGINT at step 5. Run the same command again"),
    ({"what": "SIGINT and SIGINT"}, 1, "Detected KeyboardInterrupt"),
)
def test_an_exit_status_tells_a_scheduler_whether_to_start_the_run_again(tmp_path, options, code, said):
    assert run(tmp_path, options, script=script) == code
    assert said in last_line(tmp_path)
    if code:  # whatever it was, the same command goes on from the last save
        assert run(tmp_path, {**options, "what": ""}, script=script) == 0
        known = {"SIGTERM": [5], "SIGINT": [5], "SIGUSR1 before": []}
        assert set(resumed_at(tmp_path)) <= set(known.get(options["what"], [4]))


@cases(
    "options, code, said",
    ({"handler": "exits", "what": "SIGUSR2"}, 44, ["handed to"]),
    ({"handler": "logs", "what": "SIGUSR2"}, STOPPED, ["handed to"]),
    ({"handler": "raises", "what": "SIGUSR2"}, 1, ["handed to", "OSError: not requeued"]),
    ({"handler": "exits", "what": "SIGTERM and SIGUSR2"}, 44, ["stopped by SIGTERM at step 5", "handed to"]),
    ({"handler": "exits", "what": "SIGTERM"}, STOPPED, []),
    ({"handler": "exits", "what": "to the launcher", "ranks": 2}, 44, ["handed to"]),
    ({"handler": "exits", "what": "SIGUSR2", "ranks": 2}, STOPPED, []),  # the handler is that of the launcher
)
def test_a_signal_is_handed_to_the_handler_that_was_there_once_all_is_saved(tmp_path, options, code, said):
    assert run(tmp_path, {**HANDS_ON, **options}, script=script) == code
    output = (tmp_path / "output.txt").read_text()
    assert all(text in output for text in said)
    assert output.count("handed to") == said.count("handed to")
    assert run(tmp_path, {**HANDS_ON, **options, "what": ""}, script=script) == 0
    assert 5 <= min(resumed_at(tmp_path)) <= max(resumed_at(tmp_path)) < (10 if "ranks" in options else 6)


def test_a_signal_to_another_rank_is_handed_on_by_rank_zero_too(tmp_path):
    """Where another program launched the ranks, each has handlers, and submitit requeues from rank zero alone."""

    def ranks(folder, options):
        fork(lambda rank: script(folder, {**options, "ranks": 2, "strategy": "ddp"}), 2)

    options = {**HANDS_ON, "handler": "logs", "what": "SIGUSR2"}
    assert run(tmp_path, options, script=ranks) == STOPPED
    assert (tmp_path / "output.txt").read_text().count("handed to") == 2
    assert run(tmp_path, {**options, "what": ""}, script=ranks) == 0
    assert 5 <= resumed_at(tmp_path)[0] < 10


@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGTERM", "SIGUSR2"]])
def test_a_job_that_submitit_requeues_without_a_save_is_warned(tmp_path, monkeypatch, signals):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert run(tmp_path, {"handler": "exits", "arguments": {"signals": signals}}, script=script) == 0
    warned = "submitit requeues this job at SIGUSR2 without a save" in (tmp_path / "output.txt").read_text()
    assert warned == (signals == ["SIGTERM"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refused_start_says_last_what_to_do(tmp_path, ranks):
    """And nothing of a run that goes on or had finished."""
    assert run(tmp_path, {"ranks": ranks}, script=script) == 0
    (tmp_path / "output.txt").unlink()
    assert run(tmp_path, {"ranks": ranks, "hidden": 8}, script=script) == 1
    assert "dirpath" in last_line(tmp_path)
    assert "AutoResume: the run" not in (tmp_path / "output.txt").read_text()
