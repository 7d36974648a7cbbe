"""Modules, data sets and readers for tests of predictions."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from tests.small import QUIET


class Numbers(Dataset):
    """Samples that hold their own index."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index


class Squares(LightningModule):
    """Predicts the squares of what the samples hold, and writes down which batches it saw."""

    def __init__(self, log=None, kill_at=None, dies_on=None, transform=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("counted", torch.zeros(1))  # which DDP broadcasts
        self.log_file, self.kill_at, self.dies_on, self.transform = log, kill_at, dies_on, transform

    def forward(self, x):
        return self.weight * x**2

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        values, numbers = batch
        if self.kill_at is not None and (self.kill_at <= numbers).any():
            if self.dies_on is not None:
                raise self.dies_on
            os.kill(os.getpid(), signal.SIGKILL)
        if self.log_file:
            with Path(self.log_file).open("a") as file:
                file.write(f"{numbers.tolist()}\n")
        squares = self(values)
        return self.transform(squares, numbers) if self.transform else {"square": squares[:, 0], "number": numbers}


def predict(writer, module=None, loaders=None, **options):
    """Predict 21 numbers in batches of 4, without what the Trainer would keep."""
    arguments = {**QUIET, "callbacks": writer if isinstance(writer, list) else [writer], **options}
    returned = arguments.pop("return_predictions", False)
    trainer = Trainer(**arguments)
    loaders = DataLoader(Numbers(21), 4) if loaders is None else loaders
    return trainer.predict(module or Squares(), loaders, return_predictions=returned)


TWO_RANKS = {"strategy": "ddp_fork", "devices": 2}


def rows_of(path):
    """The rows of a file as dicts of plain values, whatever its format."""
    path = Path(path)
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    columns = dict(np.load(path)) if path.suffix == ".npz" else torch.load(path, weights_only=True)
    for name in [name for name in columns if f"{name}.lengths" in columns]:
        columns[name] = np.split(columns[name], np.cumsum(columns.pop(f"{name}.lengths"))[:-1])
    plain = {
        name: [row.tolist() if hasattr(row, "tolist") else row for row in column] for name, column in columns.items()
    }
    return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]


def squares(count=21):
    return [{"loader": 0, "index": n, "square": float(n * n), "number": n} for n in range(count)]
