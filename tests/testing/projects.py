"""Projects for `assert_resumable`: programs of the docs, modules of others, and seeded mistakes."""

from __future__ import annotations

import itertools
import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_tricks.cli import main
from tests.foreign.projects import SCRIPTS
from tests.small import QUIET, EvaluatedNet, Net, digits, loader

EXAMPLES = Path(__file__).parents[2] / "examples"


class _ReachedFitError(Exception):
    """Raised where a program would begin to train."""


def what_it_fits(program: Callable[[], object]) -> tuple[Any, ...]:
    """Run a program up to its fit; return the Trainer and what the program calls its `fit` with."""
    taken = []

    @wraps(Trainer.fit)  # whose signature LightningCLI reads
    def fit(trainer, model, *data, datamodule=None, **_):
        taken.extend((trainer, model, *data, *([] if datamodule is None else [datamodule])))
        raise _ReachedFitError

    with patch.object(Trainer, "fit", fit), suppress(_ReachedFitError):
        program()
    return tuple(taken)


def program(name: str) -> Callable[[Path], tuple[Any, ...]]:
    """Return what makes a program of `examples/` up to its fit."""

    def run() -> None:
        if name.endswith(".yaml"):
            main(["fit", "--config", str(EXAMPLES / name)])
        else:
            sys.argv = [name]
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    def make(folder: Path) -> tuple[Any, ...]:
        os.chdir(folder)
        made = what_it_fits(run)
        made[0].fit_loop.max_epochs, made[0].limit_train_batches, made[0].limit_val_batches = 2, 8, 2
        return made

    return make


def foreign(name: str) -> Callable[[Path], tuple[Any, ...]]:
    """Return what makes a script of tests/foreign up to its fit."""

    def make(folder: Path) -> tuple[Any, ...]:
        seed_everything(1, workers=True, verbose=False)
        trainer = Trainer(max_epochs=2, limit_train_batches=9, limit_val_batches=3, **QUIET)
        job = SimpleNamespace(fit=lambda *args, **kwargs: trainer.fit(*args, **kwargs))
        return what_it_fits(lambda: SCRIPTS[name].script(job))

    return make


# Mistakes: small projects of 2 epochs of 10 batches


def project(net: type[Net] = Net, data: Any = None, *callbacks: Callback, seed: int | None = 1, **more: Any) -> Any:
    if seed is not None:
        seed_everything(seed, workers=True, verbose=False)
    trainer = Trainer(**{**QUIET, "max_epochs": 2, "callbacks": [*callbacks], **more})
    return trainer, net(dropout=0.2), loader(shuffle=True) if data is None else data()


class Digits(Dataset):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.rows, self.change = digits(), change

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        image, label = self.rows[index]
        return self.change(image), label


def not_seeded(folder: Path) -> Any:
    return project(seed=None)


def python_random_without_seed(folder: Path) -> Any:
    torch.manual_seed(1)
    return project(data=lambda: DataLoader(Digits(lambda x: x * random.uniform(0.9, 1)), 4), seed=None)


def generator_of_the_clock(folder: Path) -> Any:
    generator = torch.Generator().manual_seed(time.time_ns() % 2**40)
    return project(data=lambda: DataLoader(digits(), 4, shuffle=True, generator=generator))


def counter_that_is_not_saved(folder: Path) -> Any:
    class Counting(Net):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.count = itertools.count(1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            made = super().training_step(batch, batch_idx)
            return made["loss"] / next(self.count)

    return project(Counting)


def callback_without_state(folder: Path) -> Any:
    class Decay(Callback):
        def __init__(self) -> None:
            self.rates = iter([0.5**k for k in range(40)])

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * next(self.rates)

    return project(Net, None, Decay())


def rate_of_the_clock(folder: Path) -> Any:
    class Clock(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (1 + time.time() % 1)

    return project(Net, None, Clock())


def rate_since_the_start_of_the_process(folder: Path) -> Any:
    """A warm-up by the steps of this process, which is no state of anything."""
    steps = itertools.count(1)

    class Warm(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=0.001 * next(steps)))
            return optimizer

    return project(Warm)


def dataset_with_an_iterator(folder: Path) -> Any:
    noise = itertools.cycle([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    return project(data=lambda: DataLoader(Digits(lambda x: x * next(noise)), 4, shuffle=True))


def metric_of_a_callback(folder: Path) -> Any:
    class Seen(Callback):
        def __init__(self) -> None:
            self.count = itertools.count(1)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.log("batches_seen", float(next(self.count)))

    return project(Net, None, Seen())


def setting_of_the_process(folder: Path) -> Any:
    """Another learning rate at the second start, as a file of the first one is there."""
    is_first, _ = not (folder / "started").exists(), (folder / "started").touch()

    class Rate(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1 if is_first else 0.01)

    return project(Rate)


def validated(folder: Path, *callbacks: Callback, **more: Any) -> Any:
    trainer, module, data = project(EvaluatedNet, None, *callbacks, **more)
    return trainer, module, data, loader()


def draw_after_the_fit_resumed(folder: Path) -> Any:
    """One random number more in each process that resumes, after the last step."""

    class Draws(Net):
        starts = 0

        def on_train_start(self) -> None:
            self.is_resumed = iter([self.trainer.global_step > 0])

        def on_train_end(self) -> None:
            if next(self.is_resumed):
                torch.rand(1)

    return project(Draws)
