"""A script that is edited between two starts: what changed is listed, taken or ignored, as `on_change` says."""

from __future__ import annotations

import argparse
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_tricks import (
    AutoResume,
    GradientClipping,
    LoRA,
    ScheduleSpec,
    seed_everything,
)
from lightning_tricks.lr_schedules import build_schedule
from tests.contract.lab import same

STOPPED_AT, RESUMED_AT, BATCHES = 15, 14, 11

SCRIPT: dict[str, Any] = {
    "seed": 7,
    "lr": 0.1,
    "optimizer": torch.optim.SGD,
    "options": {"momentum": 0.9},
    "groups": None,  # weight decay of each of two groups
    "schedule": None,  # class, arguments, interval
    "spec": None,  # a ScheduleSpec
    "rows": 44,
    "loader": {"batch_size": 4, "shuffle": True},
    "sampler": None,
    "augment": None,
    "dropout": 0.2,
    "activation": nn.ReLU,
    "width": 8,
    "loss_weight": 1.0,
    "hparams": {},
    "argument": 0.5,
    "epochs": 3,
    "trainer": {},
    "callbacks": list,
}


class Net(LightningModule):
    def __init__(self, loss_weight: float, argument: float, script: dict[str, Any], **others: Any) -> None:
        super().__init__()
        self.save_hyperparameters({"loss_weight": loss_weight, **others})
        self.argument = argument
        self.net = nn.Sequential(
            nn.Linear(6, script["width"]),
            script["activation"](),
            nn.Dropout(script["dropout"]),
            nn.Linear(script["width"], 3),
        )
        object.__setattr__(self, "_script", script)
        self.seen: dict[int, tuple[float, int]] = {}

    def training_step(self, batch, batch_idx):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen[self.trainer.global_step] = (rate, len(batch[0]))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return self.hparams["loss_weight"] * self.argument * loss

    def configure_optimizers(self):
        script = self._script
        groups: Any = [one for one in self.parameters() if one.requires_grad]
        if script["groups"]:
            layers = (self.net[0], self.net[3])
            groups = [
                {"params": part.parameters(), "weight_decay": decay}
                for part, decay in zip(layers, script["groups"], strict=True)
            ]
        optimizer = script["optimizer"](groups, lr=script["lr"], **script["options"])
        if script["spec"]:
            return {"optimizer": optimizer, "lr_scheduler": build_schedule(optimizer, script["spec"], self.trainer)}
        if not script["schedule"]:
            return optimizer
        kind, arguments, interval = script["schedule"]
        scheduler = kind(optimizer, **arguments)
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "monitor": "loss"}]


class Augmented(TensorDataset):
    def __init__(self, *tensors: torch.Tensor, transform: Any = None) -> None:
        super().__init__(*tensors)
        self.transform = transform

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x if self.transform is None else self.transform(x)), y


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


