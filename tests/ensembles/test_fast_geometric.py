"""Fast geometric ensembles: learning rates and copies against closed formulas, and one optimizer from end to end."""

import copy

import pytest
import torch
from lightning.pytorch import Callback

from lightning_tricks import OptimizerSpec
from lightning_tricks.ensembles import FastGeometricClassifier, FastGeometricRegressor
from tests.ensembles.nets import CNN, MLP, digits, fit, same, some, trained_alone, values
from tests.small import cases

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class _Watch(Callback):
    """Notes the learning rates of each step."""

    def __init__(self):
        self.rates = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def _triangle(t, high, low):
    """The authors' learning rate at a share t of a cycle."""
    return high * (1 - 2 * t) + low * 2 * t if t < 0.5 else high * (2 * t - 1) + low * (2 - 2 * t)


@pytest.mark.parametrize("cycle", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [48, 64])  # 3 or 4 steps an epoch, so cycles of an odd number of steps as well
@pytest.mark.trap("ensembles: FastGeometric cycle=1 loops forever; odd cycles save at the wrong LR")
def test_rates_and_copies_are_those_of_the_formula(cycle, count):
    watch, after, per_epoch = _Watch(), [], count // 16

    class Watched(FastGeometricClassifier):
        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            after.append((self.trainer.global_step, self.n_members, values(self.working.member(0))))

    ensemble = Watched(
        CNN, 2, cycle=cycle, lr_1=0.05, lr_2=0.001, base_epochs=2, optimizer=("SGD", {"lr": 0.2}), seed=0
    )
    fit(ensemble, some(count), max_epochs=2 + 2 * cycle, callbacks=[watch])
    length = cycle * per_epoch
    expected = [0.2] * 2 * per_epoch + [_triangle(step / length, 0.05, 0.001) for step in range(length)] * 2
    made = len(watch.rates)
    assert [rate for (rate,) in watch.rates] == pytest.approx(expected[:made])
    lowest = [2 * per_epoch + number * length + -(-length // 2) for number in range(2)]  # steps made at the copies
    assert made == -(-lowest[-1] // per_epoch) * per_epoch, "the run ends after the epoch of the last copy"
    counts = [sum(step >= at for at in lowest) for step, _, _ in after]
    assert [members for _, members, _ in after] == counts
    for index, at in enumerate(lowest):
        copied, model = values(ensemble.estimators_.member(index)), after[at - 1][2]
        assert all(torch.equal(copied[name], model[name]) for name in model)
        rates = expected[at - -(-length // 2) : at - -(-length // 2) + length]
        before = rates[-(-length // 2) - 1]
        assert before <= sorted(rates)[1] + 1e-12, "the step before a copy is one of the two with the lowest rates"


def test_rates_follow_the_optimizers_and_groups_keep_their_proportions():
    watch = _Watch()
    ensemble = FastGeometricClassifier(MLP, 1, cycle=1, optimizer=("SGD", {"lr": 0.2}), seed=0)
    fit(ensemble, some(), max_epochs=1, callbacks=[watch])
    assert [rate for (rate,) in watch.rates] == pytest.approx([_triangle(s / 4, 0.1, 0.001) for s in range(4)])
    watch = _Watch()
    optimizer = OptimizerSpec("SGD", lr=0.1, groups={"last.*": {"lr": 0.02}})
    ensemble = FastGeometricClassifier(MLP, 1, cycle=2, lr_1=0.05, lr_2=0.01, optimizer=optimizer, seed=0)
    fit(ensemble, some(), max_epochs=3, callbacks=[watch])
    ratios = [sorted(max(rates) / rate for rate in set(rates)) for rates in watch.rates]
    assert all(found == pytest.approx([1, 5]) for found in ratios)
    assert [max(rates) for rates in watch.rates[4:]] == pytest.approx([_triangle(s / 8, 0.05, 0.01) for s in range(4)])


@pytest.mark.trap("ensembles: FastGeometric loses the momentum between the phases")
def test_the_momentum_is_kept():
    train, rates = some(shuffle=False), [0.1] * 8 + [_triangle(step / 8, 0.05, 0.001) for step in range(4)]
    options = {"cycle": 2, "lr_1": 0.05, "lr_2": 0.001, "optimizer": ("SGD", {"lr": 0.1, "momentum": 0.9}), "seed": 0}
    ensemble = FastGeometricClassifier(MLP, 1, **options)
    alone = copy.deepcopy(ensemble.working.member(0))
    fit(ensemble, train, max_epochs=4)
    optimizer = torch.optim.SGD(alone.parameters(), momentum=0.9)
    for rate, batch in zip(rates, [*train] * 3, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        trained_alone(alone, optimizer, [batch])
    same(values(ensemble.estimators_.member(0)), values(alone), atol=1e-5, rtol=1e-4)


@pytest.mark.trap("ensembles: FastGeometric takes softmax of the mean of logits, its authors average probabilities")
def test_a_pretrained_model_needs_no_base():
    model = MLP()
    before = copy.deepcopy(model)
    ensemble = FastGeometricClassifier([model], 2, cycle=2, base_epochs=0, optimizer=("SGD", {"lr": 1.0}), seed=0)
    x = digits()[1].tensors[0]
    assert torch.equal(ensemble.predict(x), before(x).softmax(-1).detach())
    fit(ensemble, some(), max_epochs=4)
    assert ensemble.n_members == 2
    outputs = ensemble.member_outputs(x).detach()
    torch.testing.assert_close(ensemble.predict(x), outputs.softmax(-1).mean(0))
    assert (ensemble.predict(x) - outputs.mean(0).softmax(-1)).abs().max() > 1e-4


def test_after_the_last_copy_half_a_cycle_may_be_left_out():
    whole, short = (
        FastGeometricClassifier(MLP, 2, cycle=4, base_epochs=1, optimizer=("SGD", {"lr": 0.1}), seed=0)
        for _ in range(2)
    )
    fit(whole, some(), max_epochs=9)
    fit(short, some(), max_epochs=7)
    assert short.n_members == 2
    same(values(whole.estimators_), values(short.estimators_), rtol=0, atol=0)


@cases(
    "arguments, options, words",
    ({"base_epochs": 2}, {"max_epochs": 7}, r"does not match max_epochs=7 and max_steps=-1: set max_epochs=6"),
    ({}, {"max_epochs": -1, "max_steps": 9}, r"does not match .* max_steps=9"),
    ({"lr_1": 1e-5, "lr_2": 1e-4}, {"max_epochs": 4}, "lr_2=0.0001 is the lowest learning rate of a cycle, and is"),
)
def test_runs_that_do_not_hold_the_cycles(arguments, options, words):
    with pytest.raises(Exception, match=words):
        fit(FastGeometricClassifier(MLP, 2, cycle=2, **arguments, seed=0), some(), **options)


@cases(
    "arguments, words",
    ({"cycle": 0}, "cycle must be a whole number >= 1, got 0"),
    ({"base_epochs": -1}, "base_epochs must be a whole number >= 0, got -1"),
    ({"lr_1": 0}, "lr_1 must be a number > 0, got 0"),
    ({"lr_2": -1}, "lr_2 must be a number > 0, got -1"),
)
def test_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        FastGeometricRegressor(MLP, 2, **arguments)
