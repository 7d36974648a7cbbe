"""What scripts do at the start of an epoch."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler, ModelPruning
from torch import nn
from torch.utils.data import Dataset, Sampler

from tests.auto_resume.scenarios.frame import Job, Net, scenario


@scenario(ranks=(1, 2), workers=(0, 2))
def kl_annealing(job: Job) -> None:
    class VAE(Net):
        def on_train_epoch_start(self) -> None:
            self.kl = min(1.0, 0.2 + self.current_epoch / 2)
            self.log("kl", self.kl)

        def loss(self, batch: Any) -> torch.Tensor:
            code = self.body(batch[0])
            return super().loss(batch) + getattr(self, "kl", 1.0) * code.square().mean()

    job.seed()
    job.fit(VAE())


@scenario()
def noise_drawn_at_epoch_start(job: Job) -> None:
    class Noisy(Net):
        def on_train_epoch_start(self) -> None:
            self.noise = torch.randn(6)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([batch[0] + 0.1 * self.noise, batch[1]], batch_idx)

    job.seed()
    job.fit(Noisy())


class Epochal(Dataset):
    """Adds noise that follows from the epoch."""

    epoch = 0

    def __init__(self, data: Any) -> None:
        self.data = data

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(6, generator=torch.Generator().manual_seed(1000 * self.epoch + index)), y


@scenario(ranks=(1, 2), workers=(0, 2))
def dataset_set_epoch(job: Job) -> None:
    class Telling(Net):
        def on_train_epoch_start(self) -> None:
            self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)

    job.seed()
    job.fit(Telling(), train=job.loader(Epochal(job.samples()), shuffle=True))


@scenario(workers=(0, 2))
def sampler_set_epoch(job: Job) -> None:
    class Order(Sampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 36

        def __iter__(self):
            return iter(torch.randperm(36, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    job.seed()
    job.fit(Net(), train=job.loader(job.samples(), sampler=Order()))


@scenario()
def freezing_by_epoch(job: Job) -> None:
    class Thawing(Net):
        def on_train_epoch_start(self) -> None:
            self.body.requires_grad_(self.current_epoch >= 1)

    job.seed()
    job.fit(Thawing())


@scenario()
def group_added_by_callback(job: Job) -> None:
    class HeadFirst(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)

    class Adds(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers[0].add_param_group({"params": list(pl_module.body.parameters()), "lr": 0.01})

    job.seed()
    job.fit(HeadFirst(), Adds())


@scenario()
def part_never_trained(job: Job) -> None:
    job.seed()
    net = Net()
    net.body[1].eval()
    net.body[0].requires_grad_(False)
    job.fit(net)


@scenario(ranks=(1, 2))
def accumulation_by_epoch(job: Job) -> None:
    job.seed()
    job.fit(Net(), GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}))


@scenario()
def backbone_finetuning(job: Job) -> None:
    class Tuned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.body = self.body, nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)

    job.seed()
    job.fit(Tuned(), BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01))


@scenario(warning="the parameter body.0.weight_orig")
def pruning(job: Job) -> None:
    job.seed()
    net = Net()
    job.fit(net, ModelPruning("l1_unstructured", parameters_to_prune=[(net.body[0], "weight")], amount=0.2))


@scenario()
def rate_halved_by_hand(job: Job) -> None:
    class Halving(Net):
        def on_train_epoch_start(self) -> None:
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.5  # twice is a quarter

    job.seed()
    job.fit(Halving())


@scenario()
def head_begun_anew(job: Job) -> None:
    class Anew(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                nn.init.normal_(self.head.weight, std=0.1)

    job.seed()
    job.fit(Anew())
