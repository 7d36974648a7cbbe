"""Members and data for the tests of ensembles."""

from __future__ import annotations

from functools import cache

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.small import QUIET

LBFGS = {"max_iter": 400, "tolerance_grad": 1e-11, "tolerance_change": 1e-14, "line_search_fn": "strong_wolfe"}


class MLP(nn.Module):
    """64 pixels to 10 classes, with a `forward` of its own."""

    def __init__(self, inputs: int = 64, outputs: int = 10, hidden: int = 32):
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.last(functional.relu(self.first(x)))


class CNN(nn.Module):
    """1 x 8 x 8 pixels to 10 classes, with statistics of batches."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.norm(self.conv(x.view(-1, 1, 8, 8)))), 2)
        return self.head(x.view(x.size(0), -1))


class Recurrent(nn.Module):
    """Rows of pixels one after another, by a layer that cannot be stacked."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 8, 8))[0][:, -1])


class LitMLP(LightningModule):
    """A LightningModule with its own loss, log and optimizer."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.net = MLP()
        self.lr = lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        scores = self(batch[0])
        loss = functional.cross_entropy(scores, batch[1], label_smoothing=0.1)
        self.log("smooth", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "preds": scores, "target": batch[1]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,297 digits to train with and 500 to test with."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[order[:1297]], y[order[:1297]]), TensorDataset(x[order[1297:]], y[order[1297:]])


@cache
def diabetes() -> tuple[TensorDataset, TensorDataset]:
    """342 patients to train with and 100 to test with; what is predicted has the mean 0 and the variance 1."""
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) * 20, torch.tensor(y, dtype=torch.float32).unsqueeze(1)
    y = (y - y.mean()) / y.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[order[:342]], y[order[:342]]), TensorDataset(x[order[342:]], y[order[342:]])


def few(dataset: TensorDataset, count: int, batch_size: int = 16, **arguments) -> DataLoader:
    part = TensorDataset(*(tensor[:count] for tensor in dataset.tensors))
    return DataLoader(part, batch_size, **{"shuffle": True, **arguments})


def some(count: int = 64, kind: str = "Classifier", **arguments) -> DataLoader:
    """The first digits, or the first patients for a regressor."""
    return few((diabetes() if kind == "Regressor" else digits())[0], count, **arguments)


def fit(ensemble: LightningModule, train, val=None, **arguments) -> Trainer:
    """Fit on the CPU, silently."""
    trainer = Trainer(**{"max_epochs": 1, **QUIET, **arguments})
    trainer.fit(ensemble, train, val)
    return trainer


def seeded(make, n):
    """Make members, each by a seed of its own."""
    members = []
    for index in range(n):
        torch.manual_seed(index)
        members.append(make())
    return members


def trained_alone(member, optimizer, batches, epochs=1, clip=lambda parameters: None, schedule=None, **loss):
    """Train one member in plain torch, and return its state."""
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            functional.cross_entropy(member(x), y, **loss).backward()
            clip(member.parameters())
            optimizer.step()
        if schedule is not None:
            schedule.step()
    return member.state_dict()


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose most probable class is the true one."""
    return (probabilities.argmax(-1) == labels).double().mean().item()


def values(ensemble: LightningModule) -> dict[str, Tensor]:
    """Return a copy of the state dict."""
    return {name: value.clone() for name, value in ensemble.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance) -> None:
    torch.testing.assert_close(one, other, **tolerance)


class Stops(Callback):
    """Raises at the first batch after a number of steps."""

    training_arguments = ()  # it is there once

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")
