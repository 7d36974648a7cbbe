"""Metrics of torchmetrics, alone, wrapped and in collections, and where scripts keep them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torchmetrics import Accuracy, F1Score, MeanMetric, MetricCollection, Precision, Recall
from torchmetrics.aggregation import CatMetric, RunningMean
from torchmetrics.wrappers import (
    ClasswiseWrapper,
    MetricTracker,
    MinMaxMetric,
    Running,
)

from tests.auto_resume.scenarios.frame import Job, Net, scenario

KIND = {"task": "multiclass", "num_classes": 3}


class Measured(Net):
    """Gives each of its metrics what it predicts, in training and in validation."""

    def measure(self, part: str, scores: torch.Tensor, y: torch.Tensor) -> None:
        """Update and log."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.measure("train", scores.detach(), batch[1])
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure("val", self(batch[0]), batch[1])


class _Kept(Measured):
    """One metric for each part, logged as an object or by what `forward` gives."""

    def __init__(self, make: Any, logs: str = "metric") -> None:
        super().__init__()
        self.kept = nn.ModuleDict({"for_train": make(), "for_val": make()})
        self.logs = logs

    def measure(self, part: str, scores: torch.Tensor, y: torch.Tensor) -> None:
        metric: Any = self.kept[f"for_{part}"]
        value = metric(scores, y)
        if self.logs == "metric":
            self.log(f"{part}_metric", metric, on_step=True, on_epoch=True)
        elif self.logs == "values":
            self.log_dict({f"{part}_{name}": one for name, one in value.items()}, on_step=True, on_epoch=False)

    def computed(self, part: str) -> None:
        if self.logs == "metric":
            return
        values = self.kept[f"for_{part}"].compute()
        plain = values.items() if isinstance(values, dict) else [("value", values)]
        for name, value in plain:
            self.log(f"{part}/{name}", value.float().mean())

    def on_train_epoch_end(self) -> None:
        if self.logs in ("values", "nothing"):
            self.computed("train")
            self.kept["for_train"].reset()

    def on_validation_epoch_end(self) -> None:
        if self.logs in ("values", "nothing"):
            self.computed("val")
            self.kept["for_val"].reset()


def _collection() -> MetricCollection:
    return MetricCollection([Accuracy(average="macro", **KIND), Precision(average="macro", **KIND), Recall(**KIND)])


@scenario(ranks=(1, 2))
def collection_with_groups(job: Job) -> None:
    class Collected(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.train_metrics = _collection().clone(prefix="train/")
            self.val_metrics = _collection().clone(prefix="val/")

        def measure(self, part: str, scores: torch.Tensor, y: torch.Tensor) -> None:
            metrics = getattr(self, f"{part}_metrics")
            metrics.update(scores, y)
            self.log_dict(metrics, on_step=False, on_epoch=True)

    job.seed()
    job.fit(Collected())


@scenario()
def collection_updated_by_hand(job: Job) -> None:
    class Updates(_Kept):
        def __init__(self) -> None:
            super().__init__(lambda: MetricCollection({"mean": _collection(), "f1": F1Score(**KIND)}), "nothing")

        def measure(self, part: str, scores: torch.Tensor, y: torch.Tensor) -> None:
            self.kept[f"for_{part}"].update(scores, y)

    job.seed()
    job.fit(Updates())


@scenario()
def running_metrics(job: Job) -> None:
    class Runs(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.mean = RunningMean(window=5)
            self.accuracy = Running(Accuracy(**KIND), window=4)
            self.all = CatMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.mean(loss.detach())
            self.all(loss.detach())
            self.log("running", self.mean, on_step=True, on_epoch=False)
            self.log("median", self.all.compute().median())
            return loss

        def measure(self, part: str, scores: torch.Tensor, y: torch.Tensor) -> None:
            if part == "train":
                self.accuracy(scores, y)
                self.log("running_accuracy", self.accuracy, on_step=True, on_epoch=True)

    job.seed()
    job.fit(Runs())


@scenario()
def tracker(job: Job) -> None:
    class Tracks(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.tracker = MetricTracker(Accuracy(**KIND), maximize=True)
            self.several = MetricTracker(_collection(), maximize=[True, True, True])

        def on_train_epoch_start(self) -> None:
            self.tracker.increment()
            self.several.increment()

        def measure(self, part: str, scores: torch.Tensor, y: torch.Tensor) -> None:
            if part == "train":
                self.tracker(scores, y)
                self.several.update(scores, y)

        def on_train_epoch_end(self) -> None:
            self.log("best", self.tracker.best_metric())
            self.log_dict({f"best_{name}": value for name, value in self.several.best_metric().items()})
            self.log("mean", self.tracker.compute_all().mean())

    job.seed()
    job.fit(Tracks())


@scenario()
def classwise_in_a_collection(job: Job) -> None:
    def make() -> MetricCollection:
        return MetricCollection(
            {
                "recall": ClasswiseWrapper(Recall(average=None, **KIND)),
                "precision": ClasswiseWrapper(Precision(average=None, **KIND)),
                "f1": F1Score(**KIND),
            }
        )

    job.seed()
    job.fit(_Kept(make, "values"))


@scenario()
def wrappers_in_a_collection(job: Job) -> None:
    def make() -> MetricCollection:
        return MetricCollection({"range": MinMaxMetric(Accuracy(**KIND)), "run": Running(Recall(**KIND), window=3)})

    job.seed()
    job.fit(_Kept(make, "values"))


@scenario(ranks=(1, 2))
def metric_of_a_callback(job: Job) -> None:
    class Measures(Callback):
        def __init__(self) -> None:
            self.mean = MeanMetric()
            self.by_name = {"recall": Recall(**KIND), "f1": F1Score(**KIND)}

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
        ) -> None:
            self.mean.update(outputs["loss"].detach())
            for metric in self.by_name.values():
                metric.update(batch[0][:, :3], batch[1])

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.log("callback/mean", self.mean.compute())
            self.mean.reset()
            for name, metric in self.by_name.items():
                pl_module.log(f"callback/{name}", metric.compute())
                metric.reset()

    job.seed()
    job.fit(Net(), Measures())


@scenario()
def metric_logged_by_a_callback(job: Job) -> None:
    class Logs(Callback):
        def __init__(self) -> None:
            self.recall = Recall(**KIND)
            self.several = {"f1": F1Score(**KIND), "first": MeanMetric()}

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.recall(batch[0][:, :3], batch[1])
            pl_module.log("callback/recall", self.recall, on_step=True, on_epoch=True, metric_attribute="recall")
            self.several["f1"](batch[0][:, :3], batch[1])
            pl_module.log("callback/f1", self.several["f1"], on_step=False, on_epoch=True, metric_attribute="f1")
            if trainer.current_epoch == 0 and batch_idx == 0:  # and never again
                first = self.several["first"]
                first(outputs["loss"].detach())
                pl_module.log("callback/first", first, on_step=False, on_epoch=True, metric_attribute="first")

    job.seed()
    job.fit(Net(), Logs())
