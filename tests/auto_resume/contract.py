"""What AutoResume promises."""

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_tricks import AutoResume
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import ranks_agree_at_once, same


class StopsOnce(Callback):
    """Sends this process a signal in a batch, in the first of two runs."""

    def __init__(self, batch: int, marker: Path) -> None:
        self.batch, self.marker = batch, marker

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        at = trainer.fit_loop.total_batch_idx == self.batch and not self.marker.exists()
        if at and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer, pl_module, exception):
        self.marker.touch()


def verify(lab: Lab, setting: Setting, callback: type = AutoResume) -> None:
    """Stopped by a signal in the second epoch and started again, the run ends where the undisturbed one does."""
    net = {"dropout": 0.2}
    batch = 11 // setting.ranks + 1  # in the second of two epochs
    whole = lab.fit_bare(setting, **net)
    runs = lab.folder / f"{setting.name} guarded"
    marker = lab.folder / f"{setting.name} stopped"
    with pytest.raises(SystemExit) as left, ranks_agree_at_once():
        lab.fit([callback(runs), StopsOnce(batch, marker)], setting, net=net)
    assert left.value.code == 75
    again = lab.fit([callback(runs), StopsOnce(batch, marker)], setting, net=net, start=9 if setting.ranks == 1 else 0)
    assert len(again) == len(whole) == setting.ranks
    for resumed, undisturbed in zip(again, whole, strict=True):
        assert 0 < len(resumed.steps) < len(undisturbed.steps)
        assert resumed.steps == undisturbed.steps[-len(resumed.steps) :]
        for what in ("weights", "optimizers", "metrics", "rng"):
            assert same(getattr(resumed, what), getattr(undisturbed, what)), f"{what} differ"
    newest = max(runs.glob(".auto_resume/0*/meta.pt"))
    assert torch.load(newest, weights_only=True)["auto_resume"]["moment"] == "at the end"


CASES = (
    Case(
        callback=AutoResume,
        arguments={
            "dirpath": "guarded",
            "every_n_train_steps": 7,
            "every_n_epochs": 2,
            "train_time_interval": {"minutes": 30},
            "keep_last": 3,
            "signals": ["SIGTERM"],
            "exit_code": 99,
            "on_change": "new",
            "ignore": ["seed"],
            "on_failed_save": "raise",
            "asynchronous": True,
            "send_timeout": {"minutes": 1},
            "allow_pickle": True,
        },
        kind="observer",
        neutral=None,
        why_no_neutral="it changes nothing in any setting",
        of_one_fit=("dirpath", "_origin"),
        instances=1,
        writes_to="dirpath",
        opens_addresses=("dirpath",),
        when_idle={"every_n_train_steps": None, "every_n_epochs": None},
        looks_between_epochs=True,
        waits={"run_then_call": 2},
        verify=verify,
    ),
)
