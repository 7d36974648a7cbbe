"""Samplers, data sets and streams that draw, count or keep their place."""

import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, SubsetRandomSampler, get_worker_info

from lightning_tricks import EndTogether
from tests.auto_resume.scenarios.frame import BATCHES, Job, Net, scenario


class OwnOrder(Sampler):
    def __init__(self, count: int) -> None:
        self.count, self.generator = count, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count, generator=self.generator).tolist())


@scenario(workers=(0, 2))
def sampler_with_generator(job: Job) -> None:
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

    job.fit(Net(), train=job.loader(job.samples(), batch_sampler=Buckets()))


@scenario()
def subset_sampler_and_dict(job: Job) -> None:
    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            pairs = zip(batch["first"], batch["second"], strict=True)
            return super().training_step([torch.cat(pair) for pair in pairs], batch_idx)

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
    job.fit(Net(), train=job.loader(Counts(job.samples()), shuffle=True, persistent_workers=True))


class Augmented(Counts):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.chance = np.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.data[index]
        return x + float(self.chance.normal(0, 0.1)), y


@scenario(workers=(0, 2))
def dataset_with_generator(job: Job) -> None:
    job.fit(Net(), train=job.loader(Augmented(job.samples()), shuffle=True))


@scenario(workers=(2,))
def dataset_with_generator_in_workers_that_stay(job: Job) -> None:
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
    job.fit(Net(), train=job.loader(ShuffleBuffer(job.samples()), persistent_workers=True))


@scenario(workers=(0, 2))
def shuffle_buffer_with_generator(job: Job) -> None:
    stream = ShuffleBuffer(job.samples(), random.Random(5))
    job.fit(Net(), train=job.loader(stream, persistent_workers=True))


class FromTorch:
    """Draws from the generator from which dropout draws as well."""

    def randrange(self, count: int) -> int:
        return int(torch.randint(count, ()))

    def shuffle(self, entries: list[Any]) -> None:
        entries[:] = [entries[index] for index in torch.randperm(len(entries)).tolist()]


@scenario(warning="draw from the global random state between training steps")
def shuffle_buffer_that_draws_as_the_step_does(job: Job) -> None:
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

    train = job.loader(Endless(job.samples()), persistent_workers=True)
    job.fit(Net(), train=train, limit_train_batches=BATCHES)


@scenario(ranks=(2,), workers=(0, 2))
def ranks_that_end_together(job: Job) -> None:
    class Longer(ShuffleBuffer):
        def __iter__(self):
            more = 12 * distributed.is_initialized() and 12 * (distributed.get_rank() == 0)
            yield from itertools.islice(itertools.cycle(super().__iter__()), 36 + more)

    train = job.loader(Longer(job.samples(), random.Random(5)))
    job.fit(Net(), EndTogether(["train", "val"]), train=train, accumulate_grad_batches=2)
