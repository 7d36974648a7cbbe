"""One ensemble of each kind, and `TricksMixin` with each preset, on a device that is not the CPU."""

from collections import Counter

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_tricks import AutoResume, Tricks, TricksMixin, ensembles
from lightning_tricks.seeding import isolated_rng
from tests.emulated_cuda.device import EmulatedCuda
from tests.emulated_cuda.test_callbacks import After, Before
from tests.ensembles.nets import CNN, MLP, Stops, diabetes, few, fit
from tests.ensembles.nets import digits as digits_for_ensembles
from tests.ensembles.test_families import ADAM, FAMILIES, made
from tests.small import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`lr_scheduler.step"),
]
_ON_DEVICE = {"accelerator": "cuda", "devices": 1, "max_epochs": 4}
_OTHERS = {"Voting": {}, "Bagging": {}, "Fusion": {}, "SnapshotEnsemble": {}, "Stacking": {"cv": 2}}


def _make(name, kind="Classifier", make=CNN):
    if name in FAMILIES:
        return made(name, kind, make=make if kind == "Classifier" else MLP)
    arguments = {"inputs": 10, "outputs": 1} if kind == "Regressor" else None
    members = {"n_estimators": 2, "estimator_args": arguments, **_OTHERS[name]}
    maker = getattr(ensembles, name + kind)
    return maker(MLP if kind == "Regressor" else make, **members, optimizer=ADAM, seed=0)


def _data(kind="Classifier"):
    train, test = diabetes() if kind == "Regressor" else digits_for_ensembles()
    return few(train, 64), few(test, 32, shuffle=False)


def _run(ensemble, accelerator, kind="Classifier", **arguments):
    """Fit, validate, test and predict; return all results on the CPU."""
    train, test = _data(kind)
    with isolated_rng(seed=0):
        trainer = fit(ensemble, train, test, accelerator=accelerator, devices=1, max_epochs=4, **arguments)
        results = [trainer.validate(ensemble, test, verbose=False), trainer.test(ensemble, test, verbose=False)]
        results.append([part.cpu() for part in trainer.predict(ensemble, test)])
    x = test.dataset.tensors[0].to(ensemble.device)
    uncertainty = ensemble.predict_uncertainty(x)
    return results, {name: value.cpu() for name, value in ensemble.state_dict().items()}, uncertainty.total.cpu()


@pytest.mark.parametrize("kind", ["Classifier", pytest.param("Regressor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [*FAMILIES, *_OTHERS])
def test_an_ensemble_has_the_bits_of_the_cpu(name, kind):
    on_cpu = _run(_make(name, kind), "cpu", kind)
    with EmulatedCuda():
        on_device = _run(_make(name, kind), "cuda", kind)
    assert same(on_device, on_cpu)


@pytest.mark.parametrize("name", [*FAMILIES, *_OTHERS])
@pytest.mark.filterwarnings("error:AutoResume")
def test_an_ensemble_that_was_stopped_ends_as_one_that_was_not(name, tmp_path):
    train, test = _data()
    with EmulatedCuda():
        whole, first, second = (_make(name) for _ in range(3))
        with isolated_rng(seed=0):
            fit(whole, train, test, **_ON_DEVICE)
        with isolated_rng(seed=0), pytest.raises(RuntimeError, match="stopped"):
            fit(first, train, test, **_ON_DEVICE, callbacks=[AutoResume(tmp_path, every_n_train_steps=1), Stops(6)])
        fit(second, train, test, **_ON_DEVICE, callbacks=[AutoResume(tmp_path)])
        assert same(dict(second.state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize("name", [*FAMILIES, *_OTHERS])
def test_no_batch_after_the_first_makes_the_host_wait(name):
    train, test = _data()
    with EmulatedCuda() as device:
        moments = [Before(device.waits), After(device.waits)]
        fit(_make(name), train, test, **_ON_DEVICE, callbacks=moments)
    found = Counter(wait.line for wait in device.waits if wait.blocks and wait.moment == "a later batch" and wait.hook)
    assert not found


class Tricked(TricksMixin, LightningModule):
    def __init__(self, outputs=10, tricks=None):
        super().__init__(tricks=tricks)
        self.net = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, outputs))

    def _step(self, batch, batch_idx):
        scores = self.net(batch[0])
        if scores.shape[1] == 1:
            target = batch[1].float().unsqueeze(1)
            return {"loss": nn.functional.mse_loss(scores, target), "preds": scores, "target": target}
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "preds": scores, "target": batch[1]}

    training_step = validation_step = _step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("preset", ["classification", "regression", "finetune", "reproducible"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_preset_trains_and_is_resumed(preset, precision, tmp_path):
    classes = {} if preset == "regression" else {"num_classes": 10}
    outputs = 1 if preset == "regression" else 10

    def make(folder):
        with isolated_rng(seed=0):
            return Tricked(outputs=outputs, tricks=Tricks.preset(preset, dirpath=str(tmp_path / folder), **classes))

    train, test = _data()
    options = {**_ON_DEVICE, "precision": precision}
    with EmulatedCuda():
        whole, first, second = make("whole"), make("stopped"), make("stopped")
        fit(whole, train, test, **options)
        with pytest.raises(RuntimeError, match="stopped"):
            fit(first, train, test, **options, callbacks=[Stops(6)])
        fit(second, train, test, **options)
        assert same(dict(second.state_dict()), dict(whole.state_dict()))
