"""What TrainableCheckpoint promises."""

import torch
from lightning.pytorch import Callback
from torch.distributed.checkpoint import FileSystemReader

from lightning_tricks.finetuning import TrainableCheckpoint
from lightning_tricks.seeding import isolated_rng
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.finetuning.cases_adaptation import plain
from tests.small import Net

_FROZEN = ("0.weight", "0.bias", "1.bias")


class PartlyFrozen(Net):
    """The contract's net with a frozen first layer, and one whose weight alone is trained."""

    def build(self):
        super().build()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not name.endswith(_FROZEN))


class SavesFirstEpoch(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def saved_names(path):
    """The names of the weights in a checkpoint, which is a folder where each rank wrote its shards."""
    if not path.is_dir():
        return set(torch.load(path, weights_only=True)["state_dict"])
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name.removeprefix("state_dict.") for name in stored if name.startswith("state_dict.")}


def verify(lab: Lab, setting: Setting, callback: type = TrainableCheckpoint) -> None:
    """However the net is trained, a checkpoint lacks what is frozen, and a new net resumes from it as from a whole."""
    runs, files = [], []
    for callbacks in ([], [callback()]):
        path = lab.folder / f"{setting.name} {len(callbacks)}.ckpt"
        for ckpt_path in (None, path):
            with isolated_rng(seed=0):
                module = PartlyFrozen(**setting.net)
            ranks = lab.fit([*callbacks, SavesFirstEpoch(path)], setting, module=module, ckpt_path=ckpt_path)
        runs.append(ranks)
        files.append(saved_names(path))
    assert len(runs[1]) == setting.ranks
    for whole, small in zip(*runs, strict=True):
        assert len(small.steps) == len(whole.steps) > 0
        assert all(torch.equal(small.weights[name], value) for name, value in whole.weights.items())
    names = set(plain(dict.fromkeys(files[0])))
    left_out = names - files[1]
    assert left_out == {name for name in names if name.endswith(_FROZEN)}
    assert len(left_out) == 3


CASE = Case(
    callback=TrainableCheckpoint,
    arguments={"extra": ["*.0.*weight", "re:4.*bias$"]},
    kind="observer",
    neutral={"extra": "*"},
    instances=1,
    waits={"on_train_epoch_start": 1},
    verify=verify,
)
