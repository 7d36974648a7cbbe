"""Habits that people bring along: from older versions, from loops of their own, from other people's templates."""

import random
from collections import defaultdict, deque

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.styles.batches import CLASSES, Classifier
from tests.styles.frame import Job, points, style


def loaders():
    return DataLoader(points(), batch_size=4, shuffle=True), DataLoader(points(12, 2), batch_size=4)


class LogsAnywhere(Classifier):
    def on_train_start(self):
        self.log("at_start", 1.0)

    def on_train_epoch_start(self):
        self.log("rate", self.optimizers().param_groups[0]["lr"])

    def on_train_batch_start(self, batch, batch_idx):
        self.log("number", batch_idx, on_step=True, on_epoch=True, reduce_fx="max")

    def on_before_zero_grad(self, optimizer):
        self.log("zeroed", True)

    def on_after_backward(self):
        self.log("slope", self.net[0].weight.grad.norm(), prog_bar=True)

    def on_before_optimizer_step(self, optimizer):
        self.log_dict({f"norms/{name}": p.grad.norm() for name, p in self.named_parameters()}, on_epoch=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("again", outputs["loss"])
        if batch_idx % 3 == 0:
            self.logger.log_metrics({"by_hand": float(outputs["loss"])}, step=self.global_step)

    def on_train_epoch_end(self):
        self.log("train_metric", float(self.trainer.callback_metrics["train_loss_epoch"]) * 2)


class LogsToo(Callback):
    """Logs in the same hooks, as a stranger's callback does."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.log("steps_of_callback", 1.0, on_epoch=True, reduce_fx="sum")

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log("from_callback", 2.0)


@style(metrics=CLASSES)
def logging_in_odd_places(job: Job) -> None:
    job.fit(LogsAnywhere(), *loaders(), callbacks=[LogsToo(), LearningRateMonitor()])


class Remembers(Classifier):
    """Keeps what no state dict holds, and generators of its own."""

    def __init__(self):
        super().__init__()
        self.history, self.recent, self.seen = defaultdict(list), deque(maxlen=5), set()
        self.random, self.generator = random.Random(3), np.random.default_rng(4)
        self.hidden, self.metrics, self.count = None, {"best": 9.0}, 0

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.history[f"epoch{self.current_epoch}"].append(round(outputs["loss"].item(), 4))
        self.recent.append(batch_idx)
        self.seen |= set(batch[1].tolist())
        self.count += 1
        self.metrics["best"] = min(self.metrics["best"], self.history[f"epoch{self.current_epoch}"][-1])
        self.hidden = (
            outputs["preds"].detach() if self.hidden is None else 0.9 * self.hidden + 0.1 * outputs["preds"].detach()
        )
        noise = self.random.random() + float(self.generator.normal())
        return outputs | {"loss": outputs["loss"] * (1 + 0.01 * noise) + 0.01 * self.hidden.sum()}


@style(metrics=CLASSES)
def state_that_is_no_tensor(job: Job) -> None:
    job.fit(Remembers(), *loaders())


class Measured(Classifier):
    """As templates do it: a collection for each stage, a mean of the loss, the best so far."""

    def __init__(self):
        super().__init__()
        both = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        self.train_metrics, self.val_metrics = both.clone(prefix="train_"), both.clone(prefix="val_")
        self.val_mean, self.val_best = MeanMetric(), MaxMetric()

    def on_train_start(self):
        self.val_mean.reset()
        self.val_best.reset()

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log_dict(self.train_metrics(outputs["preds"], outputs["target"]), on_step=True)
        return outputs

    def validation_step(self, batch, batch_idx):
        outputs = super().validation_step(batch, batch_idx)
        self.val_metrics.update(outputs["preds"], outputs["target"])
        self.val_mean(nn.functional.cross_entropy(outputs["preds"], outputs["target"]))
        self.log("val/mean", self.val_mean, on_step=False, on_epoch=True, prog_bar=True)
        return outputs

    def on_validation_epoch_end(self):
        values = self.val_metrics.compute()
        self.log_dict(values)
        self.val_metrics.reset()
        self.val_best(values["val_MulticlassAccuracy"])
        self.log("val/acc_best", self.val_best.compute(), sync_dist=True)


@style(metrics=CLASSES)
def metrics_of_the_module(job: Job) -> None:
    job.fit(Measured(), *loaders())


class OwnLoop(Classifier):
    """Overrides what the Trainer does with optimizers and schedulers."""

    def backward(self, loss, *args, **kwargs):
        loss.backward(retain_graph=True)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 6)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


@style(metrics=CLASSES)
def overridden_steps(job: Job) -> None:
    job.fit(OwnLoop(), *loaders(), accumulate_grad_batches=2)


class Inner(LightningModule):
    """A LightningModule that is a part of another, and logs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x):
        return self.net(x)


class Outer(LightningModule):
    """Delegates what it does not know to its net, and is built late."""

    def __init__(self):
        super().__init__()
        self.encoder = Inner()
        self.heads = nn.ModuleDict()

    def configure_model(self):
        if not self.heads:
            self.heads["class"] = nn.Linear(8, 3)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("encoder").net, name)

    def training_step(self, batch):
        scores = self.heads["class"](self.encoder(batch[0]))
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.log("part", loss)
        return {"loss": loss, "preds": scores, "target": batch[1]}

    def configure_optimizers(self):
        self.encoder(torch.zeros(2, 6))
        return torch.optim.NAdam([*self.encoder.parameters(), *self.heads.parameters()], lr=0.01)


@style(metrics=CLASSES)
def modules_in_modules_built_late(job: Job) -> None:
    job.fit(Outer(), loaders()[0])


class Adapts(LightningModule):
    """Learns in an inner loop, in validation as well."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(6, 3)

    def adapted(self, batch):
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            loss = nn.functional.cross_entropy(torch.func.functional_call(self.net, weights, batch[0]), batch[1])
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        scores = torch.func.functional_call(self.net, weights, batch[0])
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "preds": scores, "target": batch[1]}

    def training_step(self, batch, batch_idx):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        outputs = self.adapted(batch)
        self.log("outer", outputs["loss"])
        self.manual_backward(outputs["loss"] / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return {name: value.detach() for name, value in outputs.items()}

    def validation_step(self, batch, batch_idx):
        torch.set_grad_enabled(True)
        outputs = self.adapted(batch)
        self.log("val_outer", outputs["loss"].detach())
        return {name: value.detach() for name, value in outputs.items()}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


@style(metrics=CLASSES)
def learning_to_learn(job: Job) -> None:
    job.fit(Adapts(), *loaders(), inference_mode=False)
