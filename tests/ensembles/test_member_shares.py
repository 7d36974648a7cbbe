"""Members that ranks share out: the same members as in one process, in checkpoints as well."""

import math
import os
import signal

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_tricks import AutoResume, ExponentialMovingAverage, GradientClipping, SpikeGuard
from lightning_tricks.ensembles import (
    AdversarialTrainingClassifier,
    BaggingClassifier,
    NeuralForestClassifier,
    VotingClassifier,
)
from tests.ensembles.nets import CNN, MLP, LitMLP, digits, few, fit, values
from tests.small import QUIET, real_fp16

# What Lightning says of few workers, and of ModelCheckpoint that is not given again
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (".*does not have many workers", ".*callbacks used to create")
]
ADAM = ("Adam", {"lr": 1e-2})
SHARDED = {"members": "sharded"}
ONE_BY_ONE = {"vectorize": False}


def ranks(count):
    return {"strategy": "ddp_fork", "devices": count} if count > 1 else {}


def loaders(data=digits, count=200):
    return few(data()[0], count), DataLoader(data()[1], 64)


def two_groups(parameters):
    return torch.optim.SGD([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}], lr=0.5)


class Counts(MLP):
    """A member with a state beside its tensors."""

    batches = 0

    def forward(self, x):
        self.batches += self.training
        return super().forward(x)

    def get_extra_state(self):
        return torch.tensor(self.batches)

    def set_extra_state(self, state):
        self.batches = int(state)


def with_a_frozen_member(**how):
    ensemble = VotingClassifier(MLP, 3, optimizer=ADAM, seed=1, **how)
    ensemble.estimators_[0].requires_grad_(False)  # all that the first of two ranks has
    return ensemble


FAMILIES = {
    "a state beside tensors": lambda **how: VotingClassifier(Counts, 3, optimizer=ADAM, seed=1, **how),
    "a frozen member": with_a_frozen_member,
    "convolutions with BatchNorm": lambda **how: VotingClassifier(CNN, 5, optimizer=ADAM, seed=1, **how),
    "members with steps": lambda **how: VotingClassifier(LitMLP, 5, seed=1, **how),
    "bootstrap samples": lambda **how: BaggingClassifier(MLP, 3, optimizer=ADAM, seed=1, **how),
    "a shared order": lambda **how: VotingClassifier(MLP, 3, optimizer="Adagrad", shared_order=True, seed=1, **how),
    "adversarial samples": lambda **how: AdversarialTrainingClassifier(MLP, 3, optimizer=ADAM, seed=1, **how),
    "trees": lambda **how: NeuralForestClassifier(3, 3, n_outputs=10, optimizer=ADAM, seed=1, **how),
    "given members": lambda **how: VotingClassifier([MLP(), MLP(hidden=16), MLP()], optimizer=ADAM, **how),
    "an optimizer by a function": lambda **how: VotingClassifier(MLP, 3, seed=1, optimizer=two_groups, **how),
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", FAMILIES)
def test_members_are_bit_for_bit_those_of_one_process(name):
    how = {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    torch.manual_seed(0)
    alone = FAMILIES[name](**ONE_BY_ONE)
    torch.manual_seed(0)
    shared = FAMILIES[name](**SHARDED)
    trainers = fit(alone, *loaders(), **how), fit(shared, *loaders(), **how, **ranks(2))
    expected = values(alone)
    assert all(torch.equal(value, expected[key]) for key, value in values(shared).items())
    logged = [trainer.callback_metrics for trainer in trainers]
    assert logged[0].keys() == logged[1].keys()
    for key, value in logged[0].items():
        assert value.item() == pytest.approx(logged[1][key].item(), rel=1e-5), key


class Differs(Callback):
    """What is apart while training, and what is not in a validation."""

    def setup(self, trainer, pl_module, stage):
        for member in pl_module.estimators_:
            member.shift.fill_(trainer.global_rank)

    def on_train_batch_end(self, trainer, pl_module, *args):
        has_gradients = [any(p.grad is not None for p in member.parameters()) for member in pl_module.estimators_]
        assert has_gradients == [index in pl_module.own_members for index in range(5)]

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:  # for a checkpoint that is saved after the fit
            assert {*trainer.optimizers[0].state} == {*pl_module.parameters()}

    def on_validation_epoch_start(self, trainer, pl_module):
        mean = trainer.strategy.reduce(weights := nn.utils.parameters_to_vector(pl_module.parameters()))
        assert torch.equal(mean, weights)


class Shifted(CNN):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))


