"""TrainableCheckpoint beside callbacks that exchange weights: each way to load gives those of a whole checkpoint."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn

from lightning_tricks import CheckpointRemapping, ExponentialMovingAverage, GradualUnfreezing, LoRA, TricksMixin
from lightning_tricks.finetuning import BaseMismatchError, TrainableCheckpoint
from lightning_tricks.seeding import isolated_rng
from tests.small import QUIET, EvaluatedNet, loader, same

averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="Lightning 2.5 has none")
pytestmark = pytest.mark.filterwarnings(
    "ignore:You're using the WeightAveraging callback",
    "ignore:Swapping scheduler",
    "ignore:The dirpath has changed",
    "ignore:Checkpoint directory",
    "ignore:Be aware that when using",
    "ignore:The checkpoint was not created with WeightAveraging",
)

AVERAGING = {
    "nothing": list,
    "EMA": lambda: [averaging.EMAWeightAveraging(decay=0.9)],
    "late EMA": lambda: [averaging.EMAWeightAveraging(decay=0.9, update_starting_at_epoch=1)],
    "our EMA": lambda: [ExponentialMovingAverage(0.9)],
    "mean": lambda: [averaging.WeightAveraging()],
    "SWA": lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)],
}
BESIDE = {
    "LoRA": lambda folder: [LoRA(2, target_modules=["net.0", "net.3"], modules_to_save="net.4")],
    "unfreezing": lambda folder: [GradualUnfreezing({0: "net.4.*", 1: "net.3.*"}, freeze_norm=False)],
    "pretrained": lambda folder: [CheckpointRemapping(str(folder / "pretrained.pt"))],
}


class Tuned(TricksMixin, EvaluatedNet):
    """A frozen backbone, whose BatchNorm counts on, and a head that trains."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        super().__init__()

    def build(self):
        with isolated_rng(seed=self.seed):
            layers = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 10)
            self.net = nn.Sequential(*layers)
        self.net[:4].requires_grad_(False)


class Weights(Callback):
    """Keeps the weights with which something is evaluated."""

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.weights = copied(pl_module.state_dict())

    on_validation_batch_start = on_predict_batch_start = on_test_batch_start


def copied(state_dict):
    return {name: value.clone() for name, value in state_dict.items()}


def trainer_of(folder, *callbacks):
    saving = ModelCheckpoint(folder, "{epoch}", monitor="loss", mode="max", save_top_k=-1, save_last=True)
    options = {**QUIET, "enable_checkpointing": True, "max_epochs": 4, "default_root_dir": folder}
    options |= {"limit_train_batches": 4, "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}
    return Trainer(callbacks=[*callbacks, saving, Weights()], **options)


def fit(trainer, module, path=None):
    with isolated_rng(seed=1):
        trainer.fit(module, loader(), loader(), ckpt_path=path)
    return copied(module.state_dict())


def evaluated(trainer, stage, module, path=None):
    getattr(trainer, stage)(module, loader(), ckpt_path=path)
    return next(one.weights for one in trainer.callbacks if isinstance(one, Weights))


@pytest.mark.parametrize(
    ("averages", "beside"),
    [pytest.param(one, "nothing", marks=[pytest.mark.thorough] * (one == "mean")) for one in AVERAGING]
    + [(one, other) for one in ("EMA", "our EMA") for other in BESIDE],
)
def test_each_way_to_load(averages, beside, tmp_path):
    torch.save(Tuned(7).state_dict(), tmp_path / "pretrained.pt")

    def others():
        return BESIDE[beside](tmp_path) if beside in BESIDE else []

    def callbacks(*further):
        return [*others(), *AVERAGING[averages](), *further]

    whole, small = tmp_path / "whole", tmp_path / "small"
    final = fit(bare := trainer_of(whole, *callbacks()), Tuned())
    trainer, module = trainer_of(small, *callbacks(TrainableCheckpoint())), Tuned()
    assert same(fit(trainer, module), final)
    assert same(evaluated(trainer, "validate", module), final)

    best = Path(bare.checkpoint_callback.best_model_path).name
    files = {"best": best, "last": "last.ckpt", small / "epoch=0.ckpt": "epoch=0.ckpt"}
    saved = {path: torch.load(whole / name, weights_only=False)["state_dict"] for path, name in files.items()}
    for path, expected in saved.items():
        assert same(evaluated(trainer, "test", module, path), dict(expected)), path
    first = small / "epoch=0.ckpt"
    for stage in ("validate", "predict"):
        assert same(evaluated(trainer, stage, module, first), dict(saved[first])), stage
    for further in (callbacks(TrainableCheckpoint()), [*others(), TrainableCheckpoint()]):
        assert same(evaluated(trainer_of(tmp_path, *further), "test", Tuned(), first), dict(saved[first]))
    if beside != "LoRA":  # which the class does not add
        loaded = Tuned.load_from_checkpoint(first, seed=7 if beside == "pretrained" else 0)
        assert same(dict(loaded.state_dict()), dict(saved[first]))
    assert same(fit(trainer_of(tmp_path, *callbacks(TrainableCheckpoint())), Tuned(), first), final)

    again = trainer_of(tmp_path, *callbacks(TrainableCheckpoint()))
    if averages in ("EMA", "late EMA") and beside != "pretrained":  # which are loaded anew
        with pytest.raises(BaseMismatchError, match=r"may change frozen weights by rounding: resume with a new module"):
            fit(again, module, first)
    else:
        assert same(fit(again, module, first), final)
