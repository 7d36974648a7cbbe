"""Objects in checkpoints: those among hyper-parameters do no harm, others are told when they are saved."""

import os
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks import AutoResume
from lightning_tricks.auto_resume import CheckpointFolder
from tests.auto_resume.test_callback import fit, stop, weights
from tests.small import Net, loader, same

_TOLD = "AutoResume does not resume from a checkpoint that contains objects"


class Mode(Enum):
    FAST = "fast"


class Argued(Net):
    """Has hyper-parameters that no reader of data restores."""

    class Kind(Enum):
        SMALL = 1

    def __init__(self, root=Path("data"), mode=Mode.FAST, activation=torch.relu, kind=Kind.SMALL, seen=range(3)):
        super().__init__(dropout=0.2)
        self.save_hyperparameters()


def test_objects_among_hyperparameters_do_not_block_a_resume(tmp_path):
    undisturbed = weights(fit(module=Argued))
    assert stop(AutoResume(tmp_path), module=Argued) == 75
    assert same(weights(fit(AutoResume(tmp_path), module=Argued)), undisturbed)


class Remembers(Callback):
    """Saves a NumPy date."""

    def __init__(self, value=None):
        self._value = {"nested": [{"best": value or np.datetime64("2026-01-01")}]}

    def state_dict(self):
        return self._value

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


class CountsByNumber(Remembers):
    def state_dict(self):
        return {"counts": {np.datetime64(0, "D"): 4}}


class SavesMore(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["extra"] = {"path": Path("here")}


class Extra(Net):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["of_module"] = (1, Mode.FAST)


class Stateful(Net):
    def get_extra_state(self):
        return {"mode": Mode.FAST}

    def set_extra_state(self, state):
        self.mode = state["mode"]


class Data(LightningDataModule):
    def state_dict(self):
        return {"seen": np.array(["a"])}

    def train_dataloader(self):
        return loader(shuffle=True)


@pytest.mark.parametrize(
    ("callbacks", "module", "data", "words"),
    [
        ([Remembers], Net, None, r"\['Remembers'\]\['nested'\]\['0'\]\['best'\] is a numpy\S*"),
        ([CountsByNumber], Net, None, r"\['CountsByNumber'\].*\['a key'\] is a numpy\S*"),
        ([SavesMore], Net, None, r"checkpoint\['extra'\]\['path'\] is a pathlib\S*"),
        ([], Extra, None, r"checkpoint\['of_module'\]\['1'\] is a .*Mode"),
        ([], Stateful, None, r"checkpoint\['state_dict'\].* is a .*Mode"),
        ([], Net, Data, r"checkpoint\['Data'\]\['seen'\] is a numpy\S*"),
    ],
    ids=["callback", "keys", "hook of a callback", "hook of the module", "extra state", "datamodule"],
)
def test_other_objects_are_named_at_the_first_save(tmp_path, callbacks, module, data, words):
    def start(**options):
        made = AutoResume(tmp_path, **options)
        return stop(made, *(c() for c in callbacks), module=module, data=data and data(), step=23, epochs=3)

    with pytest.warns(UserWarning, match=words) as told:
        start()
    assert sum(_TOLD in str(warning.message) for warning in told) == 1, "twice for two saves"
    newest = CheckpointFolder(tmp_path).manifests()[0]
    with pytest.raises(MisconfigurationException, match=f"{words} in .*allow_pickle=True"):
        fit(AutoResume(tmp_path), *(c() for c in callbacks), module=module, data=data and data(), epochs=3)
    assert CheckpointFolder(tmp_path).manifests()[0] == newest

    kept = [c() for c in callbacks]
    again = fit(AutoResume(tmp_path, allow_pickle=True), *kept, module=module, data=data and data(), epochs=3)
    assert again.global_step == 30
    if callbacks == [Remembers]:
        assert kept[0].loaded == Remembers().state_dict()


def test_numbers_of_numpy_are_resumed(tmp_path):
    """As comparisons of metrics give them."""
    first, kept = (Remembers({np.int64(0): np.float32(0.5)}) for _ in range(2))
    assert stop(AutoResume(tmp_path), first, step=23, epochs=3) == 75
    fit(AutoResume(tmp_path), kept, epochs=3)
    ((key, value),) = kept.loaded["nested"][0]["best"].items()
    assert (key, value, type(key), type(value)) == (0, 0.5, np.int64, np.float32)


def test_a_save_that_cannot_be_resumed_counts_as_failed(tmp_path):
    with pytest.raises(OSError, match=r"Remembers.* is a numpy\S*"):
        fit(AutoResume(tmp_path, on_failed_save="raise"), Remembers())


class SavesALambda(Callback):
    def state_dict(self):
        return {"key": lambda: 0}


def test_what_no_checkpoint_can_hold_does_not_end_the_training(tmp_path):
    with pytest.warns(UserWarning, match=r"AutoResume: step .* could not be saved in .*lambda.* Training continues"):
        trainer = fit(AutoResume(tmp_path), SavesALambda())
    assert trainer.global_step == 20
    assert not list(tmp_path.iterdir()) or not CheckpointFolder(tmp_path).manifests()


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.trap("checkpoints: AutoResume unpickled before it knew whose checkpoint it was")
@pytest.mark.parametrize("place", ["hyper_parameters", "anything"])
def test_a_foreign_checkpoint_runs_nothing(tmp_path, monkeypatch, place):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    stop(AutoResume(tmp_path))
    folder = CheckpointFolder(tmp_path)
    newest = folder.manifests()[0]
    poisoned = {**torch.load(folder.path_of(newest), weights_only=True), place: {"x": RunsCode()}}
    folder.save(poisoned, epoch=1, step=13, batches=3, finished=False, run=newest.run)
    with pytest.raises(MisconfigurationException, match=r"asks to call .*mkdir"):
        fit(AutoResume(tmp_path))
    with pytest.raises(MisconfigurationException, match=r"another run|asks to call"):
        fit(AutoResume(tmp_path, allow_pickle=True), module=lambda: Net(hidden=8))
    assert not Path("ran").exists()