def test_a_rank_has_gradients_of_its_members_and_in_validations_the_values_of_all():
    ensemble = VotingClassifier(Shifted, 5, optimizer=ADAM, **SHARDED)  # of seeds of the ranks' own
    before = values(ensemble)
    fit(ensemble, *loaders(), callbacks=[Differs()], **ranks(2))
    weights = [key for key in before if key.endswith("weight")]
    assert not any(torch.equal(before[key], value) for key, value in values(ensemble).items() if key in weights)
    assert not any(member.shift for member in ensemble.estimators_), "buffers begin with those of rank zero"


def saved(folder):
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


@pytest.mark.oldest
@pytest.mark.parametrize("optimizer", [ADAM, "Adagrad"])
def test_a_checkpoint_is_that_of_one_process_and_resumes_on_any_number_of_ranks(optimizer, tmp_path):
    schedule = ("ExponentialLR", {"gamma": 0.5})

    def made(**how):
        return VotingClassifier(CNN, 3, optimizer=optimizer, lr_scheduler=schedule, seed=1, **how)

    runs = {"one": (ONE_BY_ONE, 1), "two": (SHARDED, 2)}
    for name, (how, count) in runs.items():
        options = {"callbacks": [saved(tmp_path / name)], "enable_checkpointing": True}
        fit(expected := made(**how), *loaders(), max_epochs=2, **options, **ranks(count))
    one, two = (torch.load(tmp_path / name / "epoch=0.ckpt") for name in runs)
    torch.testing.assert_close(one["state_dict"], two["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(one["optimizer_states"], two["optimizer_states"], rtol=0, atol=0)
    for name, how, count in [("one", SHARDED, 2), ("two", ONE_BY_ONE, 1), ("two", SHARDED, 3), ("two", SHARDED, 1)]:
        ensemble = made(**how)
        trainer = Trainer(max_epochs=2, **QUIET, **ranks(count))
        trainer.fit(ensemble, *loaders(), ckpt_path=tmp_path / name / "epoch=0.ckpt")
        torch.testing.assert_close(values(ensemble), values(expected), rtol=0, atol=0)
    loaded = VotingClassifier.load_from_checkpoint(tmp_path / "two" / "epoch=1.ckpt", estimator=CNN)
    assert loaded.members == "sharded"
    x = digits()[1].tensors[0]
    assert torch.equal(loaded.predict(x), expected.predict(x))


def test_a_checkpoint_of_members_that_ran_at_once_is_refused(tmp_path):
    options = {"callbacks": [saved(tmp_path)], "enable_checkpointing": True}
    fit(VotingClassifier(MLP, 3, optimizer=ADAM), *loaders(), **options)
    trainer, ensemble = Trainer(max_epochs=2, **QUIET, **ranks(2)), VotingClassifier(MLP, 3, optimizer=ADAM, **SHARDED)
    with pytest.raises(ProcessRaisedException, match=r'of the checkpoint ran at once: .*members="replicated"'):
        trainer.fit(ensemble, *loaders(), ckpt_path=tmp_path / "epoch=0.ckpt")


class Spikes(LitMLP):
    def training_step(self, batch, batch_idx):
        result = super().training_step(batch, batch_idx)
        return {**result, "loss": result["loss"] * (math.nan if batch_idx == 3 else 1)}


@pytest.mark.filterwarnings("ignore:SpikeGuard")
def test_what_spike_guard_leaves_out_is_in_no_mean():
    logged = []
    for how, count in [(ONE_BY_ONE, 1), (SHARDED, 2)]:
        ensemble = VotingClassifier(Spikes, 3, seed=1, **how)
        trainer = fit(ensemble, *loaders(), callbacks=[SpikeGuard()], **ranks(count))
        logged.append({key: value.item() for key, value in trainer.callback_metrics.items()})
    assert math.isfinite(logged[0]["train/loss"])
    assert logged[0] == pytest.approx(logged[1])


class Kill(Callback):
    """Kills the process of the last rank after a step."""

    training_arguments = ()  # it is there once

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:AutoResume. the run had")
def test_auto_resume_goes_on_in_the_middle_of_an_epoch(before, after, workers, tmp_path):
    def run(folder, count, *callbacks):
        ensemble = VotingClassifier(LitMLP, 3, seed=1, **SHARDED)
        train, val = few(digits()[0], 200, num_workers=workers), DataLoader(digits()[1], 64)
        callbacks = [AutoResume(tmp_path / folder, every_n_train_steps=4), *callbacks]
        fit(ensemble, train, val, max_epochs=2, callbacks=callbacks, **ranks(count))
        return values(ensemble)

    with pytest.raises(ProcessExitedException):
        run("killed", before, Kill(19))
    torch.testing.assert_close(run("killed", after), run("undisturbed", 1), rtol=0, atol=0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(digits()[0])


def _without_replicas():
    return DataLoader(digits()[0], 16, sampler=DistributedSampler(digits()[0], 2, 0))


REFUSED = {
    "2 ranks are more than 1 members": {"n_estimators": 1},
    "sync_batchnorm=True": {"trainer": {"sync_batchnorm": True}},
    "averages weights of members that other ranks train": {"callback": lambda: StochasticWeightAveraging(1e-2)},
    "ExponentialMovingAverage averages weights of members": {"callback": lambda: ExponentialMovingAverage(0.9)},
    "Trainer.gradient_clip_val=.... clips each": {"callback": lambda: GradientClipping(1.0)},
    "LBFGS": {"optimizer": "LBFGS"},
    "IterableDataset": {"loader": lambda: DataLoader(Stream(), 16)},
    "a DistributedSampler divides samples among ranks": {"loader": _without_replicas},
    "overfit_batches": {"trainer": {"overfit_batches": 2}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_mix_ranks_is_refused(words):
    case = REFUSED[words]
    ensemble = VotingClassifier(MLP, case.get("n_estimators", 3), optimizer=case.get("optimizer"), **SHARDED)
    callbacks = [case["callback"]()] if "callback" in case else []
    loader = case.get("loader", lambda: loaders()[0])()
    with pytest.raises((ProcessRaisedException, MisconfigurationException), match=rf'"sharded"\): .*{words}'):
        fit(ensemble, loader, loaders()[1], callbacks=callbacks, **case.get("trainer", {}), **ranks(2))


class Shared(MLP):
    first_of_all = nn.Linear(64, 32)

    def __init__(self):
        super().__init__()
        self.first = self.first_of_all


def test_members_that_share_a_parameter_are_refused():
    with pytest.raises(ProcessRaisedException, match="members share a parameter"):
        fit(VotingClassifier([Shared(), Shared()], **SHARDED), *loaders(), **ranks(2))


def test_fp16_refuses_a_rank_that_has_frozen_members_alone():
    with pytest.raises(ProcessRaisedException, match=r"fp16 scales gradients, and .*: use bf16-mixed"):
        fit(with_a_frozen_member(**SHARDED), *loaders(), plugins=[real_fp16()], **ranks(2))


class Vector(LitMLP):
    def training_step(self, batch, batch_idx):
        self.log("vector", torch.ones(2))
        return super().training_step(batch, batch_idx)


def test_what_is_no_number_is_not_logged():
    with pytest.raises(ProcessRaisedException, match=r"a member logs 'vector' as Tensor, and .* single numbers"):
        fit(VotingClassifier(Vector, 2, **SHARDED), *loaders(), **ranks(2))


def test_bad_arguments():
    with pytest.raises(ValueError, match="members must be one of replicated, sharded, got 'split'"):
        VotingClassifier(MLP, 3, members="split")
    with pytest.raises(ValueError, match='vectorize=True needs members="replicated"'):
        VotingClassifier(MLP, 3, vectorize=True, **SHARDED)
