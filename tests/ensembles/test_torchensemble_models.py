"""torchensemble's models, there and back, and what goes wrong in torchensemble and not here."""

import contextlib
import inspect
import io
import logging

import pytest
import torch
import torchensemble
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks
from lightning_tricks import ensembles
from lightning_tricks.checkpoint_remapping import CheckpointError
from lightning_tricks.ensembles import SnapshotEnsembleClassifier, VotingClassifier, VotingRegressor
from tests.ensembles.nets import CNN, MLP, diabetes, digits, few, fit, values

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]

FAMILIES = (
    "Voting", "Bagging", "Fusion", "SnapshotEnsemble", "GradientBoosting", "SoftGradientBoosting", "FastGeometric",
    "AdversarialTraining", "NeuralForest",
)  # fmt: skip
NAMES = [f"{family}{kind}" for family in FAMILIES for kind in ("Classifier", "Regressor")]
DIFFERENT = {
    "FastGeometricClassifier": "takes the probabilities of the mean logits, not the mean of probabilities",
    "NeuralForestRegressor": "predicts the softmax of one output, so 1.0",
}


def _data(name):
    return diabetes() if "Regressor" in name else digits()


def _arguments(name):
    return {"inputs": 10, "outputs": 1} if "Regressor" in name else {"hidden": 9}


def _members(name):
    if name.startswith("NeuralForest"):
        return {"n_estimators": 2, "depth": 3}
    return {"estimator": MLP, "n_estimators": 2, "estimator_args": _arguments(name)}


def _unit(name, count=64):
    """Some of the data, with inputs in [0, 1], which torchensemble's adversarial training asks for."""
    x, y = (tensor[:count] for tensor in _data(name)[0].tensors)
    return DataLoader(TensorDataset((x - x.min()) / (x.max() - x.min()), y), 16, shuffle=True)


def _theirs(name, folder=None, **arguments):
    """A fitted model of torchensemble, which prints and saves much."""
    model = getattr(torchensemble, name)(**_members(name), cuda=False, **arguments)
    model.set_optimizer("Adam", lr=1e-3)
    options = {"cycle": 2} if name.startswith("FastGeometric") else {}
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(_unit(name), epochs=2, save_model=folder is not None, save_dir=folder, **options)
    return model


def _ours(name, **options):
    if name.startswith("FastGeometric"):
        options["cycle"] = 1
    if name == "NeuralForestClassifier":
        options["n_outputs"] = 10
    if "BoostingC" in name or "BoostingR" in name:
        options["shrinkage_rate"] = 0.5
    ensemble = getattr(ensembles, name)(**_members(name), seed=0, **options)
    fit(ensemble, few(_data(name)[0], 64), max_epochs=2)
    return ensemble


@pytest.mark.parametrize("name", NAMES)
def test_ours_as_theirs(name, tmp_path):
    ensemble = _ours(name)
    if name in DIFFERENT:
        with pytest.raises(ValueError, match=f"{name}.to_torchensemble: torchensemble.*{DIFFERENT[name]}"):
            ensemble.to_torchensemble()
        return
    theirs = ensemble.to_torchensemble()
    assert type(theirs) is getattr(torchensemble, name)
    x, y = _data(name)[1].tensors
    torch.testing.assert_close(theirs.predict(x), ensemble.predict(x), atol=1e-6, rtol=1e-6)
    assert theirs.predict(x).shape == (len(x), ensemble.n_outputs)
    theirs.evaluate(DataLoader(TensorDataset(x, y), 50))
    torchensemble.utils.io.save(theirs, str(tmp_path), logging.getLogger("torchensemble"))
    fresh = getattr(torchensemble, name)(
        **_members(name), cuda=False, **({"shrinkage_rate": 0.5} if "GradientBoosting" in name else {})
    )
    torchensemble.utils.io.load(fresh, str(tmp_path))
    torch.testing.assert_close(fresh.predict(x), ensemble.predict(x), atol=1e-6, rtol=1e-6)
    fresh.evaluate(DataLoader(TensorDataset(x, y), 50))
    for parameter in theirs.parameters():
        parameter.data.zero_()  # shares no memory
    assert any(value.any() for key, value in values(ensemble).items() if key.startswith("estimators_.0"))


@pytest.mark.parametrize("name", NAMES)
def test_theirs_as_ours(name, tmp_path):
    theirs = _theirs(name, str(tmp_path))
    x = _data(name)[1].tensors[0]
    kind = getattr(ensembles, name)
    of_object = kind.from_torchensemble(theirs)
    (path,) = tmp_path.glob(f"{name}_*_2_ckpt.pth")
    estimator = () if name.startswith("NeuralForest") else (MLP, _arguments(name))
    of_file = kind.from_torchensemble(path, *estimator)
    for ours in (of_object, of_file):
        if name not in DIFFERENT:
            torch.testing.assert_close(ours.predict(x), theirs.predict(x), atol=1e-6, rtol=1e-5)
        for index, member in enumerate(theirs.estimators_):
            torch.testing.assert_close(ours.estimators_.member(index).eval()(x), member.eval()(x))
        assert ours.n_outputs == theirs.n_outputs
        if name.startswith(("Snapshot", "FastGeometric")):  # continues from the last one
            last = theirs.estimators_[-1].state_dict()
            assert all(torch.equal(last[key], value) for key, value in ours.working.member(0).state_dict().items())
        epochs = 8 if name.startswith("FastGeometric") else 2
        trainer = fit(ours, few(_data(name)[0], 64), max_epochs=epochs)  # and it trains on
    if name == "VotingClassifier":  # the one of a file knows its estimator
        trainer.save_checkpoint(tmp_path / "ours.ckpt")
        again = kind.load_from_checkpoint(tmp_path / "ours.ckpt", weights_only=True)
        torch.testing.assert_close(values(again), values(ours), rtol=0, atol=0)
    assert type(of_object.criterion) is type(theirs._criterion)