class Crash(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == STOPPED_AT:
            raise RuntimeError("crash")


class ByHand(Callback):
    """Makes the same edit in a run that is not stopped."""

    def __init__(self, act: Callable[[Trainer, Any], None]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == RESUMED_AT:
            self.act(trainer, pl_module)


def run(folder: Any, *callbacks: Callback, on_change: Any = "raise", **edits: Any) -> tuple[Trainer, Any]:
    """Run the script with edits; with a folder, guarded."""
    script = {**SCRIPT, **edits}
    seed_everything(script["seed"], verbose=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(script["rows"], 6, generator=generator)
    data = Augmented(x, x[:, :3].argmax(1), transform=script["augment"])
    arguments = dict(script["loader"])
    if script["sampler"]:
        arguments |= {"shuffle": None, "sampler": script["sampler"](x)}
    module = Net(script["loss_weight"], script["argument"], script, **script["hparams"])
    guard = [AutoResume(folder, every_n_train_steps=2, on_change=on_change)] if folder else []
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "callbacks": [*guard, *script["callbacks"](), *callbacks],
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "log_every_n_steps": 1,
        "logger": False,
        "max_epochs": script["epochs"],
    }
    trainer = Trainer(**{**given, **script["trainer"]})
    try:
        trainer.fit(module, DataLoader(data, **arguments))
    except RuntimeError as error:
        if "crash" not in str(error):
            raise
    return trainer, module


@dataclass
class Edit:
    """An edit of the script between two starts, and what it does.

    Attributes:
        now: What the second start changes.
        before: What the script was before, beside `SCRIPT`.
        line: A regular expression of a line in the error; empty if it is no change.
        old: What `on_change="old"` does: "kept" ends as if nothing had been edited; "nevertheless" and "refused".
        by_hand: Makes the edit in a run that is not stopped, which then ends with the same weights.
        rates: Whether `on_change="new"` has the learning rates of a run that was edited from the start.
        warns: A regular expression of a warning that comes in all cases.
    """

    now: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    old: str = "kept"
    by_hand: Callable[[Trainer, Any], None] | None = None
    rates: bool = True
    warns: str = ""


def _set_option(name: str, value: Any, groups: slice = slice(None)) -> Callable[[Trainer, Any], None]:
    def act(trainer: Trainer, module: Any) -> None:
        for group in trainer.optimizers[0].param_groups[groups]:
            group[name] = value

    return act


def _step(step: int, gamma: float, interval: str = "step") -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.StepLR, {"step_size": step, "gamma": gamma}, interval


def _one_cycle(rate: float, total: int) -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.OneCycleLR, {"max_lr": rate, "total_steps": total}, "step"


def _cosine(epochs: int) -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.CosineAnnealingLR, {"T_max": epochs}, "epoch"


def _power(base: float) -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.LambdaLR, {"lr_lambda": lambda step: base**step}, "step"


def _plateau(factor: float) -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.ReduceLROnPlateau, {"factor": factor, "patience": 0, "threshold": 10.0}, "epoch"


class Polynomial(lr_scheduler.LRScheduler):
    """A schedule as people write them."""

    def __init__(self, optimizer: Any, power: float, last_epoch: int = -1) -> None:
        self.power = power
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        return [base / (1 + self.last_epoch) ** self.power for base in self.base_lrs]


def _warm_up(optimizer: Any, gamma: float) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, gamma)]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


def _milestone(step: int) -> tuple[Any, dict[str, Any], str]:
    def make(optimizer: Any) -> Any:
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 100), lr_scheduler.ExponentialLR(optimizer, 0.5 + step / 100)]
        return lr_scheduler.SequentialLR(optimizer, parts, [step])

    return make, {}, "step"


