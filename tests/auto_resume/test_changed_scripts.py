"""A script that is edited between two starts: each edit is refused by name, told in one line, or no change at all."""

import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from lightning_tricks import AutoResume, GradientClipping, seed_everything
from lightning_tricks.lr_schedules import CombinedOptimizer
from tests.small import QUIET, same

STOPPED_AT, RESUMED_AT, BATCHES = 15, 14, 11


class Net(LightningModule):
    """A module that a script's edits shape; what they are is no attribute of it, which would be compared."""

    def __init__(self, script: dict[str, Any], argument: float) -> None:
        super().__init__()
        self.save_hyperparameters({"loss_weight": 1.0, **script["hparams"]})
        self.argument = argument
        self.net = nn.Sequential(
            nn.Linear(6, script["width"]),
            script["activation"](),
            nn.Dropout(script["dropout"]),
            nn.Linear(script["width"], 3),
            *script["more_layers"](),
        )
        self.seen: dict[int, tuple[float, int]] = {}
        script["build"](self)

    def training_step(self, batch, batch_idx):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen[self.trainer.global_step] = (rate, len(batch[0]))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return self.hparams["loss_weight"] * self.argument * loss

    def configure_optimizers(self):
        script = THIS
        groups: Any = [one for one in self.net.parameters() if one.requires_grad]
        if script["groups"]:
            layers = zip((self.net[0], self.net[3]), script["groups"], strict=True)
            groups = [{"params": part.parameters(), "weight_decay": decay} for part, decay in layers]
        if script["temperature"]:
            self.temperature = nn.Parameter(torch.ones(script["temperature"]))
            groups = [*groups, self.temperature]
        optimizer = script["optimizer"](groups, lr=script["lr"], **script["options"])
        if not script["schedule"]:
            return optimizer
        kind, arguments, interval = script["schedule"]
        scheduler = kind(optimizer, **arguments)
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "monitor": "loss"}]


class Renamed(Net):
    """`Net` under another name."""


class Augmented(TensorDataset):
    def __init__(self, *tensors: torch.Tensor, transform: Any = None, crop: int = 4) -> None:
        super().__init__(*tensors)
        self.transform, self.crop = transform, crop

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x if self.transform is None else self.transform(x)), y


class OtherData(Augmented):
    """Another class of the same data."""

    def __len__(self) -> int:
        return super().__len__()


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


class Crash(Callback):
    training_arguments = ()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == STOPPED_AT:
            raise RuntimeError("crash")


