"""What a hook changes, and another changes back to what it was before the fit."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import Dataset

from tests.auto_resume.scenarios.frame import Job, Net, scenario


class Warm(Net):
    """Has a loss of its own while it is warm."""

    warm = False

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (0.3 if self.warm else 1.0)


@scenario()
def warm_at_the_start_of_each_epoch(job: Job) -> None:
    class EachEpoch(Warm):
        def __init__(self) -> None:
            super().__init__()
            self.warm = False

        def on_train_epoch_start(self) -> None:
            self.warm = True

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.warm = False

    job.seed()
    job.fit(EachEpoch())


class InFirstEpoch(Callback):
    """Changes something when training starts, and changes it back when its first epoch ends."""

    def change(self, trainer: Trainer, module: Any) -> None:
        raise NotImplementedError

    def change_back(self, trainer: Trainer, module: Any) -> None:
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.change(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.change_back(trainer, pl_module)


@scenario()
def attribute_of_the_first_epoch(job: Job) -> None:
    class Adds(InFirstEpoch):
        def change(self, trainer: Trainer, module: Any) -> None:
            module.warm = True

        def change_back(self, trainer: Trainer, module: Any) -> None:
            del module.warm

    job.seed()
    job.fit(Warm(), Adds())


@scenario()
def body_frozen_in_the_first_epoch(job: Job) -> None:
    class Freezes(InFirstEpoch):
        def change(self, trainer: Trainer, module: Any) -> None:
            module.body.requires_grad_(False)

        def change_back(self, trainer: Trainer, module: Any) -> None:
            module.body.requires_grad_(True)

    job.seed()
    job.fit(Net(), Freezes())


@scenario()
def clipping_in_half_of_each_epoch(job: Job) -> None:
    class Clips(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.gradient_clip_val = 0.1

        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.gradient_clip_val = None

    job.seed()
    job.fit(Net(), Clips())


@scenario()
def head_left_out_in_the_first_epoch(job: Job) -> None:
    class LeavesOut(InFirstEpoch):
        def change(self, trainer: Trainer, module: Any) -> None:
            trainer.optimizers[0].param_groups[0]["params"] = list(module.body.parameters())

        def change_back(self, trainer: Trainer, module: Any) -> None:
            trainer.optimizers[0].param_groups[0]["params"] = list(module.parameters())

    job.seed()
    job.fit(Net(), LeavesOut())


@scenario(warning="head.weight")
def head_pruned_in_the_first_epoch(job: Job) -> None:
    class Prunes(InFirstEpoch):
        def change(self, trainer: Trainer, module: Any) -> None:
            prune.random_unstructured(module.head, "weight", 0.5)

        def change_back(self, trainer: Trainer, module: Any) -> None:
            prune.remove(module.head, "weight")

    job.seed()
    job.fit(Net(), Prunes())


class Augmented(Dataset):
    """Adds noise while it is told to."""

    def __init__(self, data: Any) -> None:
        self.data, self.noise = data, 0.0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + self.noise * torch.sin(9 * x), y


class Noise(Callback):
    """Changes what data are read from: when training starts, and when an epoch ends."""

    def __init__(self, name: str, *levels: float) -> None:
        self.name, self.levels = name, levels

    def tell(self, trainer: Trainer, level: float) -> None:
        getattr(trainer, self.name).dataset.noise = level

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tell(trainer, self.levels[0])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.tell(trainer, self.levels[1])


def noisy_data(job: Job, name: str, *levels: float) -> None:
    """Fit with one noisy loader."""
    job.seed()
    train, held_out = (job.loader(Augmented(job.samples(seed=seed)), shuffle=seed == 1) for seed in (1, 2))
    job.trainer(Noise(name, *levels)).fit(Net(), train, held_out)


@scenario(workers=(0, 2))
def data_noisy_in_the_first_epoch(job: Job) -> None:
    noisy_data(job, "train_dataloader", 0.5, 0.0)


@scenario(workers=(0, 2))
def validation_data_less_noisy_after_the_first_epoch(job: Job) -> None:
    noisy_data(job, "val_dataloaders", 0.5, 0.25)


@scenario()
def module_in_a_list_frozen_in_the_first_epoch(job: Job) -> None:
    class Teacher(Callback):
        def __init__(self) -> None:
            self.net = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.net.eval()

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.net.train()

    class Taught(Net):
        def __init__(self, teacher: Teacher) -> None:
            super().__init__()
            self.teachers = [teacher]

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) + (self(batch[0]) - self.teachers[0].net(batch[0]).detach()).square().mean()

    job.seed()
    teacher = Teacher()
    job.fit(Taught(teacher), teacher)
