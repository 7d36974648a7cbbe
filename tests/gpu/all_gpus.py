"""Train on all devices of this machine, be stopped, and go on: all ranks end as one another, and as undisturbed.

`python -m tests.gpu.all_gpus cuda -1` takes all GPUs (NCCL), `... cpu 2` two ranks on the CPU (gloo). Lightning starts
this program again for the other ranks. Each rank writes what it ended with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from torchmetrics.classification import MulticlassAccuracy

from lightning_tricks import AutoResume, GradientClipping, MetricsMonitor
from lightning_tricks.seeding import isolated_rng
from tests.small import QUIET, EvaluatedNet, loader


class Stops(Callback):
    """Ends all ranks in a batch, as an error in the user's code would."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            raise KeyError("stopped")


def train(accelerator: str, devices: int, folder: Path, extra: list[Callback]) -> None:
    """Fit two epochs, and write what this rank ended with."""
    guard = AutoResume(folder, every_n_train_steps=1)
    callbacks = [GradientClipping(0.5), MetricsMonitor(MulticlassAccuracy(10), stages=["train", "val"]), guard, *extra]
    options = {**QUIET, "accelerator": accelerator, "devices": devices, "strategy": "ddp", "max_epochs": 2}
    trainer = Trainer(callbacks=callbacks, **options)
    with isolated_rng(seed=0):
        module = EvaluatedNet()
    trainer.fit(module, loader(shuffle=True), loader())
    weights = {name: value.cpu() for name, value in module.state_dict().items()}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    torch.save((trainer.world_size, weights, metrics), folder.parent / f"{folder.name}-{trainer.global_rank}.pt")


def main() -> None:
    """Train in the folder that the environment names: which run it is says its last argument."""
    accelerator, devices, run = sys.argv[1:]
    folder = Path(os.environ["ALL_GPUS_FOLDER"])
    if run == "stopped":
        try:
            train(accelerator, int(devices), folder / "resumed", [Stops()])
        except KeyError:
            os._exit(0)  # without waiting for the other ranks
    train(accelerator, int(devices), folder / run, [])


if __name__ == "__main__":
    main()
