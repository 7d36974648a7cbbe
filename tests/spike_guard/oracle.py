"""The oracle: a run in which batches are left out is the run whose loader leaves them out, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_tricks.lr_schedules import CombinedOptimizer
from tests.small import QUIET, digits, real_fp16

BATCH = 4


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Rows(Dataset):
    """Rows of digits; those of the poisoned batches are huge. They draw from all generators, as augmentations do.

    Args:
        batches: How many batches of four there are.
        poisoned: The numbers of the batches that are spoilt.
        factor: What their pixels are multiplied with.
        one_rank: The only rank that reads them spoilt; None for all.
        draws: Whether reading a row draws random numbers.
    """

    def __init__(
        self,
        batches: int,
        poisoned: Collection[int] = (),
        factor: float = 1e4,
        one_rank: int | None = None,
        draws: bool = True,
    ) -> None:
        self.pixels, self.labels = digits(BATCH * batches).tensors
        self.poisoned, self.factor, self.one_rank, self.draws = poisoned, factor, one_rank, draws

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(()).item() if self.draws else 0.5
        is_spoilt = row // BATCH in self.poisoned and self.one_rank in (None, rank())
        factor = self.factor if is_spoilt else 1.0
        return (self.pixels[row] + 0.01 * noise) * factor, self.labels[row]


class LeavingOut(BatchSampler):
    """The batches of an epoch without some, which are never read."""

    def __init__(self, sampler: Sampler[int], left_out: Collection[int]) -> None:
        super().__init__(sampler, BATCH, drop_last=False)
        self.left_out = left_out

    def __len__(self) -> int:
        return super().__len__() - len(self.left_out)

    def __iter__(self) -> Iterator[list[int]]:
        return (rows for number, rows in enumerate(super().__iter__()) if number not in self.left_out)


def loader(rows: Dataset, left_out: Collection[int] = (), shuffle: bool = False, **options: Any) -> DataLoader:
    """Batches of four rows, in their order or not, without some."""
    sampler = RandomSampler(rows) if shuffle else SequentialSampler(rows)
    return DataLoader(rows, batch_sampler=LeavingOut(sampler, left_out), **options)


class Noisy(LightningModule):
    """A net with dropout, batch statistics, noise of every generator, schedules, metrics and logged values."""

    def __init__(self, optimizer: str = "adamw", frequency: int = 1, automatic: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10, bias=False)
        )
        self.accuracy = MulticlassAccuracy(10)
        self.optimizer, self.frequency = optimizer, frequency
        self.automatic_optimization = automatic
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def loss(self, batch: Any) -> torch.Tensor:
        pixels, labels = batch
        self.calls += 1
        noise = random.random() + np.random.rand()
        scores = self.net(pixels * (1 + 0.01 * noise) + 0.01 * torch.randn_like(pixels))
        self.accuracy(scores, labels)
        # what the batch norm cannot hide
        return nn.functional.cross_entropy(scores, labels) + 1e-3 * self.net[0](pixels).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=BATCH, sync_dist=True)
        self.log("accuracy", self.accuracy, on_epoch=True, batch_size=BATCH)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                optimizer.step()
                scheduler.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, batch_size=BATCH, sync_dist=True)

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        kinds: dict[str, Any] = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
            "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
            "combined": lambda p: CombinedOptimizer([kinds["sgd"](p[:2]), kinds["adamw"](p[2:])]),
            "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        }
        if not self.automatic_optimization:
            optimizers = [kinds["sgd"](parameters[:2]), kinds["adamw"](parameters[2:])]
            return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
        optimizer = kinds[self.optimizer](parameters)
        by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=1000, cycle_momentum=False)
        by_epoch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step", "frequency": self.frequency},
            {"scheduler": by_epoch, "interval": "epoch"},
        ]


class Ended(Callback):
    """Writes down all that a fit ends with, on each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            random.seed(0)  # Lightning's fork launcher draws from it, now more, now less

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        facts = {
            "tensors": {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())},
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "scaler": scaler.state_dict() if scaler else None,
            "global_step": trainer.global_step,
            "logged": {
                name: value.item()
                for name, value in trainer.callback_metrics.items()
                if not name.startswith("spike_guard") and not name.endswith("_step")
            },
            "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
            "others": [
                tree_map_only(
                    torch.Tensor, lambda tensor: tensor.nan_to_num(-1.0), callback.state_dict()
                )  # NaN is no NaN
                for callback in trainer.callbacks
                if type(callback).__name__ in ("GradientClipping", "WeightAveraging", "EMAWeightAveraging")
            ],
        }
        torch.save(facts, self.folder / f"rank{trainer.global_rank}.pt")


def run(
    folder: Path,
    loader: Any,
    callbacks: Sequence[Callback] = (),
    *,
    module: Callable[[], LightningModule] = Noisy,
    fp16: bool = False,
    ranks: int = 1,
    **trainer: Any,
) -> list[dict[str, Any]]:
    """Train, and return what each rank ends with."""
    folder.mkdir()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    options: dict[str, Any] = {"max_epochs": 2, **QUIET, **trainer}
    if fp16:
        options["plugins"] = [real_fp16()]
    if ranks > 1:
        options |= {"strategy": "ddp_fork", "devices": ranks, "use_distributed_sampler": False}
    validation = DataLoader(digits(8), batch_size=BATCH)
    Trainer(callbacks=[*callbacks, Ended(folder)], **options).fit(module(), loader, validation)
    return [torch.load(file, weights_only=False) for file in sorted(folder.glob("rank*.pt"))]
