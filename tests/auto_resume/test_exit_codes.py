"""The exit status of a run and its last line, in processes of their own: a scheduler starts it again at 75 alone."""

import os
import resource
import signal

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_tricks import AutoResume, seed_everything
from tests.auto_resume.killing import STOPPED, resumed_at, run
from tests.small import QUIET, Net, loader


class Does(Callback):
    """Does something after step 5."""

    def __init__(self, what):
        self._what = what

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != 5 or trainer.global_rank != trainer.world_size - 1:
            return
        if "full disk" in self._what:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        if "raises" in self._what:
            raise ZeroDivisionError("of the user")
        for name in self._what.split(" and "):
            if hasattr(signal, name):
                os.kill(os.getpid(), getattr(signal, name))


def script(folder, options):
    options = {"what": "", "hidden": 16, "ranks": 1, **options}
    seed_everything(3, verbose=False)
    guard = AutoResume(folder / "resume", every_n_train_steps=2, **options.get("arguments", {}))
    if options["what"] == "SIGUSR1 before":
        os.kill(os.getpid(), signal.SIGUSR1)
    ranks = {"strategy": "ddp_fork", "devices": options["ranks"]} if options["ranks"] > 1 else {}
    trainer = Trainer(max_epochs=2, callbacks=[guard, Does(options["what"])], **QUIET, **ranks)
    trainer.fit(Net(hidden=options["hidden"], dropout=0.2), loader(shuffle=True))


def last_line(folder):
    return (folder / "output.txt").read_text().strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({}, 0, "`Trainer.fit` stopped: `max_epochs=2` reached"),
        ({"what": "SIGTERM"}, STOPPED, "stopped by SIGTERM at step 5. Run the same command again to resume"),
        ({"what": "SIGUSR1 before"}, STOPPED, "stopped by SIGUSR1 before the first batch. Run the same command again"),
        ({"what": "full disk and SIGTERM"}, STOPPED, "stopped by SIGTERM at step 5. Run the same command again"),
        ({"what": "full disk and SIGTERM", "arguments": {"on_failed_save": "raise"}}, 1, "could not be saved in"),
        ({"what": "raises"}, 1, "ZeroDivisionError: of the user"),
        ({"what": "raises", "ranks": 2}, 1, "ZeroDivisionError: of the user"),
        ({"what": "SIGINT"}, STOPPED, "stopped by SIGINT at step 5. Run the same command again"),
        ({"what": "SIGINT and SIGINT"}, 1, "Detected KeyboardInterrupt"),
    ],
)
def test_an_exit_status_tells_a_scheduler_whether_to_start_the_run_again(tmp_path, options, code, said):
    assert run(tmp_path, options, script=script) == code
    assert said in last_line(tmp_path)
    if code:  # whatever it was, the same command goes on from the last save
        assert run(tmp_path, {**options, "what": ""}, script=script) == 0
        known = {"SIGTERM": [5], "SIGINT": [5], "SIGUSR1 before": []}
        assert set(resumed_at(tmp_path)) <= set(known.get(options["what"], [4]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refused_start_says_last_what_to_do(tmp_path, ranks):
    """And nothing of a run that goes on or had finished."""
    assert run(tmp_path, {"ranks": ranks}, script=script) == 0
    (tmp_path / "output.txt").unlink()
    assert run(tmp_path, {"ranks": ranks, "hidden": 8}, script=script) == 1
    assert "dirpath" in last_line(tmp_path)
    assert "AutoResume: the run" not in (tmp_path / "output.txt").read_text()