@pytest.mark.parametrize("make", [VotingClassifier, SnapshotEnsembleClassifier])
def test_votes_are_kept(make):
    theirs = _theirs(make.__name__, voting_strategy="hard")
    x = digits()[1].tensors[0]
    ours = make.from_torchensemble(theirs)
    assert ours.voting_strategy == "hard"
    if make is VotingClassifier:  # their snapshots average all the same
        torch.testing.assert_close(ours.predict(x), theirs.predict(x))
        torch.testing.assert_close(ours.to_torchensemble().predict(x), theirs.predict(x))


def test_nothing_in_a_file_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    members = {f"estimators_.{i}.{name}": value for i in range(2) for name, value in MLP().state_dict().items()}
    torch.save({"model": members, "_criterion": Evil(), "n_outputs": 10, "n_estimators": 2}, tmp_path / "a.pth")
    with contextlib.suppress(CheckpointError):
        VotingClassifier.from_torchensemble(tmp_path / "a.pth", MLP)
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_imported_says_why(tmp_path):
    theirs = _theirs("VotingClassifier", str(tmp_path))
    path = tmp_path / "VotingClassifier_MLP_2_ckpt.pth"
    with pytest.raises(ValueError, match=r"VotingRegressor.from_torchensemble got a VotingClassifier"):
        VotingRegressor.from_torchensemble(theirs)
    with pytest.raises(ValueError, match=r"holds only weights: give the class of the members, estimator=Net"):
        VotingClassifier.from_torchensemble(path)
    with pytest.warns(UserWarning, match="has a name that torchensemble does not give to the files of a Snapshot"):
        SnapshotEnsembleClassifier.from_torchensemble(path, MLP, {"hidden": 9})
    with pytest.raises(CheckpointError):
        VotingClassifier.from_torchensemble(path, CNN)
    with pytest.raises(ValueError, match="has no members yet: call its fit first"):
        VotingClassifier.from_torchensemble(torchensemble.VotingClassifier(estimator=MLP, n_estimators=2, cuda=False))
    torch.save({"model": MLP().state_dict()}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"is not a file of torchensemble: it has no weights called estimators_.0"):
        VotingClassifier.from_torchensemble(tmp_path / "other.pth", MLP)


def test_what_cannot_be_exported_says_why():
    with pytest.raises(ValueError, match="torchensemble has no weights of members"):
        VotingClassifier(MLP, 2, weights=[1, 2]).to_torchensemble()
    VotingClassifier(MLP, 2, weights=[2, 2]).to_torchensemble()
    with pytest.raises(ValueError, match="BaggingClassifier of torchensemble has no voting_strategy"):
        lightning_tricks.ensembles.BaggingClassifier(MLP, 2, voting_strategy="hard").to_torchensemble()
    with pytest.raises(ValueError, match="has no snapshots yet"):
        SnapshotEnsembleClassifier(MLP, 2).to_torchensemble()


def _public_methods():
    """The public methods of torchensemble's classes: class, method and its arguments."""
    for name in torchensemble.__all__:
        for method in ("__init__", "fit", "predict", "forward", "evaluate", "set_optimizer", "set_scheduler"):
            for kind in getattr(torchensemble, name).__mro__:
                if kind.__module__.startswith("torchensemble") and method in vars(kind):
                    yield name, method, set(inspect.signature(vars(kind)[method]).parameters) - {"self", "kwargs", "x"}


OF_A_TRAINER = {"train_loader", "epochs", "log_interval", "test_loader", "save_model", "save_dir", "cuda", "n_jobs"}


def test_what_the_page_calls_the_same_is_there():
    for name, method, arguments in _public_methods():
        ours = getattr(ensembles, name)
        own = set(inspect.signature(ours if method in ("__init__", "fit") else getattr(ours, method)).parameters)
        gone = {"estimator", "estimator_args"} if name.startswith("NeuralForest") else set()  # it makes its trees
        assert arguments - OF_A_TRAINER - gone <= own, (name, method)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("Snapshot", "FastGeometric"))])
@pytest.mark.parametrize("scheduler", [("ReduceLROnPlateau", {"patience": 0}), ("StepLR", {"step_size": 1})], ids=str)
def test_schedules_by_name(name, scheduler):
    sizes = {"n_outputs": 10} if name == "NeuralForestClassifier" else {}
    ensemble = getattr(ensembles, name)(**_members(name), **sizes)
    ensemble.set_scheduler(scheduler[0], **scheduler[1])
    fit(ensemble, few(_data(name)[0], 64), few(_data(name)[0], 32, shuffle=False), max_epochs=2)
