"""For how long a save keeps training waiting, where the one before is written when it is due; training with saves."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import torch
from _ratios import LEAN, arguments, be_quiet, measure, ratios, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import AutoResume, seed_everything
from lightning_tricks.auto_resume.resumable_fit import ResumableFit

WORK = 40  # steps between two saves
KINDS = ("ModelCheckpoint", "AutoResume", "AutoResume, asynchronous")
NONE = "no saves"


class Large(LightningModule):
    """A model of a size; SGD with momentum doubles what is saved, and steps take as long as the net is wide."""

    def __init__(self, megabytes: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1024, 1024)) for _ in range(megabytes // 8))
        self.net = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy; the large weights have gradients in the first step only."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss + sum(weight.sum() for weight in self.weights) if batch_idx == 0 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Waits(Callback):
    """Waits for the checkpoint that is written before the next one is due."""

    def __init__(self, guard: AutoResume) -> None:
        self.guard = guard

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Wait before the last step."""
        if batch_idx % WORK == WORK - 1 and self.guard._fit is not None:
            self.guard._fit.writer.wait()


class Clock(Callback):
    """Times what lies between the first step, which takes new memory, and the last."""

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        """Read the clock."""
        self.end = time.perf_counter()
        if trainer.global_step == 1:
            self.start = self.end


def data(saves: int) -> DataLoader[Any]:
    """Return batches for so many saves."""
    rows = WORK * saves * 64
    return DataLoader(TensorDataset(torch.rand(rows, 256), torch.randint(10, (rows,))), 64)


def saving(kind: str, folder: str) -> Callback:
    """Return what saves every so many steps."""
    if kind == "ModelCheckpoint":
        return ModelCheckpoint(folder, every_n_train_steps=WORK)
    return AutoResume(folder, every_n_train_steps=WORK, every_n_epochs=None, asynchronous="asynchronous" in kind)


def fit(kind: str, callbacks: list[Callback], steps: int, width: int, megabytes: int, loader: DataLoader[Any]) -> None:
    """Train with what saves by itself switched off, but for ModelCheckpoint."""
    seed_everything(1, verbose=False)
    own = {"enable_checkpointing": kind == "ModelCheckpoint", **LEAN}
    Trainer(max_steps=steps, callbacks=callbacks, **own).fit(Large(megabytes, width), loader)
    gc.collect()  # a fit's objects refer to each other, and hold what the model takes


def stalls(megabytes: int, saves: int, kinds: tuple[str, ...], rounds: int) -> dict[str, dict[str, float]]:
    """Time what stands between two steps with a save between them."""
    spent: dict[str, list[float]] = defaultdict(list)
    loader = data(saves)

    def timed(name: str, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **options)
            finally:
                spent[name].append(time.perf_counter() - start)

        return call

    def stall(kind: str) -> float:
        spent.clear()
        owner, name = (ResumableFit, "_save") if kind != "ModelCheckpoint" else (ModelCheckpoint, "_save_checkpoint")
        with tempfile.TemporaryDirectory() as folder, patch.object(owner, name, timed("save", getattr(owner, name))):
            callbacks = [saving(kind, folder)]
            if isinstance(callbacks[0], AutoResume):
                callbacks.append(Waits(callbacks[0]))
            fit(kind, callbacks, WORK * saves - 1, 512, megabytes, loader)
        return statistics.median(spent["save"][1 : saves - 1])  # the first takes new memory, the last waits

    return ratios(measure({kind: lambda kind=kind: stall(kind) for kind in kinds}, rounds, warmup=1), "ModelCheckpoint")


def training(megabytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time steps with two saves among them, which take about as long as a save's writing takes."""
    loader = data(3)

    def seconds(kind: str) -> float:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [clock] if kind == NONE else [saving(kind, folder), clock]
            fit(kind, callbacks, WORK * 3 - 1, 16384, megabytes, loader)
        return clock.end - clock.start

    return ratios(measure({kind: lambda kind=kind: seconds(kind) for kind in (NONE, *KINDS)}, rounds, warmup=1), NONE)


def main() -> None:
    """Measure and report."""
    given = arguments(15)
    torch.set_num_threads(1)
    be_quiet()
    results = {
        "a save of 100 MB": stalls(100, 5, KINDS, given.rounds),
        "a save of 1000 MB": stalls(1000, 3, (KINDS[0], KINDS[2]), given.rounds),
        "119 steps with 2 saves of 100 MB": training(100, given.rounds),
    }
    report("asynchronous_saves", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
