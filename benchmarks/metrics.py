"""What measuring costs: epochs with six metrics, by MetricsMonitor and by the three usual idioms, over one without."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable

import torch
import torchvision
from _ratios import arguments, measure, ratios, report
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCohenKappa,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
    MulticlassSpecificity,
)

from lightning_tricks import MetricsMonitor


def six_metrics() -> dict[str, Metric]:
    """Six metrics of a classification into ten classes."""
    return {
        "acc": MulticlassAccuracy(10, average="micro"),
        "precision": MulticlassPrecision(10),
        "recall": MulticlassRecall(10),
        "f1": MulticlassF1Score(10),
        "specificity": MulticlassSpecificity(10),
        "kappa": MulticlassCohenKappa(10),
    }


class Classifier(LightningModule):
    """A net that measures itself by one of the idioms, or not at all."""

    def __init__(self, net: nn.Module, idiom: str = "") -> None:
        super().__init__()
        self.net = net
        self.idiom = idiom
        self.collection = MetricCollection(six_metrics()) if idiom else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return loss, scores and labels."""
        scores = self.net(batch[0])
        if self.idiom == "update, compute at the epoch's end":
            self.collection.update(scores, batch[1])
        elif self.idiom == "update, log_dict(objects) at each step":
            self.collection.update(scores, batch[1])
            self.log_dict(self.collection, on_step=False, on_epoch=True)
        elif self.idiom == "log_dict(collection(preds, target))":
            self.log_dict(self.collection(scores, batch[1]), on_step=False, on_epoch=True)
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "preds": scores, "target": batch[1]}

    def on_train_epoch_end(self) -> None:
        """Log, where that is the idiom."""
        if self.idiom == "update, compute at the epoch's end":
            self.log_dict(self.collection.compute())
            self.collection.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Times the second epoch: the first one checks its first batch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start."""
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, last of all callbacks."""
        self.elapsed = time.perf_counter() - self.start


def fits(make: Callable[[], nn.Module], data: TensorDataset, batch_size: int) -> dict[str, Callable[[], float]]:
    """The same two epochs without metrics, with ours and with each idiom."""

    def fit(idiom: str = "", monitor: bool = False) -> float:
        torch.manual_seed(0)
        clock = Clock()
        callbacks = [MetricsMonitor(six_metrics()), clock] if monitor else [clock]
        Trainer(
            max_epochs=2, accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(Classifier(make(), idiom), DataLoader(data, batch_size))  # fmt: skip
        return clock.elapsed

    return {
        "without": fit,
        "MetricsMonitor": lambda: fit(monitor=True),
        "update, compute at the epoch's end": lambda: fit("update, compute at the epoch's end"),
        "update, log_dict(objects) at each step": lambda: fit("update, log_dict(objects) at each step"),
        "log_dict(collection(preds, target))": lambda: fit("log_dict(collection(preds, target))"),
    }


def perceptron() -> nn.Module:
    """A net of the size that MNIST gets."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def random_images(count: int, *shape: int) -> TensorDataset:
    """Images and labels; what they show does not matter to the clock."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.rand(count, *shape, generator=generator), torch.randint(10, (count,), generator=generator)
    )


def main() -> None:
    """Measure, print and write."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    given = arguments(default_rounds=21)
    torch.set_num_threads(1)
    times = measure(fits(perceptron, random_images(10_000, 1, 28, 28), 32), given.rounds)
    results = {"perceptron, batch 32, 313 steps": ratios(times, peer="without")}
    resnet = fits(lambda: torchvision.models.resnet18(num_classes=10), random_images(64, 3, 64, 64), 8)
    times = measure({name: resnet[name] for name in ("without", "MetricsMonitor")}, given.rounds, warmup=1)
    results["ResNet-18, batch 8 of 64 x 64, 8 steps"] = ratios(times, peer="without")
    report("metrics", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
