"""Where scripts take their data from."""

from __future__ import annotations

import random
from itertools import cycle
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
    random_split,
)

from tests.auto_resume.scenarios.frame import BATCHES, Job, Net, scenario

OTHER_DATA = r"AutoResume: .*(samples|data).*"


@scenario(warning="dataset.x", workers=(0, 2))
def data_mapped_from_a_file_that_it_writes_to(job: Job) -> None:
    class Mapped(Dataset):
        def __init__(self) -> None:
            self.y = job.samples().tensors[1]
            if not (job.folder / "x.npy").exists():
                np.save(job.folder / "x.npy", job.samples().tensors[0].numpy())
            self.x = np.load(job.folder / "x.npy", mmap_mode="r+")

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, index: int) -> Any:
            self.x[index] *= 0.9
            return self.x[index].copy(), self.y[index]

    job.seed()
    job.fit(Net(), train=job.loader(Mapped(), shuffle=True))


class OwnOrder(Sampler):
    """Draws from a generator of its own."""

    def __init__(self, count: int) -> None:
        self.count, self.generator = count, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count, generator=self.generator).tolist())


@scenario(workers=(0, 2))
def sampler_with_generator(job: Job) -> None:
    job.seed()
    job.fit(Net(), train=job.loader(job.samples(), sampler=OwnOrder(36)))


@scenario(workers=(0, 2))
def sampler_with_state(job: Job) -> None:
    class Stateful(OwnOrder):
        given = 0

        def __iter__(self):
            for index in super().__iter__():
                self.given += 1
                yield (index + self.given) % self.count

        def state_dict(self):
            return {"given": self.given, "generator": self.generator.get_state()}

        def load_state_dict(self, state):
            self.given = state["given"]
            self.generator.set_state(state["generator"])

    job.seed()
    job.fit(Net(), train=job.loader(job.samples(), sampler=Stateful(36)))


@scenario(workers=(0, 2))
def batch_sampler_with_random(job: Job) -> None:
    class Buckets(BatchSampler):
        def __init__(self) -> None:
            self.chance = random.Random(5)

        def __len__(self) -> int:
            return BATCHES

        def __iter__(self):
            starts = list(range(0, 36, 4))
            self.chance.shuffle(starts)
            return ([start + offset for offset in range(4)] for start in starts)

    job.seed()
    job.fit(Net(), train=job.loader(job.samples(), batch_sampler=Buckets()))


@scenario()
def subset_sampler_and_dict(job: Job) -> None:
    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            pairs = zip(batch["first"], batch["second"], strict=True)
            return super().training_step([torch.cat(pair) for pair in pairs], batch_idx)

    job.seed()
    first = job.loader(job.samples(), sampler=SubsetRandomSampler(range(36)))
    second = job.loader(job.samples(20, seed=4), sampler=OwnOrder(20))
    job.fit(Two(), train={"first": first, "second": second})


class Counts(Dataset):
    """Knows what it gave."""

    def __init__(self, data: Any) -> None:
        self.data, self.given = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.given += 1
        x, y = self.data[index]
        return x * (1 + 0.01 * self.given), y


@scenario(workers=(0, 2))
def dataset_that_counts(job: Job) -> None:
    job.seed()
    job.fit(Net(), train=job.loader(Counts(job.samples()), shuffle=True, persistent_workers=True))


