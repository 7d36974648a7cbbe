"""What GradualUnfreezing promises."""

import math

import torch
from lightning.pytorch import Callback

from lightning_tricks import GradualUnfreezing
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting, full
from tests.small import loader

_EARLY, _LATE = "*net.4.*", "*"


class Snapshots(Callback):
    """Keeps the weights at the start of each epoch and at the end, by name, and refuses what is frozen and moves."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def on_train_epoch_start(self, trainer, pl_module):
        self.save(trainer, pl_module, str(trainer.current_epoch))

    def on_train_end(self, trainer, pl_module):
        self.save(trainer, pl_module, "end")

    def save(self, trainer, pl_module, name):
        weights = {key: full(value) for key, value in pl_module.state_dict().items()}
        torch.save(weights, self.folder / f"{name}.{trainer.global_rank}.pt")


def verify(lab: Lab, setting: Setting, callback: type = GradualUnfreezing) -> None:
    """In the first epoch the head alone moves, in the second one all; frozen weights are bit-identical."""
    folder = lab.folder / f"snapshots of {setting.name}"
    folder.mkdir()
    facts = lab.fit([Snapshots(folder), callback({0: _EARLY, 1: _LATE})], setting)
    assert len(facts) == setting.ranks
    for rank in range(setting.ranks):
        start, middle, end = (torch.load(folder / f"{name}.{rank}.pt") for name in ("0", "1", "end"))
        for name in start:
            head = ".4." in name
            assert torch.equal(start[name], middle[name]) != head, f"{name} in epoch 0"
            assert not torch.equal(middle[name], end[name]), f"{name} in epoch 1"
    assert all(math.isfinite(step.after) for step in facts[0].steps)
    assert len(loader()) * 2 >= len(facts[0].steps) / (2 if "manual" in setting.name else 1) or setting.closures_vary


CASE = Case(
    callback=GradualUnfreezing,
    arguments={
        "schedule": {0: "net.4.*", 3: ["*"]},
        "lr_multipliers": {"net.0.*": 0.5},
        "freeze_norm": False,
        "unit": "step",
    },
    kind="changer",
    neutral={"schedule": {0: "*"}},
    instances=1,
    verify=verify,
)
