"""A training script that torchrun starts; one rank is killed once: `torchrun_program.py FOLDER SIGNAL`."""

import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer

from lightning_tricks import AutoResume
from lightning_tricks.seeding import isolated_rng
from tests.small import QUIET, EvaluatedNet, loader


class KilledOnce(Callback):
    """Sends rank one a signal after its seventh step, if no process was killed in this folder before."""

    training_arguments = ()  # it is there once

    def __init__(self, folder: Path, name: str) -> None:
        self.marker, self.name = folder / "killed", name

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.name != "none" and trainer.global_rank == 1 and trainer.global_step == 7 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), getattr(signal, self.name))


def train(folder: Path, name: str) -> None:
    """Train three epochs of five steps on two ranks, and write the weights of each."""
    callbacks = [AutoResume(folder / "runs", every_n_train_steps=2, asynchronous=False), KilledOnce(folder, name)]
    trainer = Trainer(**QUIET, strategy="ddp", devices=2, max_epochs=3, callbacks=callbacks)
    with isolated_rng(seed=0):
        net = EvaluatedNet(dropout=0.2)
    torch.manual_seed(1)
    trainer.fit(net, loader(shuffle=True), loader())
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    torch.save((attempt, net.state_dict(), torch.get_rng_state()), folder / f"end{trainer.global_rank}.pt")


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
