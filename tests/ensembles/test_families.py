"""Promises that every family of ensembles keeps."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_tricks import AutoResume, OptimizerSpec, ensembles
from tests.ensembles.nets import CNN, MLP, Stops, accuracy, diabetes, digits, few, fit, same, some, values
from tests.small import QUIET, cases, real_fp16

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`lr_scheduler.step"),
]

ADAM = ("Adam", {"lr": 5e-3})
# The arguments of each family
FAMILIES = {
    "GradientBoosting": {},
    "SoftGradientBoosting": {},
    "FastGeometric": {"cycle": 1, "base_epochs": 2},
    "AdversarialTraining": {},
    "NeuralForest": {"depth": 3},
    "Voting": {},
    "Bagging": {},
    "Fusion": {},
    "SnapshotEnsemble": {},
}
STACKED = ("SoftGradientBoosting", "AdversarialTraining", "NeuralForest", "Voting", "Bagging", "Fusion")


def made(family, kind="Classifier", n=2, make=MLP, **options):
    """Return an ensemble of a family for digits or for diabetes."""
    arguments = {"inputs": 10, "outputs": 1} if kind == "Regressor" else None
    members = {"estimator": make, "n_estimators": n, "estimator_args": arguments}
    if family == "NeuralForest":
        members = {"n_estimators": n, "n_outputs": 1 if kind == "Regressor" else 10}
    return getattr(ensembles, family + kind)(
        **members, **{"optimizer": ADAM, "seed": 0, **FAMILIES.get(family, {}), **options}
    )


LENGTHS = {"GradientBoosting": 20, "FastGeometric": 16}


@pytest.mark.parametrize("family", FAMILIES)
def test_classifiers_learn_the_digits(family):
    train, test = digits()
    options = {"base_epochs": None} if family == "FastGeometric" else {}
    ensemble = made(family, n=4, optimizer=("Adam", {"lr": 1e-2}), **options)
    epochs = LENGTHS.get(family, 12)
    trainer = fit(ensemble, DataLoader(train, 32, shuffle=True), DataLoader(test, 64), max_epochs=epochs)
    x, y = test.tensors
    found = accuracy(ensemble.predict(x), y)
    assert found > {"NeuralForest": 0.88, "SnapshotEnsemble": 0.92}.get(family, 0.94)
    assert trainer.callback_metrics["val/acc"].item() == pytest.approx(found)
    nll = torch.nn.functional.nll_loss(ensemble.predict(x).log(), y).item()
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(nll, rel=1e-4)
    uncertainty = ensemble.predict_uncertainty(x)
    torch.testing.assert_close(uncertainty.mean, ensemble.predict(x))
    torch.testing.assert_close(uncertainty.aleatoric + uncertainty.epistemic, uncertainty.total)
    assert uncertainty.total[y != uncertainty.mean.argmax(1)].mean() > 1.2 * uncertainty.total.mean()
    assert uncertainty.epistemic.any() == ("Boosting" not in family)  # whose members are parts of one model


@pytest.mark.trap("ensembles: NeuralForestRegressor.predict is always 1.0")
@pytest.mark.parametrize("family", FAMILIES)
def test_regressors_learn_diabetes(family):
    train, test = diabetes()
    options = {"base_epochs": None} if family == "FastGeometric" else {}
    ensemble = made(family, "Regressor", n=4, optimizer=("Adam", {"lr": 5e-3}), **options)
    trainer = fit(ensemble, DataLoader(train, 32, shuffle=True), DataLoader(test, 30), max_epochs=24)
    x, y = test.tensors
    error = (ensemble.predict(x) - y).square().mean().item()
    assert error < 0.65  # the mean alone: 1.0
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(error, rel=1e-4)
    uncertainty = ensemble.predict_uncertainty(x)
    torch.testing.assert_close(uncertainty.mean, ensemble.predict(x))
    assert uncertainty.epistemic.any() == ("Boosting" not in family)


SETTINGS = {
    "bf16": {"precision": "bf16-mixed"},
    "64": {"precision": "64-true"},
    "bf16-true": {"precision": "bf16-true"},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.5},
    "clipping by value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    "limited": {"limit_train_batches": 3},
    "overfit": {"overfit_batches": 2},
    "dev run": {"fast_dev_run": True, "max_epochs": 1},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")
def test_settings_of_the_trainer(family, setting):
    ensemble = made(family, make=CNN)
    before = values(ensemble)
    options = {"max_epochs": 4, **SETTINGS[setting]}
    trainer = fit(ensemble, some(count=96), some(shuffle=False), **options)
    after = values(ensemble)
    weights = ("weight", "bias")
    assert all(value.isfinite().all() for name, value in after.items() if name.endswith(weights))
    moved = [name for name in before if name.endswith(weights) and not torch.equal(before[name], after[name])]
    trained = [name for name in before if name.endswith(weights)]
    assert moved == trained or (setting == "dev run" and moved)  # which trains one stage, or captures no copy
    assert trainer.callback_metrics["train/loss"].isfinite()
    assert trainer.callback_metrics["val/loss"].isfinite()


@pytest.mark.parametrize("family", FAMILIES)
@cases("precision", "fp16", pytest.param("16-mixed", marks=[pytest.mark.gpu, pytest.mark.sampled(3)]))
def test_real_fp16_and_a_gpu(family, precision):
    options = {"accelerator": "gpu", "devices": 1, "precision": precision}
    if precision == "fp16":
        options = {"plugins": real_fp16(), "gradient_clip_val": 1.0}
    ensemble = made(family, optimizer=("Adam", {"lr": 1e-2}))
    fit(ensemble, some(count=640, batch_size=32), max_epochs={"FastGeometric": 4}.get(family, 10), **options)
    x, y = digits()[1].tensors
    assert accuracy(ensemble.predict(x), y) > 0.7


class _Agree(Callback):
    """Compares the weights of the ranks after each epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        of_rank = torch.cat([value.double().flatten() for value in pl_module.state_dict().values()])
        assert torch.equal(trainer.strategy.broadcast(of_rank), of_rank)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_agree(family):
    ensemble, val = made(family, seed=None, optimizer=("Adam", {"lr": 1e-2})), some(count=37, shuffle=False)
    trainer = fit(
        ensemble, some(count=640), val, max_epochs={"FastGeometric": 4}.get(family, 8),
        strategy="ddp_fork", devices=2, callbacks=[_Agree()],
    )  # fmt: skip
    share, loss = ensemble.evaluate(val, return_loss=True)  # of 37 samples: one rank repeats the first one
    logged = {key: trainer.callback_metrics[key].item() for key in ("val/acc", "val/loss")}
    assert logged == pytest.approx({"val/acc": share / 100, "val/loss": loss}, rel=1e-5)
    x, y = digits()[1].tensors
    assert accuracy(ensemble.predict(x), y) > 0.7


