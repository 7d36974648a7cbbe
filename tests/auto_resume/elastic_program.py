"""A training script of torchrun with one or two nodes of one rank: `elastic_program.py FOLDER`."""

import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import AutoResume
from lightning_tricks.seeding import isolated_rng
from tests.small import QUIET

SAMPLES, EPOCHS = 48, 2


class Noting(LightningModule):
    """Appends epoch, step, and the samples of each batch to a file of its process."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.net = folder, torch.nn.Linear(1, 1)

    def training_step(self, batch):
        (samples,) = batch
        time.sleep(0.2)  # so that the other node is killed in the middle
        file = self.folder / f"read-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.getpid()}.txt"
        with file.open("a") as stream:
            ranks, step = self.trainer.world_size, self.global_step
            stream.write(f"{ranks} {self.current_epoch} {step} {' '.join(str(int(each)) for each in samples)}\n")
        return self.net(samples[:, None]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


def main(folder: Path) -> None:
    """Train on as many nodes as torchrun has."""
    data = DataLoader(TensorDataset(torch.arange(float(SAMPLES))), 4, shuffle=True)
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    resume = AutoResume(folder / "runs", every_n_train_steps=2, asynchronous=False)
    trainer = Trainer(**QUIET, strategy="ddp", devices=1, num_nodes=nodes, max_epochs=EPOCHS, callbacks=[resume])
    with isolated_rng(seed=0):
        net = Noting(folder)
    torch.manual_seed(1)
    trainer.fit(net, data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
