"""Programs as people write them: a text classifier, and a forecaster with named loaders.

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
    DeviceMonitor,
    FlopsReport,
    GradientClipping,
    LoRA,
    MetricsMonitor,
    ModelReport,
    SeedEverything,
    TrainableCheckpoint,
    isolated_rng,
    multiclass_metrics,
    regression_metrics,
)


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        module: Makes the module.
        train: The training data.
        val: The validation data: a loader, or a dict of them.
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
