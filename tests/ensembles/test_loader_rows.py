"""Which rows each member is trained on: every kind of sampler, and everything that reads a loader's rows.

The truth is what each member's `forward` was given: a row's input is its number.
"""

import re
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_tricks import AutoResume, ensembles
from lightning_tricks.ensembles import BaggingRegressor, StackingRegressor, VotingRegressor, cross_validate
from tests.ensembles.nets import Stops, fit
from tests.small import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

SIZE, BATCH, EPOCHS = 40, 8, 2
TRAINER = partial(Trainer, **QUIET, max_epochs=1)
PART = list(range(1, SIZE, 2))
ALL = list(range(SIZE))
DATA = TensorDataset(torch.arange(float(SIZE)).unsqueeze(1), torch.arange(float(SIZE)).unsqueeze(1) % 7)
WEIGHTS = [0.0 if row not in PART else 9.0 if row == 1 else 1.0 for row in ALL]


class OneByOne(Dataset):
    """The same data, not in memory; also for a sampler that says more than the number of a row."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return DATA[index[0] if isinstance(index, tuple) else index]


class Stream(IterableDataset):
    def __iter__(self):
        return (DATA[row] for row in PART)


class Listed:
    """A sampler of the user's: some rows in the order that a function gives."""

    def __init__(self, order, size=20):
        self.order, self.size, self.epoch = order, size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        yield from self.order(self)


class WithEpoch(Listed):
    def set_epoch(self, epoch):
        self.epoch = epoch


class WithNumpy(Listed):
    def __init__(self):
        super().__init__(lambda own: own.generator.permutation(PART))
        self.generator = np.random.default_rng(0)


class Endless(Listed):
    __len__ = None


def seeded():
    return torch.Generator().manual_seed(3)


def loader(sampler=None, data=DATA, **arguments):
    return DataLoader(data, BATCH, **{"sampler": sampler, **arguments})


# what the loader is -> (how it is made, the rows that an epoch has, once each or drawn)
ONCE = {
    "shuffle": (partial(loader, shuffle=True), ALL),
    "in order": (loader, ALL),
    "not in memory": (lambda: loader(data=OneByOne(), shuffle=True), ALL),
    "generator": (lambda: loader(shuffle=True, generator=seeded()), ALL),
    "some at random": (lambda: loader(RandomSampler(range(20)), data=OneByOne()), ALL[:20]),
    "some in order": (lambda: loader(SequentialSampler(range(20))), ALL[:20]),
    "subset": (lambda: loader(SubsetRandomSampler(PART)), PART),
    "subset, seeded": (lambda: loader(SubsetRandomSampler(PART, seeded()), data=OneByOne()), PART),
    "list": (lambda: loader(PART[::-1]), PART),
    "own, by torch": (lambda: loader(Listed(lambda own: [PART[i] for i in torch.randperm(len(PART))])), PART),
    "own, by numpy": (lambda: loader(WithNumpy()), PART),
    "batch sampler": (lambda: DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(PART), 8, False)), PART),
}
DRAWN = {
    "weighted": (lambda: loader(WeightedRandomSampler(WEIGHTS, 24)), PART),
    "weighted, once": (lambda: loader(WeightedRandomSampler(WEIGHTS, 16, replacement=False)), PART),
    "replacement": (lambda: loader(RandomSampler(PART, replacement=True, num_samples=32)), ALL[: len(PART)]),
    "by epoch": (lambda: loader(WithEpoch(lambda own: PART[own.epoch :: 2], 10)), PART),
    "drop_last": (lambda: DataLoader(DATA, 12, shuffle=True, drop_last=True), ALL),
}
WORKERS = {"workers": (lambda: loader(data=OneByOne(), shuffle=True, num_workers=1, persistent_workers=True), ALL)}
SHARED = {
    "batches": (lambda: DataLoader(DATA, batch_sampler=[PART[:8], PART[8:]]), "list makes the batches itself"),
    "no length": (lambda: loader(Endless(lambda own: PART)), "Endless has no length"),
    "pairs": (
        lambda: loader(Listed(lambda own: [(row, 1) for row in PART]), data=OneByOne()),
        r"Listed yields \(1, 1\)",
    ),
    "stream": (lambda: DataLoader(Stream(), 8), "Stream is an IterableDataset"),
}


