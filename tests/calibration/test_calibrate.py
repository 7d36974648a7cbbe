"""`calibrate` as people call it: ensembles, modules of any kind, loaders of any kind, checkpoints, ranks."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import lightning_tricks
from lightning_tricks import calibrate, ensembles
from lightning_tricks.calibration import CalibratedClassifier, Calibration, calibration_scores
from lightning_tricks.ensembles import VotingClassifier
from tests.ensembles.nets import MLP, digits, few, fit, values
from tests.small import QUIET, cases, fork, without_warnings

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
METHODS = ("temperature", "vector", "isotonic")
ADAM = ("Adam", {"lr": 1e-2})


def drawn(rows=600, classes=3, sure=3.0, seed=0):
    """Logits that are too sure, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(rows, classes, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return sure * logits, labels


def loader_of(*columns, **arguments):
    return DataLoader(TensorDataset(*columns), **{"batch_size": 64, **arguments})


@pytest.fixture(scope="module")
def voting():
    ensemble = VotingClassifier(MLP, 3, optimizer=ADAM, seed=0)
    fit(ensemble, few(digits()[0], 300), max_epochs=8)
    return ensemble


def held_out():
    x, y = digits()[0].tensors
    return x[300:1200], y[300:1200]


# --- ensembles


@pytest.mark.parametrize("method", METHODS)
@cases(
    "family",
    "Voting",
    "Fusion",
    "SoftGradientBoosting",
    "GradientBoosting",
    "SnapshotEnsemble",
    "NeuralForest",
    "Stacking",
)
def test_an_ensemble_is_calibrated_as_a_whole_and_nothing_else_changes(family, method):
    options = {"n_estimators": 2, "optimizer": ADAM, "seed": 0}
    of_others = {"NeuralForest": {"n_outputs": 10, "depth": 3}, "Stacking": {"estimators": MLP, "cv": 2}}
    members = of_others.get(family, {"estimator": MLP})
    ensemble = getattr(ensembles, f"{family}Classifier")(**members, **options)
    with without_warnings():
        fit(ensemble, few(digits()[0], 300), max_epochs=4)
    ensemble.train()
    before, modes = values(ensemble), [part.training for part in ensemble.modules()]
    x, y = held_out()
    loader = loader_of(x, y, shuffle=True)
    state = torch.get_rng_state()
    combined = ensemble.predict(x)
    try:
        table = calibrate(ensemble, loader, method)
    except ValueError:  # some family tells the rows of a class apart
        assert method == "vector"
        return
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in ensemble.modules()] == modes
    after = ensemble.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert after.keys() - before.keys() == {f"calibration.{name}" for name in names(method)}
    torch.testing.assert_close(ensemble.predict(x), combined)
    found = ensemble.predict(x, calibrated=True)
    if method == "temperature":
        assert torch.equal(found.argmax(1), combined.argmax(1))
        torch.testing.assert_close(
            found, (combined.double().log() / ensemble.calibration.temperature).softmax(1).float(), rtol=1e-3, atol=1e-5
        )
    assert table.module is ensemble
    assert table.after["nll"] < table.before["nll"]
    assert_scores(table.before, calibration_scores(combined, y), len(y))
    assert_scores(table.after, calibration_scores(found, y), len(y))
    uncertainty = ensemble.predict_uncertainty(x)
    torch.testing.assert_close(uncertainty.mean, found)
    torch.testing.assert_close(uncertainty.total, torch.special.entr(found).sum(1))
    torch.testing.assert_close(uncertainty.aleatoric + uncertainty.epistemic, uncertainty.total)
    assert (uncertainty.aleatoric >= 0).all()
    assert (uncertainty.epistemic >= 0).all()


