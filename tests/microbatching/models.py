"""A small net in float64 that runs out of memory on demand, and fits of it."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.small import QUIET


class Memory:
    """What a device is emulated by: it takes so many rows, and tells the others by torch's own error."""

    def __init__(self, rows: int, where: str = "forward"):
        self.rows, self.where, self.errors = rows, where, 0

    def allocate(self, rows: int, where: str) -> None:
        if where == self.where and rows > self.rows:
            self.errors += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows} MiB")


class Limited(torch.autograd.Function):
    """The identity, which runs out of memory in its backward pass."""

    @staticmethod
    def forward(ctx, x, memory):
        ctx.memory = memory
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.memory.allocate(len(gradient), "backward")
        return gradient, None


def rows_of(count: int = 37, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


class Net(LightningModule):
    """Two layers, a parameter without a gradient, and a choice of what else people have in a module."""

    def __init__(self, memory=None, optimizer="adam", dropout=0.0, reduction="mean", norm=None):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16), *([norm] if norm else []), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)]
        self.net = nn.Sequential(*layers).double()
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.memory, self.kind, self.reduction = memory, optimizer, reduction

    def loss(self, batch):
        x, y = batch
        scores = self.net(x) if self.memory is None else self.net[2:](Limited.apply(self.net[:2](x), self.memory))
        self.seen += len(x)
        if self.memory is not None:
            self.memory.allocate(len(x), "forward")
        return nn.functional.cross_entropy(scores, y, reduction=self.reduction), scores

    def training_step(self, batch, batch_idx):
        loss, scores = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "scores": scores}

    def configure_optimizers(self):
        if self.kind == "adam":
            return torch.optim.Adam(self.parameters(), 1e-2)
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def fit(module, *callbacks, data=None, batch_size=10, **trainer):
    given = {**QUIET, "max_epochs": 4, "callbacks": list(callbacks), **trainer}
    runner = Trainer(**given)
    loader = data if isinstance(data, DataLoader) else DataLoader(data or rows_of(), batch_size=batch_size)
    runner.fit(module, loader)
    return runner


def difference(left, right) -> float:
    """The largest difference between the weights of two modules, relative to the largest weight."""
    pairs = list(zip(left.parameters(), right.parameters(), strict=True))
    largest = max(p.abs().max() for p, _ in pairs)
    return float((max((p - q).abs().max() for p, q in pairs) / largest).detach())
