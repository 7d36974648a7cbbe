"""What EndTogether costs two ranks with the same number of batches, over the bare Trainer, at steps of about 2 ms."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from _ratios import LEAN, arguments, be_quiet, measure, ratios, report
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_tricks import EndTogether

_STEPS, _ROWS, _WIDTH = 200, 32, 512


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(_STEPS, _ROWS, _WIDTH))


class _Perceptron(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))

    def training_step(self, batch: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        rows = batch if isinstance(batch, torch.Tensor) else batch[0]
        loss: torch.Tensor = self.net(rows).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Clock(Callback):
    """Writes the seconds of the second epoch, in which nothing starts."""

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(str(time.perf_counter() - self.start), encoding="utf-8")


def main() -> None:
    """Measure, print and write."""
    be_quiet()
    given = arguments(default_rounds=15)
    torch.set_num_threads(1)
    stored = TensorDataset(torch.ones(2 * _STEPS * _ROWS, _WIDTH))  # of which each rank gets half
    loaders = {"a stream": DataLoader(_Stream(), batch_size=None), "stored samples": DataLoader(stored, _ROWS)}
    ranks = {**LEAN, "accelerator": "cpu", "devices": 2, "strategy": "ddp_fork", "enable_checkpointing": False}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        clock = _Clock(Path(folder) / "seconds")

        def fit(loader: DataLoader[torch.Tensor], *callbacks: Callback) -> float:
            Trainer(max_epochs=2, callbacks=[*callbacks, clock], **ranks).fit(_Perceptron(), loader)
            return float(clock.path.read_text(encoding="utf-8"))

        for name, loader in loaders.items():
            contestants = {
                "bare": lambda loader=loader: fit(loader),
                name: lambda loader=loader: fit(loader, EndTogether()),
            }
            results |= ratios(measure(contestants, given.rounds), peer="bare")
    report("end_together", {"two ranks, steps of 2 ms": results}, given.rounds, given.out)


if __name__ == "__main__":
    main()
