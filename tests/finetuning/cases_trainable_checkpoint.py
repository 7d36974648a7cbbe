"""What TrainableCheckpoint promises."""

import torch

from lightning_tricks import isolated_rng
from lightning_tricks.finetuning import TrainableCheckpoint
from tests.contract.case import Case
from tests.contract.lab import Lab, Net, Setting, full

_FROZEN = ("0.weight", "0.bias", "1.bias")


class PartlyFrozen(Net):
    """The contract's net with a frozen first layer, and one whose weight alone is trained."""

    def build(self):
        super().build()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not name.endswith(_FROZEN))


def build(setting: Setting) -> PartlyFrozen:
    with isolated_rng(seed=0):
        return PartlyFrozen(**setting.net)


def verify(lab: Lab, setting: Setting, callback: type = TrainableCheckpoint) -> None:
    """Whatever trains the net, a checkpoint lacks what is frozen, and a new net resumes from it as from a whole one."""
    runs = {}
    for name, callbacks in (("whole", list), ("small", lambda: [callback()])):
        path = lab.folder / f"{setting.name} {name}.ckpt"
        lab.fit(callbacks(), setting, module=build(setting), max_epochs=1, save_to=path)
        runs[name] = lab.fit(callbacks(), setting, module=build(setting), ckpt_path=path)
    assert len(runs["small"]) == setting.ranks
    for whole, small in zip(runs["whole"], runs["small"], strict=True):
        for name, value in whole.weights.items():
            assert torch.equal(full(small.weights[name]), full(value)), name
        assert len(small.steps) == len(whole.steps)
    whole, small = (
        torch.load(lab.folder / f"{setting.name} {name}.ckpt", weights_only=True)["state_dict"] for name in runs
    )
    if setting.ranks == 1:  # under `ddp_fork`, the Trainer that saves after the fit has trained nothing
        assert {name for name in whole if name not in small} == {n for n in whole if n.endswith(_FROZEN)}
    assert len([name for name in whole if name.endswith(_FROZEN)]) == 3


CASE = Case(
    callback=TrainableCheckpoint,
    arguments={"extra": ["*.0.weight", "re:4.bias$"]},
    kind="observer",
    neutral={"extra": "*"},
    instances=1,
    verify=verify,
    refuses={"FSDP2": "TrainableCheckpoint cannot leave anything out of the files that ModelParallelStrategy writes"},
    untested={"CUDA": "no GPU run yet"},
)
