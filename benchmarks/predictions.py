"""A prediction that is written to a file against one that is not, and what is usually copied to write one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _ratios import LEAN, arguments, be_quiet, measure, ratios, report, work
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import PredictionWriter

CASES = {
    "2,000 batches of 8 rows of 10 scores": (2000, 8, 10),
    "10 batches of 1,024 rows of 512 values": (10, 1024, 512),
}


class Net(LightningModule):
    """A perceptron of 32 inputs, with a hidden layer as wide as its outputs."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, outputs), nn.ReLU(), nn.Linear(outputs, outputs))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the outputs beside the number of each row."""
        return {"scores": self.net(batch[0]), "number": batch[1]}


class OneFileABatch(BasePredictionWriter):
    """The recipe of Lightning's documentation."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch")
        self.folder = folder

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Save what the step returned."""
        torch.save(prediction, self.folder / f"{batch_idx}.pt")


def contestants(folder: Path, batches: int, rows: int, outputs: int) -> dict[str, Callable[[], float]]:
    """The same prediction, written in several ways or not at all; each returns the seconds that the process worked."""
    data = TensorDataset(torch.randn(batches * rows, 32), torch.arange(batches * rows))
    module = Net(outputs)

    def predict(*callbacks: Callback, collects: bool = False) -> float:
        trainer, start = Trainer(callbacks=[*callbacks], **LEAN), work()
        returned: Any = trainer.predict(module, DataLoader(data, rows), return_predictions=collects)
        if collects:
            joined = {name: torch.cat([batch[name] for batch in returned]) for name in returned[0]}
            torch.save(joined, folder / "collected.pt")
        return work() - start

    def in_new_folder(make: Callable[[Path], Callback]) -> float:
        own = folder / "own"
        own.mkdir()
        try:
            return predict(make(own))
        finally:
            shutil.rmtree(own)

    return {
        "not written": lambda: predict(),
        "PredictionWriter, pt": lambda: in_new_folder(lambda own: PredictionWriter(own / "all.pt")),
        "PredictionWriter, npz": lambda: in_new_folder(lambda own: PredictionWriter(own / "all.npz")),
        "BasePredictionWriter, torch.save of each batch": lambda: in_new_folder(OneFileABatch),
        "collected, torch.cat and torch.save": lambda: predict(collects=True),
    }


def main() -> None:
    """Measure, print and write."""
    be_quiet()
    given = arguments(default_rounds=15)
    torch.manual_seed(0)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            times = measure(contestants(Path(folder), *case), given.rounds, warmup=1)
            results[name] = ratios(times, peer="not written")
    report("predictions", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
