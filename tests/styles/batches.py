"""Batches of every kind (a tokenizer's are in `language.py`), and steps that return every kind of output: one net."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

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


# Each makes a batch of (x, y)
BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict_of_dicts_with_texts": lambda x, y: {"x": {"x": x}, "y": y, "ids": [str(i) for i in y], "source": "here"},
    "object_that_moves_itself": Movable,
    "plain_object": Plain,
    "list_of_samples": lambda x, y: [{"x": row, "y": label} for row, label in zip(x, y, strict=True)],
    "packed": lambda x, y: (nn.utils.rnn.pack_padded_sequence(x[:, :, None], [6] * len(x), batch_first=True), y),
    "jagged": lambda x, y: (torch.nested.nested_tensor(list(x), layout=torch.jagged), y),
}


def unpack(batch: Any) -> tuple[Tensor, Tensor]:
    """Find x and y in a batch of any kind."""
    if isinstance(batch, dict):
        x = batch["x"]
        return (x["x"] if isinstance(x, dict) else x), batch["y"]
    if isinstance(batch, Movable | Plain):
        return batch.x, batch.y
    if isinstance(batch, list) and isinstance(batch[0], dict):
        return torch.stack([sample["x"] for sample in batch]), torch.stack([sample["y"] for sample in batch])
    x, y = batch
    if isinstance(x, nn.utils.rnn.PackedSequence):
        return nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0][..., 0], y
    return torch.stack(x.unbind()), y


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


for _kind, _make in BATCHES.items():
    _enter(_kind, _make)
