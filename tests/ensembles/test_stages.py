"""Members that are trained stage by stage: what a stage trains, what it leaves alone, and how it resumes."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_tricks import ScheduleSpec
from lightning_tricks.ensembles.prediction import ClassifierEnsemble
from lightning_tricks.ensembles.stages import StagedEnsemble
from tests.ensembles.nets import CNN, MLP, LitMLP, digits, few, fit, values

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
)
ADAM = ("AdamW", {"lr": 1e-2, "weight_decay": 0.1})


class Residual(StagedEnsemble, ClassifierEnsemble):
    """Each member is fitted to what the sum of the earlier ones gets wrong."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def combine(self, outputs):
        return outputs.sum(0).softmax(-1)

    def log_prediction(self, outputs):
        return outputs.sum(0)

    def training_loss(self, inputs, targets):
        outputs = self.training_outputs(inputs, targets)
        earlier = self.earlier_outputs(*inputs)
        scores = torch.zeros_like(outputs[0]) if earlier is None else earlier.sum(0)
        residual = nn.functional.one_hot(targets[0], outputs.shape[-1]) - scores.softmax(-1)
        return (outputs[0] - residual).square().mean(), outputs

    def on_stage_start(self):
        optimizer = self.trainer.optimizers[0]
        self.seen.append((self.stage, self.trainer.global_step, len(optimizer.state), self.n_members))
        self.before = values(self)


class Watched(Residual):
    """Compares the members that a stage does not train, at each epoch's end."""

    def on_train_batch_end(self, *args):
        trained = f"estimators_.{self.stage}."
        for name, value in values(self).items():
            if name.startswith("estimators_") and not name.startswith(trained):
                assert torch.equal(value, self.before[name]), name
        assert [member.training for member in self.estimators_] == [index == self.stage for index in range(3)]


def _train(count=64):
    return few(digits()[0], count)


def test_a_stage_trains_one_member_with_a_new_optimizer_and_leaves_the_others_alone():
    ensemble = Watched(CNN, 3, optimizer=ADAM, seed=0)
    fit(ensemble, _train(), few(digits()[1], 32, shuffle=False), max_epochs=6, accumulate_grad_batches=3)
    assert ensemble.seen == [(0, 0, 0, 1), (1, 4, 0, 2), (2, 8, 0, 3)]
    fit(ensemble, _train(), max_epochs=3)
    assert ensemble.seen[3:] == [(0, 0, 0, 1), (1, 4, 0, 2), (2, 8, 0, 3)], "a second fit begins with the first stage"


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_has_the_length_of_a_stage(interval):
    rates = []

    class Rates(Residual):
        def on_train_batch_start(self, batch, batch_idx):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    schedule = ScheduleSpec("warmup_linear", warmup=0, interval=interval)
    fit(Rates(MLP, 3, optimizer=("SGD", {"lr": 1.0}), lr_scheduler=schedule, seed=0), _train(), max_epochs=6)
    stage = [1 - step / 8 for step in range(8)] if interval == "step" else [1.0] * 4 + [0.5] * 4
    assert rates == pytest.approx(stage * 3)


def test_a_state_dict_knows_how_many_members_predict():
    ensemble = Residual(MLP, 3, optimizer=ADAM, seed=0)
    x = digits()[1].tensors[0][:20]
    fit(ensemble, _train(), max_epochs=3, max_steps=6)
    assert (ensemble.stage, ensemble.n_members) == (1, 2)
    loaded = Residual(MLP, 3, seed=1)
    loaded.load_state_dict(ensemble.state_dict())
    assert loaded.n_members == 2
    expected = sum(copy.deepcopy(ensemble.estimators_[index])(x) for index in range(2)).softmax(-1)
    torch.testing.assert_close(loaded.predict(x), expected.detach())


def test_the_members_of_all_stages_log_through_the_ensemble():
    logged = set()

    class Watch(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            logged.update(trainer.logged_metrics)

    class OwnSteps(StagedEnsemble, ClassifierEnsemble):
        pass

    fit(OwnSteps([LitMLP(), LitMLP()], seed=0), _train(), max_epochs=2, callbacks=[Watch()])
    assert {key.split("/")[0] for key in logged if key.startswith("member")} == {"member_0", "member_1"}
