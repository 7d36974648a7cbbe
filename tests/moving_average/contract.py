"""What ExponentialMovingAverage promises."""

from __future__ import annotations

from functools import partial

import torch
from lightning.pytorch import Callback

from lightning_tricks import ExponentialMovingAverage
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting, full
from tests.small import unseen

DECAY = 0.9


def average_of(seen: list[torch.Tensor], decay: float, warmup: bool = True) -> torch.Tensor:
    """The closed form: the weights of each update times the powers of what later updates keep, in float64."""
    decays = [0.0] + [min(decay, (1 + t) / (10 + t)) if warmup else decay for t in range(1, len(seen))]
    total = torch.zeros_like(seen[0], dtype=torch.float64)
    for number, weights in enumerate(seen):
        share = 1 - decays[number]
        for later in decays[number + 1 :]:
            share *= later
        total += share * weights.double()
    return total


class Watches(Callback):
    """The reference implementation: all weights after each step of their optimizer, and those at the very end."""

    def __init__(self, folder):
        self.folder = folder
        self.seen = unseen({})  # which AutoResume does not see

    def on_train_start(self, trainer, pl_module):
        for number, optimizer in enumerate(trainer.optimizers):
            optimizer.register_step_post_hook(partial(self.note, pl_module, number))

    def note(self, module, number, optimizer, *_):
        if float(getattr(optimizer, "found_inf", 0.0)) == 0:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in module.named_parameters():
                if id(parameter) in own:
                    self.seen().setdefault(name, []).append(full(parameter))

    def teardown(self, trainer, pl_module, stage):
        final = {name: full(parameter) for name, parameter in pl_module.named_parameters()}
        torch.save((self.seen(), final), self.folder / f"{trainer.global_rank}.pt")


def verify(lab: Lab, setting: Setting, callback: type = ExponentialMovingAverage) -> None:
    """On each rank the module ends with the closed form of the average of each parameter, after all of its steps."""
    folder = lab.folder / f"seen {setting.name}"
    folder.mkdir()
    lab.fit([callback(DECAY), Watches(folder)], setting)
    files = sorted(folder.iterdir())
    assert len(files) == setting.ranks
    for file in files:
        seen, final = torch.load(file, weights_only=False)
        assert seen.keys() == final.keys()
        for name, weights in seen.items():
            assert len(weights) >= 6
            expected = average_of(weights, DECAY)
            assert torch.allclose(final[name].double(), expected, rtol=setting.tolerance, atol=setting.tolerance / 100)
            assert not torch.equal(final[name], weights[-1])


CASES = (
    Case(
        callback=ExponentialMovingAverage,
        arguments={"decay": 0.5, "warmup": False, "every_n_steps": 2, "buffers": "copy"},
        kind="changer",
        neutral={"decay": 0.0},
        instances=1,
        waits={"on_fit_end": 12},  # the averages and the weights of training go to the host, as the module does
        verify=verify,
    ),
)
