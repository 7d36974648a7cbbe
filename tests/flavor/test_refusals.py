"""Classes of the Lightning that was not taken: refused in one sentence that says how to have the other one."""

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import ScheduleSpec, TricksMixin, count_flops
from lightning_tricks._lightning_compat.flavor import other_flavor
from lightning_tricks.ensembles import FusionRegressor, VotingClassifier
from lightning_tricks.lr_schedules import build_schedule, total_steps
from tests.contract.cases import CASES
from tests.small import QUIET

_log_of_lightning = rank_zero.log
import pytorch_lightning as pl  # noqa: E402

rank_zero.log = _log_of_lightning  # whichever package comes last takes over what both say

_REMEDY = r"import `pytorch_lightning`, .* before .*LIGHTNING_TRICKS_LIGHTNING=pytorch_lightning in the environment\.$"


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x):
        return self.net(x)

    def prepare_step(self, batch):
        raise AssertionError("a step was run")

    training_step = validation_step = test_step = predict_step = prepare_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("function", ["fit", "validate", "test", "predict"])
def test_callbacks_refuse_its_trainer(name, function):
    trainer = pl.Trainer(max_epochs=1, callbacks=[CASES[name].make()], **QUIET)
    with pytest.raises(Exception, match=rf"{name}: Trainer comes from `pytorch_lightning`.* {_REMEDY}") as error:
        getattr(trainer, function)(Lit(), *[DataLoader(torch.zeros(4, 4))] * (2 if function == "fit" else 1))
    assert type(error.value).__name__ == "MisconfigurationException"


def test_the_mixin_refuses_its_module():
    with pytest.raises(TypeError, match=rf"class LitNet\(TricksMixin, \.\.\.\): LitNet comes from .* {_REMEDY}"):

        class LitNet(TricksMixin, pl.LightningModule):
            pass

    class Base(TricksMixin):
        pass

    with pytest.raises(TypeError, match=_REMEDY):
        type("LitNet", (Base, Lit), {})


def test_an_ensemble_refuses_its_modules_where_it_would_leave_out_their_steps():
    words = rf"VotingClassifier would not call the training_step of its members: Lit .* {_REMEDY}"
    with pytest.raises(TypeError, match=words):
        VotingClassifier(Lit, 2)
    FusionRegressor(Lit, 2)  # calls `forward` alone


def test_schedules_refuse_its_trainer():
    trainer = pl.Trainer(max_epochs=1, **QUIET)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(Exception, match=f"The steps of a run cannot be counted: .* {_REMEDY}"):
        total_steps(trainer)
    with pytest.raises(Exception, match=_REMEDY):
        build_schedule(optimizer, ScheduleSpec(), trainer)


def test_the_core_takes_its_modules():
    assert count_flops(Lit(), torch.zeros(1, 4)).macs == 8


def test_what_is_not_from_there_is_let_through():
    assert other_flavor(nn.Linear) == ""
    assert other_flavor(type("Trainer", (), {"__module__": "pytorch_lightning_of_mine"})) == ""
