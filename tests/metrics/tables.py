"""A module whose predictions are in the data, its loaders, and what a metric of torchmetrics says of them."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.small import QUIET


def trainer(*callbacks, **arguments):
    return Trainer(callbacks=list(callbacks), **{"max_epochs": 1, **QUIET, **arguments})


class Trained(LightningModule):
    """A module whose predictions are in the data: columns of a table, by name."""

    def __init__(self, names=("preds", "target")):
        super().__init__()
        self.names = names
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return {"loss": (self.weight * 0).sum() + 1.0, **dict(zip(self.names, batch, strict=True))}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Table(Trained):
    """The same, validated and tested as well."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return dict(zip(self.names, batch, strict=True))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return self.validation_step(batch, batch_idx)

    predict_step = test_step


class OneLoader(Table):
    def validation_step(self, batch, batch_idx):
        return super().validation_step(batch, batch_idx)


def table(count, classes=4, seed=0):
    """Scores, labels and queries; scores without ties."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, classes, generator=generator).softmax(1)
    return scores, torch.randint(classes, (count,), generator=generator), torch.arange(count) % 5


def loader_of(*columns, batch_size=4, **arguments):
    return DataLoader(TensorDataset(*columns), batch_size, **arguments)


def truth(metric, *inputs, **named):
    metric.update(*inputs, **named)
    return metric.compute().item()


def numbers(values):
    return {name: value.item() for name, value in values.items()}
