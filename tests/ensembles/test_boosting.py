"""Boosting: what members are fitted to, what a stage leaves alone, what is computed once, and where a run ends."""

import copy
import gc
import math

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_tricks import ScheduleSpec
from lightning_tricks.ensembles import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    SoftGradientBoostingClassifier,
    SoftGradientBoostingRegressor,
)
from lightning_tricks.ensembles.boosting import negative_gradient
from lightning_tricks.ensembles.gradient_boosting import CachedPredictions
from tests.ensembles.nets import CNN, MLP, LitMLP, Recurrent, digits, few, fit, same, some, values
from tests.small import QUIET, cases

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
SGD = ("SGD", {"lr": 0.1, "momentum": 0.9})


# --- residuals


class _Asymmetric:
    """A loss without `reduction`, the mean over samples."""

    def __call__(self, scores, targets):
        error = targets - scores
        return torch.where(error > 0, error.square(), 3 * error.square()).sum(1).mean()


CLASSES = torch.tensor([0, 2, 1, 2])
REAL = torch.tensor([[0.3, -2.0, 0.1], [1.0, 0.2, 4.0], [0.0, 0.7, -0.4], [0.6, 0.5, 0.2]])
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), CLASSES),
    "half of the squared": (lambda scores, targets: (targets - scores).square().sum(1).mean() / 2, REAL),
    "ignored": (nn.CrossEntropyLoss(ignore_index=2), CLASSES),
    "ignored by default": (nn.CrossEntropyLoss(), torch.tensor([0, -100, 1, 2])),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), CLASSES),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), CLASSES),
    "probabilities": (nn.CrossEntropyLoss(), REAL.softmax(1)),
    "summed": (nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "absolute": (nn.L1Loss(), REAL),
    "own": (_Asymmetric(), REAL),
}


@pytest.mark.parametrize("name", LOSSES)
def test_residuals_are_finite_differences_of_each_samples_loss(name):
    criterion, targets = LOSSES[name]
    scores = torch.linspace(-1, 1.3, 12, dtype=torch.float64).view(4, 3)
    summed = copy.copy(criterion)
    if hasattr(criterion, "weight") and criterion.weight is not None:
        summed = nn.CrossEntropyLoss(weight=criterion.weight.double())
        criterion = copy.copy(summed)
    if hasattr(summed, "reduction"):
        summed.reduction = "sum"
    targets = targets.double() if targets.is_floating_point() else targets
    found = negative_gradient(criterion, scores, targets)
    assert not found.requires_grad
    for index in torch.cartesian_prod(torch.arange(4), torch.arange(3)).tolist():
        step = torch.zeros_like(scores)
        step[tuple(index)] = 1e-5
        of_batch = 1 if hasattr(summed, "reduction") else len(scores)
        slope = (summed(scores + step, targets) - summed(scores - step, targets)) * of_batch / 2e-5
        assert found[tuple(index)].item() == pytest.approx(-slope.item(), abs=1e-6), index


def test_a_loss_that_does_not_depend_on_the_scores():
    with pytest.raises(ValueError, match="does not depend on the scores: nothing can be fitted to it"):
        negative_gradient(lambda scores, targets: targets.mean().requires_grad_(), REAL, REAL)


# --- gradient boosting


def _boosted_by_hand(ensemble, train, epochs, rate, loss):
    """The members of an ensemble, fitted in plain torch."""
    members = [copy.deepcopy(member) for member in ensemble.estimators_]
    for stage, member in enumerate(members):
        optimizer = torch.optim.SGD(member.parameters(), lr=0.1, momentum=0.9)
        for _ in range(epochs):
            for x, y in train:
                with torch.no_grad():
                    earlier = [other.eval()(x) for other in members[:stage]]
                scores = rate * sum(earlier) if earlier else torch.zeros(len(x), 10)
                optimizer.zero_grad()
                member.train()
                (member(x) - negative_gradient(loss, scores, y)).square().mean().backward()
                optimizer.step()
    return members


