"""A run that stands still: `python -m tests.hang_watch.hanging KIND FOLDER` trains until it does."""

import ctypes
import sys
import time
from functools import partial

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_tricks import HangWatch
from tests.small import QUIET, EvaluatedNet, digits, fork, loader


class Stands(EvaluatedNet):
    """Stands still in its fourth batch, or logs and skips what the other rank does not."""

    def __init__(self, kind):
        super().__init__("manual" if kind == "skip" else "adamw")
        self.kind = kind

    def training_step(self, batch, batch_idx):
        is_second = self.trainer.global_rank == 1
        if batch_idx == 3 and self.kind == "sleep" and is_second:
            time.sleep(1000)
        if batch_idx == 3 and self.kind == "holds the lock":
            ctypes.PyDLL(None).sleep(1000)  # which does not release it
        if batch_idx == 3 and self.kind in ("ends", "stops") and is_second:
            self.trainer.should_stop = True
        if batch_idx == 3 and self.kind == "skip" and is_second:
            return None
        return super().training_step(batch, batch_idx)

    def evaluate(self, batch, batch_idx):
        self.log("loss", 1.0, sync_dist=True)
        if self.kind == "keys" and self.trainer.global_rank == 1:
            self.log("extra", 1.0, sync_dist=True)

    validation_step = evaluate


class Waits(Dataset):
    """Its sample 22, of the second rank's fourth batch or so, never comes."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 22:
            time.sleep(1000)
        return digits()[index]


class Shorter(IterableDataset):
    """On the second rank it has a batch less."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        yield from (digits()[index] for index in range(20 - 4 * rank))


def end(folder, rank):
    """Let the fit of the second rank end while the first waits, and its process go on."""
    options = {**QUIET, "strategy": "ddp", "devices": 2, "limit_val_batches": 0}
    Trainer(callbacks=[HangWatch("1 second", folder)], max_epochs=2, **options).fit(Stands("ends"), loader())
    time.sleep(1000)


def main(kind, folder):
    if kind == "ends":
        fork(partial(end, folder), 2)
    data = {"loader": Waits(), "shorter": Shorter()}.get(kind)
    train = loader() if data is None else DataLoader(data, batch_size=4)
    ranks = {} if kind == "holds the lock" else {"strategy": "ddp_fork", "devices": 2}
    trainer = Trainer(callbacks=[HangWatch("1 second", folder)], max_epochs=2, **{**QUIET, **ranks})
    trainer.fit(Stands(kind), train, loader())


if __name__ == "__main__":
    main(*sys.argv[1:])