def _backwards(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Give the parameters in another order, as a set of them does in another process."""
    return torch.optim.SGD(parameters[::-1], **options)


class Wrapper(torch.optim.SGD):
    """An optimizer around another one, whose groups it shares."""

    def __init__(self, parameters: Any, lr: float, **options: Any) -> None:
        super().__init__(parameters, lr, **options)
        self.base = torch.optim.SGD(self.param_groups, lr, **options)
        self.param_groups = self.base.param_groups

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


def _machine(one: bool) -> dict[str, Any]:
    here, name = ("/a", "fox") if one else ("/b", "dog")
    return {
        "cpu_count": 2 + one,
        "env": {"SHLVL": str(2 + one)},
        "exp_name": name,
        "git_sha": "abc1234" if one else "def5678",
        "machine": name,
        "name": name,
        "train_files": [f"{here}/{number}.png" for number in range(3 + one)],
        "use_cuda": one,
        "version": 1 + one,
        "world_size": 1 + one,
    }


def _namespace(rate: float) -> dict[str, Any]:
    return {
        "args": argparse.Namespace(mixup=rate, output_dir=f"runs/{rate}", started="2026-11-2" + str(int(10 * rate)))
    }


def _clipping(norm: float) -> Callable[[], list[Callback]]:
    return lambda: [GradientClipping(norm)]


def _patience(number: int) -> Callable[[], list[Callback]]:
    return lambda: [EarlyStopping("loss", patience=number, mode="max")]


class Noise(Callback):
    """A callback of a user, that changes the training by an argument."""

    def __init__(self, scale: float, out_dir: str = "a") -> None:
        self.scale, self.out_dir = scale, out_dir

    def on_after_backward(self, trainer, pl_module):
        for one in pl_module.parameters():
            one.grad.mul_(1 + self.scale)


EDITS = {
    "lr": Edit({"lr": 0.01}, line="SGD.lr: 0.1 -> 0.01", by_hand=_set_option("lr", 0.01)),
    "momentum": Edit(
        {"options": {"momentum": 0.5}}, line="SGD.momentum: 0.9 -> 0.5", by_hand=_set_option("momentum", 0.5)
    ),
    "weight decay": Edit(
        {"options": {"momentum": 0.9, "weight_decay": 0.1}},
        line="SGD.weight_decay: 0 -> 0.1",
        by_hand=_set_option("weight_decay", 0.1),
    ),
    "several options": Edit(
        {"lr": 0.01, "options": {"momentum": 0.5}}, line=r"SGD.lr: 0.1 -> 0.01\n  SGD.momentum: 0.9 -> 0.5"
    ),
    "decay of one group": Edit(
        {"groups": (0.0, 0.1)},
        {"groups": (0.0, 0.0)},
        line=r"SGD.groups\[1\].weight_decay: 0.0 -> 0.1",
        by_hand=_set_option("weight_decay", 0.1, slice(1, 2)),
    ),
    "two groups": Edit(
        {"groups": (0.0, 0.0)}, line="SGD.groups: .*4.* -> .*2, 2", old="refused", by_hand=lambda *_: None
    ),
    "one group": Edit(
        {"groups": None},
        {"groups": (0.0, 0.0)},
        line="SGD.groups: .*2, 2.* -> .*4",
        old="refused",
        by_hand=lambda *_: None,
    ),
    "betas": Edit(
        {"options": {"betas": (0.5, 0.9)}},
        {"optimizer": torch.optim.Adam, "lr": 0.01, "options": {}},
        line=r"Adam.betas: \[0.9, 0.999\] -> \[0.5, 0.9\]",
        by_hand=_set_option("betas", (0.5, 0.9)),
    ),
    "an option with another moment": Edit(
        {"options": {"amsgrad": True}},
        {"optimizer": torch.optim.Adam, "lr": 0.01, "options": {}},
        line="Adam.amsgrad: False -> True",
    ),
    "an optimizer with the same moments": Edit(
        {"optimizer": torch.optim.AdamW},
        {"optimizer": torch.optim.Adam, "lr": 0.01, "options": {"weight_decay": 0.0}},
        line="optimizer 0: Adam -> AdamW",
        old="refused",
        by_hand=lambda *_: None,
    ),
    "lr in a wrapper": Edit(
        {"lr": 0.01}, {"optimizer": Wrapper}, line="Wrapper.lr: 0.1 -> 0.01", by_hand=_set_option("lr", 0.01)
    ),
    "kernels of an optimizer": Edit(
        {"options": {"momentum": 0.9, "foreach": True}}, {"options": {"momentum": 0.9, "foreach": False}}
    ),
    "order of the parameters": Edit({"optimizer": _backwards}),
    "another optimizer": Edit(
        {"optimizer": torch.optim.Adam, "options": {}}, line="optimizer 0: SGD -> Adam", old="refused"
    ),
    "factor of a step schedule": Edit(
        {"schedule": _step(5, 0.1)}, {"schedule": _step(5, 0.5)}, line="StepLR.gamma: 0.5 -> 0.1"
    ),
    "length of its steps": Edit(
        {"schedule": _step(3, 0.5)}, {"schedule": _step(5, 0.5)}, line="StepLR.step_size: 5 -> 3"
    ),
    "interval of a schedule": Edit(
        {"schedule": _step(1, 0.5, "step")},
        {"schedule": _step(1, 0.5, "epoch")},
        line="StepLR.interval: epoch -> step",
        rates=False,  # the number of its steps continues
    ),
    "lr of a schedule": Edit({"lr": 0.3}, {"schedule": _step(5, 0.5)}, line="SGD.lr: 0.1 -> 0.3"),
    "max_lr of a cycle": Edit(
        {"schedule": _one_cycle(0.4, 40)}, {"schedule": _one_cycle(0.2, 40)}, line="SGD.max_lr: 0.2 -> 0.4"
    ),
    "a longer cycle": Edit(
        {"epochs": 5, "schedule": _one_cycle(0.2, 55)},
        {"schedule": _one_cycle(0.2, 33)},
        line=r"OneCycleLR.total_steps: 33 -> 55 \(its length follows from that of the run\)",
        old="refused",
    ),
    "a longer cosine": Edit(
        {"epochs": 5, "schedule": _cosine(5)},
        {"schedule": _cosine(3)},
        line=r"CosineAnnealingLR.T_max: 3 -> 5 \(its length follows from that of the run\)",
        old="extended",
    ),
    "a longer spec": Edit(
        {"epochs": 5},
        {"spec": ScheduleSpec("polynomial")},
        line=r"FactorLR.factor\(\): .* \(its length follows from that of the run\)",
        old="nevertheless",
    ),
    "a function": Edit(
        {"schedule": _power(0.8)}, {"schedule": _power(0.9)}, line=r"LambdaLR.lr_lambdas\(\): ", old="nevertheless"
    ),
    "a schedule of a user": Edit(
        {"schedule": (Polynomial, {"power": 1.0}, "step")},
        {"schedule": (Polynomial, {"power": 0.5}, "step")},
        line="Polynomial.power: 0.5 -> 1.0",
    ),
    "a part of a schedule": Edit(
        {"schedule": (_warm_up, {"gamma": 0.5}, "step")},
        {"schedule": (_warm_up, {"gamma": 0.9}, "step")},
        line=r"SequentialLR.schedulers\[1\].gamma: 0.9 -> 0.5",
    ),
    "milestone of a schedule": Edit(
        {"schedule": _milestone(20)}, {"schedule": _milestone(10)}, line=r"SequentialLR.schedulers\[1\].gamma"
    ),
    "what a schedule adds to groups": Edit(
        {"schedule": (torch.optim.swa_utils.SWALR, {"swa_lr": 0.02}, "step")},
        {"schedule": (torch.optim.swa_utils.SWALR, {"swa_lr": 0.05}, "step")},
        line="SGD.swa_lr: 0.05 -> 0.02",
    ),
    "factor on a plateau": Edit(
        {"schedule": _plateau(0.1)},
        {"schedule": _plateau(0.5)},
        line="ReduceLROnPlateau.factor: 0.5 -> 0.1",
        rates=False,
    ),
    "lr on a plateau": Edit({"lr": 0.2}, {"schedule": _plateau(0.5)}, line="SGD.lr: 0.1 -> 0.2"),
    "another schedule": Edit(
        {"schedule": (lr_scheduler.ExponentialLR, {"gamma": 0.9}, "step")},
        {"schedule": _step(5, 0.5)},
        line="scheduler 0: StepLR -> ExponentialLR",
        old="refused",
    ),
    "a first schedule": Edit({"schedule": _step(5, 0.5)}, line="scheduler 0: none -> StepLR", old="refused"),
    "no schedule": Edit(
        {"schedule": None}, {"schedule": _step(5, 0.5)}, line="scheduler 0: StepLR -> none", old="refused"
    ),
    "larger batches": Edit(
        {"loader": {"batch_size": 8, "shuffle": True}},
        line="train_dataloaders?.batch_size: 4 -> 8",
        old="nevertheless",
    ),
    "smaller batches": Edit(
        {"loader": {"batch_size": 3, "shuffle": True}},
        line="train_dataloaders?.batch_size: 4 -> 3",
        old="nevertheless",
    ),
    "no shuffling": Edit(
        {"loader": {"batch_size": 4, "shuffle": False}},
        line="train_dataloaders?.shuffle: True -> False",
        old="nevertheless",
    ),
    "shuffling": Edit(
        {"loader": {"batch_size": 4, "shuffle": True}},
        {"loader": {"batch_size": 4, "shuffle": False}},
        line="train_dataloaders?.shuffle: False -> True",
        old="nevertheless",
    ),
    "dropping the last batch": Edit(
        {"loader": {"batch_size": 4, "shuffle": True, "drop_last": True}},
        line="train_dataloaders?.drop_last: False -> True",
        old="nevertheless",
    ),
    "a sampler": Edit(
        {"sampler": lambda x: WeightedRandomSampler(torch.ones(len(x)), len(x))},
        line="train_dataloaders?.sampler: none -> WeightedRandomSampler",
        old="nevertheless",
    ),
    "more data": Edit({"rows": 60}, warns="other data than in the stopped run"),
    "another transform": Edit(
        {"augment": Scale(2.0)}, {"augment": Scale(1.0)}, warns="other data than in the stopped run"
    ),
    "accumulation": Edit({"trainer": {"accumulate_grad_batches": 2}}, line="Trainer.accumulate_grad_batches: 1 -> 2"),
    "clipping of the Trainer": Edit(
        {"trainer": {"gradient_clip_val": 0.01}},
        {"trainer": {"gradient_clip_val": 1.0}},
        line="Trainer.gradient_clip_val: 1.0 -> 0.01",
        by_hand=lambda trainer, module: setattr(trainer, "gradient_clip_val", 0.01),
    ),
    "half of the batches": Edit(
        {"trainer": {"limit_train_batches": 5}},
        {"trainer": {"limit_train_batches": 11}},
        line="Trainer.limit_train_batches: 11 -> 5",
    ),
    "precision": Edit(
        {"trainer": {"precision": "bf16-mixed"}},
        line="Trainer.precision: '32-true' -> 'bf16-mixed'",
        old="nevertheless",
    ),
    "norm of GradientClipping": Edit(
        {"callbacks": _clipping(0.01)},
        {"callbacks": _clipping(1.0)},
        line="GradientClipping.max_norm: 1.0 -> 0.01",
        old="nevertheless",
    ),
    "GradientClipping added": Edit(
        {"callbacks": _clipping(0.01)}, line="GradientClipping: none -> 'in use'", old="nevertheless"
    ),
    "patience": Edit({"callbacks": _patience(5)}, {"callbacks": _patience(3)}, line="EarlyStopping.patience: 3 -> 5"),
    "a callback of a user": Edit(
        {"callbacks": lambda: [Noise(0.5, "b/c")]},
        {"callbacks": lambda: [Noise(0.0)]},
        line="Noise.scale: 0.0 -> 0.5",
        by_hand=lambda trainer, module: setattr(trainer.callbacks[0], "scale", 0.5),
    ),
    "an observer": Edit({"callbacks": lambda: [LearningRateMonitor()], "trainer": {"logger": True}}),
    "seed": Edit({"seed": 8}, line="seed: 7 -> 8"),
    "dropout": Edit(
        {"dropout": 0.5}, line="net.2.p: 0.2 -> 0.5", by_hand=lambda trainer, module: setattr(module.net[2], "p", 0.5)
    ),
    "another activation": Edit({"activation": nn.Tanh}, line="net.1: ReLU -> Tanh", old="nevertheless"),
    "weight of a loss": Edit(
        {"loss_weight": 2.0},
        line="hparams.loss_weight: 1.0 -> 2.0",
        by_hand=lambda trainer, module: module.hparams.update(loss_weight=2.0),
    ),
    "an argument that is no hyper-parameter": Edit(
        {"argument": 0.25},
        line="Net.argument: 0.5 -> 0.25",
        by_hand=lambda trainer, module: setattr(module, "argument", 0.25),
    ),
    "a new hyper-parameter": Edit({"hparams": {"mixup": 0.2}}, line="hparams.mixup: none -> 0.2", old="nevertheless"),
    "in a namespace": Edit(
        {"hparams": _namespace(0.3)},
        {"hparams": _namespace(0.2)},
        line="hparams.args.mixup: 0.2 -> 0.3",
        old="nevertheless",
    ),
    "a fraction with a path in its name": Edit(
        {"hparams": {"drop_path_rate": 0.3}},
        {"hparams": {"drop_path_rate": 0.1}},
        line="hparams.drop_path_rate: 0.1 -> 0.3",
    ),
    "another machine": Edit({"hparams": _machine(True)}, {"hparams": _machine(False)}),
    "a path and a date": Edit(
        {"hparams": {"out_dir": "/b", "name": "run of 2026-11-25", "num_workers": 8, "started": 1795600000.5}},
        {"hparams": {"out_dir": "/a", "name": "run of 2026-11-24", "num_workers": 2, "started": 1795500000.5}},
    ),
    "more epochs": Edit({"epochs": 5}, old="extended"),
    "more epochs, as a hyper-parameter": Edit(
        {"epochs": 5, "hparams": {"max_epochs": 5}}, {"hparams": {"max_epochs": 3}}, old="extended"
    ),
    "fewer epochs": Edit({"epochs": 2}, line="Trainer.max_epochs: 3 -> 2"),
    "fewer steps": Edit({"trainer": {"max_steps": 20}}, line="Trainer.max_steps: -1 -> 20"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Run the script before its edit until it crashes, once for each way that it was; return a copy of its folder."""
    known: dict[str, Any] = {}

    def copy_of(name: str, target: Any) -> Any:
        if name not in known:
            known[name] = tmp_path_factory.mktemp("stopped")
            run(known[name], Crash(), **EDITS[name].before)
        shutil.copytree(known[name], target)
        return target

    return copy_of


def started(name: str, folder: Any, on_change: str) -> tuple[Trainer, Any, str]:
    """Start the edited script; return Trainer, module, and what was warned."""
    edit = EDITS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, module = run(folder, on_change=on_change, **{**edit.before, **edit.now})
    return trainer, module, "\n".join(str(one.message) for one in caught if "AutoResume" in str(one.message))


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.sampled(3)
def test_what_changed_is_listed(name, stopped, tmp_path):
    edit, folder = EDITS[name], stopped(name, tmp_path / "run")
    before = sorted(path.name for path in folder.iterdir())
    if not edit.line:
        trainer, _, warned = started(name, folder, "raise")
        assert trainer.current_epoch == trainer.max_epochs
        assert bool(warned) == bool(edit.warns)
        assert re.search(edit.warns, warned)
        return
    with pytest.raises(MisconfigurationException) as raised:
        started(name, folder, "raise")
    words = str(raised.value)
    assert re.search(edit.line, words), words
    assert all(remedy in words for remedy in ("on_change='new'", "on_change='old'", "Another dirpath"))
    assert sorted(path.name for path in folder.iterdir()) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the script as it was resumes as if nobody had tried
        warnings.filterwarnings("ignore", message=".*(num_workers|logging interval|LeafSpec|litlogger|GPU).*")
        resumed = run(folder, **edit.before)
    assert same(*(one.state_dict() for one in (resumed[1], run(None, **edit.before)[1])))


@pytest.mark.parametrize("name", [name for name, edit in EDITS.items() if edit.line])
@pytest.mark.sampled(3, 1)
def test_new_values_take_effect_from_the_resume_on(name, stopped, tmp_path, caplog):
    edit, folder = EDITS[name], stopped(name, tmp_path / "run")
    trainer, module, warned = started(name, folder, "new")
    assert not warned
    assert re.search(edit.line.split(r"\n")[0], caplog.text)
    now = run(None, **{**edit.before, **edit.now})[1]
    resumed = {step: one for step, one in module.seen.items() if step >= RESUMED_AT}
    assert resumed
    if edit.rates:
        assert {step: rate for step, (rate, _) in resumed.items() if step in now.seen} == pytest.approx(
            {step: now.seen[step][0] for step in resumed if step in now.seen}, rel=1e-12
        )
    if edit.by_hand is not None:
        by_hand = run(None, ByHand(edit.by_hand), **edit.before)[1]
        assert same(module.state_dict(), by_hand.state_dict())
    with warnings.catch_warnings():  # the new values are now those of the run
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(num_workers|logging interval|LeafSpec|litlogger|GPU).*")
        caplog.clear()
        again = run(folder, **{**edit.before, **edit.now})
    assert "had finished" in caplog.text
    assert same(again[1].state_dict(), module.state_dict())
    assert trainer.global_step == again[0].global_step


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.sampled(3, 2)
def test_old_values_are_kept_or_it_is_said_which_cannot_be(name, stopped, tmp_path, caplog):
    edit, folder = EDITS[name], stopped(name, tmp_path / "run")
    if edit.old == "refused":
        with pytest.raises(MisconfigurationException, match=r"the saved state does not fit .*on_change='new'"):
            started(name, folder, "old")
        return
    _, module, warned = started(name, folder, "old")
    if edit.old == "nevertheless":
        assert re.search(f"in effect nevertheless.*{edit.line}", warned), warned
        return
    assert bool(warned) == bool(edit.warns)
    assert not edit.line or re.search(f"old values are kept: .*{edit.line.split(chr(92) + 'n')[0]}", caplog.text)
    if edit.warns:
        return
    epochs = {"epochs": edit.now["epochs"]} if edit.old == "extended" else {}
    whole = run(None, **{**edit.before, **epochs})[1]
    assert same(module.state_dict(), whole.state_dict())
    if edit.line:  # the script as it was before the edit goes on as well
        assert same(module.state_dict(), run(folder, **{**edit.before, **epochs})[1].state_dict())


def test_samples_are_seen_once_though_batches_are_larger(stopped, tmp_path):
    for name, size in (("larger batches", 8), ("smaller batches", 3)):
        _, module, _ = started(name, stopped(name, tmp_path / name), "new")
        in_epoch = [count for step, (_, count) in module.seen.items() if step >= RESUMED_AT]
        seen = (RESUMED_AT - BATCHES) * 4
        rest = 44 - seen // size * size
        first = in_epoch[: -(-rest // size)]
        assert sum(first) == rest
        assert sum(in_epoch) == rest + 44


def test_layers_that_are_written_in_another_order_keep_their_moments(stopped, tmp_path):
    """Lists of parameters that a script builds; Lightning gives each moment to the parameter at its place."""
    folder = stopped("lr", tmp_path / "run")

    def reversed_order(parameters: Any, **options: Any) -> Any:
        return torch.optim.SGD(list(parameters)[::-1], **options)

    _, module = run(folder, optimizer=reversed_order)
    assert same(module.state_dict(), run(None)[1].state_dict())


@pytest.mark.parametrize("ranks", [2])
def test_all_ranks_refuse_and_take_what_changed(ranks, tmp_path):
    ways = {"trainer": {"devices": ranks, "strategy": "ddp_fork"}}
    run(tmp_path, **ways, epochs=1)
    with pytest.raises(Exception, match=r"SGD\.lr: 0\.1 -> 0\.01"):
        run(tmp_path, **ways, epochs=1, lr=0.01)
    run(tmp_path, **ways, epochs=2, lr=0.01, on_change="new")
    newest = torch.load(max(tmp_path.glob(".auto_resume/0*/meta.pt")), weights_only=True)
    assert newest["global_step"] == 12
    assert newest["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01


def test_a_finished_run_that_is_given_more_epochs_is_extended(tmp_path, caplog):
    run(tmp_path)
    caplog.clear()
    _, module = run(tmp_path, epochs=4)
    assert "resumes at epoch 3, step 33, extended from 3 to 4 epochs" in caplog.text
    assert "had finished" not in caplog.text
    assert same(module.state_dict(), run(None, epochs=4)[1].state_dict())


def test_a_finished_run_with_another_learning_rate(tmp_path, caplog):
    run(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"SGD\.lr: 0\.1 -> 0\.01"):
        run(tmp_path, lr=0.01)
    caplog.clear()
    run(tmp_path, lr=0.01, on_change="new")
    assert "They take effect" in caplog.text or "they take effect when it is given more epochs" in caplog.text
    _, module = run(tmp_path, lr=0.01, epochs=4, on_change="new")
    assert {rate for step, (rate, _) in module.seen.items() if step >= 33} == {0.01}


@pytest.mark.parametrize("on_change", ["raise", "new"])
def test_fewer_epochs_than_were_done_are_refused(on_change, stopped, tmp_path):
    folder = stopped("lr", tmp_path / "run")
    with pytest.raises(MisconfigurationException, match=r"max_epochs.*1"):
        run(folder, epochs=1, on_change=on_change)
    assert run(folder, epochs=1, on_change="old")[0].current_epoch == 3


def test_another_model_is_refused_whatever_is_said(stopped, tmp_path):
    folder = stopped("lr", tmp_path / "run")
    for on_change in ("raise", "new", "old"):
        with pytest.raises(MisconfigurationException, match=r"has shape .* load_weights"):
            run(folder, width=9, on_change=on_change)


def test_another_rank_of_lora_is_refused(tmp_path):
    run(tmp_path, Crash(), callbacks=lambda: [LoRA(1, target_modules="linear")])
    with pytest.raises(MisconfigurationException, match=r"lora_.*has shape"):
        run(tmp_path, callbacks=lambda: [LoRA(2, target_modules="linear")], on_change="new")


class Growing(LightningDataModule):
    def train_dataloader(self):
        x = torch.randn(44, 6, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 4 + self.trainer.current_epoch)


def test_batches_that_a_hook_makes_larger_are_no_change(tmp_path):
    def fit(folder: Any, *callbacks: Callback) -> tuple[Trainer, Any]:
        seed_everything(7, verbose=False)
        module = Net(1.0, 0.5, SCRIPT)
        guard = [AutoResume(folder, every_n_train_steps=2)] if folder else []
        trainer = Trainer(
            accelerator="cpu",
            callbacks=[*guard, *callbacks],
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=4,
            reload_dataloaders_every_n_epochs=1,
        )
        trainer.fit(module, datamodule=Growing())
        return trainer, module

    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path, Crash())
    assert same(fit(tmp_path)[1].state_dict(), fit(None)[1].state_dict())


class Annealed(Callback):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rate *= 0.9
        pl_module.net[2].p = self.rate


def test_what_hooks_set_in_a_fit_is_no_change_when_its_objects_are_fitted_again(tmp_path):
    seed_everything(7, verbose=False)
    module, annealed = Net(1.0, 0.5, SCRIPT), Annealed(0.5)
    x = torch.randn(44, 6)
    data = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 4)

    def fit(*callbacks: Callback) -> None:
        trainer = Trainer(
            accelerator="cpu",
            callbacks=[AutoResume(tmp_path, every_n_train_steps=2), annealed, *callbacks],
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=3,
        )
        trainer.fit(module, data)

    with pytest.raises(RuntimeError, match="crash"):
        fit(Crash())
    annealed.rate, left = 0.4, annealed.rate
    with pytest.raises(MisconfigurationException, match=r"Annealed\.rate: 0\.5 -> 0\.4"):
        fit()
    annealed.rate = left
    fit()
    assert annealed.rate == pytest.approx(0.5 * 0.9**33)


class Searched(Net):
    def __init__(self, script: dict[str, Any]) -> None:
        super().__init__(1.0, 0.5, script, lr=0.1)
        self.lr = 0.1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=100)]


