"""What decides about a run: schedulers, callbacks of Lightning and of users, optimization by hand."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner

from tests.auto_resume.scenarios.frame import Job, Net, scenario


class Plateau(Net):
    """Lowers its learning rate where a loss does not fall."""

    monitor = "val_loss"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


@scenario(ranks=(1, 2))
def stop_plateau_and_checkpoint(job: Job) -> None:
    job.seed()
    stops = EarlyStopping("val_loss", patience=2)
    keeps = ModelCheckpoint(job.folder / "best", monitor="val_loss", save_top_k=2, save_last=True)
    job.fit(Plateau(), stops, keeps, LearningRateMonitor(), max_epochs=5)


@scenario()
def test_of_the_best_in_default_folder(job: Job) -> None:
    job.seed()
    trainer = job.fit(Net(), ModelCheckpoint(monitor="val_loss", mode="max", save_last=True))
    trainer.test(dataloaders=job.held_out(), ckpt_path="best", verbose=False)
    trainer.test(dataloaders=job.held_out(), ckpt_path="last", verbose=False)


def _allow_function(job: Job) -> None:
    """Let a function be restored where torch's scheduler of averaged weights saves one, as that of torch 2.6 does."""
    if "anneal_func" in torch.optim.swa_utils.SWALR(torch.optim.SGD([torch.zeros(1)], 0.1), 0.1).state_dict():
        job.options["resume"] = {**job.options["resume"], "allow_pickle": True}


@scenario(ranks=(1, 2))
def swa_from_an_epoch(job: Job) -> None:
    _allow_function(job)
    job.seed()
    job.fit(Net(), StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1), max_epochs=4)


@scenario()
def swa_annealed(job: Job) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]

    _allow_function(job)
    job.seed()
    averages = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=0.4, annealing_epochs=2)
    job.fit(Scheduled(), averages, max_epochs=4)


def _averaging(**wanted: Any) -> Callback:
    from lightning.pytorch.callbacks import WeightAveraging

    class Averaging(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            if "epochs" in wanted:
                return epoch_idx is not None and epoch_idx >= wanted["epochs"]
            return step_idx is not None and step_idx % wanted["steps"] == 0

    return Averaging()


@scenario(since=(2, 6), ranks=(1, 2))
def averaging_by_epochs(job: Job) -> None:
    job.seed()
    job.fit(Net(), _averaging(epochs=0))


@scenario(since=(2, 6))
def averaging_by_steps(job: Job) -> None:
    job.seed()
    job.fit(Net(), _averaging(steps=3), val_check_interval=4)


@scenario(since=(2, 6))
def ema_by_steps_and_epochs(job: Job) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    job.seed()
    keeps = ModelCheckpoint(job.folder / "best", monitor="val_loss")
    job.fit(Net(), EMAWeightAveraging(decay=0.9, update_every_n_steps=2, update_starting_at_epoch=1), keeps)


@scenario(ranks=(1, 2))
def accumulation_by_hand(job: Job) -> None:
    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            body, head = self.optimizers()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.log("loss", loss, on_step=True, on_epoch=True)
            head.step()
            head.zero_grad()
            if (batch_idx + 1) % 5 == 0:  # its gradients are kept over the head's steps
                body.step()
                body.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.body, self.head)]

    job.seed()
    job.fit(ByHand())


@scenario()
def logged_from_a_callback(job: Job) -> None:
    class Norms(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            norm = torch.stack([one.norm() for one in pl_module.parameters()]).norm()
            self.log("norm", norm, on_step=True, on_epoch=True)
            pl_module.log("norm/max", norm, on_step=False, on_epoch=True, reduce_fx="max")

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            pl_module.log_dict({"grad/head": pl_module.head.weight.grad.norm()}, on_step=False, on_epoch=True)

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.log("epochs", float(trainer.current_epoch))

        def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.log("validated", float(trainer.global_step))

    job.seed()
    job.fit(Plateau(), Norms())


@scenario()
def learning_rate_finder(job: Job) -> None:
    job.seed()
    net = _Rated()
    job.fit(net, LearningRateFinder(num_training_steps=6, early_stop_threshold=None))


@scenario()
def tuned_rate(job: Job) -> None:
    job.seed()
    net, trainer, train = _Rated(), job.trainer(), job.loader(job.samples(), shuffle=True)
    Tuner(trainer).lr_find(net, train, job.held_out(), num_training=6, early_stop_threshold=None)
    trainer.fit(net, train, job.held_out())


@scenario()
def batch_size_finder(job: Job) -> None:
    class Sized(Net):
        batch_size = 2

        def train_dataloader(self):
            return job.loader(job.samples(), shuffle=True, batch_size=self.batch_size)

        def val_dataloader(self):
            return job.held_out()

    job.seed()
    finder = BatchSizeFinder("binsearch", steps_per_trial=1, init_val=4, max_trials=1)
    job.trainer(finder).fit(Sized())


class _Rated(Net):
    """Whose learning rate is an attribute, as the finders want it."""

    lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


@scenario()
def decay_by_own_callback(job: Job) -> None:
    class Decays(Callback):
        def __init__(self) -> None:
            self.best, self.waited, self.history = float("inf"), 0, []

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
            loss = float(outputs["loss"])
            self.history.append(loss)
            self.waited = 0 if loss < self.best else self.waited + 1
            self.best = min(self.best, loss)
            if self.waited >= 3:
                self.waited = 0
                for group in trainer.optimizers[0].param_groups:
                    group["lr"] *= 0.9

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.log("history", sum(self.history) / len(self.history))

    job.seed()
    job.fit(Net(), Decays())


@scenario(ranks=(1, 2))
def scheduler_of_steps_and_accumulation(job: Job) -> None:
    class Cycled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            steps = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    job.seed()
    job.fit(Cycled(), accumulate_grad_batches=2, gradient_clip_val=0.5)
