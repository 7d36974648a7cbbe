"""Ensembles in real fits: what they learn, in which settings, at once or one after another, stopped and resumed."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import GradientClipping, MetricsMonitor, OptimizerSpec, ScheduleSpec
from lightning_tricks.ensembles import (
    BaggingClassifier,
    FusionClassifier,
    SnapshotEnsembleClassifier,
    SnapshotEnsembleRegressor,
    SoftGradientBoostingClassifier,
    VotingClassifier,
    VotingRegressor,
)
from lightning_tricks.ensembles.core.members import SequentialMembers
from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.gradient_clipping import AGC, adaptive_clip_grad_
from lightning_tricks.metrics import multiclass_metrics
from tests.ensembles.nets import (
    CNN,
    MLP,
    LitMLP,
    Stops,
    accuracy,
    diabetes,
    digits,
    few,
    fit,
    same,
    some,
    trained_alone,
    values,
)
from tests.small import QUIET, cases, real_fp16

# not every fit here needs a validation
pytestmark = [
    pytest.mark.oldest,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
]

ADAM = ("Adam", {"lr": 5e-3})


CONFIG = """
trainer: {max_epochs: 1, accelerator: cpu, logger: false}
model:
  class_path: lightning_tricks.ensembles.BaggingClassifier
  init_args:
    estimator: tests.ensembles.nets.MLP
    n_estimators: 3
    estimator_args: {hidden: 7}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.2}}