class ByHand(Callback):
    """Makes the same edit in a run that is not stopped."""

    def __init__(self, act: Callable[[Trainer, Any], object]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == RESUMED_AT:
            self.act(trainer, pl_module)


class Noise(Callback):
    """A callback of a user, that changes the training by an argument."""

    def __init__(self, scale: float, out_dir: str = "a") -> None:
        self.scale, self.out_dir = scale, out_dir

    def on_after_backward(self, trainer, pl_module):
        for one in pl_module.parameters():
            if one.grad is not None:
                one.grad.mul_(1 + self.scale)


class Watches(Noise):
    """One that says itself that it only looks."""

    training_arguments = ()

    def on_after_backward(self, trainer, pl_module):
        pass


class Bare(Callback):
    """One without arguments."""


THIS: dict[str, Any] = {}  # the script that runs


def _as_it_is(module: Any) -> None:
    """Build nothing more."""


SCRIPT: dict[str, Any] = {
    "seed": 7,
    "lr": 0.1,
    "optimizer": torch.optim.SGD,
    "options": {"momentum": 0.9},
    "groups": None,  # weight decay of each of two groups
    "schedule": None,  # class, arguments, interval
    "temperature": 0,  # the length of a parameter that configure_optimizers makes
    "rows": 44,
    "data": Augmented,
    "data_arguments": {},
    "loader": {"batch_size": 4, "shuffle": True},
    "sampler": None,
    "module": Net,
    "build": _as_it_is,
    "dropout": 0.2,
    "activation": nn.ReLU,
    "more_layers": tuple,
    "width": 8,
    "hparams": {},
    "argument": 0.5,
    "epochs": 3,
    "trainer": {},
    "callbacks": list,
}


def run(folder: Any, *callbacks: Callback, guard: Any = None, **edits: Any) -> tuple[Trainer, Any]:
    """Run the script with edits; with a folder, guarded."""
    global THIS
    script = THIS = {**SCRIPT, **edits}
    seed_everything(script["seed"], verbose=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(script["rows"], 6, generator=generator)
    data = script["data"](x, x[:, :3].argmax(1), **script["data_arguments"])
    arguments = dict(script["loader"])
    if script["sampler"]:
        arguments |= {"shuffle": None, "sampler": script["sampler"](x)}
    module = script["module"](script, script["argument"])
    guards = [AutoResume(folder, every_n_train_steps=2, **(guard or {}))] if folder else []
    given = {**QUIET, "callbacks": [*guards, *script["callbacks"](), *callbacks], "log_every_n_steps": 1}
    trainer = Trainer(**{**given, "max_epochs": script["epochs"], **script["trainer"]})
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
        refused: Regular expressions of all lines of the error, in any order; empty if it is no reason to stop.
        said: A regular expression of the one line that is logged; empty if none is.
        by_hand: Makes the edit in a run that is not stopped, which then ends as a run with `on_change="new"`.
        rates: Whether `on_change="new"` has the learning rates of a run that was edited from the start.
        new: Part of the error of `on_change="new"`, where that is one.
        warned: Part of a warning that comes in all cases.
    """

    now: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    said: str = ""
    by_hand: Callable[[Trainer, Any], object] | None = None
    rates: bool = True
    new: str = ""
    warned: str = ""


def _set_option(name: str, value: Any, groups: slice = slice(None)) -> Callable[[Trainer, Any], None]:
    def act(trainer: Trainer, module: Any) -> None:
        for group in trainer.optimizers[0].param_groups[groups]:
            group[name] = value

    return act


def _step(step: int, gamma: float, interval: str = "step") -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.StepLR, {"step_size": step, "gamma": gamma}, interval


def _one_cycle(rate: float, total: int) -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.OneCycleLR, {"max_lr": rate, "total_steps": total}, "step"


def _power(base: float) -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.LambdaLR, {"lr_lambda": lambda step: base**step}, "step"


class Decay:
    """A function of the step that remembers how often it was called, as torch saves it."""

    def __init__(self, factor: float) -> None:
        self.factor, self.value = factor, 1.0

    def __call__(self, step: int) -> float:
        self.value *= self.factor
        return self.value


def _plateau(factor: float) -> tuple[Any, dict[str, Any], str]:
    return lr_scheduler.ReduceLROnPlateau, {"factor": factor, "patience": 0, "threshold": 10.0}, "epoch"


def _warm_up(optimizer: Any, gamma: float) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, gamma)]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


def _backwards(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Give the parameters in another order, as a set of them does in another process."""
    return torch.optim.SGD(parameters[::-1], **options)


def _several(groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Step each group by an optimizer of its own."""
    return CombinedOptimizer([torch.optim.SGD([group], **options) for group in groups])


class Wrapper(torch.optim.SGD):
    """An optimizer around another one, whose groups it shares."""

    def __init__(self, parameters: Any, lr: float, **options: Any) -> None:
        super().__init__(parameters, lr, **options)
        self.base = torch.optim.SGD(self.param_groups, lr, **options)
        self.param_groups = self.base.param_groups
        self.state_dict, self.step = self.base.state_dict, self.base.step

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class EachOther(Sampler):
    """A sampler with an argument."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.count, self.start = count, start

    def __iter__(self):
        return iter([*range(self.start, self.count), *range(self.start)])

    def __len__(self) -> int:
        return self.count


class Warped(nn.Module):
    """A layer of a user, without weights."""

    def forward(self, x):
        return x.sin()


# A class that was renamed: the module does not have it
WarpedBefore = type("WarpedBefore", (Warped,), {"__module__": __name__, "__qualname__": "Wrapped"})


def _freeze(module: Any) -> None:
    module.net[0].requires_grad_(False)


def _freeze_bias(module: Any) -> None:
    module.net[0].bias.requires_grad = False


def _manual(module: Any) -> None:
    module.automatic_optimization = False


def _clipping(norm: float) -> Callable[[], list[Callback]]:
    return lambda: [GradientClipping(norm)]


def _patience(number: int) -> Callable[[], list[Callback]]:
    return lambda: [EarlyStopping("loss", patience=number, mode="max")]


def _noise(*arguments: Any) -> Callable[[], list[Callback]]:
    return lambda: [Noise(*arguments)]


def _job(number: int) -> dict[str, Any]:
    """Return what differs each time that one command is queued."""
    now = f"2026-11-2{number}_10-32-1{number}"
    return {
        "hparams": {
            "output_dir": f"outputs/{now}",
            "started": now,
            "slurm_job_id": 4711 + number,
            "host": f"node{number}",
            "port": 29500 + number,
            "git": {"sha": "abc1234"[number:], "dirty": bool(number)},
            "day": number,
        }
    }


ADAM = {"optimizer": torch.optim.Adam, "lr": 0.01, "options": {}}
LOADER = {"batch_size": 4, "shuffle": True}
RECORDS = "these changed since the first start, do not change the training by themselves, and the run continues: "

EDITS = {
    "lr": Edit({"lr": 0.01}, refused=("SGD.lr: 0.1 -> 0.01",), by_hand=_set_option("lr", 0.01)),
    "two changes at once": Edit(
        {"lr": 0.01, "loader": {"batch_size": 8, "shuffle": True}, "dropout": 0.5, "build": _freeze},
        refused=(
            "net.2.p: 0.2 -> 0.5",
            "net.0.requires_grad: True -> False",
            "SGD.lr: 0.1 -> 0.01",
            r"SGD.groups: 'parameters: 4 .*' -> 'parameters: 2 .*'",
            "train_dataloader.batch_size: 4 -> 8",
        ),
    ),
    "decay of one group": Edit(
        {"groups": (0.0, 0.1)},
        {"groups": (0.0, 0.0)},
        refused=(r"SGD.groups\[1\].weight_decay: 0.0 -> 0.1",),
        by_hand=_set_option("weight_decay", 0.1, slice(1, 2)),
    ),
    "one group": Edit(
        {"groups": None}, {"groups": (0.0, 0.0)}, refused=("SGD.groups: .*2, 2.* -> .*4.*",), by_hand=lambda *_: None
    ),
    "an option with another moment": Edit(
        {"options": {"amsgrad": True}}, ADAM, refused=("Adam.amsgrad: False -> True",)
    ),
    "another optimizer": Edit({"optimizer": torch.optim.Adam, "options": {}}, refused=("optimizer 0: SGD -> Adam",)),
    "lr in a wrapper": Edit(
        {"lr": 0.01}, {"optimizer": Wrapper}, refused=("Wrapper.lr: 0.1 -> 0.01",), by_hand=_set_option("lr", 0.01)
    ),
    "lr in several optimizers": Edit(
        {"lr": 0.01},
        {"optimizer": _several, "groups": (0.0, 0.0)},
        refused=(r"CombinedOptimizer.groups\[0\].lr: 0.1 -> 0.01", r"CombinedOptimizer.groups\[1\].lr: 0.1 -> 0.01"),
        by_hand=_set_option("lr", 0.01),
    ),
    "another of several optimizers": Edit(
        {"optimizer": torch.optim.SGD},
        {"optimizer": _several, "groups": (0.0, 0.0)},
        refused=("optimizer 0: CombinedOptimizer -> SGD",),
    ),
    "kernels of an optimizer": Edit(
        {"options": {"momentum": 0.9, "foreach": True}}, {"options": {"momentum": 0.9, "foreach": False}}
    ),
    "order of the parameters": Edit({"optimizer": _backwards}),
    "interval of a schedule": Edit(
        {"schedule": _step(1, 0.5, "step")},
        {"schedule": _step(1, 0.5, "epoch")},
        refused=("StepLR.interval: epoch -> step",),
        rates=False,  # the number of its steps continues
    ),
    "max_lr of a cycle": Edit(
        {"schedule": _one_cycle(0.4, 40)},
        {"schedule": _one_cycle(0.2, 40)},
        refused=("SGD.lr: .*", "SGD.max_lr: 0.2 -> 0.4", "SGD.min_lr: .*"),
    ),
    "a longer cycle": Edit(
        {"epochs": 5, "schedule": _one_cycle(0.2, 55)},
        {"schedule": _one_cycle(0.2, 33)},
        refused=("OneCycleLR.total_steps: 33 -> 55",),
    ),
    "a variable of a function": Edit(
        {"schedule": _power(0.8)}, {"schedule": _power(0.9)}, refused=("LambdaLR.lr_lambdas.base: 0.9 -> 0.8",)
    ),
    "an object that is called": Edit(
        {"schedule": (lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay(0.8)), {}, "step")},
        {"schedule": (lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay(0.9)), {}, "step")},
        refused=("LambdaLR.lr_lambdas.factor: 0.9 -> 0.8", "LambdaLR.lr_lambdas.value: 0.9 -> 0.8"),
    ),
    "a part of a schedule": Edit(
        {"schedule": (_warm_up, {"gamma": 0.5}, "step")},
        {"schedule": (_warm_up, {"gamma": 0.9}, "step")},
        refused=(r"SequentialLR.schedulers\[1\].gamma: 0.9 -> 0.5",),
    ),
    "what a schedule adds to groups": Edit(
        {"schedule": (torch.optim.swa_utils.SWALR, {"swa_lr": 0.02}, "step")},
        {"schedule": (torch.optim.swa_utils.SWALR, {"swa_lr": 0.05}, "step")},
        refused=("SGD.swa_lr: 0.05 -> 0.02",),
    ),
    "factor on a plateau": Edit(
        {"schedule": _plateau(0.1)},
        {"schedule": _plateau(0.5)},
        refused=("ReduceLROnPlateau.factor: 0.5 -> 0.1",),
        rates=False,
    ),
    "lr on a plateau": Edit({"lr": 0.2}, {"schedule": _plateau(0.5)}, refused=("SGD.lr: 0.1 -> 0.2",)),
    "another schedule": Edit(
        {"schedule": (lr_scheduler.ExponentialLR, {"gamma": 0.9}, "step")},
        {"schedule": _step(5, 0.5)},
        refused=("scheduler 0: StepLR -> ExponentialLR",),
    ),
    "a first schedule": Edit({"schedule": _step(5, 0.5)}, refused=("scheduler 0: none -> StepLR",)),
    "no schedule": Edit({"schedule": None}, {"schedule": _step(5, 0.5)}, refused=("scheduler 0: StepLR -> none",)),
    "batch size": Edit({"loader": {**LOADER, "batch_size": 8}}, refused=("train_dataloader.batch_size: 4 -> 8",)),
    "smaller batches": Edit({"loader": {**LOADER, "batch_size": 3}}, refused=("train_dataloader.batch_size: 4 -> 3",)),
    "dropping the last batch": Edit(
        {"loader": {**LOADER, "drop_last": True}}, refused=("train_dataloader.drop_last: False -> True",)
    ),
    "no shuffling": Edit({"loader": {"batch_size": 4}}, refused=("train_dataloader.shuffle: True -> False",)),
    "a sampler": Edit(
        {"sampler": lambda x: WeightedRandomSampler(torch.ones(len(x)), len(x), replacement=False)},
        refused=("train_dataloader.sampler: none -> WeightedRandomSampler",),
    ),
    "argument of a sampler": Edit(
        {"sampler": lambda x: EachOther(len(x), 7)},
        {"sampler": lambda x: EachOther(len(x))},
        refused=("train_dataloader.sampler.start: 0 -> 7",),
    ),
    "class of the data": Edit({"data": OtherData}, refused=("train_dataloader.dataset: Augmented -> OtherData",)),
    "argument of the data": Edit({"data_arguments": {"crop": 8}}, refused=("train_dataloader.dataset.crop: 4 -> 8",)),
    "more data": Edit({"rows": 60}, refused=("train_dataloader.dataset.length: 44 -> 60",)),
    "another transform": Edit(
        {"data_arguments": {"transform": Scale(2.0)}},
        {"data_arguments": {"transform": Scale(1.0)}},
        refused=("train_dataloader.dataset.transform.factor: 1.0 -> 2.0",),
    ),
    "number of workers": Edit({"loader": {**LOADER, "num_workers": 1}}, warned="had num_workers=0 and has 1"),
    "clipping of the Trainer": Edit(
        {"trainer": {"gradient_clip_val": 0.01}},
        {"trainer": {"gradient_clip_val": 1.0}},
        refused=("Trainer.gradient_clip_val: 1.0 -> 0.01",),
        by_hand=lambda trainer, module: setattr(trainer, "gradient_clip_val", 0.01),
    ),
    "more epochs": Edit({"epochs": 5}),
    "fewer epochs": Edit({"epochs": 2}, refused=("Trainer.max_epochs: 3 -> 2",)),
    "steps in place of epochs": Edit(
        {"epochs": None, "trainer": {"max_steps": 50}},
        refused=("Trainer.max_epochs: 3 -> -1", "Trainer.max_steps: -1 -> 50"),
        by_hand=None,
    ),
    "seed": Edit({"seed": 8}, refused=("seed: 7 -> 8",)),
    "dropout": Edit(
        {"dropout": 0.5},
        refused=("net.2.p: 0.2 -> 0.5",),
        by_hand=lambda trainer, module: setattr(module.net[2], "p", 0.5),
    ),
    "an activation of a user's": Edit(
        {"activation": Warped},
        refused=("net.1: ReLU -> Warped",),
        by_hand=lambda _, module: _exchange(module, Warped()),
    ),
    "a class of a layer that was renamed": Edit(
        {"activation": Warped}, {"activation": WarpedBefore}, said=RECORDS + "net.1: WarpedBefore -> Warped"
    ),
    "a layer without weights": Edit({"more_layers": lambda: [nn.Softsign()]}, refused=("net.4: none -> Softsign",)),
    "a frozen bias": Edit(
        {"build": _freeze_bias}, refused=("net.0.bias.requires_grad: True -> False", "SGD.groups: .*4 .* -> .*3 .*")
    ),
    "thawed": Edit(
        {"build": _as_it_is},
        {"build": _freeze},
        refused=("net.0.requires_grad: False -> True", "SGD.groups: .*2 .* -> .*4 .*"),
    ),
    "a layer that evaluates": Edit(
        {"build": lambda module: module.net[2].eval()},
        refused=("net.2.training: True -> False",),
        by_hand=lambda trainer, module: module.net[2].eval(),
    ),
    "a buffer": Edit(
        {"build": lambda module: module.register_buffer("mean", torch.zeros(8))},
        refused=(r"mean: none -> 'buffer of shape \[8\]'",),
    ),
    "manual optimization": Edit(
        {"build": _manual},
        refused=("module.automatic_optimization: True -> False",),
        new="Lightning counts the steps of a run differently then",
    ),
    "an argument that the module stores": Edit(
        {"argument": 0.25},
        refused=("module.argument: 0.5 -> 0.25",),
        by_hand=lambda trainer, module: setattr(module, "argument", 0.25),
    ),
    "GradientClipping added": Edit({"callbacks": _clipping(0.01)}, refused=("GradientClipping: none -> 'in use'",)),
    "patience": Edit(
        {"callbacks": _patience(5)}, {"callbacks": _patience(3)}, refused=("EarlyStopping.patience: 3 -> 5",)
    ),
    "argument of a user's callback": Edit(
        {"callbacks": _noise(0.5, "b/c")},
        {"callbacks": _noise(0.0)},
        refused=("Noise.scale: 0.0 -> 0.5",),
        by_hand=lambda trainer, module: setattr(trainer.callbacks[0], "scale", 0.5),
    ),
    "a user's callback added": Edit({"callbacks": _noise(0.5)}, refused=("Noise: none -> 'in use'",)),
    "a user's callback without arguments": Edit(
        {"callbacks": lambda: [Bare()]}, said=RECORDS + "Bare: none -> 'in use'"
    ),
    "weight averaging added": Edit(
        {"callbacks": lambda: [StochasticWeightAveraging(1e-3, swa_epoch_start=2)]},
        refused=("StochasticWeightAveraging: none -> 'in use'",),
        rates=False,
    ),
    "an observer, and a logger": Edit({"callbacks": lambda: [LearningRateMonitor()], "trainer": {"logger": True}}),
    "a place in a callback": Edit(
        {"callbacks": lambda: [Noise(0.1, "/tmp/b/second")]},
        {"callbacks": lambda: [Noise(0.1, "/tmp/a/first")]},
        said=RECORDS + "Noise.out_dir: '/tmp/a/first' -> '/tmp/b/second'",
    ),
    "a callback that says it looks": Edit({"callbacks": lambda: [Watches(0.5)]}, {"callbacks": lambda: [Watches(0.1)]}),
    "hyper-parameters": Edit(
        {"hparams": {"loss_weight": 2.0, "mixup": 0.2}},
        said=RECORDS + "hparams.loss_weight: 1.0 -> 2.0; hparams.mixup: none -> 0.2",
    ),
    "another job": Edit(
        _job(1),
        _job(0),
        said=RECORDS + ".*output_dir: .*; hparams.started: .*; hparams.slurm_job_id: 4711 -> 4712; .*day: 0 -> 1",
    ),
    "a module that was renamed": Edit({"module": Renamed}, said=RECORDS + "module: Net -> Renamed"),
    "width": Edit({"width": 9}, new=" has shape (9, 6) in this run and (8, 6) in the checkpoint"),
}


def _exchange(module: Any, layer: nn.Module) -> None:
    module.net[1] = layer


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Run the script before its edit until it crashes, once for each way that it was; return a copy of its folder."""
    known: dict[str, Any] = {}

    def copy_of(name: str, target: Any) -> Any:
        before = EDITS[name].before
        if (key := str(before)) not in known:
            known[key] = tmp_path_factory.mktemp("stopped")
            run(known[key], Crash(), **before)
        shutil.copytree(known[key], target)
        return target

    return copy_of


def said(text: str) -> list[str]:
    """Return what is logged about changes."""
    lines = re.findall(r"AutoResume: (.*)", text)
    known = ("the run resumes at", "the run continues with new values")
    return [line.rstrip(".") for line in lines if not line.startswith(known)]


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*(num_workers|logging interval|LeafSpec|litlogger|GPU|val_loop|lr_scheduler)")
@pytest.mark.filterwarnings("ignore:.*(SWA|Swapping|Precision bf16|divisible|validation|in eval mode)")
def test_what_an_edit_does(name, stopped, tmp_path, caplog):
    edit, folder = EDITS[name], stopped(name, tmp_path / "run")
    before, now = edit.before, {**edit.before, **edit.now}
    files = sorted(path.name for path in folder.rglob("*"))
    if edit.refused:
        with pytest.raises(MisconfigurationException, match="on_change='new'") as raised:
            run(folder, **now)
        lines = str(raised.value).split("\n  ")
        lines[-1] = lines[-1].partition("\n")[0]
        assert len(lines) == 1 + len(edit.refused), lines
        unmet = [one for one in edit.refused if not any(re.fullmatch(one, line) for line in lines[1:])]
        assert not unmet, lines
        assert not said(caplog.text)
        assert sorted(path.name for path in folder.rglob("*")) == files, "nothing was changed"
        ignored = re.search(r"ignore=(\[.*?\]) does so", str(raised.value), re.DOTALL)
    caplog.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if edit.new:
            with pytest.raises(MisconfigurationException, match=re.escape(edit.new)):
                run(folder, guard={"on_change": "new"}, **now)
            return
        trainer, module = run(folder, guard={"on_change": "new"} if edit.refused else {}, **now)
    warned = [str(one.message) for one in caught if "AutoResume" in str(one.message)]
    assert bool(warned) == bool(edit.warned), warned
    assert edit.warned in "".join(warned)
    if not edit.refused:
        lines = said(caplog.text)
        assert len(lines) == bool(edit.said), lines
        assert not edit.said or re.fullmatch(edit.said, lines[0]), lines
        if not edit.warned and edit.now.keys() <= {"options", "optimizer", "temperature", "module", "activation"}:
            assert edit.said or same(module.state_dict(), run(None, **before)[1].state_dict())
        return
    assert "the run continues with new values: " in caplog.text
    whole = run(None, **now)[1]
    resumed = {step: one for step, one in module.seen.items() if step >= RESUMED_AT}
    if edit.rates:
        rates = {step: rate for step, (rate, _) in resumed.items() if step in whole.seen}
        assert rates == pytest.approx({step: whole.seen[step][0] for step in rates}, rel=1e-12)
    if edit.by_hand is not None:
        assert same(module.state_dict(), run(None, ByHand(edit.by_hand), **before)[1].state_dict())
    copied = stopped(name, tmp_path / "ignored")
    caplog.clear()
    other = run(copied, guard={"ignore": eval(ignored[1])}, **now)[1]
    assert same(other.state_dict(), module.state_dict())
    assert len([line for line in said(caplog.text) if line.startswith("these changes take effect")]) == 1
    caplog.clear()
    again = run(folder, **now)  # the new values are now those of the run
    assert "had finished" in caplog.text
    assert again[0].global_step == trainer.global_step


def test_another_source_of_a_class_is_one_line(tmp_path, monkeypatch, caplog):
    """Its values are compared; what it computes is known by the text of its file alone."""
    for factor in (1.0, 1.5):
        (tmp_path / "of_a_user.py").write_text(
            "from tests.auto_resume.test_changed_scripts import Net\n\n\nclass Edited(Net):\n"
            f"    def training_step(self, *batch):\n        return {factor} * super().training_step(*batch)\n"
        )
        spec = spec_from_file_location("of_a_user", tmp_path / "of_a_user.py")
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "of_a_user", module)
        spec.loader.exec_module(module)
        caplog.clear()
        run(tmp_path / "run", *([Crash()] if factor == 1.0 else []), module=module.Edited)
    assert said(caplog.text) == ["the code in of_a_user.py changed since the first start"]


def test_samples_are_seen_once_though_batches_are_larger(stopped, tmp_path):
    for name, size in (("batch size", 8), ("smaller batches", 3)):
        folder = stopped(name, tmp_path / name)
        _, module = run(folder, guard={"on_change": "new"}, **EDITS[name].now)
        in_epoch = [count for step, (_, count) in module.seen.items() if step >= RESUMED_AT]
        seen = (RESUMED_AT - BATCHES) * 4
        rest = 44 - seen // size * size
        assert sum(in_epoch[: -(-rest // size)]) == rest
        assert sum(in_epoch) == rest + 44


def test_a_function_of_the_step_is_called_as_often_as_without(tmp_path):
    """Describing a schedule calls nothing; a changed one is stepped on a copy, with the objects that it calls."""
    log = tmp_path / "calls"  # a list would be restored

    class Counted(Decay):
        def __call__(self, step: int) -> float:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{id(self)}\n")
            return super().__call__(step)

    def number_of_calls(folder: Any, factor: float, *callbacks: Callback, **guard: Any) -> int:
        def schedule(optimizer: Any) -> Any:
            return lr_scheduler.LambdaLR(optimizer, Counted(factor))

        log.write_text("", encoding="utf-8")
        trainer, _ = run(folder, *callbacks, guard=guard, schedule=(schedule, {}, "step"))
        this = trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0]
        return log.read_text(encoding="utf-8").splitlines().count(str(id(this)))

    assert number_of_calls(None, 0.9) == number_of_calls(tmp_path / "whole", 0.9) == 1 + 33
    number_of_calls(tmp_path / "stopped", 0.9, Crash())
    assert number_of_calls(tmp_path / "stopped", 0.8, on_change="new") == 1 + 33 - RESUMED_AT


def test_all_ranks_refuse_and_take_what_changed(tmp_path):
    ways = {"trainer": {"devices": 2, "strategy": "ddp_fork"}}
    run(tmp_path, **ways, epochs=1)
    with pytest.raises(Exception, match=r"SGD\.lr: 0\.1 -> 0\.01"):
        run(tmp_path, **ways, epochs=1, lr=0.01)
    run(tmp_path, **ways, epochs=2, lr=0.01, guard={"on_change": "new"})
    newest = torch.load(max(tmp_path.glob(".auto_resume/0*/meta.pt")), weights_only=True)
    assert newest["global_step"] == 12
    assert newest["optimizer_states"][0]["param_groups"][0]["lr"] == 0.01


def test_a_finished_run_is_extended_and_takes_another_learning_rate_then(tmp_path, caplog):
    run(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"SGD\.lr: 0\.1 -> 0\.01"):
        run(tmp_path, lr=0.01)
    run(tmp_path, lr=0.01, guard={"on_change": "new"})
    assert "they take effect when you give it more epochs" in caplog.text
    caplog.clear()
    _, module = run(tmp_path, lr=0.01, epochs=4, guard={"on_change": "new"})
    assert {rate for step, (rate, _) in module.seen.items() if step >= 33} == {0.01}
    assert "resumes at epoch 3, step 33, extended from 3 to 4 epochs" in caplog.text
    assert "had finished" not in caplog.text


def test_what_was_done_cannot_be_taken_back(stopped, tmp_path):
    folder = stopped("lr", tmp_path / "run")
    with pytest.raises(MisconfigurationException, match=r"Trainer\.max_epochs: 3 -> 1"):
        run(folder, epochs=1)
    with pytest.raises(MisconfigurationException, match=r"max_epochs: 3 -> 1: it is already at 2 epochs"):
        run(folder, epochs=1, guard={"on_change": "new"})


def test_a_parameter_that_the_optimizers_make_is_refused_before_training(tmp_path):
    with pytest.raises(MisconfigurationException, match="configure_optimizers created the parameters temperature"):
        run(tmp_path, temperature=2)


def test_patterns_of_ignore(stopped, tmp_path, caplog):
    folder = stopped("lr", tmp_path / "run")
    run(folder, guard={"ignore": ["SGD.*", "re:^net.*p$"]}, lr=0.01, dropout=0.5)
    assert "these changes take effect, as ignore lists them: net.2.p: 0.2 -> 0.5; SGD.lr" in caplog.text
    for wrong, error in ((3, TypeError), ([3], TypeError), (["re:("], ValueError)):
        with pytest.raises(error, match="ignore"):
            AutoResume(tmp_path, ignore=wrong)
