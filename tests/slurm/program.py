"""A training script that Slurm starts: `program.py FOLDER [--lightning-requeues]`."""

import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_tricks import AutoResume
from lightning_tricks.seeding import isolated_rng
from tests.small import QUIET, EvaluatedNet, loader


class Tells(Callback):
    """Takes its time for each step, and writes how far the run is."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "steps"

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        time.sleep(float(os.environ.get("SECONDS_A_STEP", "0.1")))
        if trainer.is_global_zero:
            with self.file.open("a") as file:
                file.write(f"{trainer.global_step}\n")


def main() -> None:
    """Train on the tasks of the job, and write the weights of each rank."""
    folder, requeues = Path(sys.argv[1]), "--lightning-requeues" in sys.argv
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    trainer = Trainer(
        **QUIET,
        strategy="ddp" if tasks > 1 else "auto",
        devices=tasks,
        max_epochs=4,
        default_root_dir=folder,
        callbacks=[AutoResume(folder / "runs", every_n_train_steps=1000), Tells(folder)],
        plugins=[SLURMEnvironment(auto_requeue=requeues)] if SLURMEnvironment.detect() else None,
    )
    with isolated_rng(seed=0):
        net = EvaluatedNet(dropout=0.2)
    torch.manual_seed(1)
    trainer.fit(net, loader(shuffle=True), loader())
    torch.save((net.state_dict(), torch.get_rng_state()), folder / f"end{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