class Row(nn.Linear):
    """A member that keeps the numbers of the rows that it is trained on."""

    def __init__(self):
        super().__init__(1, 1)
        self.seen = []

    def forward(self, x):
        if self.training:
            self.seen += x.detach()[:, 0].round().int().tolist()
        return super().forward(x / SIZE)


def rows_of_members(kind, given, n=3, epochs=EPOCHS, **arguments):
    ensemble = kind(Row, n, vectorize=False, seed=0, **arguments)
    fit(ensemble, given, max_epochs=epochs)
    seen = [member.seen for member in ensemble.estimators_]
    assert len({len(rows) for rows in seen}) == 1
    return [torch.tensor(rows).view(epochs, -1).tolist() for rows in seen]


@pytest.mark.parametrize("name", ONCE | DRAWN)
def test_voting_members_see_what_the_sampler_yields(name):
    made, rows = (ONCE | DRAWN)[name]
    seen = rows_of_members(VotingRegressor, made())
    for member in seen:
        for epoch in member:
            assert sorted(epoch) == rows if name in ONCE else set(epoch) <= set(rows)
    fixed = {"in order", "some in order", "list", "by epoch"}
    assert len({tuple(epoch) for member in seen for epoch in member}) == (
        6 if name not in fixed else 2 if name == "by epoch" else 1
    )


@pytest.mark.trap("ensembles: bagging draws a bootstrap index per member, once")
@pytest.mark.parametrize("name", ONCE | DRAWN)
def test_a_bootstrap_is_drawn_from_what_the_sampler_yields(name):
    made, rows = (ONCE | DRAWN)[name]
    seen = rows_of_members(BaggingRegressor, made())
    for first, second in seen:
        assert set(first + second) <= set(rows)
        assert name == "drop_last" or sorted(first) == sorted(second), "drawn once"
    assert len({tuple(sorted(first)) for first, _ in seen}) == 3
    if name in ONCE:
        assert all(len(first) == len(rows) for first, _ in seen)
        assert 0.5 < np.mean([len(set(first)) / len(rows) for first, _ in seen]) < 0.76  # about 1 - 1/e


def test_the_weights_of_a_sampler_apply_to_its_rows():
    sampler = WeightedRandomSampler(WEIGHTS, 1000)
    for first, _ in rows_of_members(BaggingRegressor, loader(sampler)):
        count = Counter(first)
        assert set(count) == set(PART)
        expected = 1000 * 9 / (9 + len(PART) - 1)  # and a standard deviation of 15
        assert abs(count[1] - expected) < 60
        assert max(count[row] for row in PART[1:]) < 70


@pytest.mark.parametrize("name", SHARED)
def test_loaders_whose_batches_members_share(name, lightning_log):
    made, words = SHARED[name]
    ensemble = VotingRegressor(Row, 2, vectorize=False, seed=0)
    fit(ensemble, made())
    assert [sorted(member.seen) for member in ensemble.estimators_] == [PART, PART]
    assert any(re.search(f"VotingRegressor: members share the batches: {words}", said) for _, said in lightning_log)
    with pytest.raises(MisconfigurationException, match=f"{words}.*use Voting instead"):
        fit(BaggingRegressor(Row, 2), made())
    with pytest.raises(MisconfigurationException, match=f"folds need a DataLoader.*{words}"):
        fit(StackingRegressor([Row(), Row()]), made())
    with pytest.raises(ValueError, match=f"folds need a DataLoader.*{words}"):
        cross_validate(partial(VotingRegressor, Row, 1), made(), TRAINER)


OTHERS = {
    "Fusion": {},
    "SnapshotEnsemble": {},
    "FastGeometric": {"cycle": 1},
    "AdversarialTraining": {"epsilon": 1e-6},
    "GradientBoosting": {},
    "SoftGradientBoosting": {},
}


@pytest.mark.parametrize("name", ["batch sampler", "weighted"])
@pytest.mark.parametrize("kind", OTHERS)
def test_no_other_ensemble_sees_other_rows(kind, name):
    made, rows = (ONCE | DRAWN)[name]
    ensemble = getattr(ensembles, f"{kind}Regressor")(Row, 2, seed=0, **OTHERS[kind])
    fit(ensemble, made(), max_epochs=2)
    seen = [set(part.seen) for part in ensemble.modules() if isinstance(part, Row) and part.seen]
    assert seen
    assert all(member <= set(rows) for member in seen)
    assert name not in ONCE or set(rows) in seen


