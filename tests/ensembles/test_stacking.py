"""Stacking: equal to scikit-learn's with the same folds, no row predicted by a member that saw it, and exact resume."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sklearn import linear_model
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.ensemble import StackingClassifier as SklearnClassifier
from sklearn.ensemble import StackingRegressor as SklearnRegressor
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from lightning_tricks import AutoResume, ScheduleSpec
from lightning_tricks.ensembles import StackingClassifier, StackingRegressor
from lightning_tricks.ensembles.core.folds import make_folds
from lightning_tricks.ensembles.meta_learner import REGRESSORS, LinearFinal, check_linear_model, fit_linear_model
from tests.ensembles.nets import CNN, LBFGS, MLP, LitMLP, Stops, accuracy, digits, few, fit, same, trained_alone, values
from tests.small import QUIET, cases, real_fp16

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    "ignore:lbfgs failed to converge",
)
ADAM = ("Adam", {"lr": 1e-2})


def even(count, batch_size=8):
    """As many digits of each class."""
    x, y = digits()[0].tensors
    number = torch.stack([(y == label).cumsum(0) for label in range(10)])[y, torch.arange(len(y))]
    rows = (number * 10 + y).argsort()[:count]
    return DataLoader(TensorDataset(x[rows], y[rows]), batch_size, shuffle=True)


# --- folds


def test_folds_are_those_of_scikit_learn():
    y = torch.tensor([0, 0, 1, 2, 2, 2, 0, 1, 1, 2, 0, 1])
    shuffled = StratifiedKFold(3, shuffle=True, random_state=1)
    for cv, targets, oracle in ((3, y.bfloat16(), KFold(3)), (shuffled, y, shuffled)):
        expected = [(train.tolist(), test.tolist()) for train, test in oracle.split(y, y)]
        ours = make_folds(cv, len(y), targets, stratified=cv is shuffled)
        assert [(train.tolist(), test.tolist()) for train, test in ours] == expected


# --- scikit-learn is the oracle


class Columns(nn.Module):
    """A linear model of some columns."""

    def __init__(self, columns, outputs):
        super().__init__()
        self.columns = columns
        self.linear = nn.Linear(len(columns), outputs, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x[:, self.columns])


def _pick(columns):
    return FunctionTransformer(lambda x: x[:, columns])


def _standard(load, columns, rows=None):
    x, y = load(return_X_y=True)
    x = x[:, columns]
    order = np.random.RandomState(0).permutation(len(x))[:rows]
    x, y = x[order], y[order]
    return (x - x.mean(0)) / x.std(0), y


LEAST_SQUARES = ("LBFGS", LBFGS)
PARTS = [[0, 1, 2], [1, 2, 3], [0, 3]]


def _fit_whole(ensemble, x, y, **arguments):
    """Fit with one batch of all rows, in double precision."""
    loader = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), len(x), shuffle=True)
    return fit(ensemble, loader, max_epochs=3, precision="64-true", **arguments)


@pytest.mark.trap("ensembles: in binary problems the first probability column is dropped")
@pytest.mark.trap("ensembles: `passthrough=True` appends X after the predictions")
@pytest.mark.parametrize("passthrough", [False, True])
@cases(
    "load, columns, method",
    (load_breast_cancer, [1, 4, 8, 9], "auto"),
    (load_breast_cancer, [1, 4, 8, 9], "decision_function"),
    (load_wine, [1, 2, 4, 7], "auto"),
    (load_wine, [1, 2, 4, 7], "predict"),
)
def test_a_classifier_is_that_of_scikit_learn(load, columns, method, passthrough):
    x, y = _standard(load, columns)
    parts = [
        (str(part), make_pipeline(_pick(part), linear_model.LogisticRegression(C=np.inf, max_iter=5000, tol=1e-10)))
        for part in PARTS
    ]
    final = linear_model.LogisticRegression(max_iter=5000, tol=1e-10)
    oracle = SklearnClassifier(parts, final, passthrough=passthrough, stack_method=method).fit(x, y)
    ours = StackingClassifier(
        [(str(part), Columns(part, y.max() + 1)) for part in PARTS],
        final,
        passthrough=passthrough,
        stack_method=method,
        optimizer=LEAST_SQUARES,
    )
    _fit_whole(ours, x, y)
    expected = torch.tensor(oracle.predict_proba(x))
    torch.testing.assert_close(ours.predict(torch.tensor(x)), expected, rtol=0, atol=1e-4)
    assert list(ours.named_estimators_) == [str(part) for part in PARTS]


@cases(
    "final, passthrough",
    (None, False),
    (None, True),
    (linear_model.Ridge(3.0), True),
    (linear_model.LinearRegression(), False),  # with the inputs, which are collinear, it has no unique solution
)
def test_a_regressor_is_that_of_scikit_learn(final, passthrough):
    x, y = _standard(load_diabetes, [2, 3, 4, 8])
    y = (y - y.mean()) / y.std()
    parts = [(str(part), make_pipeline(_pick(part), linear_model.LinearRegression())) for part in PARTS]
    folds = list(KFold(4, shuffle=True, random_state=0).split(x))
    oracle = SklearnRegressor(parts, final, cv=folds, passthrough=passthrough).fit(x, y)
    ours = StackingRegressor([Columns(part, 1) for part in PARTS], final, folds, passthrough, optimizer=LEAST_SQUARES)
    _fit_whole(ours, x, y[:, None])
    expected = torch.tensor(oracle.predict(x))[:, None]
    torch.testing.assert_close(ours.predict(torch.tensor(x)), expected, rtol=0, atol=1e-4)
    coef = torch.tensor(oracle.final_estimator_.coef_)
    torch.testing.assert_close(ours.final_estimator_.coef[0], coef, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", REGRESSORS)
@pytest.mark.filterwarnings("ignore")
def test_every_linear_model_predicts_as_scikit_learn(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64) + 3 + 0.1 * x[:, 0].square()
    model = check_linear_model(getattr(linear_model, name)(), False)
    if "random_state" in model.get_params():
        model.set_params(random_state=0)
    final = LinearFinal()
    final.set_values(*fit_linear_model(model, x, y[:, None]))
    torch.testing.assert_close(final(x)[:, 0], torch.tensor(model.fit(x.numpy(), y.numpy()).predict(x.numpy())))


@pytest.mark.parametrize("n_classes", [2, 3])
def test_classes_without_samples_have_no_probability(n_classes):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(60) % n_classes + 1
    model = linear_model.LogisticRegression()
    final = LinearFinal()
    final.set_values(*fit_linear_model(model, x, y, 5))
    probabilities = final(x).softmax(-1)
    expected = torch.tensor(model.fit(x.numpy(), y.numpy()).predict_proba(x.numpy()))
    torch.testing.assert_close(probabilities[:, 1 : n_classes + 1], expected)
    assert probabilities[:, [0, 4]].sum() == 0


# --- the folds of a fit


class Watch(Callback):
    """Notes the rows of each batch, by the stage."""

    def __init__(self):
        self.trained, self.lengths = {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.trained.setdefault(pl_module.stage, []).append(batch[0][:, 0])

    def on_train_epoch_start(self, trainer, pl_module):
        self.lengths.append(trainer.num_training_batches)


class Memory(nn.Module):
    """Predicts 1 for the rows that it was trained on, and 0 for others; the first column of a row is its number."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("seen", torch.zeros(size, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        rows = x[:, 0].long()
        if self.training:
            self.seen[rows] = 1
        return self.seen[rows] + 0 * self.bias


