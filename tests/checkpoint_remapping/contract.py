"""What CheckpointRemapping promises."""

import torch
from lightning.pytorch import Callback

from lightning_tricks import CheckpointRemapping
from lightning_tricks.seeding import isolated_rng
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting, full
from tests.small import Net


class Seen(Callback):
    """Writes down each rank's weights before the first step."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        weights = {name.replace("_orig_mod.", ""): full(value) for name, value in pl_module.state_dict().items()}
        torch.save(weights, self.folder / f"seen by {trainer.global_rank}.pt")


def verify(lab: Lab, setting: Setting, callback: type = CheckpointRemapping) -> None:
    """Whoever trains the net, and however it is wrapped, its first step starts from the file's weights."""
    with isolated_rng(seed=7):
        pretrained = {f"module.{name}": value for name, value in Net().state_dict().items()}
    torch.save(pretrained, lab.folder / f"{setting.name}.pt")
    remapping = callback(str(lab.folder / f"{setting.name}.pt"))
    lab.fit([remapping, Seen(lab.folder)], setting)
    for rank in range(setting.ranks):
        seen = torch.load(lab.folder / f"seen by {rank}.pt")
        assert len(seen) == len(pretrained) == 6
        for name, value in seen.items():
            torch.testing.assert_close(value, pretrained[f"module.{name}"].to(value.dtype), rtol=0, atol=0)
    if setting.ranks == 1:
        assert remapping.report.loaded == remapping.report.total == 6


CASES = (
    Case(
        callback=CheckpointRemapping,
        arguments={
            "rules": ["wrappers", {"from": "model", "to": "net"}],
            "allow_missing": ["head.*"],
            "allow_unexpected": ["ema.*"],
            "allow_mismatched": ["head.*"],
            "interpolate": ["pos_embed"],
            "accept": ["decoder.*"],
            "clean_on_save": True,
        },
        kind="observer",
        neutral={},
        of_one_fit=("report",),
        instances=1,
        opens_addresses=("path",),
        verify=verify,
    ),
)
