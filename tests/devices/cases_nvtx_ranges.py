"""What NvtxRanges promises."""

from unittest.mock import patch

import torch
from lightning.pytorch import Callback

from lightning_tricks.devices import NvtxRanges
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import BATCHES


class Writes(Callback):
    """Stands for NVTX and, at the end, writes the ranges of this rank down."""

    def __init__(self, folder):
        self.folder, self.depth, self.names = folder, 0, []

    def push(self, name):
        self.depth += 1
        self.names.append(name)

    def pop(self):
        self.depth -= 1
        assert self.depth >= 0

    def setup(self, trainer, pl_module, stage):
        self.patches = [
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda.nvtx, "range_push", self.push),
            patch.object(torch.cuda.nvtx, "range_pop", self.pop),
        ]
        for one in self.patches:
            one.start()

    def on_fit_start(self, trainer, pl_module):
        for one in self.patches:
            one.stop()

    def on_train_end(self, trainer, pl_module):
        (self.folder / f"{trainer.global_rank}").write_text("\n".join([*self.names, str(self.depth)]))


def verify(lab: Lab, setting: Setting, callback: type = NvtxRanges) -> None:
    """On each rank, each step has its ranges, and none is left open."""
    folder = lab.folder / f"ranges {setting.name}"
    folder.mkdir()
    lab.fit([Writes(folder), callback()], setting)
    ranks = [path.read_text().splitlines() for path in folder.iterdir()]
    assert len(ranks) == setting.ranks
    batches = 2 * BATCHES // setting.ranks
    steps = 2 * 3 if setting.name == "accumulation" else batches
    for names in ranks:
        assert names[-1] == "0"
        assert names.count("train data wait") == names.count("train step") == batches
        for name, count in (("forward", batches), ("backward", batches), ("optimizer", steps)):
            assert names.count(name) == count or setting.closures_vary or setting.name == "manual", name
            assert names.count(name) >= count


CASE = Case(callback=NvtxRanges, arguments={}, kind="observer", neutral={}, instances=1, verify=verify)
