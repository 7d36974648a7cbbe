"""What decides about a run: schedulers, callbacks of Lightning and of users, and metrics that callbacks keep."""

from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import nn
from torchmetrics import F1Score, MeanMetric, Recall

from lightning_tricks import ExponentialMovingAverage, Microbatching
from tests.auto_resume.scenarios.frame import Job, Net, scenario

KIND = {"task": "multiclass", "num_classes": 3}


class Plateau(Net):
    """Lowers its learning rate where a loss does not fall."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@scenario(ranks=(1, 2))
def stop_plateau_and_checkpoint(job: Job) -> None:
    stops = EarlyStopping("val_loss", patience=2)
    keeps = ModelCheckpoint(job.folder / "best", monitor="val_loss", save_top_k=2, save_last=True)
    job.fit(Plateau(), stops, keeps, LearningRateMonitor(), max_epochs=5)


def _allow_function(job: Job) -> None:
    """Let a function be restored where torch's scheduler of averaged weights saves one, as that of torch 2.6 does."""
    if "anneal_func" in torch.optim.swa_utils.SWALR(torch.optim.SGD([torch.zeros(1)], 0.1), 0.1).state_dict():
        job.options["resume"] = {**job.options["resume"], "allow_pickle": True}


@scenario(ranks=(1, 2))
def swa_from_an_epoch(job: Job) -> None:
    _allow_function(job)
    job.fit(Net(), StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1), max_epochs=4)


@scenario()
def swa_annealed(job: Job) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]

    _allow_function(job)
    averages = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=0.4, annealing_epochs=2)
    job.fit(Scheduled(), averages, max_epochs=4)


@scenario(since=(2, 6), ranks=(1, 2))
def ema_by_steps_and_epochs(job: Job) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    keeps = ModelCheckpoint(job.folder / "best", monitor="val_loss")
    job.fit(Net(), EMAWeightAveraging(decay=0.9, update_every_n_steps=2, update_starting_at_epoch=1), keeps)


@scenario(ranks=(1, 2))
def ema_of_the_collection(job: Job) -> None:
    keeps = ModelCheckpoint(job.folder / "best", monitor="val_loss")
    job.fit(Net(), ExponentialMovingAverage(0.9, every_n_steps=2), keeps)


class Rated(Net):
    """Whose learning rate is an attribute, as the finders want it."""

    lr = 0.01

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


@scenario()
def learning_rate_finder(job: Job) -> None:
    job.fit(Rated(), LearningRateFinder(num_training_steps=6, early_stop_threshold=None))


@scenario()
def batch_size_finder(job: Job) -> None:
    class Sized(Net):
        batch_size = 2

        def train_dataloader(self):
            return job.loader(job.samples(), shuffle=True, batch_size=self.batch_size)

        def val_dataloader(self):
            return job.held_out()

    finder = BatchSizeFinder("binsearch", steps_per_trial=1, init_val=4, max_trials=1)
    job.trainer(finder).fit(Sized())


@scenario(ranks=(1, 2))
def accumulation_by_epoch(job: Job) -> None:
    job.fit(Net(), GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}))


def _count(batch: Any) -> torch.Tensor:
    return (batch[0][:, 0] < 0.5).sum()


@scenario(ranks=(1, 2))
def mean_over_targets(job: Job) -> None:
    class Masked(Net):
        def loss(self, batch):
            return nn.functional.cross_entropy(self(batch[0]), batch[1].where(batch[0][:, 0] < 0.5, -100))

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", super().loss(batch), sync_dist=True)

    job.fit(Masked(), Microbatching(2, on_mismatch="warn", count=_count), accumulate_grad_batches=2)


@scenario()
def backbone_finetuning(job: Job) -> None:
    class Tuned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.body = self.body, nn.Identity()

        def forward(self, x):
            return self.head(self.backbone(x))

        def configure_optimizers(self):
            return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)

    job.fit(Tuned(), BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01))


def _prune(job: Job, permanent: bool) -> None:
    net = Net()
    pruned = [(net.body[0], "weight"), (net.head, "weight")]
    prunes = ModelPruning("l1_unstructured", parameters_to_prune=pruned, amount=0.2, make_pruning_permanent=permanent)
    job.fit(net, prunes)


@scenario()
def pruning(job: Job) -> None:
    _prune(job, permanent=True)


@scenario()
def pruning_that_keeps_its_masks(job: Job) -> None:
    _prune(job, permanent=False)


class Measures(Callback):
    """Has metrics that it computes itself."""

    def __init__(self) -> None:
        self.metrics = {"mean": MeanMetric(), "recall": Recall(**KIND), "f1": F1Score(**KIND)}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, metric in self.metrics.items():
            metric.update(*([outputs["loss"].detach()] if name == "mean" else (batch[0][:, :3], batch[1])))

    def on_train_epoch_end(self, trainer, pl_module):
        for name, metric in self.metrics.items():
            pl_module.log(f"callback/{name}", metric.compute())
            metric.reset()


@scenario(ranks=(1, 2))
def metric_of_a_callback(job: Job) -> None:
    job.fit(Net(), Measures())


class Logs(Callback):
    """Lets Lightning compute its metrics, one of which it logs once and never again."""

    def __init__(self) -> None:
        self.recall = Recall(**KIND)
        self.several = {"f1": F1Score(**KIND), "first": MeanMetric()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.recall(batch[0][:, :3], batch[1])
        pl_module.log("callback/recall", self.recall, on_step=True, on_epoch=True, metric_attribute="recall")
        self.several["f1"](batch[0][:, :3], batch[1])
        pl_module.log("callback/f1", self.several["f1"], on_step=False, on_epoch=True, metric_attribute="f1")
        if trainer.current_epoch == 0 and batch_idx == 0:
            first = self.several["first"]
            first(outputs["loss"].detach())
            pl_module.log("callback/first", first, on_step=False, on_epoch=True, metric_attribute="first")


@scenario()
def metric_logged_by_a_callback(job: Job) -> None:
    job.fit(Net(), Logs())
