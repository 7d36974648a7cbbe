"""Cross-validation of any LightningModule: out-of-fold predictions, scores, seeds."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_tricks.ensembles import VotingClassifier, cross_validate
from tests.ensembles.nets import LBFGS, MLP, digits
from tests.small import QUIET, cases

trainer = partial(Trainer, max_epochs=1, **QUIET)


class Line(LightningModule):
    def __init__(self, inputs=4):
        super().__init__()
        self.linear = nn.Linear(inputs, 1, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/mse", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), **LBFGS)


def _diabetes():
    x, y = load_diabetes(return_X_y=True)
    return (x[:, [2, 3, 4, 8]] * 20), ((y - y.mean()) / y.std())[:, None]


@pytest.mark.parametrize("folds", [5, list(KFold(3, shuffle=True, random_state=0).split(range(442)))])
def test_it_is_that_of_scikit_learn(folds):
    x, y = _diabetes()
    result = cross_validate(Line, (torch.tensor(x), torch.tensor(y)), trainer, folds, batch_size=442)
    expected = torch.tensor(cross_val_predict(LinearRegression(), x, y, cv=folds))
    torch.testing.assert_close(result.predictions, expected, rtol=0, atol=1e-4)
    errors = (result.predictions - torch.tensor(y)).square()
    by_fold = [float(errors[held_out].mean()) for _, held_out in result.folds]
    assert [fold["val/mse"] for fold in result.scores] == pytest.approx(by_fold)
    assert result.mean == {"val/mse": pytest.approx(np.mean(by_fold))}
    assert result.std == {"val/mse": pytest.approx(np.std(by_fold))}
    assert result.modules == []


class Counts(Line):
    """Notes the rows that it was trained on; predicts their numbers."""

    def __init__(self):
        super().__init__(1)
        self.seen, self.drawn = set(), torch.rand(()).item()

    def training_step(self, batch, batch_idx):
        self.seen.update(batch[0][:, 0].int().tolist())
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        assert not self.seen & {*batch[0][:, 0].int().tolist()}, "a row that it was trained on"
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Rows(Dataset):
    """Numbered rows, of which a third each is of one class; rows draw noise."""

    def __len__(self):
        return 31

    def __getitem__(self, index):
        torch.rand(1), np.random.rand(), random.random()
        return torch.tensor([float(index)], dtype=torch.float64), torch.tensor([index % 3], dtype=torch.float64)


@pytest.mark.parametrize("data", [Rows(), DataLoader(Rows(), 4, shuffle=True, drop_last=True, num_workers=0)])
def test_predictions_are_in_the_order_of_the_rows_and_nothing_else_changes(data):
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    result = cross_validate(Counts, data, trainer, cv=4, keep_modules=True)
    assert result.predictions.flatten().tolist() == list(range(31))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert len({module.drawn for module in result.modules}) == 4, "each fold has a seed of its own"
    drop_last = isinstance(data, DataLoader)
    for module, (train, _) in zip(result.modules, result.folds, strict=True):
        assert len(module.seen) == len(train) - (len(train) % 4 if drop_last else 0)


def test_a_fold_does_not_depend_on_the_folds_before_it():
    made = partial(VotingClassifier, MLP, 2, optimizer=("Adam", {"lr": 1e-2}))
    x, y = (tensor[:200] for tensor in digits()[0].tensors)
    first = cross_validate(made, (x, y), trainer, cv=3, seed=5)
    torch.manual_seed(99)
    again = cross_validate(made, (x, y), trainer, cv=3, seed=5)
    assert torch.equal(first.predictions, again.predictions)
    assert first.scores == again.scores
    other = cross_validate(made, (x, y), trainer, cv=3, seed=6)
    assert not torch.equal(first.predictions, other.predictions)
    folds = [first.folds[1], first.folds[0], first.folds[2]]
    moved = cross_validate(made, (x, y), trainer, cv=[(a.tolist(), b.tolist()) for a, b in folds], seed=5)
    assert torch.equal(moved.predictions[folds[2][1]], first.predictions[folds[2][1]])
    assert {"val/loss", "val/acc"} == set(first.mean)


def test_class_indices_are_stratified_and_the_loader_keeps_its_settings():
    x, y = load_breast_cancer(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32)[:90], torch.tensor(y)[:90])
    batches = []

    def collate(rows):
        batches.append(len(rows))
        return torch.utils.data.default_collate(rows)

    made = partial(VotingClassifier, nn.Linear, 2, {"in_features": 30, "out_features": 2})
    loader = DataLoader(data, 7, collate_fn=collate)
    result = cross_validate(made, loader, trainer, cv=3)
    expected = [test.tolist() for _, test in StratifiedKFold(3).split(x[:90], y[:90])]
    assert [held_out.tolist() for _, held_out in result.folds] == expected
    assert max(batches) == 7
    plain = cross_validate(made, loader, trainer, cv=3, stratified=False)
    assert [held_out.tolist() for _, held_out in plain.folds] == [test.tolist() for _, test in KFold(3).split(x[:90])]


class Silent(Counts):
    validation_step = LightningModule.validation_step


def test_a_module_without_validation_has_no_scores():
    result = cross_validate(Silent, Rows(), trainer, cv=2)
    assert (result.scores, result.mean, result.std) == ([{}, {}], {}, {})
    assert result.predictions.flatten().tolist() == list(range(31))


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


class NoTensor(Counts):
    def predict_step(self, batch, batch_idx):
        return [batch[0]]


class TooFew(Counts):
    def predict_step(self, batch, batch_idx):
        return batch[0][:1]


@cases(
    "arguments, error, words",
    ({"cv": "prefit"}, ValueError, 'cv="prefit" is for StackingClassifier'),
    ({"cv": [([0], [1]), ([1], [0])]}, ValueError, "29 rows are in no test part, such as row 2"),
    ({"data": Stream()}, TypeError, "data must be a data set with a length"),
    ({"data": DataLoader(Stream())}, ValueError, "Stream is an IterableDataset"),
    ({"data": (torch.zeros(3, 1), torch.zeros(4, 1))}, ValueError, "tensors must have one length, got 3, 4"),
    ({"data": DataLoader(Rows()), "batch_size": 3}, ValueError, "batch_size=3 is not used: data is a DataLoader"),
    ({"batch_size": 0}, ValueError, "batch_size must be a whole number >= 1, got 0"),
    ({"seed": -1}, ValueError, "seed must be an integer in"),
    ({"make_module": dict}, TypeError, "make_module must make a LightningModule, it made {}"),
    ({"trainer_factory": dict}, TypeError, "trainer_factory must make a Trainer, it made {}"),
    ({"make_module": NoTensor}, TypeError, "NoTensor.predict_step must return a tensor for each batch, got list"),
    ({"make_module": TooFew}, ValueError, "must return a row for each of the 8 held-out samples, got 1 rows"),
    (
        {"trainer_factory": partial(trainer, strategy="ddp_fork", devices=2)},
        ValueError,
        "trainer_factory made a Trainer of 2 devices: give one device",
    ),
)
def test_what_is_refused(arguments, error, words):
    given = {"make_module": Counts, "data": Rows(), "trainer_factory": trainer, "cv": 4, **arguments}
    state = torch.get_rng_state()
    with pytest.raises(error, match=words):
        cross_validate(**given)
    assert torch.equal(torch.get_rng_state(), state)
