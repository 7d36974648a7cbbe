"""What measuring costs: epochs with six metrics, by MetricsMonitor and by the three usual idioms, over one without."""

from __future__ import annotations

import time
from typing import Any

import torch
import torchvision
from _ratios import ACCELERATOR, arguments, be_quiet, now, ratios, report
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


_IDIOMS = (
    "update, compute at the epoch's end",
    "update, log_dict(objects) at each step",
    "log_dict(collection(preds, target))",
)


class Classifier(LightningModule):
    """A net that measures itself by one of the idioms, or not at all."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.idiom = ""
        self.collections = nn.ModuleList(MetricCollection(six_metrics(), prefix=f"{n}/") for n in range(len(_IDIOMS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return loss, scores and labels."""
        scores = self.net(batch[0])
        if self.idiom == _IDIOMS[0]:
            self.collections[0].update(scores, batch[1])
        elif self.idiom == _IDIOMS[1]:
            self.collections[1].update(scores, batch[1])
            self.log_dict(self.collections[1], on_step=False, on_epoch=True)
        elif self.idiom == _IDIOMS[2]:
            self.log_dict(self.collections[2](scores, batch[1]), on_step=False, on_epoch=True)
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "preds": scores, "target": batch[1]}

    def on_train_epoch_end(self) -> None:
        """Log, where that is the idiom."""
        if self.idiom == _IDIOMS[0]:
            self.log_dict(self.collections[0].compute())
            self.collections[0].reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class TimedMonitor(MetricsMonitor):
    """Adds up the time inside its own hooks, which the machine's other work disturbs less than whole epochs."""

    def __init__(self, metrics: dict[str, Metric]) -> None:
        super().__init__(metrics, log_plots=False)
        self.inside = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        """Count a batch."""
        start = time.perf_counter()
        super().on_train_batch_end(*args)
        self.inside += time.perf_counter() - start

    def on_train_epoch_end(self, *args: Any) -> None:
        """Log the metrics."""
        start = time.perf_counter()
        super().on_train_epoch_end(*args)
        self.inside += time.perf_counter() - start


class Rotation(Callback):
    """Gives each epoch of one fit to another contestant, in an order that rotates, and times it.

    Fits of their own would differ by more than what is measured: in where memory lies and what else the machine does.
    """

    def __init__(self, contestants: dict[str, tuple[str, list[Callback]]], rounds: int) -> None:
        self.contestants = contestants
        names = list(contestants)
        self.order = [names[(turn + round_) % len(names)] for round_ in range(rounds) for turn in range(len(names))]
        self.times: dict[str, list[float]] = {name: [] for name in names}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the next contestant in, and start."""
        pl_module.idiom, self.callbacks = self.contestants[self.order[trainer.current_epoch]]
        trainer.callbacks[:] = [*self.callbacks, self]
        self.start = now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, last of all callbacks."""
        self.times[self.order[trainer.current_epoch]].append(now() - self.start)
        for monitor in self.callbacks:
            if isinstance(monitor, TimedMonitor):
                self.times.setdefault("inside MetricsMonitor's hooks", []).append(monitor.inside)
                monitor.inside = 0.0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the first two epochs of each: the first one checks its first batch."""
        self.times = {name: times[2:] for name, times in self.times.items()}


def epochs(net: nn.Module, data: TensorDataset, batch_size: int, rounds: int, idioms: bool) -> dict[str, list[float]]:
    """Time epochs without metrics, with ours and, if they are wanted, with each idiom."""
    monitor = TimedMonitor(six_metrics())
    contestants: dict[str, tuple[str, list[Callback]]] = {"without": ("", []), "MetricsMonitor": ("", [monitor])}
    if idioms:
        contestants["a callback that does nothing"] = "", [Callback()]
        contestants |= {idiom: (idiom, []) for idiom in _IDIOMS}
    rotation = Rotation(contestants, rounds + 2)
    Trainer(
        max_epochs=len(rotation.order), accelerator=ACCELERATOR, devices=1, callbacks=[monitor, rotation], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Classifier(net), DataLoader(data, batch_size))  # fmt: skip
    return rotation.times


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
    be_quiet()
    given = arguments(default_rounds=31)
    torch.set_num_threads(1)
    times = epochs(perceptron(), random_images(10_000, 1, 28, 28), 32, given.rounds, idioms=True)
    results = {"perceptron, batch 32, 313 steps": ratios(times, peer="without")}
    resnet = torchvision.models.resnet18(num_classes=10)
    times = epochs(resnet, random_images(64, 3, 64, 64), 8, given.rounds, idioms=False)
    results["ResNet-18, batch 8 of 64 x 64, 8 steps"] = ratios(times, peer="without")
    report("metrics", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
