"""Data that come in other ways than as one DataLoader that is given to `fit`."""

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, random_split

from tests.styles.batches import CLASSES, Classifier
from tests.styles.frame import BATCHES, Job, points, style


class SemiSupervised(Classifier):
    """Labelled and unlabelled data side by side, and two sets to validate on."""

    def train_dataloader(self):
        loaders = {
            "labelled": DataLoader(points(20), batch_size=4, shuffle=True),
            "unlabelled": DataLoader(points(seed=3), batch_size=4, shuffle=True),
        }
        return CombinedLoader(loaders, "max_size_cycle")

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


class Endless(IterableDataset):
    """A stream without length, in chunks that are shuffled."""

    def __iter__(self):
        while True:
            data = points()
            for index in torch.randperm(len(data)).tolist():
                yield data[index]


DRAWS = (r"draw from the global random state in between the training steps",)


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


class Points(LightningDataModule):
    """Splits in `setup`, changes batches on the device, keeps what it found."""

    def setup(self, stage):
        self.parts = random_split(points(4 * BATCHES + 12), [4 * BATCHES, 12])
        self.mean = points().tensors[0].mean(0)

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=4)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.trainer.training:
            x = x + 0.1 * torch.randn_like(x)
        return x - self.mean, y


@style(metrics=CLASSES)
def datamodule_that_splits_and_augments(job: Job) -> None:
    job.fit(Classifier(), datamodule=Points(), reload_dataloaders_every_n_epochs=1)