@pytest.mark.filterwarnings("ignore:.*num_workers|.*logging interval")
@pytest.mark.parametrize("by_another_trainer", [False, True])
def test_what_a_tuner_finds_is_no_change(by_another_trainer, tmp_path):
    for number in (1, 2):
        seed_everything(number, verbose=False)  # it finds another rate each time
        seed_everything(7, verbose=False)
        module = Searched(SCRIPT)
        trainer = Trainer(
            accelerator="cpu",
            callbacks=[AutoResume(tmp_path)],
            default_root_dir=tmp_path / "root",
            enable_checkpointing=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=number,
        )
        x = torch.randn(44, 6, generator=torch.Generator().manual_seed(number))
        data = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 4)
        searching = Trainer(
            accelerator="cpu",
            default_root_dir=tmp_path / "root",
            enable_checkpointing=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=1,
        )
        Tuner(searching if by_another_trainer else trainer).lr_find(module, data, num_training=10 * number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other data
            trainer.fit(module, data)
    assert trainer.current_epoch == 2


def test_the_trainer_keeps_what_it_was_given(stopped, tmp_path):
    folder = stopped("accumulation", tmp_path / "run")
    limits = {"accumulate_grad_batches": 2, "max_steps": 20}
    trainer, _ = run(folder, on_change="old", trainer=limits)
    assert trainer.global_step == 33
    assert (trainer.accumulate_grad_batches, trainer.max_steps) == (2, 20)


def test_a_drawn_seed_is_no_change(stopped, tmp_path):
    run(tmp_path / "drawn", Crash(), seed=2_034_556_911)
    assert run(tmp_path / "drawn", seed=1_783_226_004)[0].current_epoch == 3
