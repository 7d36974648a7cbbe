"""A run that was stopped and whose folder is stored: each release resumes those of its own format and the one before.

`python -m tests.auto_resume.stored_format` writes `stored/<format>/` as the present release writes it, once for each
format: when `FORMAT` grows, the older folder stays, and the one before it is removed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import AutoResume, seed_everything
from lightning_tricks.auto_resume import CheckpointFolder
from lightning_tricks.auto_resume.core.checkpoint_folder import FORMAT
from tests.small import QUIET

STORED = Path(__file__).parent / "stored"
STOPPED_AT = 5  # in the middle of the second epoch of three


class Small(LightningModule):
    """A net of two layers with a buffer, a counter and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), nn.Linear(3, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean of the squares, and note it."""
        self.seen += len(batch[0])
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class _Stops(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step > STOPPED_AT:
            raise KeyError("stopped")


def train(*callbacks: Callback) -> Small:
    """Train for three epochs of three batches."""
    seed_everything(1, verbose=False)
    module, rows = Small(), torch.linspace(-1, 1, 48).view(12, 4)
    trainer = Trainer(max_epochs=3, callbacks=list(callbacks), **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(rows), 4, shuffle=True))
    return module


def write(target: Path) -> None:
    """Write the newest checkpoint of the run that is stopped, and nothing else, to a directory."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(AutoResume(folder, every_n_train_steps=STOPPED_AT), _Stops())
        except KeyError:
            made = CheckpointFolder(folder)
        shutil.rmtree(target, ignore_errors=True)
        name = made.manifests()[0].file
        shutil.copytree(made.private / name, CheckpointFolder(target).private / name)


if __name__ == "__main__":
    from tests.auto_resume import stored_format  # so that classes are named as in the tests

    stored_format.write(STORED / str(FORMAT))
