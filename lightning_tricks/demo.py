"""A small classifier of real digits, for first tries: its data, its net, and a module that takes all tricks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from lightning_tricks._lightning_compat.flavor import LightningDataModule, LightningModule
from lightning_tricks.mixin import TricksMixin
from lightning_tricks.tricks import Tricks


class Digits(LightningDataModule):
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels in [0, 1], split 1,197 / 300 / 300.

    Args:
        batch_size: Images in a batch.
        num_workers: Processes that load them; 0 loads them in the process that trains.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Load and split the digits; the split does not depend on the seed."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        dataset = TensorDataset(images, torch.tensor(digits.target))
        self._splits = random_split(dataset, [1197, 300, 300], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training images, shuffled."""
        return self._loader(self._splits[0], shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation images."""
        return self._loader(self._splits[1])

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test images."""
        return self._loader(self._splits[2])

    predict_dataloader = test_dataloader

    def _loader(self, split: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(split, batch_size=self.batch_size, shuffle=shuffle, num_workers=self.num_workers)


class DigitsNet(nn.Sequential):
    """A small convolutional net, from images (n, 1, 8, 8) to scores (n, 10).

    Args:
        width: Channels of its convolution.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 4 * 4, 64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 10),
        )


class DigitsClassifier(TricksMixin, LightningModule):
    """A classifier of 8 x 8 digits.

    Args:
        tricks: What to switch on.
    """

    def __init__(self, tricks: Tricks | None = None) -> None:
        super().__init__(tricks=tricks)
        self.save_hyperparameters()
        self.net = DigitsNet()
        self.loss = nn.CrossEntropyLoss(reduction="none")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Compute and log the loss of a batch of images (n, 1, 8, 8) and labels (n,)."""
        outputs = self.validation_step(batch, batch_idx)
        outputs["loss"] = outputs["loss"].mean()
        self.log("train/loss", outputs["loss"])
        return outputs

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the cross-entropy of each image, the logits and the labels."""
        images, labels = batch
        scores = self.net(images)
        return {"loss": self.loss(scores, labels), "preds": scores, "target": labels}

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the digit (n,) of each image."""
        digits: Tensor = self.net(batch[0]).argmax(1)
        return digits