"""


def _unshuffled(count=64):
    return some(count, shuffle=False)


def test_attributes_are_set_as_those_of_every_module():
    ensemble = VotingClassifier(MLP, 2, seed=0)
    ensemble.note = "text"
    ensemble.note = None
    assert ensemble.note is None
    ensemble.note = nn.Linear(1, 1)
    assert "note" in dict(ensemble.named_children())
    with pytest.raises(TypeError, match="child module"):
        ensemble.note = "text"


@pytest.mark.parametrize("clips", ["the norm", "units"])
@pytest.mark.parametrize("vectorize", [True, False])
def test_each_member_is_trained_as_if_it_were_alone(vectorize, clips):
    train = _unshuffled()
    ensemble = VotingClassifier(MLP, 3, optimizer=("SGD", {"lr": 0.1}), vectorize=vectorize, seed=0)
    alone = [copy.deepcopy(ensemble.estimators_.member(index)) for index in range(3)]
    options = {"gradient_clip_val": 0.3} if clips == "the norm" else {"callbacks": [GradientClipping(method=AGC(0.01))]}
    fit(ensemble, train, max_epochs=2, **options)
    clip_, limit = (nn.utils.clip_grad_norm_, 0.3) if clips == "the norm" else (adaptive_clip_grad_, 0.01)
    for index, member in enumerate(alone):
        optimizer = torch.optim.SGD(member.parameters(), lr=0.1)
        expected = trained_alone(member, optimizer, train, 2, lambda parameters: clip_(parameters, limit))
        same(ensemble.estimators_.member(index).state_dict(), expected, atol=1e-5, rtol=1e-4)


def test_a_fused_optimizer_and_clipping_under_fp16_are_refused_in_words():
    def fused(parameters):
        return torch.optim.Adam(parameters, fused=True)

    ensemble = VotingClassifier(MLP, 2, optimizer=fused, seed=0)
    with pytest.raises(Exception, match=r"gradient_clip_val=1.0 with fp16 needs an optimizer that is not fused"):
        fit(ensemble, some(), plugins=real_fp16(), gradient_clip_val=1.0)


def test_a_fit_that_raises_leaves_nothing_installed():
    members = [LitMLP(), LitMLP()]
    ensemble = VotingClassifier(members, seed=0)
    trainer = Trainer(**QUIET, max_epochs=2, callbacks=[Stops(1)])
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.fit(ensemble, some())
    assert not any("log" in vars(member) for member in ensemble.estimators_)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    assert "on_exception" not in vars(trainer.strategy)


@pytest.mark.parametrize("stacked_first", [True, False])
@pytest.mark.parametrize("step", [2, 3, 5])  # of three an epoch
def test_a_run_is_resumed_in_the_layout_of_its_checkpoint(step, stacked_first, tmp_path):
    how = {"lr_scheduler": ScheduleSpec("warmup_cosine"), "seed": 0}
    first, second = (VotingClassifier(MLP, 2, vectorize=stacks, **how) for stacks in (stacked_first, not stacked_first))
    options = {"max_epochs": 3, "limit_train_batches": 3}
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    train = DataLoader(list(some().dataset), 16, shuffle=True)
    fit(first, train, callbacks=[saves], enable_checkpointing=True, **options)
    Trainer(**QUIET, **options).fit(second, train, ckpt_path=tmp_path / f"step={step}.ckpt")
    assert type(second.estimators_) is type(first.estimators_)
    same(values(first), values(second))


@pytest.mark.trap("ensembles: after fit the model is that of the last epoch, and nothing brings back the best")
@pytest.mark.trap("ensembles: evaluate(return_loss=True) applies the cross-entropy to probabilities")
def test_the_best_checkpoint_restores_the_best_ensemble(tmp_path):
    ensemble = VotingClassifier(MLP, 3, optimizer=("SGD", {"lr": 2.0}), seed=0)  # unsteady
    saves, (x, y) = ModelCheckpoint(tmp_path, monitor="val/loss"), some(320).dataset.tensors
    fit(ensemble, some(320), some(320, shuffle=False), max_epochs=9, callbacks=[saves], enable_checkpointing=True)
    best = VotingClassifier.load_from_checkpoint(saves.best_model_path, weights_only=True)
    found, last = (nn.functional.nll_loss(one.predict(x).log(), y).item() for one in (best, ensemble))
    assert saves.best_model_score.item() == pytest.approx(found, rel=1e-4)
    assert found < last


def test_a_checkpoint_says_what_the_loss_is(tmp_path):
    arguments = {"inputs": 10, "outputs": 2}
    ensemble = VotingRegressor(MLP, 2, arguments, criterion=nn.GaussianNLLLoss(eps=1e-4), seed=0)
    trainer = fit(ensemble, few(diabetes()[0], 64))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = VotingRegressor.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    x = diabetes()[1].tensors[0]
    assert torch.equal(loaded.predict_uncertainty(x).aleatoric, ensemble.predict_uncertainty(x).aleatoric)
    assert loaded.predict(x).shape == (100, 1)
    assert loaded.criterion.eps == 1e-4
    for kind, name in ((nn.CrossEntropyLoss, "weight"), (nn.BCEWithLogitsLoss, "pos_weight")):
        weighted = kind(**{name: torch.arange(1.0, 11)})
        if kind is nn.CrossEntropyLoss:
            trainer = fit(VotingClassifier(MLP, 2, criterion=weighted, seed=0), some())
        else:
            x, y = digits()[0].tensors
            data = TensorDataset(x[:64], nn.functional.one_hot(y[:64], 10).float())
            trainer = fit(VotingRegressor(MLP, 2, criterion=weighted, seed=0), DataLoader(data, 16, shuffle=True))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        loaded = type(trainer.model).load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
        assert torch.equal(getattr(loaded.criterion, name), getattr(weighted, name))
    for criterion in (nn.functional.cross_entropy, lambda o, t: o.mean()):
        trainer = fit(VotingClassifier(MLP, 2, criterion=criterion, seed=0), some())
        trainer.save_checkpoint(tmp_path / "b.ckpt")
        with pytest.raises(ValueError, match=r"is not a loss of torch.nn and is not saved: .*\(path, criterion=...\)"):
            VotingClassifier.load_from_checkpoint(tmp_path / "b.ckpt")
        loaded = VotingClassifier.load_from_checkpoint(tmp_path / "b.ckpt", criterion=criterion)
        assert torch.equal(loaded.predict(torch.ones(1, 64)), trainer.model.predict(torch.ones(1, 64)))


def _tanh_mlp(hidden, activation):
    return nn.Sequential(nn.Linear(64, hidden), activation(), nn.Linear(hidden, 10))


def test_a_checkpoint_says_numbers_of_numpy_and_weights_of_any_kind(tmp_path):
    x = digits()[1].tensors[0]
    for kind, arguments in (
        (VotingClassifier, {"weights": np.array([1.0, 3.0])}),
        (VotingClassifier, {"weights": torch.tensor([1.0, 3.0]), "estimator_args": {"hidden": np.int64(7)}}),
        (SoftGradientBoostingClassifier, {"shrinkage_rate": np.float32(0.25)}),
    ):
        ensemble = kind(MLP, n_estimators=2, seed=0, **arguments)
        fit(ensemble, some()).save_checkpoint(tmp_path / "a.ckpt")
        loaded = kind.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
        assert torch.equal(loaded.predict(x), ensemble.predict(x))


def test_a_checkpoint_does_not_build_members_without_the_arguments_that_it_lacks(tmp_path):
    arguments = {"hidden": 7, "activation": nn.Tanh}
    ensemble = VotingClassifier(_tanh_mlp, 2, arguments, seed=0)
    fit(ensemble, some()).save_checkpoint(tmp_path / "a.ckpt")
    words = r"estimator_args is not a plain value and was not saved: give it again, .*\(path, estimator_args=\.\.\.\)"
    for given in ({}, {"estimator": _tanh_mlp}):
        with pytest.raises(ValueError, match=words):
            VotingClassifier.load_from_checkpoint(tmp_path / "a.ckpt", **given)
    x = digits()[1].tensors[0]
    for given in ({"estimator": _tanh_mlp, "estimator_args": arguments}, {"estimator": list(ensemble.estimators_)}):
        loaded = VotingClassifier.load_from_checkpoint(tmp_path / "a.ckpt", **given)
        assert torch.equal(loaded.predict(x), ensemble.predict(x))


class _Poison:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_a_checkpoint_builds_nothing_else(tmp_path):
    path = tmp_path / "a.ckpt"
    fit(VotingClassifier(MLP, 2, seed=0), some()).save_checkpoint(path)
    own = torch.load(path, weights_only=True)
    of_cli = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}
    evil = {"class_path": "pathlib.Path.touch", "init_args": {}}
    for more, words in (
        ({**of_cli, "criterion": evil}, r"path, estimator=\.\.\., criterion=\.\.\.\).* criterion "),
        ({**of_cli, "estimator_args": {"hidden": evil}}, r"estimator_args=\.\.\."),
        ({"estimator": "os:system"}, "does not name an imported class of modules"),
        ({"estimator": ["victim.pt"], "estimator_args": None}, r"other files \('victim.pt'\), which are not read"),
        ({"n_estimators": _Poison()}, r"n_estimators \(a pathlib\S*Path.touch\)"),
    ):
        torch.save({**own, "hyper_parameters": {**own["hyper_parameters"], **more}}, path)
        with pytest.raises((ValueError, TypeError), match=words):
            VotingClassifier.load_from_checkpoint(path, weights_only=False)
    assert not Path("ran").exists()


def test_a_checkpoint_of_members_that_have_no_name_needs_them_again(tmp_path):
    trainer = fit(VotingClassifier(lambda: MLP(), 2, seed=0), some())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, estimator=Net\)"):
        VotingClassifier.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded = VotingClassifier.load_from_checkpoint(tmp_path / "a.ckpt", estimator=MLP)
    assert torch.equal(loaded.predict(torch.ones(1, 64)), trainer.model.predict(torch.ones(1, 64)))


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.trap("ensembles: ReduceLROnPlateau never lowers the LR with n_jobs > 1; LR == 0 is skipped")
def test_plateaus_lower_the_learning_rate(vectorize):
    ensemble = VotingClassifier(MLP, 2, vectorize=vectorize, seed=0)
    ensemble.set_optimizer("SGD", lr=0.0)
    ensemble.set_scheduler("ReduceLROnPlateau", patience=0, factor=0.5, threshold=0.99)
    for val in (None, _unshuffled()):
        trainer = fit(ensemble, some(), val, max_epochs=3)
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0
    ensemble.set_optimizer("SGD", lr=1e-5)
    trainer = fit(ensemble, some(), _unshuffled(), max_epochs=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 1e-5
    assert trainer.lr_scheduler_configs[0].monitor == "val/loss"


@cases(
    "optimizer, scheduler",
    (OptimizerSpec("AdamW", lr=1e-2, groups={"last.*": {"lr": 1e-3}}), ScheduleSpec("warmup_cosine")),
    ({"name": "SGD", "lr": 1e-2}, {"kind": "constant"}),
    (
        lambda parameters: torch.optim.RMSprop(parameters),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    ),
    ("NAdam", ("ExponentialLR", {"gamma": 0.5})),
    (("SGD", {"lr": 0.1, "weight_decay": 0.1}), ("StepLR", {"step_size": 1})),
    ids=["spec", "dict", "functions", "names", "names with options"],
)
def test_ways_to_choose_optimizer_and_schedule(optimizer, scheduler):
    trained = []
    for vectorize in (True, False):
        ensemble = VotingClassifier(MLP, 2, optimizer=optimizer, lr_scheduler=scheduler, vectorize=vectorize, seed=0)
        fit(ensemble, some(), max_epochs=2)
        trained.append(values(ensemble))
    same(*trained, atol=2e-3, rtol=2e-2)  # steps of Adam are as large where gradients are almost 0


def test_batch_norm_of_all_ranks_needs_the_layers_of_torch():
    net = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    # torch has it for GPUs only, and says so where it has put it in place of the layers
    with pytest.raises(Exception, match="SyncBatchNorm layers only work with GPU modules"):
        fit(VotingClassifier(net, 2), some(), strategy="ddp_fork", devices=1, sync_batchnorm=True)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_optimizers_that_look_at_whole_tensors_keep_the_members_apart(name, lightning_log):
    ensemble = VotingClassifier(MLP, 2, optimizer=name, seed=0)
    assert isinstance(ensemble.estimators_, SequentialMembers)
    fit(ensemble, some())
    reason = f"VotingClassifier: members run one after another: {name} does not treat each element"
    assert any(message.startswith(reason) for _, message in lightning_log)
    stacked = VotingClassifier(MLP, 2, seed=0)
    stacked.set_optimizer(name)
    assert isinstance(stacked.estimators_, SequentialMembers)


@pytest.mark.parametrize("optimizer", [None, ("SGD", {"lr": 0.1})])
def test_lightning_modules_train_by_their_own_step(optimizer, lightning_log):
    train = _unshuffled()
    ensemble = VotingClassifier(LitMLP, 2, optimizer=optimizer, seed=0)
    alone = copy.deepcopy(ensemble.estimators_.member(1))
    trainer = fit(ensemble, train, _unshuffled(), max_epochs=2)
    made = alone.configure_optimizers() if optimizer is None else torch.optim.SGD(alone.parameters(), lr=0.1)
    expected = trained_alone(alone, made, train, 2, label_smoothing=0.1)
    same(ensemble.estimators_.member(1).state_dict(), expected)
    assert {"member_0/smooth", "member_1/smooth", "train/loss", "val/acc"} <= trainer.callback_metrics.keys()
    assert any("LitMLP has its own training_step" in message for _, message in lightning_log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LitMLP, "configure_optimizers", lambda self: [made, made])
        if optimizer is None:
            with pytest.raises(Exception, match="must return one optimizer of the same type for each member, got list"):
                fit(ensemble, train)


def test_fusion_trains_lightning_modules_by_their_mean():
    ensembles = [
        FusionClassifier(LitMLP, 2, optimizer=ADAM, seed=0, vectorize=vectorize) for vectorize in (True, False)
    ]
    for ensemble in ensembles:
        fit(ensemble, _unshuffled())
    same(values(ensembles[0]), values(ensembles[1]), atol=1e-4, rtol=1e-3)
    x, y = _unshuffled().dataset.tensors
    before = FusionClassifier(LitMLP, 2, seed=0).predict(x)
    loss = nn.functional.nll_loss
    assert loss(ensembles[0].predict(x).log(), y) < loss(before.log(), y) - 0.05


def test_built_by_lightning_cli(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.setattr("sys.argv", ["train.py", "--config", str(tmp_path / "config.yaml")])
    cli = LightningCLI(
        Ensemble, subclass_mode_model=True, run=False, save_config_callback=None, seed_everything_default=False
    )
    ensemble = cli.model
    assert type(ensemble) is BaggingClassifier
    assert (ensemble.n_estimators, ensemble.estimators_[0].first.out_features) == (3, 7)
    optimizer = ensemble.optimizer([nn.Parameter(torch.zeros(2))])
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.SGD, 0.2)


def test_shared_batches_are_the_loaders():
    class Counts(VotingClassifier):
        def training_step(self, batch, batch_idx):
            assert len(batch[0]) == 16
            outputs = super().training_step(batch, batch_idx)
            assert outputs["preds"].shape == (32, 10)
            assert torch.equal(outputs["target"], batch[1].repeat(2))
            return outputs

    fit(Counts(MLP, 2, seed=0, shared_order=True), some())


def test_metrics_of_the_collection():
    monitor = MetricsMonitor(multiclass_metrics(10), log_plots=False)
    ensemble = VotingClassifier(MLP, 2, optimizer=ADAM, seed=0)
    trainer = fit(ensemble, some(), _unshuffled(), max_epochs=2, callbacks=[monitor, GradientClipping(1.0)])
    x, y = some().dataset.tensors
    assert trainer.callback_metrics["val/acc"].item() == pytest.approx(accuracy(ensemble.predict(x), y))
    assert {"train/loss", "train/acc", "val/f1", "grad_norm/pre_clip"} <= trainer.callback_metrics.keys()


@pytest.mark.parametrize("make", [MLP, CNN])
def test_snapshots_are_copies_at_the_ends_of_cycles(make):
    rates, working = [], []

    class Watched(SnapshotEnsembleClassifier):
        def on_train_batch_start(self, batch, batch_idx):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            working.append((self.n_members, values(self.working.member(0))))

    ensemble = Watched(make, 3, optimizer=("SGD", {"lr": 0.1}), seed=0)
    assert torch.equal(ensemble(torch.ones(2, 64)), ensemble.working.member(0)(torch.ones(2, 64)).softmax(-1))
    fit(ensemble, some(), max_epochs=6)  # 24 steps
    cycle = [0.1 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 8)).item()) for step in range(8)]
    assert rates == pytest.approx(cycle * 3)
    assert [count for count, _ in working] == [0] * 7 + [1] * 8 + [2] * 8 + [3]
    for index in range(3):  # buffers as well
        same(values(ensemble.estimators_.member(index)), working[8 * index + 7][1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [SnapshotEnsembleClassifier, SnapshotEnsembleRegressor])
def test_the_weights_are_those_of_the_snapshots_taken_so_far(kind):
    ensemble = kind(MLP, 3, weights=[1, 3, 4], n_outputs=10, seed=0)
    x, found = torch.ones(2, 64), []

    class Watches(Callback):
        @torch.no_grad()
        def on_train_epoch_end(self, trainer, pl_module):
            each = torch.stack([pl_module.estimators_.member(index)(x) for index in range(trainer.current_epoch + 1)])
            found.append((each.softmax(-1) if kind is SnapshotEnsembleClassifier else each, pl_module(x)))

    target = torch.eye(10)[digits()[0].tensors[1][:64]] if kind is SnapshotEnsembleRegressor else None
    train = some() if target is None else DataLoader(TensorDataset(digits()[0].tensors[0][:64], target), 16)
    fit(ensemble, train, max_epochs=3, callbacks=[Watches()])
    for (each, combined), weights in zip(found, ([1.0], [0.25, 0.75], [0.125, 0.375, 0.5]), strict=True):
        expected = sum(weight * own for weight, own in zip(weights, each, strict=True))
        torch.testing.assert_close(combined, expected)


def test_copies_of_weight_0_predict_until_another_one_is_there():
    ensemble = SnapshotEnsembleClassifier(MLP, 3, weights=[0, 1, 1], seed=0)
    x = digits()[1].tensors[0]
    taken = []
    for count in range(4):
        ensemble.load_state_dict({**ensemble.state_dict(), "taken": torch.tensor(count)})
        taken.append(ensemble.predict(x))
    first, second, third = (ensemble.estimators_[index](x).softmax(-1) for index in range(3))
    torch.testing.assert_close(taken[1], first)
    torch.testing.assert_close(taken[2], second)
    torch.testing.assert_close(taken[3], (second + third) / 2)
    torch.testing.assert_close(taken[0], ensemble.working.member(0)(x).softmax(-1))


def test_the_learning_rate_of_cycles_can_be_kept_within_limits():
    rates = []

    class Watched(SnapshotEnsembleRegressor):
        def on_train_batch_start(self, batch, batch_idx):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    arguments = {"inputs": 10, "outputs": 1}
    fit(Watched(MLP, 1, arguments, optimizer=("SGD", {"lr": 0.1}), lr_clip=(0.03, 0.08)), few(diabetes()[0], 320))
    assert (min(rates), max(rates)) == (0.03, 0.08)
    assert rates == sorted(rates, reverse=True)


@cases(
    "arguments, words",
    ({"max_epochs": 4}, r"3 cycles of equal length, and max_epochs=4 \(16 steps\) is not a multiple of 3"),
    ({"max_epochs": -1, "max_steps": 7}, r"7 steps is not a multiple of 3: set max_steps to a multiple of"),
    ({"max_epochs": -1}, "the run has no end"),
)
def test_cycles_that_do_not_divide_the_run(arguments, words):
    with pytest.raises(Exception, match=words):
        fit(SnapshotEnsembleClassifier(MLP, 3, seed=0), some(), **arguments)


def test_gaussian_members_predict_noise():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 1, generator=generator) * 2
    y = x + torch.randn(2000, 1, generator=generator) * (0.05 + 0.3 * (x > 1))
    options = {"criterion": nn.GaussianNLLLoss(), "optimizer": ("Adam", {"lr": 1e-2}), "seed": 0}
    ensemble, data = VotingRegressor(MLP, 3, {"inputs": 1, "outputs": 2}, **options), TensorDataset(x, y)
    trainer = fit(ensemble, DataLoader(data, 100, shuffle=True), DataLoader(data, 500), max_epochs=20)
    found = ensemble.predict_uncertainty(torch.tensor([[0.5], [1.5], [9.0]]))
    deviation = found.aleatoric.sqrt().flatten()
    assert deviation[0].item() == pytest.approx(0.05, abs=0.04)
    assert deviation[1].item() == pytest.approx(0.35, abs=0.06)
    assert found.epistemic[2] > 10 * found.epistemic[1]
    assert ensemble.n_outputs == 1
    assert ensemble(x).shape == (2000, 1)
    assert trainer.callback_metrics["val/loss"] < 0


@pytest.mark.parametrize("vectorize", [True, False])
def test_one_member(vectorize):
    ensemble, x = VotingClassifier(MLP, 1, vectorize=vectorize, seed=0), digits()[1].tensors[0]
    fit(ensemble, some(), max_epochs=2)
    torch.testing.assert_close(ensemble.predict(x), ensemble.estimators_[0](x).softmax(-1).detach())
    assert ensemble.predict_uncertainty(x).epistemic.abs().max() < 1e-6


def test_votes_and_weights_decide():
    ensemble = VotingClassifier([nn.Identity() for _ in range(3)], voting_strategy="hard", weights=[5, 1, 1])
    assert isinstance(ensemble, Ensemble)

    def outputs(*x):
        return torch.eye(3).unsqueeze(1)

    ensemble.estimators_.forward_shared = outputs
    assert ensemble(torch.ones(1, 3)).tolist() == [[1, 0, 0]]


def test_prediction_steps():
    ensemble = VotingClassifier(MLP, 2, seed=0)
    x, y = digits()[1].tensors
    trainer = Trainer(**QUIET)
    expected = ensemble.predict(x[:32])
    for dataset in (TensorDataset(x[:32]), TensorDataset(x[:32], y[:32]), x[:32].unbind()):
        found = torch.cat(trainer.predict(ensemble, DataLoader(dataset, batch_size=10)))
        torch.testing.assert_close(found, expected)
    assert torch.equal(ensemble.predict(x[:32].numpy()), expected)
