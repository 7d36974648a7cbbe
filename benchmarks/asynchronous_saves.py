"""For how long a save keeps training waiting, where the one before is written when it is due."""

from __future__ import annotations

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

SAVES = 5
WORK = 40  # steps between two saves


class Large(LightningModule):
    """A model of a size; SGD with momentum doubles what is saved, and steps take little."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1024, 1024)) for _ in range(megabytes // 8))
        self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

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


def stalls(megabytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time what stands between two steps with a save between them."""
    spent: dict[str, list[float]] = defaultdict(list)
    data = DataLoader(TensorDataset(torch.rand(WORK * SAVES * 64, 256), torch.randint(10, (WORK * SAVES * 64,))), 64)

    def timed(name: str, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **options)
            finally:
                spent[name].append(time.perf_counter() - start)

        return call

    def fit(kind: str) -> float:
        seed_everything(1, verbose=False)
        spent.clear()
        owner, name = (ResumableFit, "_save") if kind != "ModelCheckpoint" else (ModelCheckpoint, "_save_checkpoint")
        with tempfile.TemporaryDirectory() as folder, patch.object(owner, name, timed("save", getattr(owner, name))):
            guard = None
            if kind == "ModelCheckpoint":
                callback: Callback = ModelCheckpoint(folder, every_n_train_steps=WORK)
            else:
                is_asynchronous = "asynchronous" in kind
                options: Any = {"every_n_train_steps": WORK, "every_n_epochs": None, "asynchronous": is_asynchronous}
                callback = guard = AutoResume(folder, **options)
            waits = [Waits(guard)] if guard is not None else []
            trainer = Trainer(
                max_steps=WORK * SAVES - 1, callbacks=[callback, *waits], enable_checkpointing=guard is None, **LEAN
            )
            trainer.fit(Large(megabytes), data)
        return statistics.median(spent["save"][1 : SAVES - 1])  # the first takes new memory, the last waits

    kinds = ("ModelCheckpoint", "AutoResume", "AutoResume, asynchronous")
    return ratios(measure({kind: lambda kind=kind: fit(kind) for kind in kinds}, rounds, warmup=1), "ModelCheckpoint")


def main() -> None:
    """Measure and report."""
    given = arguments(15)
    torch.set_num_threads(1)
    be_quiet()
    results = {f"a save of {megabytes} MB": stalls(megabytes, given.rounds) for megabytes in (100, 1000)}
    report("asynchronous_saves", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
