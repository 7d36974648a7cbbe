"""What is wrong is said early, with the value and the remedy."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_tricks import OptimizerSpec
from lightning_tricks.ensembles import (
    FastGeometricClassifier,
    FusionClassifier,
    GradientBoostingClassifier,
    SnapshotEnsembleClassifier,
    SoftGradientBoostingClassifier,
    SoftGradientBoostingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from tests.ensembles.nets import MLP, accuracy, digits, few, fit
from tests.small import cases

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@cases(
    "arguments, error, words",
    ({"n_estimators": 0}, ValueError, "n_estimators must be a whole number >= 1, got 0"),
    ({"n_estimators": 2.0}, TypeError, "n_estimators must be a whole number >= 1, got 2.0"),
    ({"n_outputs": 0}, ValueError, "n_outputs must be a whole number >= 1, got 0"),
    ({"seed": -1}, ValueError, "seed must be a whole number >= 0, got -1"),
    ({"voting_strategy": "sotf"}, ValueError, "voting_strategy must be one of soft, hard, got 'sotf'. Did"),
    ({"vectorize": "yes"}, ValueError, "vectorize must be True, False or \"auto\", got 'yes'"),
    ({"weights": [1]}, ValueError, r"weights must be one number for each of the 2 members, got \[1\]"),
    ({"weights": [1, -1]}, ValueError, r"weights must be finite, none below 0 and not all 0, got \[1, -1\]"),
    ({"optimizer": "Adma"}, ValueError, "optimizer must be one of .*, got 'Adma'. Did you mean 'Adamax'"),
    ({"optimizer": 3}, TypeError, "optimizer must be OptimizerSpec\\(...\\), a dict of its arguments, a function"),
    ({"lr_scheduler": ("StepRL", {})}, ValueError, "got 'StepRL'. Did you mean 'StepLR'"),
    ({"criterion": 3}, TypeError, "criterion must be a function of outputs and targets, got 3"),
    ({"criterion": "MSELos"}, ValueError, "criterion must be one of .*, got 'MSELos'. Did you mean 'MSELoss'"),
    ({"estimator": None}, ValueError, "estimator must be given, as it is not saved"),
    ({"estimator": [MLP(), MLP()], "n_estimators": 3}, ValueError, "n_estimators=3, but estimator holds 2 members"),
)
def test_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        VotingClassifier(**{"estimator": MLP, "n_estimators": 2, **arguments})


@pytest.mark.parametrize("limits", [(0.1,), (0.2, 0.1), (-1, 1)])
def test_limits_of_the_learning_rate(limits):
    with pytest.raises(ValueError, match="lr_clip must be"):
        SnapshotEnsembleClassifier(MLP, 2, lr_clip=limits)


def test_snapshots_are_of_one_model():
    with pytest.raises(ValueError, match="SnapshotEnsembleClassifier trains one model, got a list of 2"):
        SnapshotEnsembleClassifier([MLP(), MLP()], 2)
    with pytest.warns(UserWarning, match=r"sets the learning rate in cycles: set_scheduler\('StepLR'\) has no effect"):
        SnapshotEnsembleClassifier(MLP, 2).set_scheduler("StepLR", step_size=1)


def _loader(x, y, **arguments):
    return DataLoader(TensorDataset(x, y), 4, **arguments)


@cases(
    "kind",
    *(partial(kind, vectorize=how) for kind in (VotingClassifier, FusionClassifier) for how in (True, False)),
    GradientBoostingClassifier,
    SoftGradientBoostingClassifier,
)
@pytest.mark.parametrize("late", [False, True])
def test_classes_that_there_are_not(kind, late):
    y = torch.arange(16) % 10
    y[15 if late else 0] = 12
    with pytest.raises(ValueError, match="train: class 12 is not one of the 10 classes 0 to 9, the outputs of the"):
        fit(kind(MLP, 2), _loader(torch.rand(16, 64), y), max_epochs=2)


@cases(
    "outputs, target, words",
    ((1,), (), r"train: targets of shape \(4,\) do not fit members' outputs of shape \(4, 1\) \(y.unsqueeze\(1\)"),
    ((2,), (1,), r"train: targets of shape \(4, 1\) do not fit members' outputs of shape \(4, 2\)\."),
    ((), (1,), r"train: targets of shape \(4, 1\) do not fit members' outputs of shape \(4,\)"),
)
@pytest.mark.trap("ensembles: regression targets (N,) against outputs (N, 1) are broadcast")
def test_targets_that_broadcasting_would_spread(outputs, target, words):
    member = nn.Sequential(nn.Linear(3, *outputs or (1,)), *([] if outputs else [nn.Flatten(0)]))
    with pytest.raises(ValueError, match=words):
        fit(VotingRegressor(member, 2), _loader(torch.rand(16, 3), torch.rand(16, *target)))


def test_a_regressor_has_no_votes():
    with pytest.raises(ValueError, match="'hard' is for classifiers, and VotingRegressor averages numbers: leave it"):
        VotingRegressor(MLP, 2, voting_strategy="hard")


def test_outputs_and_targets_without_columns_fit_each_other():
    member = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    ensemble = VotingRegressor(member, 2)
    x, y = torch.rand(16, 3), torch.rand(16)
    trainer = fit(ensemble, _loader(x, y), _loader(x, y))
    assert ensemble.predict(x).shape == (16, 1)
    expected = (ensemble.predict(x).squeeze(1) - y).square().mean().item()
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(expected, rel=1e-4)


@cases(
    "member, words",
    (nn.Linear(64, 1), "members return 1 output for each sample; a classifier needs one for each class"),
    (nn.Sequential(nn.Linear(64, 64), nn.Unflatten(1, (8, 8))), r"members must return outputs \(B, n_outputs\)"),
)
def test_outputs_that_are_none_of_a_classifier(member, words):
    with pytest.raises(ValueError, match=words):
        fit(VotingClassifier(member, 2), few(digits()[0], 32))


def test_another_number_of_outputs():
    with pytest.raises(ValueError, match="n_outputs=7, but members return 10 columns"):
        VotingClassifier(MLP, 2, n_outputs=7)(torch.rand(2, 64))
    assert VotingClassifier(MLP, 2, n_outputs=10)(torch.rand(2, 64)).shape == (2, 10)


def test_targets_of_columns():
    with pytest.raises(ValueError, match=r"train: targets must be class indices \(B,\), got \(4, 1\)"):
        fit(VotingClassifier(MLP, 2), _loader(torch.rand(16, 64), torch.ones(16, 1, dtype=torch.long)))


def test_probabilities_are_targets_too():
    x, y = torch.rand(16, 64), torch.rand(16, 10).softmax(-1)
    trainer = fit(VotingClassifier(MLP, 2), _loader(x, y), _loader(x, y))
    assert trainer.callback_metrics["val/loss"].isfinite()


@pytest.mark.parametrize("row", [torch.rand(64), {"x": torch.rand(64)}, ["a"]])
def test_batches_that_are_none(row):
    with pytest.raises(TypeError, match=r"a batch must be \(x, y\) or \(x1, x2, ..., y\) of tensors, got"):
        fit(VotingClassifier(MLP, 2), DataLoader([row] * 8, 4, shuffle=True))


def test_collated_batches_that_mix_samples():
    def pack(samples):
        return torch.cat([x for x, _ in samples]).view(1, -1), torch.stack([y for _, y in samples])

    data = [(torch.rand(64), torch.tensor(index % 10)) for index in range(8)]
    loader = DataLoader(data, 4, shuffle=True, collate_fn=pack)
    with pytest.raises(ValueError, match="not the same number for each of 2 members: collate_fn mixes samples"):
        fit(VotingClassifier(MLP, 2), loader)


def test_an_empty_loader():
    with pytest.raises(ValueError, match=r"VotingClassifier has nothing to train with: loader 0 has no batches"):
        fit(VotingClassifier(MLP, 2), _loader(torch.rand(0, 64), torch.rand(0), shuffle=False))
    with pytest.raises(ValueError, match="loader 0 has no batches"):
        fit(VotingClassifier(MLP, 2), _loader(torch.rand(3, 64), torch.zeros(3), shuffle=True, drop_last=True))


def test_nothing_to_train():
    members = [MLP().requires_grad_(False) for _ in range(2)]
    with pytest.raises(ValueError, match=r"no trainable parameters \(requires_grad=True\)"):
        fit(VotingClassifier(members), few(digits()[0], 32))
    with pytest.raises(ValueError, match=r"pattern 'nothing.*' matches none"):
        fit(VotingClassifier(MLP, 2, optimizer=OptimizerSpec(groups={"nothing.*": {"lr": 1.0}})), few(digits()[0], 32))


def test_batches_that_are_none_to_predict():
    with pytest.raises(TypeError, match=r"a batch to predict must be x, \(x, y\) or \(x1, x2, ..., y\), got dict"):
        VotingClassifier(MLP, 2).predict_step({"x": torch.rand(4, 64)}, 0)
    for predict in (VotingClassifier(MLP, 2).predict, GradientBoostingClassifier(MLP, 2).predict_uncertainty):
        with pytest.raises(TypeError, match=r"got a DataLoader: .* trainer.predict\(ensemble, loader\)"):
            predict(few(digits()[0], 32))


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(few(digits()[0], 64).dataset)


@pytest.mark.parametrize("kind", [SnapshotEnsembleClassifier, FastGeometricClassifier])
def test_cycles_on_a_stream_take_the_remedy_of_their_error(kind):
    with pytest.raises(MisconfigurationException, match=r"limit_train_batches=\.\.\., the number of batches of an"):
        fit(kind(MLP, 2, seed=0), DataLoader(_Stream(), 16), max_epochs=8)
    fit(ensemble := kind(MLP, 2, seed=0), DataLoader(_Stream(), 16), max_epochs=8, limit_train_batches=4)
    assert ensemble.n_members == 2


class _Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(ignore_index=255)

    def forward(self, scores, target):
        return self.loss(scores, target)


IGNORING = [nn.CrossEntropyLoss(ignore_index=255), _Wrapped(), partial(nn.functional.cross_entropy, ignore_index=255)]


@pytest.mark.parametrize("criterion", IGNORING, ids=["module", "wrapped", "function"])
@pytest.mark.parametrize("kind", [VotingClassifier, GradientBoostingClassifier, SoftGradientBoostingClassifier])
def test_rows_that_are_ignored_and_labels_of_any_whole_numbers(kind, criterion):
    x, y = (tensor[:48] for tensor in digits()[0].tensors)
    ignored = y.where(torch.arange(48) % 3 > 0, 255)
    ignored[:16] = 255  # a batch of nothing else
    loader = DataLoader(TensorDataset(x, ignored.byte()), 16)
    ensemble = kind(MLP, 2, criterion=criterion, seed=0)
    trainer = fit(ensemble, DataLoader(TensorDataset(x, y.byte()), 16), loader, max_epochs=4)
    counted = ignored != 255
    probabilities = ensemble.predict(x)[counted]
    expected = accuracy(probabilities, y[counted]), nn.functional.nll_loss(probabilities.log(), y[counted]).item()
    share, loss = ensemble.evaluate(loader, return_loss=True)
    logged = [trainer.callback_metrics[key].item() for key in ("val/acc", "val/loss")]
    assert [share / 100, loss] == pytest.approx(expected, rel=1e-4)
    assert logged == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("use_reduction_sum", [False, True])
@pytest.mark.parametrize("kind", [GradientBoostingClassifier, SoftGradientBoostingClassifier])
def test_boosted_members_are_not_fitted_to_ignored_rows(kind, use_reduction_sum):
    x, y = (tensor[:48] for tensor in digits()[0].tensors)
    ignored, scores = torch.arange(48) % 3 == 0, []
    ignored[:16] = True  # a batch of nothing else
    for values in (x, x.where(~ignored.unsqueeze(1), -x)):
        ensemble = kind(MLP, 2, use_reduction_sum=use_reduction_sum, seed=0)
        fit(ensemble, DataLoader(TensorDataset(values, y.where(~ignored, -100)), 16), max_epochs=2)
        scores.append(ensemble.predict(x))
    assert torch.equal(*scores)
    assert scores[0].isfinite().all()


@pytest.mark.parametrize("kind", [GradientBoostingClassifier, SnapshotEnsembleClassifier, FastGeometricClassifier])
def test_lazy_layers_have_a_shape_before_members_are_frozen_or_copied(kind):
    lazy = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(10))
    with pytest.raises(ValueError, match=r"estimator(\[0\])? has lazy layers, which have no shape yet: run it once"):
        kind(lazy, 2)
    lazy(torch.rand(1, 64))
    kind(lazy, 2)


def test_a_loss_is_no_class_and_its_name_is_checked_when_it_is_set():
    with pytest.raises(TypeError, match=r"criterion must be a loss, not its class: give CrossEntropyLoss\(\), got"):
        VotingClassifier(MLP, 2, criterion=nn.CrossEntropyLoss)
    ensemble = VotingClassifier(MLP, 2)
    ensemble.set_criterion("MultiMarginLoss")
    assert isinstance(ensemble.criterion, nn.MultiMarginLoss)
    boosted = SoftGradientBoostingRegressor(MLP, 2)
    with pytest.raises(ValueError, match="needs a variance, which a sum of members does not give"):
        boosted.set_criterion("GaussianNLLLoss")