@pytest.mark.parametrize("make", [MLP, CNN])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_stages_are_those_of_a_loop_in_plain_torch(make, loss):
    train = some(shuffle=False)
    ensemble = GradientBoostingClassifier(make, 3, shrinkage_rate=0.7, optimizer=SGD, criterion=copy.copy(loss), seed=0)
    expected = _boosted_by_hand(ensemble, train, 2, 0.7, loss)
    trainer = fit(ensemble, train, max_epochs=6)
    for found, member in zip(ensemble.estimators_, expected, strict=True):
        same(found.state_dict(), member.state_dict(), atol=1e-5, rtol=1e-4)
    x, _ = digits()[1].tensors
    sums = 0.7 * sum(member.eval()(x) for member in expected)
    torch.testing.assert_close(ensemble.predict(x), sums.softmax(1).detach(), atol=1e-4, rtol=1e-3)
    assert trainer.global_step == 24


def _trained(data, callbacks=(), **options):
    """The weights after a fit, and how many rows each member saw in evaluation mode."""
    seen = [0] * 3

    class Counts(MLP):
        def forward(self, x):
            if not self.training:
                seen[members.index(self)] += len(x)
            return super().forward(x)

    torch.manual_seed(0)
    members = [Counts() for _ in range(3)]
    ensemble = GradientBoostingClassifier(members, optimizer=SGD, seed=0, **options)
    fit(ensemble, DataLoader(data, 16), max_epochs=9, callbacks=list(callbacks))
    return values(ensemble), seen


class _Halves(Callback):
    """Changes each batch, in place or by another tensor."""

    def __init__(self, in_place):
        self.in_place = in_place

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.in_place:
            batch[0].mul_(0.5)
        else:
            batch[0] = batch[0] * 0.5


def test_outputs_of_earlier_members_are_computed_once():
    data = some().dataset
    kept, rows = _trained(data)
    again, all_rows = _trained(list(data))
    same(kept, again, atol=1e-5, rtol=1e-4)
    assert rows == [64, 64, 0]
    assert all_rows == [64 * 6, 64 * 3, 0]
    subset, rows_of_subset = _trained(torch.utils.data.Subset(few(digits()[0], 80).dataset, range(64)))
    same(kept, subset, rtol=0, atol=0)
    assert rows_of_subset == rows


@pytest.mark.parametrize("in_place", [True, False])
def test_batches_that_a_callback_changes_have_scores_of_their_own(in_place):
    data = some().dataset
    kept, rows = _trained(data, [_Halves(in_place)])
    again, _ = _trained(list(data), [_Halves(in_place)])
    same(kept, again, atol=1e-5, rtol=1e-4)
    assert rows == [64 * 6, 64 * 3, 0]