@pytest.mark.parametrize("step", [2, 4, 7, 8, 11, 14])  # of 16, four an epoch
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("error:AutoResume")
@pytest.mark.trap("ensembles: n_jobs=2 gives other weights each time, with one seed")
@pytest.mark.sampled(5)
def test_a_run_that_was_stopped_anywhere_ends_as_one_that_was_not(family, step, tmp_path):
    train, val = some(), some(shuffle=False)
    options = {"early_stopping_rounds": 1} if family == "GradientBoosting" else {}
    whole, first, second = (made(family, make=CNN, **options) for _ in range(3))
    fit(whole, train, val, max_epochs=4)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(first, train, val, max_epochs=4, callbacks=[AutoResume(tmp_path, every_n_train_steps=1), Stops(step)])
    fit(second, train, val, max_epochs=4, callbacks=[AutoResume(tmp_path)])
    same(values(second), values(whole), rtol=0, atol=0)
    assert second.n_members == whole.n_members


@pytest.mark.parametrize("kind", ["Classifier", "Regressor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_says_what_the_ensemble_is(family, kind, tmp_path):
    options = {} if "Boosting" in family else {"weights": [1, 3]}
    ensemble = made(family, kind, optimizer=OptimizerSpec("AdamW", lr=2e-3), **options)
    trainer = fit(ensemble, some(kind=kind), max_epochs=4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = type(ensemble).load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    x = some(kind=kind).dataset.tensors[0]
    assert torch.equal(loaded.predict(x), ensemble.predict(x))
    assert loaded.hparams == ensemble.hparams
    assert loaded.hparams["optimizer"]["lr"] == 2e-3
    assert (loaded.seed, loaded.n_outputs, loaded.n_members) == (ensemble.seed, ensemble.n_outputs, 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.trap("ensembles: fit() twice doubles the members (Fusion, GB, Snapshot)")
def test_a_second_fit_trains_the_same_members(family):
    ensemble = made(family)
    fit(ensemble, some(), max_epochs=4)
    names, first = list(ensemble.state_dict()), values(ensemble)
    fit(ensemble, some(), max_epochs=4)
    assert list(ensemble.state_dict()) == names
    assert len(ensemble.estimators_) == ensemble.n_members == 2
    weights = [name for name in names if name.endswith("weight")]
    assert not any(torch.equal(ensemble.state_dict()[name], first[name]) for name in weights)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "NeuralForest"])
@pytest.mark.trap("ensembles: the first validation runs in train mode, BatchNorm learns from validation data")
@pytest.mark.trap("ensembles: AdversarialTraining counts 12 batches in BatchNorm where there were 4")
def test_statistics_are_those_of_training_batches(family):
    ensemble = made(family, make=CNN)
    fit(ensemble, some(), some(shuffle=False), max_epochs=4, num_sanity_val_steps=2)
    counts = {name: int(value) for name, value in values(ensemble).items() if name.endswith("num_batches_tracked")}
    of_copies = {"FastGeometric": [10, 14, 16], "SnapshotEnsemble": [8, 16, 16]}
    expected = {"GradientBoosting": [8, 8], **of_copies}.get(family, [16, 16])
    assert sorted(counts.values()) == expected
    before = values(ensemble)
    ensemble.predict(torch.rand(5, 64))
    ensemble.predict_uncertainty(torch.rand(5, 64))
    same(values(ensemble), before, rtol=0, atol=0)


@pytest.mark.parametrize("family", STACKED)
def test_at_once_or_one_after_another_is_the_same(family):
    def trained(vectorize):
        ensemble = made(family, n=3, vectorize=vectorize, optimizer=("SGD", {"lr": 0.05, "momentum": 0.9}))
        fit(ensemble, some(), max_epochs=2)
        assert (type(ensemble.estimators_).__name__ == "StackedMembers") == vectorize
        return values(ensemble)

    same(trained(True), trained(False), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["GradientBoosting", "AdversarialTraining"])
@pytest.mark.newest
# torch's compiler asks outputs for their gradients where it resumes after the gradients of the inputs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.thorough
def test_compiled(family):
    ensemble = made(family, optimizer=("Adam", {"lr": 1e-2}))
    fit(torch.compile(ensemble, backend="aot_eager"), some(count=640, batch_size=32), max_epochs=6)
    x, y = digits()[1].tensors
    assert accuracy(ensemble.predict(x), y) > 0.8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.trap("ensembles: a class that is missing in the training data crashes GB")
def test_an_exception_and_a_class_that_is_missing_leave_an_ensemble_that_trains_on(family):
    ensemble, (x, y) = made(family), digits()[0].tensors
    data = few(torch.utils.data.TensorDataset(x[y != 9], y[y != 9]), 64)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(ensemble, data, max_epochs=4, callbacks=[Stops(9)])
    trained = ensemble if family == "GradientBoosting" else ensemble.trained_members()
    assert all(parameter.requires_grad for parameter in trained.parameters())
    assert fit(ensemble, data, max_epochs=4).global_step == 16
    assert (ensemble.n_members, ensemble.predict(x).shape) == (2, (len(x), 10))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_tests_and_predicts(family):
    ensemble = made(family)
    fit(ensemble, some(), max_epochs=4)
    x, y = digits()[1].tensors
    (results,) = Trainer(**QUIET).test(ensemble, DataLoader(digits()[1], 100), verbose=False)
    assert results["test/acc"] == pytest.approx(accuracy(ensemble.predict(x), y))
    found = torch.cat(Trainer(**QUIET).predict(ensemble, DataLoader(digits()[1], 100)))
    torch.testing.assert_close(found, ensemble.predict(x))


SHORT = {
    "stages": ("GradientBoosting", {}, "ends in stage 1 of 3; .* Set max_epochs=3 to train", 1),
    "long stages": ("GradientBoosting", {"epochs_per_estimator": 2}, "stage 1 of 3; .* Set max_epochs=6 to train", 1),
    "cycles": (
        "SnapshotEnsemble",
        {},
        r"max_epochs=1 \(4 steps\) is not a multiple of 3; 3 cycles have 1 steps each",
        3,
    ),
    "base": ("FastGeometric", {"base_epochs": 2}, "for base_epochs=2 epochs, and then 3 cycles of 4 .*=14", 0),
    "no base": ("FastGeometric", {"base_epochs": None}, "its base model, and then .* set max_epochs=12 or more", 0),
}


@pytest.mark.parametrize("kind", ["Classifier", "Regressor"])
@pytest.mark.parametrize("name", SHORT)
def test_a_run_that_only_tries_whether_all_works(name, kind):
    """Too short for what the ensemble is to be: a warning, and a model that predicts."""
    family, options, words, members = SHORT[name]
    make, arguments = MLP, {"inputs": 10, "outputs": 1} if kind == "Regressor" else None
    ensemble = getattr(ensembles, family + kind)(make, 3, arguments, **options, seed=0)
    with pytest.warns(UserWarning, match=words):
        fit(ensemble, some(kind=kind), some(kind=kind, shuffle=False), max_epochs=1)
    assert ensemble.n_members == members
    assert ensemble.predict(some(kind=kind).dataset.tensors[0]).isfinite().all()