class Augmented(Counts):
    """Draws from a generator of its own."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.chance = np.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.data[index]
        return x + float(self.chance.normal(0, 0.1)), y


@scenario(workers=(0, 2))
def dataset_with_generator(job: Job) -> None:
    job.seed()
    job.fit(Net(), train=job.loader(Augmented(job.samples()), shuffle=True))


@scenario(workers=(2,))
def dataset_with_generator_in_workers_that_stay(job: Job) -> None:
    job.seed()
    job.fit(Net(), train=job.loader(Augmented(job.samples()), shuffle=True, persistent_workers=True))


class ShuffleBuffer(IterableDataset):
    """A stream, shuffled in a buffer with the random numbers of the process, or with its own."""

    def __init__(self, data: Any, chance: Any = random) -> None:
        self.data, self.chance = data, chance

    def __iter__(self):
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        buffer: list[Any] = []
        for index in range(part, len(self.data), parts):
            buffer.append(self.data[index])
            if len(buffer) > 8:
                yield buffer.pop(self.chance.randrange(len(buffer)))
        self.chance.shuffle(buffer)
        yield from buffer


@scenario(workers=(0, 2))
def shuffle_buffer(job: Job) -> None:
    job.seed()
    job.fit(Net(), train=job.loader(ShuffleBuffer(job.samples()), persistent_workers=True))


@scenario(workers=(0, 2))
def shuffle_buffer_with_generator(job: Job) -> None:
    job.seed()
    stream = ShuffleBuffer(job.samples(), random.Random(5))
    job.fit(Net(), train=job.loader(stream, persistent_workers=True))


class FromTorch:
    """Draws from the generator from which dropout draws as well."""

    def randrange(self, count: int) -> int:
        return int(torch.randint(count, ()))

    def shuffle(self, entries: list[Any]) -> None:
        entries[:] = [entries[index] for index in torch.randperm(len(entries)).tolist()]


@scenario(warning="draw from the global random state in between the training steps")
def shuffle_buffer_that_draws_as_the_step_does(job: Job) -> None:
    job.seed()
    job.fit(Net(), train=job.loader(ShuffleBuffer(job.samples(), FromTorch())))


@scenario(workers=(0, 2))
def endless_stream_that_keeps_its_place(job: Job) -> None:
    class Endless(IterableDataset):
        def __init__(self, data: Any) -> None:
            self.data, self.position = data, 0

        def __iter__(self):
            while True:
                self.position += 1
                yield self.data[self.position * 7 % (len(self.data) - 1)]  # no epoch is like the one before

    job.seed()
    train = job.loader(Endless(job.samples()), persistent_workers=True)
    job.fit(Net(), train=train, limit_train_batches=BATCHES)


class Reloading(LightningDataModule):
    """Makes its training loader anew in each epoch, with another choice of samples."""

    def __init__(self, job: Job, generator: torch.Generator | None) -> None:
        super().__init__()
        self.job, self.generator = job, generator

    def train_dataloader(self):
        chosen = torch.randperm(60, generator=self.generator)[:36].tolist()
        data = self.job.samples(60)
        return self.job.loader([data[index] for index in chosen], shuffle=True)

    def val_dataloader(self):
        return self.job.held_out()


@scenario(workers=(0, 2))
def reloaded_each_epoch(job: Job) -> None:
    job.seed()
    trainer = job.trainer(reload_dataloaders_every_n_epochs=1)
    trainer.fit(Net(), datamodule=Reloading(job, None))


@scenario()
def reloaded_with_generator(job: Job) -> None:
    job.seed()
    trainer = job.trainer(reload_dataloaders_every_n_epochs=1)
    trainer.fit(Net(), datamodule=Reloading(job, torch.Generator().manual_seed(4)))


@scenario()
def reloaded_every_other_epoch_by_the_epoch(job: Job) -> None:
    class Harder(Reloading):
        def train_dataloader(self):
            count = 16 + 4 * self.trainer.current_epoch
            data = self.job.samples(60, seed=self.trainer.current_epoch)
            return self.job.loader([data[index] for index in range(count)], shuffle=True)

        def val_dataloader(self):
            return self.job.loader(self.job.samples(12, seed=self.trainer.current_epoch))

    job.seed()
    job.trainer(reload_dataloaders_every_n_epochs=2, max_epochs=4).fit(Net(), datamodule=Harder(job, None))


GLOBAL_NOISE = np.random.default_rng(5)


@scenario(workers=(0, 2))
def augmented_from_a_global_generator_and_a_closure(job: Job) -> None:
    own = random.Random(6)

    class Noisy(Counts):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = self.data[index]
            return x + float(GLOBAL_NOISE.normal(0, 0.1)), y

    def collate(samples: list[Any]) -> list[torch.Tensor]:
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return [x + own.gauss(0, 0.1), y]

    job.seed()
    job.fit(Net(), train=job.loader(Noisy(job.samples()), shuffle=True, collate_fn=collate))


@scenario(workers=(2,))
def order_set_by_epoch_before_workers_know_it(job: Job) -> None:
    class Ordered(Counts):
        order: Any = None

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.data[index if self.order is None else int(self.order[index])]

    class Orders(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            data = trainer.train_dataloader.dataset
            data.order = np.random.default_rng(trainer.current_epoch).permutation(len(data))

    job.seed()
    job.fit(Net(), Orders(), train=job.loader(Ordered(job.samples()), shuffle=True, persistent_workers=True))


@scenario(warning=r"AutoResume: .*\bother\b")
def second_iterator_of_the_module(job: Job) -> None:
    class Mixed(Net):
        def on_fit_start(self) -> None:
            self.other = cycle(job.loader(job.samples(20, seed=4), shuffle=True))

        def loss(self, batch: Any) -> torch.Tensor:
            loss = super().loss(batch)
            return loss + super().loss(next(self.other)) if self.trainer.training else loss

    job.seed()
    job.fit(Mixed())


@scenario(warning=OTHER_DATA)
def split_without_seed(job: Job) -> None:
    train, _ = random_split(job.samples(60), [36, 24])
    job.fit(Net(), train=job.loader(train, shuffle=True))


@scenario()
def split_without_seed_in_setup(job: Job) -> None:
    class Splits(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.part, _ = random_split(job.samples(60), [36, 24])

        def train_dataloader(self):
            return job.loader(self.part, shuffle=True)

        def val_dataloader(self):
            return job.held_out()

    job.trainer().fit(Net(), datamodule=Splits())


@scenario()
def split_with_generator(job: Job) -> None:
    job.seed()
    train, _ = random_split(job.samples(60), [36, 24], generator=torch.Generator().manual_seed(1))
    job.fit(Net(), train=job.loader(train, shuffle=True))


class Shuffling:
    """A loader that is no DataLoader."""

    def __init__(self, data: Any, chance: Any) -> None:
        self.data, self.chance = data, chance

    def __len__(self) -> int:
        return len(self.data) // 4

    def __iter__(self) -> Any:
        order = list(range(len(self.data)))
        self.chance.shuffle(order)
        for start in range(0, len(order), 4):
            yield [
                torch.stack(part) for part in zip(*map(self.data.__getitem__, order[start : start + 4]), strict=True)
            ]


@scenario()
def shuffled_by_a_loader_of_its_own(job: Job) -> None:
    job.seed()
    job.fit(Net(), train=Shuffling(job.samples(), random))


@scenario(warning="reads the training loader again up to its position, as a Shuffling is not")
def shuffled_without_seed_by_a_loader_of_its_own(job: Job) -> None:
    job.seed()
    job.fit(Net(), train=Shuffling(job.samples(), random.Random()))