@pytest.mark.parametrize("name", ["some in order", "subset", "own, by numpy", "weighted", "by epoch", "batch sampler"])
def test_folds_of_a_sampler_of_ones_own_are_refused(name):
    made, words = (ONCE | DRAWN)[name][0], r"a (\w*Sampler|With\w+) chooses rows: give a Subset of them"
    with pytest.raises(MisconfigurationException, match=f"folds need a DataLoader with shuffle=.* and {words}"):
        fit(StackingRegressor([Row(), Row()]), made())
    with pytest.raises(ValueError, match=words):
        cross_validate(partial(VotingRegressor, Row, 1), made(), TRAINER)


def test_a_distributed_sampler_gives_a_rank_its_part():
    for rank in range(2):
        sampler = DistributedSampler(DATA, 2, rank, seed=5)
        own = [rows_of_members(kind, loader(sampler)) for kind in (VotingRegressor, BaggingRegressor)]
        assert all(len(epoch) == SIZE // 2 for kind in own for member in kind for epoch in member)
    with pytest.raises(MisconfigurationException, match="a DistributedSampler chooses rows"):
        fit(StackingRegressor([Row(), Row()]), loader(sampler))


def test_bagging_refuses_shared_batches():
    with pytest.raises(MisconfigurationException, match=r"BaggingRegressor\(shared_order=True\): members that share"):
        fit(BaggingRegressor(Row, 2, shared_order=True), loader(shuffle=True))


def test_a_sampler_of_another_length_than_it_says():
    with pytest.raises(ValueError, match=r"Listed has given 20 rows in an epoch, and its len\(\) is 21: let __len__"):
        fit(VotingRegressor(Row, 2), loader(Listed(lambda own: PART, 21)))


class Reported(VotingRegressor):
    """Writes what this rank's members have seen into a folder."""

    def on_train_end(self):
        rows = [member.seen for member in self.estimators_]
        torch.save(rows, f"{self.trainer.default_root_dir}/{self.global_rank}.pt")


class ReportedBagging(Reported, BaggingRegressor):
    """The same of bagging."""


@pytest.mark.parametrize("kind", [Reported, ReportedBagging])
@pytest.mark.parametrize("name", ["subset", "own, by torch"])
def test_two_ranks_share_out_what_the_sampler_yields(kind, name, tmp_path):
    ensemble = kind(Row, 2, vectorize=False, seed=0)
    fit(ensemble, ONCE[name][0](), strategy="ddp_fork", devices=2, default_root_dir=tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = kind(Row, 2, vectorize=False, seed=0)
    fit(alone, ONCE[name][0](), default_root_dir=tmp_path)
    for member, *ranks in zip(alone.estimators_, first, second, strict=True):
        assert [len(rows) for rows in ranks] == [len(PART) // 2] * 2
        assert sorted(ranks[0] + ranks[1]) == sorted(member.seen)


@pytest.mark.parametrize("name", ["subset, seeded", "own, by torch", "weighted", "workers"])
@pytest.mark.parametrize("kind", [VotingRegressor, BaggingRegressor])
def test_a_run_that_was_stopped_in_an_epoch_goes_on_with_the_same_rows(kind, name, tmp_path):
    made, _ = (ONCE | DRAWN | WORKERS)[name]
    whole, first, second = (kind(Row, 2, vectorize=False, seed=0) for _ in range(3))
    fit(whole, made(), max_epochs=3)
    callbacks = [AutoResume(tmp_path, every_n_train_steps=1), Stops(len(made()) + 2)]  # in the second epoch
    with pytest.raises(RuntimeError, match="stopped"):
        fit(first, made(), max_epochs=3, callbacks=callbacks)
    fit(second, made(), max_epochs=3, callbacks=[AutoResume(tmp_path)])
    for expected, member in zip(whole.estimators_, second.estimators_, strict=True):
        rest = len(expected.seen) - len(expected.seen) // 3 - 2 * BATCH  # of the second epoch and the third
        assert member.seen[-rest:] == expected.seen[-rest:]
        assert torch.equal(member.weight, expected.weight)
