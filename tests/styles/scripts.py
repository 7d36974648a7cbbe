"""Scripts as people write them: odd batches, hooks and steps of their own, endless data, Hydra's configs."""

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import hydra
import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities import CombinedLoader
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from transformers.modeling_outputs import SequenceClassifierOutput

from tests.styles.frame import Job, points, style

CLASSES = {"task": "multiclass", "num_classes": 3}


class Movable:
    """What moves itself to a device, as graphs and images with boxes do."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, **options: Any) -> "Movable":
        return type(self)(self.x.to(device, **options), self.y.to(device, **options))


class Plain:
    """What Lightning knows nothing about."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Item:
    x: Tensor
    y: Tensor


# Each makes a batch of (x, y)
KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict_of_dicts_with_texts": lambda x, y: {"x": {"x": x}, "y": y, "ids": [str(i) for i in y], "source": "here"},
    "nested_tuple": lambda x, y: ((x, (x.flip(0), None)), y),
    "named_tuple": Named,
    "dataclass": Item,
    "model_output": lambda x, y: SequenceClassifierOutput(logits=x, loss=y),
    "list_of_samples": lambda x, y: [{"x": row, "y": label} for row, label in zip(x, y, strict=True)],
    "one_tensor": lambda x, y: torch.cat([x, y[:, None].float()], dim=1),
    "sparse": lambda x, y: (x.to_sparse(), y),
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "object_that_moves_itself": Movable,
    "plain_object": Plain,
    "packed": lambda x, y: (nn.utils.rnn.pack_padded_sequence(x[:, :, None], [6] * len(x), batch_first=True), y),
    "jagged": lambda x, y: (torch.nested.nested_tensor(list(x), layout=torch.jagged), y),
}


def unpack(batch: Any) -> tuple[Tensor, Tensor]:
    """Find x and y in a batch of any kind."""
    if isinstance(batch, Tensor):
        return batch[:, :6], batch[:, 6].long()
    if isinstance(batch, SequenceClassifierOutput):
        return batch.logits, batch.loss
    if isinstance(batch, dict):
        x = batch["x"]
        return (x["x"] if isinstance(x, dict) else x), batch["y"]
    if isinstance(batch, Item | Movable | Plain):
        return batch.x, batch.y
    if isinstance(batch[0], dict):
        return torch.stack([sample["x"] for sample in batch]), torch.stack([sample["y"] for sample in batch])
    x, y = batch
    if isinstance(x, nn.utils.rnn.PackedSequence):
        return nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0][..., 0], y
    x = x[0] if isinstance(x, tuple | list) else torch.as_tensor(x)
    return (torch.stack(x.unbind()) if x.is_nested else x.to_dense()), torch.as_tensor(y)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = unpack(batch)
        scores = self(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return {"loss": loss, "preds": scores, "target": y}

    def validation_step(self, batch, batch_idx):
        x, y = unpack(batch)
        scores = self(x)
        self.log("val_loss", nn.functional.cross_entropy(scores, y), batch_size=len(y))
        return {"preds": scores, "target": y}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _enter(kind: str, make: Callable[[Tensor, Tensor], Any]) -> None:
    def script(job: Job) -> None:
        def collate(samples: Any) -> Any:
            return make(*default_collate(samples))

        loaders = [DataLoader(points(seed=s), 4, shuffle=s == 1, collate_fn=collate) for s in (1, 2)]
        job.fit(Classifier(), *loaders)

    script.__name__ = f"batches_{kind}"
    style(metrics=CLASSES)(script)


for _kind, _make in KINDS.items():
    _enter(_kind, _make)


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


class Gan(LightningModule):
    """Two optimizers that are toggled, and a slope in the loss of one."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def slope(self, real, fake):
        mixed = (real + torch.rand(len(real), 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(mixed).sum(), mixed, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def training_step(self, batch):
        z, softplus = torch.randn(len(batch[0]), 4), nn.functional.softplus
        fake = self.generator(z)
        losses = {
            "generated": lambda: softplus(-self.discriminator(self.generator(z))).mean(),
            "judged": lambda: (
                softplus(-self.discriminator(batch[0])).mean()
                + softplus(self.discriminator(fake.detach())).mean()
                + self.slope(batch[0], fake.detach())
            ),
        }
        for (name, loss), optimizer in zip(losses.items(), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.log(name, value := loss())
            self.manual_backward(value)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.discriminator)]


@style()
def gan_with_toggled_optimizers(job: Job) -> None:
    job.fit(Gan(), loaders()[0])


class Endless(IterableDataset):
    """A stream without length, in chunks that are shuffled."""

    def __iter__(self):
        while True:
            data = points()
            for index in torch.randperm(len(data)).tolist():
                yield data[index]


DRAWS = (r"draw from the global random state between training steps",)


@style(metrics=CLASSES, says=DRAWS, resumed=DRAWS)
def stream_without_length(job: Job) -> None:
    job.fit(
        Classifier(),
        DataLoader(Endless(), batch_size=4),
        DataLoader(points(12, 2), batch_size=4),
        max_epochs=-1,
        max_steps=18,
        val_check_interval=7,
        check_val_every_n_epoch=None,
    )


class SemiSupervised(Classifier):
    """Labelled and unlabelled data side by side, and two sets to validate on."""

    def train_dataloader(self):
        labelled, unlabelled = (DataLoader(points(seed=seed), batch_size=4, shuffle=True) for seed in (1, 3))
        return CombinedLoader({"labelled": labelled, "unlabelled": unlabelled}, "max_size_cycle")

    def val_dataloader(self):
        return [DataLoader(points(12, seed), batch_size=4) for seed in (4, 5)]

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch["labelled"], batch_idx)
        unsure = self(batch["unlabelled"][0]).softmax(1)
        return outputs | {"loss": outputs["loss"] + 0.1 * -(unsure * unsure.log()).sum(1).mean()}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return super().validation_step(batch, batch_idx)


@style(metrics=CLASSES)
def several_loaders_at_once(job: Job) -> None:
    job.fit(SemiSupervised())


class FetchesItself(Classifier):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@style(
    metrics=CLASSES,
    left_out={"AutoResume": r"AutoResume cannot follow training_step\(dataloader_iter\)"},
    says=(r"FlopsReport", r"training_step takes `dataloader_iter`"),
)
def step_that_fetches_its_batches(job: Job) -> None:
    job.fit(FetchesItself(), DataLoader(points(), batch_size=4, shuffle=True))


class Data(LightningDataModule):
    """Points in batches.

    Args:
        batch_size: How many points are in a batch.
    """

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(points(), batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(points(12, 2), batch_size=self.hparams["batch_size"])


@style(metrics=CLASSES)
def hydra_targets(job: Job) -> None:
    """Hydra instantiates all of it; configs, not lists and dicts, are what the callbacks are given."""
    new = {name: {"_target_": f"lightning_tricks.{name}", **given} for name, given in job.added.items()}
    config = OmegaConf.create(
        {
            "seed": 1,
            "data": {"_target_": f"{__name__}.Data", "batch_size": 4},
            "model": {"_target_": "tests.styles.scripts.Classifier"},
            "callbacks": new,
            "logger": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(job.folder), "name": "logs"},
            "trainer": {"_target_": "lightning.Trainer", **job.settings()},
        }
    )
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    trainer = hydra.utils.instantiate(
        config.trainer, callbacks=[*callbacks, *job.probes()], logger=hydra.utils.instantiate(config.logger)
    )
    trainer.fit(hydra.utils.instantiate(config.model), datamodule=hydra.utils.instantiate(config.data))