@pytest.mark.trap("ensembles: `estimators_` are fitted on all data, `final_estimator_` on `cross_val_predict`")
@pytest.mark.parametrize("vectorize", [False, "auto"])
def test_no_row_is_predicted_by_a_member_that_has_seen_it(vectorize):
    size = 23
    data = TensorDataset(torch.arange(size).float()[:, None], torch.ones(size, 1))
    gathered = []

    class Watched(StackingRegressor):
        def member_features(self, outputs):
            if not self.training and not self._final_is_fitted:
                gathered.append((self.stage, outputs.clone()))
            return super().member_features(outputs)

    watch = Watch()
    ensemble = Watched([Memory(size), Memory(size)], linear_model.LinearRegression(), cv=4, vectorize=vectorize)
    fit(ensemble, DataLoader(data, 5, shuffle=True), max_epochs=2, callbacks=[watch])
    assert sum(outputs.shape[1] for _, outputs in gathered) == size
    assert all(outputs.sum() == 0 for _, outputs in gathered), "the first time that a member sees them"
    folds = list(KFold(4).split(range(size)))
    for stage, (train, _) in enumerate(folds):
        assert sorted(torch.cat(watch.trained[stage]).tolist()) == sorted([*train, *train] * 2)
    assert watch.lengths == [4] * 8 + [5] * 2
    assert (ensemble.member_outputs(data.tensors[0]) == 1).all(), "the refit has seen all of them"