def _trained_on(data_of_epoch, **attributes):
    """The weights after a fit on what a datamodule gives in each epoch."""

    class Data(LightningDataModule):
        epoch = -1

        def train_dataloader(self):
            self.epoch += 1
            return DataLoader(data_of_epoch(self.epoch), 16)

    ensemble = GradientBoostingClassifier(MLP, 2, optimizer=SGD, seed=0)
    options = {"max_epochs": 6, "limit_train_batches": 4, "reload_dataloaders_every_n_epochs": 1}
    Trainer(**QUIET, **options).fit(ensemble, type("Changed", (Data,), attributes)())
    return values(ensemble)


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"])
def test_batches_that_a_datamodule_changes_have_scores_of_their_own(hook):
    changed = {hook: lambda self, batch, *_: [batch[0] * 2 - 1, batch[1]]}
    kept, again = (_trained_on(lambda _, data=data: data, **changed) for data in (some().dataset, list(some().dataset)))
    same(kept, again, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("change", ["other data", "other rows", "other values"])
def test_an_epoch_with_other_data_has_scores_of_its_own(change):
    def trained(kind):
        x, y = (tensor.clone() for tensor in digits()[0].tensors)

        def data_of(epoch):
            if change == "other values":
                x.mul_(0.9)
            rows = torch.arange(64) + 16 * epoch
            data = TensorDataset(x[rows], y[rows]) if change == "other data" else TensorDataset(x, y)
            return kind(Subset(data, rows.tolist()) if change == "other rows" else data)

        return _trained_on(data_of)

    same(trained(lambda data: data), trained(list), atol=1e-5, rtol=1e-4)


def test_a_fit_that_raises_keeps_no_predictions():
    def caches():
        gc.collect()
        return sum(type(found) is CachedPredictions for found in gc.get_objects())

    class Breaks(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            assert caches() == 1
            if trainer.current_epoch == 2:
                raise RuntimeError("broken off")

    ensemble = GradientBoostingClassifier(MLP, 2, seed=0)
    with pytest.raises(RuntimeError, match="broken off"):
        fit(ensemble, some(), max_epochs=4, callbacks=[Breaks()])
    assert caches() == 0


@pytest.mark.trap("ensembles: GB backpropagates through frozen learners and lets their BatchNorm statistics drift")
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_learner_is_the_same_after_its_stage(in_memory):
    after, started = {}, []

    class Watched(GradientBoostingClassifier):
        def on_stage_start(self):
            super().on_stage_start()
            optimizer = self.trainer.optimizers[0]
            started.append((self.stage, self.trainer.global_step, len(optimizer.state), self.n_members))

        def on_train_batch_end(self, *args):
            assert [member.training for member in self.estimators_] == [index == self.stage for index in range(3)]
            for index in range(self.stage):
                same(after[index], values(self.estimators_.member(index)), rtol=0, atol=0)
            frozen = [not any(p.requires_grad for p in member.parameters()) for member in self.estimators_]
            assert frozen == [index != self.stage for index in range(3)]
            assert all(p.grad is None for index in range(self.stage) for p in self.estimators_[index].parameters())

        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            after[self.stage] = values(self.estimators_.member(self.stage))

    data = some().dataset
    optimizer = ("AdamW", {"lr": 1e-2, "weight_decay": 0.5})
    ensemble = Watched(CNN, 3, optimizer=optimizer, seed=0)
    ensemble.estimators_[1].head.bias.requires_grad_(False)
    loader = DataLoader(data if in_memory else list(data), 16, shuffle=True)
    fit(ensemble, loader, some(32, shuffle=False), max_epochs=6, accumulate_grad_batches=3)
    assert started == [(0, 0, 0, 1), (1, 4, 0, 2), (2, 8, 0, 3)], "each stage has a new optimizer"
    fit(ensemble, loader, max_epochs=3)
    assert started[3:] == started[:3], "a second fit begins with the first stage"
    still = [name for name, parameter in ensemble.named_parameters() if not parameter.requires_grad]
    assert still == ["estimators_.1.head.bias"]


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_has_the_length_of_a_stage(interval):
    rates = []

    class Rates(GradientBoostingClassifier):
        def on_train_batch_start(self, *args):
            super().on_train_batch_start(*args)
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    schedule = ScheduleSpec("warmup_linear", warmup=0, interval=interval)
    fit(Rates(MLP, 3, optimizer=("SGD", {"lr": 1.0}), lr_scheduler=schedule, seed=0), some(), max_epochs=6)
    stage = [1 - step / 8 for step in range(8)] if interval == "step" else [1.0] * 4 + [0.5] * 4
    assert rates == pytest.approx(stage * 3)


def test_a_state_dict_knows_how_many_members_predict():
    ensemble, loaded = (GradientBoostingClassifier(MLP, 3, optimizer=SGD, seed=seed) for seed in range(2))
    fit(ensemble, some(), max_epochs=3, max_steps=6)
    assert (ensemble.stage, ensemble.n_members) == (1, 2)
    loaded.load_state_dict(ensemble.state_dict())
    x = digits()[1].tensors[0]
    expected = sum(ensemble.estimators_[index](x) for index in range(2)).softmax(1)
    torch.testing.assert_close(loaded.predict(x), expected.detach())


def _constants(*amounts):
    """Members that predict a number each, and a learning rate of 0."""
    members = [nn.Linear(1, 1) for _ in amounts]
    for member, amount in zip(members, amounts, strict=True):
        nn.init.zeros_(member.weight)
        nn.init.constant_(member.bias, amount)
    return members


def _ones(count=10, batch_size=4):
    return DataLoader(TensorDataset(torch.zeros(count, 1), torch.ones(count, 1)), batch_size)


@cases(
    "amounts, rounds, trained, kept",
    ((0.5, 0.3, 5.0, 5.0, 0.1), 2, 4, 2),
    ((0.5, 0.3, 5.0, 5.0, 0.1), 1, 3, 2),
    ((0.5, 5.0, -4.6, 5.0, 5.0), 2, 5, 3),  # better again in the second round
    ((0.5, 0.3, 5.0, 5.0, 0.1), 9, 5, 2),
    ((0.1, 0.1, 0.1, 0.1, 5.0), 2, 5, 4),  # the last stage comes before the second round
    ((1.0, 0.0, 0.0, 0.0, 0.0), 2, 3, 1),  # ties
    ((math.nan, 1.0, 1.0, 1.0, 1.0), 2, 3, 1),
)
@pytest.mark.trap("ensembles: GB keeps members that did not improve when the last stage comes first")
def test_early_stopping_keeps_the_best_stage(amounts, rounds, trained, kept, tmp_path):
    ensemble = GradientBoostingRegressor(
        _constants(*amounts), optimizer=("SGD", {"lr": 0.0}), early_stopping_rounds=rounds, seed=0
    )
    saves = ModelCheckpoint(tmp_path, "last")
    trainer = fit(ensemble, _ones(), _ones(), max_epochs=10, callbacks=[saves], enable_checkpointing=True)
    assert trainer.current_epoch == 2 * trained
    assert ensemble.n_members == kept
    x = torch.zeros(3, 1)
    if not math.isnan(amounts[0]):
        torch.testing.assert_close(ensemble.predict(x), torch.full((3, 1), sum(amounts[:kept])))
        sums = torch.tensor(amounts).cumsum(0)[:trained]
        torch.testing.assert_close(ensemble.stage_losses[:trained], (1 - sums).square())
    loaded = GradientBoostingRegressor.load_from_checkpoint(
        saves.best_model_path, estimator=_constants(*[0.0] * len(amounts))
    )
    assert loaded.n_members == kept
    torch.testing.assert_close(loaded.predict(x), ensemble.predict(x), equal_nan=True)
    fit(ensemble, _ones(), _ones(), max_epochs=10)
    assert ensemble.n_members == kept, "a second fit begins anew"


def test_a_run_that_may_not_stop_yet_goes_on():
    ensemble = GradientBoostingRegressor(
        _constants(0.5, 5.0, -4.9, 0.3, 0.1), optimizer=("SGD", {"lr": 0.0}), early_stopping_rounds=1, seed=0
    )
    trainer = fit(ensemble, _ones(), _ones(), max_epochs=5, min_epochs=4)
    assert (trainer.current_epoch, ensemble.n_members) == (4, 4), "the members that were trained since predict, too"
    sums = torch.tensor([0.5, 5.0, -4.9, 0.3]).cumsum(0)
    torch.testing.assert_close(ensemble.stage_losses[:4], (1 - sums).square())


@pytest.mark.trap("ensembles: GB's validation is the mean of batch means")
@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_the_loss_of_a_stage_is_that_of_all_samples_at_its_end(interval):
    x = torch.arange(10.0).unsqueeze(1)
    val = DataLoader(TensorDataset(x, x), 4)  # batches of 4, 4 and 2
    ensemble = GradientBoostingRegressor(
        _constants(1.0, 1.0), optimizer=("SGD", {"lr": 0.0}), early_stopping_rounds=2, seed=0
    )
    fit(ensemble, _ones(16), val, max_epochs=4, val_check_interval=interval)
    expected = torch.stack([(x - level).square().mean() for level in (1, 2)])
    torch.testing.assert_close(ensemble.stage_losses, expected)


class _Same(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        here = torch.cat([pl_module.stage_losses, torch.tensor([float(trainer.should_stop)])])
        assert torch.equal(trainer.strategy.broadcast(here), here)


def test_two_ranks_stop_at_the_same_stage():
    x = torch.arange(1.0, 8.0).unsqueeze(1)  # of which one rank repeats the first
    ensemble = GradientBoostingRegressor(
        _constants(3.0, 0.5, 9.0, 9.0), optimizer=("SGD", {"lr": 0.0}), early_stopping_rounds=1, seed=0
    )
    val = DataLoader(TensorDataset(x, x), 2)
    fit(ensemble, _ones(8), val, max_epochs=4, strategy="ddp_fork", devices=2, callbacks=[_Same()])
    assert ensemble.n_members == 2
    assert ensemble.stage_losses.isfinite().tolist() == [True, True, True, False]
    x_bar = torch.stack([(x - level).square().mean() for level in (3, 3.5)])
    torch.testing.assert_close(ensemble.stage_losses[:2], x_bar)


@cases(
    "arguments, options, words",
    ({}, {"max_epochs": 4}, "has 3 stages of equal length, and max_epochs=4 is not a multiple"),
    ({"early_stopping_rounds": 1}, {"max_epochs": 3}, r"early_stopping_rounds=1 needs validation data"),
    (
        {"early_stopping_rounds": 1},
        {"max_epochs": 6, "check_val_every_n_epoch": 3, "val": True},
        r"so after every 2 epochs, and check_val_every_n_epoch=3",
    ),
)
@pytest.mark.trap("ensembles: a refused fit of GB already leaves members behind")
def test_a_refused_fit_leaves_nothing_behind(arguments, options, words):
    ensemble = GradientBoostingClassifier(MLP, 3, **arguments, seed=0)
    before, flags = values(ensemble), [parameter.requires_grad for parameter in ensemble.parameters()]
    options = dict(options)
    val = some(shuffle=False) if options.pop("val", False) else None
    with pytest.raises(Exception, match=words):
        fit(ensemble, some(), val, **options)
    same(values(ensemble), before, rtol=0, atol=0)
    assert [parameter.requires_grad for parameter in ensemble.parameters()] == flags
    fit(ensemble, some(), some(shuffle=False), max_epochs=6)
    assert len(ensemble.estimators_) == ensemble.n_members or arguments.get("early_stopping_rounds")


@pytest.mark.parametrize("kind", [GradientBoostingRegressor, SoftGradientBoostingRegressor])
@cases(
    "arguments, error, words",
    ({"shrinkage_rate": 0}, ValueError, r"shrinkage_rate must be a number > 0 and <= 1, got 0"),
    ({"shrinkage_rate": 1.5}, ValueError, r"got 1.5"),
    ({"shrinkage_rate": "1"}, TypeError, r"got '1' \(str\)"),
    ({"criterion": nn.GaussianNLLLoss()}, ValueError, r"needs a variance, .*: use VotingRegressor"),
    ({"voting_strategy": "hard"}, TypeError, "unexpected keyword argument 'voting_strategy'"),
)
def test_arguments(kind, arguments, error, words):
    with pytest.raises(error, match=words):
        kind(MLP, 2, **arguments)
    if "criterion" in arguments:
        with pytest.raises(error, match=words):
            kind(MLP, 2).set_criterion(arguments["criterion"])


def test_members_of_any_kind_are_boosted_by_the_ensembles_loss():
    trainer = fit(GradientBoostingClassifier([Recurrent(), LitMLP()], seed=0), some(), max_epochs=2)
    assert not any(key.startswith("member") for key in trainer.callback_metrics)


@pytest.mark.trap("ensembles: GB sums the squared error, so that the learning rate depends on the batch size")
@pytest.mark.parametrize("kind", [GradientBoostingClassifier, SoftGradientBoostingClassifier])
def test_the_loss_is_a_mean_or_the_sum(kind):
    x, y = digits()[0].tensors
    targets = y[:20].expand(2 if kind is SoftGradientBoostingClassifier else 1, 20)

    def loss(**options):
        return kind(MLP, 2, seed=0, **options).training_loss([x[:20]], targets)[0].item()

    assert loss(use_reduction_sum=True) == pytest.approx(loss() * 20 * 10, rel=1e-5)


def test_metrics_see_the_scores_of_the_ensemble():
    found = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            with torch.no_grad():
                members = [member(batch[0]) for member in pl_module.estimators_][: pl_module.stage + 1]
            self.expected = sum(members)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            found.append((outputs["preds"], self.expected))
            assert torch.equal(outputs["target"], batch[1])

    fit(GradientBoostingClassifier(MLP, 3, optimizer=SGD, seed=0), some(), max_epochs=3, callbacks=[Watch()])
    assert len(found) == 12
    for preds, expected in found:
        torch.testing.assert_close(preds, expected, atol=1e-5, rtol=1e-4)


# --- soft gradient boosting


@pytest.mark.trap("ensembles: SoftGradientBoosting trains earlier members to make later targets small")
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_a_member_is_fitted_to_its_own_residual_alone(loss):
    x, y = (tensor[:20] for tensor in digits()[0].tensors)
    ensemble = SoftGradientBoostingClassifier(MLP, 3, shrinkage_rate=0.5, criterion=loss, vectorize=False, seed=0)
    ensemble.training_loss([x], y.expand(3, 20))[0].backward()
    scores = torch.zeros(20, 10)
    for member in ensemble.estimators_:
        found = [parameter.grad.clone() for parameter in member.parameters()]
        member.zero_grad()
        outputs = member(x)
        (outputs - negative_gradient(loss, scores, y)).square().mean().backward()
        for gradient, parameter in zip(found, member.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
        scores = scores + 0.5 * outputs.detach()