def assert_scores(found, expected, n):
    """Compare scores; a probability at the edge of a bin, as isotonic ones are, is in either with other rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=3 / n if "ece" in name else 1e-4), name


def names(method):
    return {"temperature": ["temperature"], "vector": ["scale", "bias"], "isotonic": ["thresholds", "values"]}[method]


def test_an_ensemble_that_is_not_calibrated_says_so(voting):
    ensemble = copy.deepcopy(voting)
    with pytest.raises(RuntimeError, match=r"not calibrated: call calibrate\(module, loader\)"):
        ensemble(torch.rand(2, 64), calibrated=True)
    assert not [name for name in ensemble.state_dict() if "calibration" in name]


def test_votes_and_regressors_are_refused():
    x, y = held_out()
    hard = VotingClassifier(MLP, 2, voting_strategy="hard", seed=0)
    with pytest.raises(ValueError, match='voting_strategy="hard"'):
        calibrate(hard, loader_of(x, y))
    regressor = lightning_tricks.ensembles.VotingRegressor(nn.Linear, 2, {"in_features": 64, "out_features": 1})
    with pytest.raises(TypeError, match="VotingRegressor is not a classifier"):
        calibrate(regressor, loader_of(x, y.float()[:, None]))
    with pytest.raises(TypeError, match="VotingRegressor is not a classifier"):
        regressor(x, calibrated=True)


def test_a_fit_of_a_calibrated_ensemble_warns(voting):
    ensemble = copy.deepcopy(voting)
    calibrate(ensemble, loader_of(*held_out()))
    with pytest.warns(UserWarning, match="call calibrate again"):
        fit(ensemble, few(digits()[0], 64))
    assert ensemble.calibration.method == "temperature"


# --- checkpoints


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_each_kind_of_checkpoint_holds_the_calibration(voting, method, tmp_path):
    ensemble = copy.deepcopy(voting)
    x, y = held_out()
    calibrate(ensemble, loader_of(x, y), method)
    expected = ensemble.predict(x, calibrated=True)
    trainer = Trainer(**QUIET)
    trainer.strategy.connect(ensemble)
    trainer.save_checkpoint(tmp_path / "lightning.ckpt")
    plain = torch.load(tmp_path / "lightning.ckpt", weights_only=True)["state_dict"]
    torch.save(ensemble.state_dict(), tmp_path / "weights.pt")
    new = VotingClassifier(MLP, 3, seed=1)
    new.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    loaded = VotingClassifier.load_from_checkpoint(tmp_path / "lightning.ckpt", estimator=MLP)
    pickled = pickle.loads(pickle.dumps(ensemble))
    for module in (new, loaded, pickled, copy.deepcopy(ensemble)):
        assert torch.equal(module.predict(x, calibrated=True), expected)
    assert {name for name in plain if name.startswith("calibration.")} == {f"calibration.{n}" for n in names(method)}
    plain["calibration." + names(method)[0]].zero_()
    new.load_state_dict(plain)  # whose tensors are its own
    plain["calibration." + names(method)[0]].fill_(7)
    assert not getattr(new.calibration, names(method)[0]).any()


def test_weights_without_a_calibration_do_not_keep_that_of_others(voting):
    weights, ensemble = values(voting), copy.deepcopy(voting)
    calibrate(ensemble, loader_of(*held_out()))
    calibrated = copy.deepcopy(ensemble)
    with pytest.raises(RuntimeError, match="not calibrated, so the previous calibration was dropped: load again"):
        ensemble.load_state_dict(weights)
    assert ensemble.calibration.method is None  # the weights are the new ones: torch tells only after loading
    ensemble.load_state_dict(weights)
    (missing,) = calibrated.load_state_dict(weights, strict=False).missing_keys
    assert "not calibrated" in missing
    assert calibrated.calibration.method is None


@cases(
    "wrong",
    {"temperature": torch.ones(2)},
    {"scale": torch.ones(3)},
    {"scale": torch.ones(3), "bias": torch.ones(2)},
    {"temperature": torch.ones(()), "scale": torch.ones(3), "bias": torch.ones(3)},
    {"temperature": "1.0"},
    {"thresholds": torch.ones(3, 0), "values": torch.ones(3, 0)},
    {"temperature": torch.ones((), dtype=torch.int64)},
)
def test_a_file_with_part_of_a_calibration_is_refused(wrong):
    with pytest.raises(RuntimeError, match="are not the tensors of one calibration"):
        Calibration().load_state_dict(wrong)


def test_an_unknown_tensor_is_unexpected():
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        Calibration().load_state_dict({"temperature": torch.ones(()), "other": torch.ones(())})
    Calibration().load_state_dict({"temperature": torch.ones(()), "other": torch.ones(())}, strict=False)


class LitWithCalibration(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = MLP()
        self.calibration = Calibration()

    def forward(self, x):
        return self.net(x)

    def predict_step(self, batch, batch_idx):
        return self.calibration(self(batch[0]))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def test_a_lightning_module_with_a_slot_has_it_in_its_checkpoints(tmp_path):
    kind = LitWithCalibration
    module = kind()
    trainer = fit(module, few(digits()[0], 300), max_epochs=4)
    trainer.save_checkpoint(tmp_path / "before.ckpt")
    table = calibrate(module, loader_of(*held_out()))
    assert table.module is module
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    new = kind.load_from_checkpoint(tmp_path / "after.ckpt")
    assert torch.equal(new.calibration.temperature, module.calibration.temperature)
    x = held_out()[0]
    batches = Trainer(**QUIET).predict(kind(), DataLoader(TensorDataset(x), 100), ckpt_path=tmp_path / "after.ckpt")
    torch.testing.assert_close(torch.cat(batches), CalibratedClassifier(module)(x))
    assert kind.load_from_checkpoint(tmp_path / "before.ckpt").calibration.method is None
    # a wrapper applies the calibration of the module, and has none of its own
    wrapper = CalibratedClassifier(module)
    assert calibrate(wrapper, loader_of(*held_out()), "isotonic").module is wrapper
    assert module.calibration.method == "isotonic"


def test_it_moves_with_the_module_and_keeps_its_precision():
    net = CalibratedClassifier(nn.Linear(4, 3))
    net.calibration.set_values(temperature=torch.tensor(1 + 2**-40, dtype=torch.float64))
    net.bfloat16()
    assert net.calibration.temperature.item() == 1 + 2**-40
    assert net.calibration.temperature.dtype == torch.float64
    assert net(torch.rand(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert net.to("meta").calibration.temperature.is_meta
    new = CalibratedClassifier(nn.Linear(4, 3))
    with torch.inference_mode():
        calibrate(new, [(torch.rand(64, 4), torch.arange(64) % 3)], "isotonic")
    new(torch.rand(2, 4)).sum().backward()  # no tensor of inference mode


# --- other modules


class Watchful(nn.Module):
    """A classifier that writes where it should only look, and draws random numbers."""

    def __init__(self, fails=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.frozen_part = nn.BatchNorm1d(3).eval()
        self.steps, self.seen, self.fails = 0, [], fails

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced + 1
        self.net[0].weight.data.mul_(0.99)
        self.steps += 1
        self.seen.append(len(x))
        assert not self.training
        assert not self.net[1].training
        if self.fails and self.steps > 2:
            raise ZeroDivisionError
        return x + 1e-3 * self.net(x) + 1e-6 * torch.randn_like(x) * np.random.rand()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_changes_also_where_the_module_or_an_exception_would_change_it(fails):
    logits, labels = drawn()
    module = Watchful(fails)
    loader = loader_of(logits, labels, shuffle=True, generator=torch.Generator().manual_seed(5))
    before, modes = copy.deepcopy(module.state_dict()), [part.training for part in module.modules()]
    buffer, states = (
        module.replaced,
        (torch.get_rng_state(), np.random.get_state()[1].copy(), loader.generator.get_state()),
    )
    if fails:
        with pytest.raises(ZeroDivisionError):
            calibrate(module, loader)
    else:
        calibrate(module, loader)
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.replaced is buffer
    assert [part.training for part in module.modules()] == modes
    assert (module.steps, module.seen) == (0, [])
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert torch.equal(states[2], loader.generator.get_state())
    assert torch.is_grad_enabled()


def linear_identity():
    """Return a layer that returns its input, with weights as others have."""
    net = nn.Linear(3, 3)
    with torch.no_grad():
        net.weight.copy_(torch.eye(3))
        net.bias.zero_()
    return net


@pytest.mark.parametrize("method", METHODS)
def test_a_wrapper_holds_the_calibration_of_any_other_module(method):
    logits, labels = drawn()
    net = linear_identity()
    keys = set(net.state_dict())
    table = calibrate(net, loader_of(logits, labels), method)
    assert set(net.state_dict()) == keys
    wrapper = table.module
    assert isinstance(wrapper, CalibratedClassifier)
    assert wrapper.module is net
    found = wrapper(logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(1), torch.ones(600))
    assert table.after == pytest.approx(calibration_scores(found, labels), abs=1e-5)
    new = CalibratedClassifier(nn.Linear(3, 3))
    file = io.BytesIO()
    torch.save(wrapper.state_dict(), file)
    file.seek(0)
    new.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(new(logits), found)
    again = calibrate(wrapper, loader_of(logits, labels), "temperature")  # in place of the first one
    assert again.module is wrapper
    assert [name for name in wrapper.state_dict() if "calibration" in name] == ["calibration.temperature"]
    with pytest.raises(RuntimeError, match="not calibrated"):
        CalibratedClassifier(net)(logits)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("as_float", [False, True])
def test_one_logit_is_that_of_class_1(method, shape, as_float):
    logits, labels = drawn(classes=2)
    one = (logits[:, 1] - logits[:, 0]).reshape(shape)
    pairs = torch.stack([torch.zeros(600), one.flatten()], 1)
    given = labels.float().reshape(shape) if as_float else labels
    ours = calibrate(nn.Identity(), loader_of(one, given), method)
    both = calibrate(nn.Identity(), loader_of(pairs, labels), method)
    assert ours.as_dict() == both.as_dict()
    assert ours.module(one).shape == one.shape
    torch.testing.assert_close(ours.module(one).flatten(), both.module(pairs)[:, 1])


@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (-1, 2), (-1, 3)])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_outputs_that_may_be_either_kind_are_asked_for(method, times, shape):
    logits, labels = drawn(2000, max(2, shape[-1]), sure=times)
    if shape[-1] in (-1, 1):
        probabilities = (logits[:, 1] - logits[:, 0]).sigmoid().reshape(shape)
    else:
        probabilities = logits.softmax(1)
    for asked in (calibrate, lambda *given: calibrate(CalibratedClassifier(given[0]), *given[1:])):
        with pytest.raises(ValueError, match=r'may be logits or probabilities\. Pass outputs="probabilities"'):
            asked(nn.Identity(), loader_of(probabilities, labels), method)
    of_logits = calibrate(nn.Identity(), loader_of(logits, labels), method)
    table = calibrate(nn.Identity(), loader_of(probabilities, labels), method, outputs="probabilities")
    found = table.module(probabilities)
    assert found.shape == probabilities.shape
    expected = of_logits.module(logits)
    assert table.after["nll"] <= table.before["nll"]
    expected = expected[:, 1].reshape(shape) if shape[-1] in (-1, 1) else expected
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    new = CalibratedClassifier(nn.Identity())
    new.load_state_dict(table.module.state_dict())  # which says of what it is the calibration
    assert torch.equal(new(probabilities), found)
    as_logits = calibrate(nn.Identity(), loader_of(probabilities, labels), method, outputs="logits")
    assert as_logits.module.calibration.from_probabilities is None
    assert as_logits.rows == 2000


def test_what_is_said_of_outputs_has_to_be_so(voting):
    logits, labels = drawn()
    with pytest.raises(ValueError, match=r'outputs="probabilities", but 600 of the 600 rows .* pass outputs="logits"'):
        calibrate(nn.Identity(), loader_of(logits, labels), outputs="probabilities")
    words = "outputs='logits', but VotingClassifier returns probabilities: leave outputs out"
    with pytest.raises(ValueError, match=words):
        calibrate(copy.deepcopy(voting), loader_of(*held_out()), outputs="logits")
    with pytest.raises(ValueError, match="outputs must be one of logits, probabilities, got 'logit'"):
        calibrate(nn.Identity(), loader_of(logits, labels), outputs="logit")
    stated = calibrate(copy.deepcopy(voting), loader_of(*held_out()), outputs="probabilities")
    assert stated.as_dict() == calibrate(copy.deepcopy(voting), loader_of(*held_out())).as_dict()


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_modules_of_another_precision_than_the_held_out_data(change):
    logits, labels = drawn()
    net = linear_identity()
    expected = calibrate(nn.Identity(), loader_of(logits, labels)).as_dict()["after"]
    found = calibrate(change(net), loader_of(logits, labels))
    assert found.as_dict()["after"] == pytest.approx(expected, abs=0.02)


def test_soft_labels_that_are_sure_are_labels():
    logits, labels = drawn()
    soft = functional.one_hot(labels, 3).float()
    assert (
        calibrate(nn.Identity(), [(logits, soft)]).as_dict() == calibrate(nn.Identity(), [(logits, labels)]).as_dict()
    )
    even = 0.5 * soft + 0.5 / 3
    softened = calibrate(nn.Identity(), [(logits, even)]).module.calibration.temperature
    assert softened > calibrate(nn.Identity(), [(logits, labels)]).module.calibration.temperature
    for method in METHODS:  # the sum is not quite 1, and another one in each row
        off = even * torch.linspace(0.9925, 1.0075, 600)[:, None]
        rounded, exact = (
            calibrate(nn.Identity(), [(logits, y)], method)
            for y in (off, off.double() / off.double().sum(1, keepdim=True))
        )
        assert rounded.as_dict()["before"] == pytest.approx(exact.as_dict()["before"], rel=1e-9)
        assert rounded.as_dict()["after"] == pytest.approx(exact.as_dict()["after"], rel=1e-9)


class TwoInputs(nn.Module):
    def forward(self, pixels, more=None):
        return {"logits": pixels + more}


def test_loaders_of_every_form():
    logits, labels = drawn()
    expected = calibrate(nn.Identity(), [(logits, labels)]).as_dict()
    half = logits / 2
    same = [
        (nn.Identity(), [{"image": logits, "label": labels}]),
        (nn.Identity(), [{"whatever": logits.numpy(), "y": labels.numpy()}]),
        (nn.Identity(), [[logits.numpy(), labels.tolist()]]),
        (nn.Identity(), [(logits, labels[:, None])]),
        (nn.Identity(), ((logits[i : i + 7], labels[i : i + 7]) for i in range(0, 600, 7))),
        (TwoInputs(), [{"pixels": half, "more": half, "labels": labels}]),
        (TwoInputs(), [(half, half, labels)]),
        (torch.compile(nn.Identity(), backend="eager"), [(logits, labels)]),
        (nn.Identity().double(), [(logits, labels.int())]),
    ]
    for module, loader in same:
        found = calibrate(module, loader).as_dict()
        assert found["before"] == pytest.approx(expected["before"], rel=1e-5)
        assert found["after"] == pytest.approx(expected["after"], rel=1e-5)


LOGITS, LABELS = drawn(60)
SURE = torch.cat([LOGITS, torch.full((60, 500), -2.0)], 1)
REFUSED = {
    "a regressor's batch": (LOGITS, "a batch must be", TypeError),
    "a dict without labels": ({"a": LOGITS, "b": LOGITS}, "the labels as one of target, .* got a, b", TypeError),
    "two kinds of labels": ({"x": LOGITS, "y": LABELS, "label": LABELS}, "the labels as one of", TypeError),
    "words": ((LOGITS, ["cat"] * 60), r"labels must be numbers, .* got \['cat', ", TypeError),
    "indices of rows": ((LOGITS, LABELS, LABELS), "3 were given; a batch must contain what `forward` takes", TypeError),
    "names of files": ({"x": LOGITS, "y": LABELS, "id": ["a"] * 60}, "keyword .*: drop the rest in", TypeError),
    "a label out of range": ((LOGITS, LABELS + 1), "Label 3 is not one of the 3 classes 0 to 2", ValueError),
    "ignored labels": ((LOGITS, torch.where(LABELS > 1, -100, LABELS)), "Label -100", ValueError),
    "float labels": ((LOGITS, LABELS.float()), "must be class indices .* float32", ValueError),
    "labels of images": ((LOGITS, LABELS[:, None].expand(60, 4)), "must be class indices .* int64", ValueError),
    "several labels": ((LOGITS, torch.ones(60, 3)), "one label at a time", ValueError),
    "negative soft labels": ((LOGITS, torch.tensor([[1.5, -0.5, 0.0]] * 60)), "at least 0", ValueError),
    "NaN": (
        (torch.where(LOGITS > 5, torch.nan, LOGITS), LABELS),
        "NaN or infinite in .* of 60 held-out rows",
        ValueError,
    ),
    "inf": ((torch.where(LOGITS > 5, torch.inf, LOGITS), LABELS), "NaN or infinite", ValueError),
    "bfloat16 probabilities": ((SURE.bfloat16().softmax(1), LABELS), "may be logits or probabilities", ValueError),
    "all but normalized": ((LOGITS.softmax(1) * 1.005, LABELS), "may be logits or probabilities", ValueError),
    "independent classes": ((LOGITS.sigmoid(), LABELS), "may be logits or probabilities", ValueError),
    "pixels": ((LOGITS[:, :, None, None], LABELS), r"Batch 0 has logits \(60, 3, 1, 1\)", ValueError),
    "other rows": ((LOGITS, LABELS[:9]), r"labels \(9,\)", ValueError),
    "too few rows": ((LOGITS[:9], LABELS[:9]), "needs 10 held-out rows", ValueError),
}


@pytest.mark.parametrize(("batch", "words", "error"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_misunderstood_is_refused(batch, words, error):
    module = CalibratedClassifier(nn.Identity())
    module.calibration.set_values(temperature=torch.tensor(3.0))
    with pytest.raises(error, match=words):
        calibrate(module, [batch])
    assert module.calibration.temperature == 3  # as it was


def test_wrong_arguments_are_refused():
    words = r"method must be one of temperature, vector, isotonic.*Did you mean 'temperature'"
    with pytest.raises(ValueError, match=words):
        calibrate(nn.Identity(), [(LOGITS, LABELS)], "temperatur")
    for call in (lambda: calibrate(max, [(LOGITS, LABELS)]), lambda: CalibratedClassifier(max)):
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module"):
            call()
    for loader in ([], [(LOGITS[:0], LABELS[:0])]):
        with pytest.raises(ValueError, match="The loader has no rows"):
            calibrate(nn.Identity(), loader)
    with pytest.raises(TypeError, match=r"or datamodule.val_dataloader\(\) does, got .*DataModule"):
        calibrate(nn.Identity(), LightningDataModule())
    with pytest.raises(TypeError, match="must return a tensor of logits, got tuple"):
        calibrate(nn.LSTM(3, 3), [(LOGITS[:, None], LABELS)])
    with pytest.raises(ValueError, match="is for 2 classes"):
        calibrate(nn.Identity(), [drawn(classes=2)], "vector").module(LOGITS)
    with pytest.raises(ValueError, match="a label for each row"):
        calibration_scores(LOGITS.softmax(1), LABELS[:3])
    for logits in (LOGITS, LOGITS[:, 0], LOGITS.numpy() * np.nan):
        with pytest.raises(ValueError, match="needs probabilities, from 0 to 1 and with the sum 1 in each row, got"):
            calibration_scores(logits, LABELS.clamp(max=1))
    calibrated = calibrate(nn.Identity(), [(LOGITS, LABELS)]).module
    with pytest.raises(ValueError, match=r"logits must be \(B, C\), .* got \(2, 5, 3\): flatten"):
        calibrated(torch.rand(2, 5, 3))


def test_the_table_can_be_read():
    table = calibrate(nn.Identity(), [drawn(sure=2.0)])
    text = str(table)
    calibrate(table.module, [drawn(sure=9.0)])
    assert str(table) == text
    assert "Calibration: temperature" in text
    for name in ("NLL", "ECE, 15 bins", "adaptive ECE, 15 bins", "Brier score", "600 held-out rows", "T = "):
        assert name in text
    assert f"{table.before['nll']:.4f}" in text
    assert set(table.as_dict()) == {"method", "rows", "before", "after"}


class LitDividing(LightningModule):
    """A module whose hooks make its inputs."""

    def forward(self, x):
        return x

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / (1 if self.trainer.training else 100), *batch[1:]


def test_the_hooks_of_a_lightning_module_prepare_its_batches():
    logits, labels = drawn()
    expected = calibrate(nn.Identity(), [(logits, labels)]).as_dict()["after"]
    module = LitDividing()
    with pytest.raises(RuntimeError, match=r"is not attached to a `Trainer`. A hook .* set module.trainer first"):
        calibrate(module, [(100 * logits, labels)])
    module.trainer = Trainer(**QUIET)
    for each in (module, torch.compile(module, backend="eager"), CalibratedClassifier(module)):
        assert calibrate(each, [(100 * logits, labels)]).as_dict()["after"] == pytest.approx(expected, rel=1e-5)


def test_ranks_with_a_distributed_sampler_get_that_of_one_process(tmp_path):
    logits, labels = drawn(101)
    calibrate_alone = {
        method: calibrate(nn.Identity(), loader_of(logits, labels, batch_size=8), method) for method in METHODS
    }

    def run(rank):
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        data = TensorDataset(logits, labels)
        sampler = DistributedSampler(data, 2, rank, shuffle=False)
        loaders = [DataLoader(data, 8, sampler=sampler)] * 2 + [
            DataLoader(data, batch_sampler=BatchSampler(sampler, 8, False))
        ]
        tables = {method: calibrate(nn.Identity(), each, method) for method, each in zip(METHODS, loaders, strict=True)}
        found = {method: (table.as_dict(), table.module.state_dict()) for method, table in tables.items()}
        torch.save(found, tmp_path / f"{rank}.pt")

    fork(run, 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for method, table in calibrate_alone.items():
            assert found[method][0] == table.as_dict()
            for name, value in table.module.state_dict().items():
                assert torch.equal(found[method][1][name], value)
