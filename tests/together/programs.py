"""Five programs as people write them: a text and an image classifier, a GAN, a U-Net, a forecaster with named loaders.

Each logs what its tutorial logs, under the names of its tutorial, and takes the tricks that its page names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import (
    AutoResume,
    CudaMemory,
    DeviceMonitor,
    FlopsReport,
    GradientClipping,
    GradualUnfreezing,
    ImageLogger,
    LoRA,
    MetricsMonitor,
    ModelReport,
    RunFingerprint,
    RunReport,
    SeedEverything,
    TrainableCheckpoint,
    isolated_rng,
    multiclass_metrics,
    regression_metrics,
    segmentation_metrics,
)


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        module: Makes the module.
        train: The training data.
        val: The validation data: a loader, a dict of them, or None.
        tricks: Makes the tricks, which write to a folder.
    """

    module: Callable[[], LightningModule]
    train: Any
    val: Any
    tricks: Callable[[Path], Sequence[Callback]]


def _loader(*tensors: torch.Tensor, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=8, shuffle=shuffle)


class TextClassifier(LightningModule):
    """A transformers model on tokens, as in Lightning's tutorial on text."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        self.model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=3, **sizes))

    def _step(self, batch: Any, stage: str) -> Any:
        tokens, labels = batch
        found = self.model(tokens, labels=labels)
        self.log(f"{stage}_loss", found.loss, prog_bar=True)
        return {"loss": found.loss, "preds": found.logits.softmax(-1), "target": labels}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ImageClassifier(LightningModule):
    """A convolutional net with mixup."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x).flatten(1))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        mixed = functional.one_hot(labels, 4).float()
        share, order = torch.rand(()), torch.randperm(len(images))
        images, mixed = (share * part + (1 - share) * part[order] for part in (images, mixed))
        loss = functional.cross_entropy(self(images), mixed)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        scores = self(images)
        loss = functional.cross_entropy(scores, labels)
        self.log("valid_loss", loss)
        return {"loss": loss, "preds": scores.softmax(-1), "target": labels}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gan(LightningModule):
    """Two nets and two optimizers that are stepped by hand, as in Lightning's tutorial on GANs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        optimizers: Any = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4))
        g_loss = -self.discriminator(fake).mean()
        d_loss = (self.discriminator(fake.detach()) - self.discriminator(real)).mean()
        for optimizer, loss, name in zip(optimizers, (g_loss, d_loss), ("g_loss", "d_loss"), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=name == "g_loss")
            self.untoggle_optimizer(optimizer)
            self.log(name, loss, prog_bar=True)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.generator, self.discriminator)]


class UNet(LightningModule):
    """A U-Net of two levels on masks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x).relu()
        low = functional.interpolate(self.middle(functional.max_pool2d(high, 2)).relu(), scale_factor=2)
        return self.up(torch.cat([high, low], 1))  # type: ignore[no-any-return]

    def _step(self, batch: Any, stage: str) -> Any:
        images, masks = batch
        scores = self(images)
        loss = functional.cross_entropy(scores, masks)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "preds": scores, "target": masks}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch, "val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Forecaster(LightningModule):
    """A recurrent net, validated on two horizons."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
        self.example_input_array = torch.zeros(2, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1]).squeeze(-1)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.mse_loss(found := self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return {"loss": loss, "preds": found.detach(), "target": batch[1]}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = functional.mse_loss(found := self(batch[0]), batch[1])
        self.log("val_loss", loss)
        return {"loss": loss, "preds": found, "target": batch[1]}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def programs() -> dict[str, Program]:
    """The programs by name."""
    with isolated_rng(seed=0):
        tokens, classes = torch.randint(0, 100, (32, 12)), torch.randint(0, 3, (32,))
        images, labels, masks = torch.rand(32, 3, 16, 16), torch.randint(0, 4, (32,)), torch.randint(0, 4, (32, 16, 16))
        rows, values = torch.randn(32, 6, 1), torch.randn(32)
    return {
        "text": Program(
            TextClassifier,
            _loader(tokens, classes, shuffle=True),
            _loader(tokens, classes),
            lambda folder: [
                SeedEverything(1),
                AutoResume(folder / "run"),
                GradientClipping(1.0),
                LoRA(2, modules_to_save=["model.classifier"]),
                TrainableCheckpoint(),
                MetricsMonitor(multiclass_metrics(3), class_names=["bad", "fair", "good"], best={"val/f1": "max"}),
                FlopsReport(),
                ModelReport(folder / "model"),
                DeviceMonitor(),
            ],
        ),
        "image": Program(
            ImageClassifier,
            _loader(images, labels, shuffle=True),
            _loader(images, labels),
            lambda folder: [
                SeedEverything(1),
                GradientClipping(1.0, on_nonfinite="skip"),
                GradualUnfreezing({0: "head.*", 1: "backbone.*"}),
                MetricsMonitor(multiclass_metrics(4), stages=["val"]),
                ImageLogger(class_names=["cat", "dog", "owl", "yak"]),
                FlopsReport(backward=True),
                DeviceMonitor(every_n_train_steps=2),
                RunReport(folder / "report"),
            ],
        ),
        "gan": Program(
            Gan,
            _loader(torch.randn(32, 8), shuffle=True),
            None,
            lambda folder: [
                SeedEverything(1),
                GradientClipping(1.0),
                RunFingerprint(folder / "fingerprint.jsonl"),
                ModelReport(),
                DeviceMonitor(every_n_train_steps=2),
            ],
        ),
        "unet": Program(
            UNet,
            _loader(images, masks, shuffle=True),
            _loader(images, masks),
            lambda folder: [
                SeedEverything(1),
                AutoResume(folder / "run"),
                GradientClipping(1.0),
                MetricsMonitor(segmentation_metrics(4), class_names=["sky", "road", "tree", "car"]),
                FlopsReport(),
                CudaMemory(),
                DeviceMonitor(every_n_train_steps=2),
                RunReport(folder / "report"),
            ],
        ),
        "forecast": Program(
            Forecaster,
            _loader(rows, values, shuffle=True),
            {"day": _loader(rows, values), "week": _loader(rows, values)},
            lambda folder: [
                SeedEverything(1),
                AutoResume(folder / "run"),
                GradientClipping(1.0),
                MetricsMonitor(regression_metrics()),
                FlopsReport(),
                ModelReport(),
                DeviceMonitor(every_n_train_steps=2),
            ],
        ),
    }
