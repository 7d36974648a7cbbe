"""What every scenario has in common: its arguments, small data, a small net, and the table that it is entered in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import seed_everything
from lightning_tricks.auto_resume import AutoResume
from tests.auto_resume.training import End, Kill, Notes
from tests.small import QUIET

BATCHES = 9  # of an epoch: a save at every second step falls on the last batch of every second epoch
DEFAULTS: dict[str, Any] = {
    "ranks": 1,
    "workers": 0,
    "guarded": True,
    "kill": None,  # hook, which of its calls, signal, rank
    "resume": {"every_n_train_steps": 2},
    "first": False,  # whether AutoResume stands before the script's own callbacks
}


@dataclass(frozen=True)
class Scenario:
    """A training script, and what a run of it that was killed and started again must do.

    Args:
        run: The script; it takes a `Job`.
        warning: A regular expression of what the run must log where it cannot be exact; empty where it must be.
        ranks: With how many ranks it makes sense.
        workers: With how many workers.
        since: The Lightning that it needs.
        seeds: Whether it begins with `seed_everything`, as a careful script does.
    """

    run: Callable[[Job], None]
    warning: str = ""
    ranks: tuple[int, ...] = (1,)
    workers: tuple[int, ...] = (0,)
    since: tuple[int, int] = (2, 5)
    seeds: bool = True

    def __call__(self, folder: Path, options: dict[str, Any]) -> None:
        """Run it in a folder, as a new process does: with random numbers that are others at each start that resumes."""
        starts = folder / "starts"
        resumes = any((folder / "resume").glob(".auto_resume/0*"))  # else it begins anew, as the undisturbed run did
        number = len(starts.read_text()) if resumes else 0
        starts.write_text("." * (number + 1))
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)
        if self.seeds:
            seed_everything(7, verbose=False)
        self.run(Job(folder, {**DEFAULTS, **options}))

    @property
    def is_there(self) -> bool:
        """Whether the Lightning that is installed has what it needs."""
        return tuple(int(part) for part in lightning.__version__.split(".")[:2]) >= self.since


SCENARIOS: dict[str, Scenario] = {}


def scenario(**about: Any) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    def enter(run: Callable[[Job], None]) -> Callable[[Job], None]:
        if run.__name__ in SCENARIOS:
            raise ValueError(f"two scenarios are called {run.__name__}.")
        SCENARIOS[run.__name__] = Scenario(run, **about)
        return run

    return enter


class Job:
    """The arguments of a script, and what it would write out with them."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options

    def samples(self, count: int = 4 * BATCHES, seed: int = 1) -> TensorDataset:
        """Points in six dimensions, of three classes."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count * self.options["ranks"], 6, generator=generator)
        noise = torch.randn(len(x), 3, generator=generator)
        return TensorDataset(x, (x[:, :3] + 0.5 * noise).argmax(1))

    def loader(self, data: Any, **arguments: Any) -> DataLoader[Any]:
        if "batch_sampler" not in arguments:
            arguments = {"batch_size": 4, **arguments}
        if self.options["workers"] == 0:
            arguments.pop("persistent_workers", None)
        return DataLoader(data, num_workers=self.options["workers"], **arguments)

    def trainer(self, *callbacks: Callback, **arguments: Any) -> Trainer:
        """A Trainer with what the comparison needs beside the script's callbacks."""
        several = self.options["ranks"] > 1
        others: list[Callback] = [*callbacks]
        if self.options["guarded"]:
            place = 0 if self.options["first"] else len(others)
            others.insert(place, AutoResume(self.folder / "resume", **self.options["resume"]))
        others.append(End(self.folder))
        if self.options["kill"]:
            others.append(Kill(*self.options["kill"]))
        given: dict[str, Any] = {
            **QUIET,
            "devices": self.options["ranks"],
            "strategy": "ddp_fork" if several else "auto",
            "max_epochs": 3,
            "callbacks": others,
            "logger": Notes(self.folder),
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 1,
            "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
            "default_root_dir": self.folder / "root",
        }
        return Trainer(**{**given, **arguments})

    def fit(self, module: LightningModule, *callbacks: Callback, train: Any = None, **arguments: Any) -> Trainer:
        """Fit a module, to shuffled samples unless others are given, and validate it on others."""
        trainer = self.trainer(*callbacks, **arguments)
        train = self.loader(self.samples(), shuffle=True) if train is None else train
        trainer.fit(module, train, self.held_out())
        return trainer

    def held_out(self) -> DataLoader[Any]:
        return self.loader(self.samples(12, seed=2))


class Net(LightningModule):
    """A net with all that an inexact resume shows in: dropout, batch statistics, momentum, logged means."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