def test_epochs_per_fold_and_the_schedule_of_a_stage():
    rates, epochs = [], []

    class Rates(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            epochs.append((pl_module.stage, trainer.current_epoch))

    ensemble = StackingClassifier(
        MLP,
        nn.Linear(20, 10),
        2,
        n_estimators=2,
        epochs_per_fold=1,
        optimizer=("SGD", {"lr": 1.0}),
        lr_scheduler=ScheduleSpec("warmup_linear", warmup=0),
    )
    trainer = fit(ensemble, few(digits()[0], 64), max_epochs=2, callbacks=[Rates()])
    assert sorted(set(epochs)) == [(0, 0), (1, 1), (2, 2), (2, 3), (3, 4), (3, 5)]
    fold, long = [1, 0.5], [1 - step / 8 for step in range(8)]
    assert rates == pytest.approx(fold * 2 + long * 2)
    assert (trainer.max_epochs, trainer.current_epoch) == (2, 6), "the Trainer is as before"


@pytest.mark.parametrize("final", [None, partial(nn.Linear, 20, 10)])
def test_a_second_fit_begins_with_the_same_weights(final):
    ensemble = StackingClassifier(CNN, final, n_estimators=2, cv=2, optimizer=ADAM, seed=0)
    loader = few(digits()[0], 60, generator=None)
    fit(ensemble, loader, max_epochs=1)
    first = values(ensemble)
    fit(ensemble, loader, max_epochs=1)
    same(values(ensemble), first, rtol=0, atol=0)


def test_the_refit_begins_with_the_initial_weights():
    refitted = []
    for cv in (2, 3):
        ensemble = StackingClassifier(CNN, n_estimators=2, cv=cv, optimizer=ADAM, seed=0)
        fit(ensemble, few(digits()[0], 60, shuffle=False), max_epochs=2)
        refitted.append(values(ensemble.estimators_))
    torch.testing.assert_close(refitted[0], refitted[1], rtol=0, atol=0)


def test_held_out_rows_draw_no_numbers_of_the_run():
    data = even(40).dataset

    class Noisy(Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            x, y = data[index]
            return x + 0.1 * torch.randn(64), y

    class Watched(StackingClassifier):
        def on_stage_start(self):
            before = torch.get_rng_state()
            super().on_stage_start()
            assert torch.equal(before, torch.get_rng_state())

    fit(Watched(MLP, n_estimators=2, cv=2, seed=0), DataLoader(Noisy(), 8, shuffle=True), max_epochs=1)


# --- meta-learners


def test_prefit_members_are_left_alone():
    train, test = digits()
    members = [MLP(), nn.Sequential(nn.Linear(64, 10))]
    for member in members:
        trained_alone(member, torch.optim.Adam(member.parameters(), lr=1e-2), [train[:300]], 30)
    before = copy.deepcopy([member.state_dict() for member in members])
    ensemble = StackingClassifier(members, linear_model.LogisticRegression(max_iter=1000), cv="prefit")
    trainer = fit(ensemble, few(train, 1297, 64), max_epochs=7)
    assert (trainer.global_step, trainer.current_epoch, trainer.max_epochs) == (0, 0, 7)
    for member, state in zip(members, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in member.state_dict().items())
    x, y = train.tensors
    features = torch.cat([member(x).softmax(-1) for member in members], 1).detach().double().numpy()
    oracle = linear_model.LogisticRegression(max_iter=1000).fit(features, y)
    seen = torch.cat([member(test.tensors[0]).softmax(-1) for member in members], 1).detach().double().numpy()
    expected = torch.tensor(oracle.predict_proba(seen)).float()
    torch.testing.assert_close(ensemble.predict(test.tensors[0]), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(ensemble.member_outputs(test.tensors[0])[1], members[1](test.tensors[0]))


@pytest.mark.parametrize("cv", [3, "prefit"])
@pytest.mark.parametrize("members", ["plain", "LightningModule"])
def test_a_torch_module_as_final_estimator(cv, members):
    stages = []

    class Grads(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            final = all(p.grad is not None for p in pl_module.final_estimator_.parameters())
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            own = {id(p) for p in pl_module.final_estimator_.parameters()}
            stages.append((pl_module.stage, final, trained == own, pl_module.estimators_.training))

    train, test = digits()
    made = [LitMLP(), LitMLP()] if members == "LightningModule" else [MLP(), nn.Sequential(nn.Linear(64, 10))]
    final = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    ensemble = StackingClassifier(made, final, cv, optimizer=ADAM, seed=0)
    before = values(final)
    fit(ensemble, few(train, 400, 40), few(test, 100, shuffle=False), max_epochs=6, callbacks=[Grads()])
    last = 4 if cv == 3 else 0
    assert {one[0] for one in stages} == set(range(last + 1))
    assert all(is_final == own == (stage == last) for stage, is_final, own, _ in stages if stage != last or is_final)
    assert any(not torch.equal(value, before[name]) for name, value in values(final).items())
    x = test.tensors[0]
    with torch.no_grad():
        columns = torch.cat([member(x).softmax(-1) for member in ensemble.eval().estimators_], 1)
        torch.testing.assert_close(ensemble.predict(x), final(columns).softmax(-1))
    assert all(parameter.requires_grad for parameter in ensemble.parameters())
    assert final[1].num_batches_tracked == 6 * 10, "nothing but its training changes it"
    if cv == 3:
        assert accuracy(ensemble.predict(x), test.tensors[1]) > 0.75


def test_heterogeneous_members_with_passthrough_are_better_than_chance_and_logged():
    train, test = digits()
    seen = {}

    class Logged(Callback):
        def on_validation_end(self, trainer, pl_module):
            seen[trainer.current_epoch] = (pl_module.stage, float(trainer.callback_metrics["val/acc"]))

    ensemble = StackingClassifier([("cnn", CNN()), ("mlp", MLP())], cv=2, passthrough=True, optimizer=ADAM, seed=0)
    fit(ensemble, few(train, 600), few(test, 500, 500, shuffle=False), max_epochs=3, callbacks=[Logged()])
    assert [stage for stage, _ in seen.values()] == [0] * 3 + [1] * 3 + [2] * 3
    final = accuracy(ensemble.predict(test.tensors[0]), test.tensors[1])
    assert seen[8][1] == pytest.approx(final)
    assert final > 0.9
    with torch.no_grad():
        uncertainty = ensemble.predict_uncertainty(test.tensors[0])
    torch.testing.assert_close(uncertainty.mean, ensemble.predict(test.tensors[0]))
    torch.testing.assert_close(uncertainty.total, uncertainty.aleatoric + uncertainty.epistemic)


def test_regression_of_several_targets_and_its_uncertainty():
    x = torch.randn(80, 5, generator=torch.Generator().manual_seed(0))
    y = torch.stack([x.sum(1), x[:, 0] - x[:, 1]], 1)
    ensemble = StackingRegressor(
        nn.Linear, n_estimators=3, estimator_args={"in_features": 5, "out_features": 2}, cv=4, seed=0
    )
    fit(ensemble, DataLoader(TensorDataset(x, y), 16, shuffle=True), max_epochs=5)
    assert ensemble.predict(x).sub(y).square().mean() < 0.05, "six columns of members give the linear function"
    uncertainty = ensemble.predict_uncertainty(x)
    torch.testing.assert_close(uncertainty.mean, ensemble.predict(x))
    torch.testing.assert_close(uncertainty.epistemic, ensemble.member_outputs(x).var(0, unbiased=False).detach())


# --- precision, ranks


@pytest.mark.parametrize("final", [None, "torch"])
def test_real_fp16(final):
    final = nn.Linear(20, 10) if final else linear_model.LogisticRegression(max_iter=1000)
    ensemble = StackingClassifier(MLP, final, 2, n_estimators=2, optimizer=ADAM, seed=0)
    fit(ensemble, few(digits()[0], 500), max_epochs=5, plugins=[real_fp16()], gradient_clip_val=None)
    assert accuracy(ensemble.predict(digits()[1].tensors[0]), digits()[1].tensors[1]) > 0.7
    assert all(value.isfinite().all() for value in values(ensemble).values())


@pytest.mark.parametrize("cv", [2, "prefit"])
@pytest.mark.parametrize("final", [None, partial(nn.Linear, 20, 10)])
def test_half_precision(final, cv):
    ensemble = StackingClassifier([MLP(), MLP()], final, cv, optimizer=("SGD", {"lr": 0.1}), seed=0)
    fit(ensemble, even(60), few(digits()[1], 60, shuffle=False), max_epochs=1, precision="bf16-true")
    x = digits()[1].tensors[0]
    torch.testing.assert_close(ensemble.predict(x).sum(1).float(), torch.ones(len(x)), rtol=0, atol=0.02)


class PerRank(MLP):
    """Predicts other numbers on the second rank."""

    def forward(self, x):
        return super().forward(x) * (1 if self.training else 1 + 0.1 * torch.distributed.get_rank())


class Save(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        checkpoint = {}
        pl_module.on_save_checkpoint(checkpoint)
        features = checkpoint["stacking"]["features"]
        torch.save([values(pl_module), features], self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.parametrize("final", ["linear", "torch"])
@pytest.mark.parametrize("net", [CNN, PerRank])
def test_two_ranks_agree(tmp_path, net, final):
    final = nn.Linear(20, 10) if final == "torch" else linear_model.LogisticRegression(max_iter=1000)
    ensemble = StackingClassifier(net, final, 2, n_estimators=2, optimizer=ADAM, seed=0)
    arguments = {"strategy": "ddp_fork", "devices": 2, "callbacks": [Save(tmp_path)], "max_epochs": 2}
    fit(ensemble, few(digits()[0], 203), **arguments)
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    (first, features), (second, others) = saved
    assert torch.equal(features, others), "those of rank 0"
    assert features.shape == (203, 20)
    assert (features.sum(1) - 2).abs().max() < 1e-5, "each row has the probabilities of two members"
    assert first["final_fitted"] == 1
    for name, value in first.items():
        if "running" not in name:
            assert torch.equal(value, second[name]), name
    if isinstance(ensemble.final_estimator_, LinearFinal) and net is not PerRank:
        assert accuracy(ensemble.predict(digits()[1].tensors[0]), digits()[1].tensors[1]) > 0.25


# --- checkpoints


@cases("final, schedule, after_validation", (None, None, True), ("torch", ScheduleSpec("warmup_cosine"), False))
def test_a_run_is_resumed_at_the_end_of_each_epoch(tmp_path, final, schedule, after_validation):
    """Also if the members of the second process have other initial weights."""

    def made():
        module = nn.Linear(20, 10) if final else None
        return StackingClassifier([MLP(), MLP()], module, 2, optimizer=ADAM, lr_scheduler=schedule, seed=0)

    whole = made()
    saves = [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=not after_validation)]
    data = even(30), few(digits()[1], 20, shuffle=False)
    fit(whole, *data, max_epochs=2, callbacks=saves, enable_checkpointing=True)
    for epoch in range(7 if final else 5):
        resumed = made()
        Trainer(**QUIET, max_epochs=2).fit(resumed, *data, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        same(values(resumed), values(whole), rtol=0, atol=0)


@pytest.mark.filterwarnings("error:AutoResume")
@pytest.mark.parametrize(("step", "torch_final"), [(14, False), (27, False), (48, True)])
def test_a_run_that_was_stopped_in_a_fold_resumes_bit_for_bit(tmp_path, step, torch_final):
    """Also if the members of the second run have other initial weights."""

    def run(folder, initial, *callbacks):
        torch.manual_seed(initial)
        members = [MLP(), nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.3), nn.Linear(16, 10))]
        torch.manual_seed(9)  # for the weights of the meta-learner and dropout
        final = nn.Linear(20, 10) if torch_final else None
        ensemble = StackingClassifier(members, final, 3, optimizer=("AdamW", {"lr": 1e-2}), seed=0)
        resume = AutoResume(tmp_path / folder, every_n_train_steps=2)
        fit(ensemble, even(50), max_epochs=2, callbacks=[resume, *callbacks])
        return values(ensemble)

    with pytest.raises(RuntimeError, match="stopped"):
        run("stopped", 0, Stops(step))
    same(run("stopped", 1), run("whole", 0), rtol=0, atol=0)


@pytest.mark.parametrize("final", [None, nn.Linear])
def test_a_checkpoint_is_loaded_without_scikit_learn(tmp_path, final, monkeypatch):
    built = nn.Linear(20, 10) if final else None
    ensemble = StackingClassifier(MLP, built, 2, n_estimators=2, optimizer=ADAM, seed=0)
    trainer = fit(ensemble, few(digits()[0], 100), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert saved["stacking"] == {"epochs": [2] * (4 if final else 3)}, "nothing of the data"
    monkeypatch.setitem(__import__("sys").modules, "sklearn.linear_model", None)
    given = {"final_estimator": nn.Linear(20, 10)} if final else {}
    loaded = StackingClassifier.load_from_checkpoint(tmp_path / "saved.ckpt", estimators=MLP, **given)
    x = digits()[1].tensors[0]
    assert torch.equal(loaded.predict(x), ensemble.predict(x))
    other = StackingClassifier(MLP, copy.deepcopy(built), 2, n_estimators=2)
    other.load_state_dict(ensemble.state_dict())
    assert torch.equal(other.predict(x), ensemble.predict(x))
    assert torch.equal(copy.deepcopy(ensemble).predict(x), ensemble.predict(x))
    wrong = {} if final else {"final_estimator": nn.Linear(20, 10)}
    with pytest.raises(ValueError, match=r"The checkpoint's final_estimator is a .*: give final_estimator= one, too"):
        StackingClassifier.load_from_checkpoint(tmp_path / "saved.ckpt", estimators=MLP, **wrong)


def test_a_checkpoint_of_other_folds_is_refused(tmp_path):
    ensemble, other = (StackingClassifier(MLP, n_estimators=2, cv=3, optimizer=ADAM) for _ in range(2))
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(ensemble, even(50), max_epochs=1, callbacks=[saves], enable_checkpointing=True)
    path = tmp_path / "epoch=1.ckpt"
    with pytest.raises(MisconfigurationException, match=r"other folds than the 3 of this one: resume with the data"):
        Trainer(**QUIET, max_epochs=1).fit(other, even(60), ckpt_path=path)
    with pytest.raises(MisconfigurationException, match=r"stages of \[1, 1, 1, 1\] epochs, this one has \[2, 2, 2"):
        Trainer(**QUIET, max_epochs=2).fit(other, even(50), ckpt_path=path)
    assert all(parameter.requires_grad for parameter in other.parameters())
    whole = Trainer(**QUIET, max_epochs=1)
    whole.fit(ensemble, even(50))
    whole.save_checkpoint(tmp_path / "after.ckpt")
    with pytest.raises(MisconfigurationException, match="resume with the cv="):
        Trainer(**QUIET, max_epochs=2).fit(other, even(50), ckpt_path=tmp_path / "after.ckpt")
    Trainer(**QUIET, max_epochs=1).fit(other, even(50), ckpt_path=tmp_path / "after.ckpt")
    same(values(other), values(ensemble), rtol=0, atol=0)


# --- what is refused


def _labels(count, rare=0):
    y = torch.arange(count) % 3
    y[:rare] = 3
    return TensorDataset(torch.randn(count, 64), y)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(64), torch.tensor(0)


def _fold_lists(*held_out, size=12):
    return [([row for row in range(size) if row not in rows], list(rows)) for rows in held_out]


TWELVE, RARE = DataLoader(_labels(12)), DataLoader(_labels(12, rare=1))
CHOSEN = DataLoader(_labels(12), sampler=WeightedRandomSampler([1.0] * 12, 12))
REAL, ONE_CLASS = (DataLoader(TensorDataset(torch.zeros(9, 64), y)) for y in (torch.zeros(9), torch.zeros(9).long()))


@cases(
    "arguments, loader, trainer, words",
    ({}, DataLoader(Stream()), {}, "Stream is an IterableDataset, which has only one order"),
    ({}, CHOSEN, {}, "a WeightedRandomSampler chooses rows: give a Subset"),
    ({}, {"a": TWELVE}, {}, "a dict is not a DataLoader"),
    ({"cv": 13}, TWELVE, {}, "the 12 rows of the data do not fit cv=13, give fewer folds"),
    ({"cv": 2}, RARE, {}, "fold 0 trains on have no sample of class 3, of which the data"),
    ({"cv": _fold_lists(range(6), range(5, 12))}, TWELVE, {}, "1 rows are in more than one test part"),
    ({"cv": _fold_lists(range(6), range(7, 12))}, TWELVE, {}, "1 rows are in no test part, such as r"),
    ({"cv": _fold_lists(range(6), range(6, 13))}, TWELVE, {}, "row index 12, the data have 12 rows"),
    ({}, REAL, {}, "targets must be class indices .*float32"),
    ({}, ONE_CLASS, {}, "the targets have one class, 0"),
    ({}, DataLoader(_labels(12), 16, drop_last=True), {}, "fold 0 trains on 8 rows, which drop_last=True leaves"),
    ({}, TWELVE, {"overfit_batches": 1}, "overfit_batches=1.* repeats the same batches"),
    ({}, TWELVE, {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1 may"),
    ({}, TWELVE, {"max_epochs": -1, "max_steps": 9}, "max_epochs=-1 is not the length of a fold"),
)
def test_a_refused_fit_leaves_nothing_behind(arguments, loader, trainer, words):
    ensemble = StackingClassifier(MLP, n_estimators=2, **{"cv": 3, **arguments})
    before = values(ensemble)
    runner = Trainer(**{**QUIET, "max_epochs": 3, **trainer})
    with pytest.raises(MisconfigurationException, match=f"StackingClassifier: .*{words}"):
        runner.fit(ensemble, loader)
    same(values(ensemble), before, rtol=0, atol=0)
    assert runner.max_epochs == trainer.get("max_epochs", 3)
    assert all(parameter.requires_grad for parameter in ensemble.parameters())
    fit(ensemble.__class__(MLP, n_estimators=2, cv=2), even(40), max_epochs=1)


@cases(
    "arguments, error, words",
    ({"estimators": None}, ValueError, "estimators must be given, as they are not saved"),
    ({"estimators": [MLP(), 3]}, TypeError, r"estimators\[1\] must be a torch.nn.Module or a path, got 3"),
    ({"estimators": [("a", MLP()), ("a", MLP())]}, ValueError, "two members are called 'a'"),
    ({"estimators": [("a", MLP()), MLP()]}, TypeError, r"estimators\[1\] must be a pair \(name, module\)"),
    ({"estimators": nn.LazyLinear, "estimator_args": {"out_features": 2}}, ValueError, r"estimators\[0\] has lazy"),
    ({"final_estimator": 3}, TypeError, "final_estimator must be a torch.nn.Module, .*got 3"),
    ({"final_estimator": linear_model.Ridge()}, ValueError, "final_estimator must be .*LogisticRegression.*got"),
    ({"final_estimator": linear_model.LogisticRegression(solver="liblinear")}, ValueError, "give solver='lbfgs'"),
    ({"final_estimator": nn.LazyLinear(2)}, ValueError, "final_estimator has lazy layers"),
    ({"cv": 1}, ValueError, "cv must be a whole number >= 2, got 1"),
    ({"cv": "prefitted"}, TypeError, "cv must be a number of folds, .*got 'prefitted'"),
    ({"cv": 2.5}, TypeError, "cv must be .*got 2.5"),
    ({"cv": [([0], [1])]}, ValueError, "cv must hold at least 2 folds, got 1"),
    ({"cv": [([0, 1], [1]), ([0], [1])]}, ValueError, r"cv\[0\]: row 1 is in train and in test"),
    ({"cv": [([0], [1.5]), ([1], [0])]}, ValueError, r"cv\[0\]\[1\] must hold row indices, whole numbers"),
    ({"cv": [([0], [-1]), ([1], [0])]}, ValueError, r"cv\[0\]\[1\] must hold row indices >= 0, got -1"),
    ({"cv": [[0, 1, 2], [3]]}, TypeError, r"cv\[0\] must be a pair of row indices"),
    ({"stack_method": "proba"}, ValueError, "stack_method must be one of auto, predict_proba, .*got 'proba'"),
    ({"epochs_per_fold": 0}, ValueError, "epochs_per_fold must be a whole number >= 1, got 0"),
)
def test_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        StackingClassifier(**{"estimators": MLP, "n_estimators": 2, **arguments})


class _Wrong(nn.Linear):
    def forward(self, x):
        return super().forward(x), 1


@cases(
    "final, words",
    (nn.Linear(19, 10), "Linear as final_estimator must take 20 features for each sample, and fails: .*mat1 and"),
    (nn.Linear(20, 9), r"must return outputs as the members do, \(2, 10\) for 2 samples, got \(2, 9\)"),
    (_Wrong(20, 10), "for 2 samples, got tuple"),
)
def test_a_final_estimator_that_does_not_fit_is_refused_before_training(final, words):
    ensemble = StackingClassifier(MLP, final, 2, n_estimators=2)
    before = values(ensemble)
    trainer = Trainer(**QUIET, max_epochs=3)
    with pytest.raises(MisconfigurationException, match=words):
        trainer.fit(ensemble, even(40))
    same(values(ensemble), before, rtol=0, atol=0)
    assert (trainer.max_epochs, trainer.global_step) == (3, 0)


def test_a_fit_that_raises_leaves_the_trainer_as_it_was():
    class Fails(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if pl_module.stage == 2:
                raise KeyError("here")

    ensemble = StackingClassifier(MLP, nn.Linear(20, 10), 2, n_estimators=2)
    trainer = Trainer(**QUIET, max_epochs=3, callbacks=[Fails()])
    with pytest.raises(KeyError):
        trainer.fit(ensemble, even(40))
    assert trainer.max_epochs == 3
    assert all(parameter.requires_grad for parameter in ensemble.parameters())
    fit(ensemble, even(40), max_epochs=1)


def test_arguments_of_regressors():
    with pytest.raises(ValueError, match="stack_method must be one of auto, predict, got 'predict_proba'"):
        StackingRegressor(MLP, stack_method="predict_proba")
    with pytest.raises(ValueError, match=r"GaussianNLLLoss.* needs a variance"):
        StackingRegressor(MLP, criterion=nn.GaussianNLLLoss())
    with pytest.raises(ValueError, match=r"got PoissonRegressor\(\)"):
        StackingRegressor(MLP, linear_model.PoissonRegressor())
    with pytest.raises(ValueError, match=r"StackingRegressor\.to_torchensemble: torchensemble has no stacking"):
        StackingRegressor(MLP).to_torchensemble()


def test_a_run_that_ends_early_predicts_the_mean_and_warns():
    ensemble = StackingClassifier(MLP, n_estimators=2, cv=2)
    stop = EarlyStopping("val/loss", patience=1, min_delta=100.0)
    with pytest.warns(UserWarning, match="the run ended in stage 1 of 3, before the meta-learner was fitted"):
        fit(ensemble, few(digits()[0], 64), few(digits()[1], 32, shuffle=False), max_epochs=5, callbacks=[stop])
    x = digits()[1].tensors[0]
    torch.testing.assert_close(ensemble.predict(x), ensemble.member_outputs(x).softmax(-1).mean(0).detach())


def test_what_a_run_will_do_is_said(lightning_log):
    fit(StackingClassifier(MLP, nn.Linear(20, 10), 2, n_estimators=2), few(digits()[0], 64), max_epochs=2)
    words = "2 folds of 2 epochs and a refit of 2 epochs, then 2 epochs of the meta-learner: 8 epochs in all"
    assert any(words in line for _, line in lightning_log)


def test_a_fast_dev_run():
    ensemble = StackingClassifier(MLP, n_estimators=2, cv=2)
    fit(ensemble, few(digits()[0], 64), few(digits()[1], 32, shuffle=False), fast_dev_run=True)
