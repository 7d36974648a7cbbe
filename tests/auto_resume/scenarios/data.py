"""Where scripts take their data from."""

import random

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import Dataset, random_split

from tests.auto_resume.scenarios.frame import Job, Net, scenario


class Reloading(LightningDataModule):
    """Makes its training loader anew in each epoch, with another choice of samples."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def train_dataloader(self):
        data = self.job.samples(60)
        return self.job.loader([data[index] for index in torch.randperm(60)[:36].tolist()], shuffle=True)

    def val_dataloader(self):
        return self.job.held_out()


@scenario(workers=(0, 2))
def reloaded_each_epoch(job: Job) -> None:
    job.trainer(reload_dataloaders_every_n_epochs=1).fit(Net(), datamodule=Reloading(job))


@scenario()
def reloaded_every_other_epoch_by_the_epoch(job: Job) -> None:
    class Harder(Reloading):
        def train_dataloader(self):
            count = 16 + 4 * self.trainer.current_epoch
            data = self.job.samples(60, seed=self.trainer.current_epoch)
            return self.job.loader([data[index] for index in range(count)], shuffle=True)

        def val_dataloader(self):
            return self.job.loader(self.job.samples(12, seed=self.trainer.current_epoch))

    job.trainer(reload_dataloaders_every_n_epochs=2, max_epochs=4).fit(Net(), datamodule=Harder(job))


GLOBAL_NOISE = np.random.default_rng(5)


class Ordered(Dataset):
    """Gives its samples in an order that it is told."""

    order = None

    def __init__(self, data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index if self.order is None else int(self.order[index])]


@scenario(workers=(0, 2))
def augmented_from_a_global_generator_and_a_closure(job: Job) -> None:
    own = random.Random(6)

    class Noisy(Ordered):
        def __getitem__(self, index):
            x, y = self.data[index]
            return x + float(GLOBAL_NOISE.normal(0, 0.1)), y

    def collate(samples):
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return [x + own.gauss(0, 0.1), y]

    job.fit(Net(), train=job.loader(Noisy(job.samples()), shuffle=True, collate_fn=collate))


@scenario(workers=(2,))
def order_set_by_epoch_before_workers_know_it(job: Job) -> None:
    class Orders(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            data = trainer.train_dataloader.dataset
            data.order = np.random.default_rng(trainer.current_epoch).permutation(len(data))

    job.fit(Net(), Orders(), train=job.loader(Ordered(job.samples()), shuffle=True, persistent_workers=True))


@scenario(ranks=(1, 2), workers=(0, 2))
def order_set_by_epoch(job: Job) -> None:
    class Telling(Net):
        def on_train_epoch_start(self):
            data = self.trainer.train_dataloader.dataset
            data.order = np.random.default_rng(self.current_epoch).permutation(len(data))

    job.fit(Telling(), train=job.loader(Ordered(job.samples()), shuffle=True))


@scenario(warning=r"AutoResume: .*(samples|data).*", seeds=False)
def split_without_seed(job: Job) -> None:
    train, _ = random_split(job.samples(60), [36, 24])
    job.fit(Net(), train=job.loader(train, shuffle=True))


@scenario(seeds=False)
def split_without_seed_in_setup(job: Job) -> None:
    class Splits(LightningDataModule):
        def setup(self, stage):
            self.part, _ = random_split(job.samples(60), [36, 24])

        def train_dataloader(self):
            return job.loader(self.part, shuffle=True)

        def val_dataloader(self):
            return job.held_out()

    job.trainer().fit(Net(), datamodule=Splits())


class Shuffling:
    def __init__(self, data, chance) -> None:
        self.data, self.chance = data, chance

    def __len__(self) -> int:
        return len(self.data) // 4

    def __iter__(self):
        order = list(range(len(self.data)))
        self.chance.shuffle(order)
        for start in range(0, len(order), 4):
            samples = [self.data[index] for index in order[start : start + 4]]
            yield [torch.stack(part) for part in zip(*samples, strict=True)]


@scenario()
def shuffled_by_a_loader_of_its_own(job: Job) -> None:
    job.fit(Net(), train=Shuffling(job.samples(), random))


@scenario(warning="reads the training loader again up to its position, as a Shuffling is not")
def shuffled_without_seed_by_a_loader_of_its_own(job: Job) -> None:
    job.fit(Net(), train=Shuffling(job.samples(), random.Random()))
