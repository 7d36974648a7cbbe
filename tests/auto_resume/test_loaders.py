"""A loader resumes at its position: compared with an uninterrupted iteration, in any training loop."""

import functools
import gc
import multiprocessing
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_tricks import AutoResume
from lightning_tricks.auto_resume.core.data.rng_state import GlobalDraws, as_rng_state, raw_rng_state
from lightning_tricks.auto_resume.core.data.tracked_loader import TrackedDataLoader, position_of, why_not_trackable
from lightning_tricks.auto_resume.core.data.workers import WorkerInit
from lightning_tricks.auto_resume.core.signals import StopRequest
from lightning_tricks.auto_resume.loader_tracker import LoaderTracker
from lightning_tricks.seeding import capture_rng_state, isolated_rng, restore_rng_state
from tests.contract.checks import Interrupts
from tests.small import QUIET, Net, cases, same

pytestmark = pytest.mark.oldest


class Noisy(Dataset):
    """Numbers with noise from each global generator; counts the samples that were read in this process."""

    read = 0  # in all
    offset = 0

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        Noisy.read += 1
        return torch.tensor(
            [index + self.offset, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64
        )


class Buffered(IterableDataset):
    """Numbers through a shuffle buffer, which draws from each global generator while it is read."""

    offset = 0

    def __init__(self, size, eager=False):
        self.size, self.eager = size, eager

    def __iter__(self):
        shift = torch.rand(()).item() if self.eager else 0.0
        return self.shuffled(shift)

    def shuffled(self, shift):
        info = get_worker_info()
        left = list(range(info.id, self.size, info.num_workers) if info else range(self.size))
        buffer, left = left[:6], left[6:]
        while buffer:
            chosen = buffer.pop(random.randrange(len(buffer)))
            buffer += left[:1]
            del left[:1]
            yield torch.tensor(
                [chosen + self.offset, shift, np.random.normal(), torch.rand(()).item()], dtype=torch.float64
            )


class Own(Dataset):
    """Draws from generators that it keeps for itself, and counts."""

    def __init__(self, size):
        self.size, self.count, self.seen = size, 0, []
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(2)
        self.legacy, self.python = np.random.RandomState(3), random.Random(4)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.count += 1
        self.seen = [*self.seen[-3:], index]
        drawn = [self.numpy.normal(), self.legacy.normal(), self.python.gauss(0, 1)]
        numbers = [index, self.count, sum(self.seen), torch.rand((), generator=self.torch).item(), *drawn]
        return torch.tensor(numbers, dtype=torch.float64)


class OwnStream(IterableDataset):
    """Gives another order in each epoch, and draws from what it keeps."""

    def __init__(self, size):
        self.data, self.epoch, self.position, self.order = Own(size), 0, 0, np.random.default_rng(5)

    def __iter__(self):
        self.epoch += 1
        info = get_worker_info()
        for index in self.order.permutation(self.data.size)[info.id if info else 0 :: info.num_workers if info else 1]:
            self.position += 1
            yield torch.cat([self.data[int(index)], torch.tensor([self.epoch, self.position])])
        self.order.random(3)


class OwnSampler(Sampler):
    """Has a generator of its own, counts its epochs, and has a state with its position."""

    def __init__(self, size):
        self.size, self.numpy, self.epoch, self.given, self.begin = size, np.random.default_rng(6), 0, 0, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        self.epoch += 1
        order = self.numpy.permutation(self.size) if self.epoch > 1 else range(self.size)
        self.given, self.begin = self.begin, 0
        for index in list(order)[self.given :]:
            self.given += 1
            yield int(index + self.numpy.integers(2)) % self.size

    def state_dict(self):
        return {"begin": self.given}

    def load_state_dict(self, state):
        self.begin = state["begin"]


class OwnCollate:
    def __init__(self):
        self.numpy = np.random.default_rng(6)

    def __call__(self, samples):
        return torch.stack(samples) * self.numpy.random()


class Plain(Buffered):
    def __iter__(self):
        return iter(torch.arange(self.size) + self.offset)


class Drawing(Sampler):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        for _ in range(self.size):
            yield random.randrange(self.size)


class Eager(Drawing):
    """Draws its order when it is asked for an iterator, not for its first index."""

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())


class AtFirst(Drawing):
    """Draws its order for its first index."""

    def __iter__(self):
        yield from torch.randperm(self.size).tolist()


def step():
    """Draws as a training step might."""
    return torch.rand(1), random.random(), np.random.normal()


def record(data, epochs=2, prefetches=False, **options):
    """Track a loader over epochs; return the batches, and position and random state after each of them."""
    loader = DataLoader(data, **options)
    tracked, batches, positions = TrackedDataLoader(loader, prefetches=prefetches), [], []
    for _ in range(epochs):
        for batch, iterator, ahead in epoch_of(loader, prefetches):
            batches.append(batch)
            step()
            positions.append((position_of(iterator, ahead), tracked.generator_states(), capture_rng_state()))
            step()
    tracked.close()
    return batches, positions


def epoch_of(loader, prefetches, draws=True):
    """Yield each batch with its iterator and the number of prefetched batches."""
    torch.rand(3)
    iterator = iter(loader)
    torch.rand(2 if draws else 0)
    ahead = [next(iterator)] if prefetches else []
    while True:
        fetched = next(iterator, None)
        if fetched is not None:
            ahead.append(fetched)
        if not ahead:
            return
        batch = ahead.pop(0)
        yield batch, iterator, len(ahead)


def resume_epoch(data, state, count, prefetches=False, epochs=0, **options):
    """Resume a fresh loader at a position; return the next batches, and the number of samples that resuming read."""
    position, generators, rng_state = state
    loader = DataLoader(data, **options)
    tracked = TrackedDataLoader(loader, prefetches=prefetches)
    tracked.resume_from(position)
    read = Noisy.read
    iterator = iter(loader)
    read = Noisy.read - read
    ahead = [next(iterator)] if prefetches and count else []
    tracked.restore_generator_states(generators)
    restore_rng_state(rng_state)
    step()
    batches = []
    for _ in range(count):
        ahead.append(next(iterator, None))
        batches.append(ahead.pop(0))
        step(), step()
    assert next(iterator, None) is None or not epochs
    for _ in range(epochs):
        for batch, _, _ in epoch_of(loader, prefetches):
            batches.append(batch)
            step(), step()
    tracked.close()
    assert tracked.differences == []
    return batches, read


@given(
    st.integers(1, 30),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from(["shuffle", "order", "generator", "weights", "eager", "alone", "batches"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_resumes_anywhere_without_reading_earlier_samples(size, batch_size, drop_last, kind, chance):
    def options():
        if kind == "weights":
            return {"sampler": WeightedRandomSampler([1.0 + i for i in range(size)], size), "batch_size": batch_size}
        if kind == "eager":
            return {"sampler": Eager(size), "batch_size": batch_size}
        if kind == "alone":
            return {"sampler": Eager(size), "batch_size": None}
        if kind == "batches":
            return {"batch_sampler": BatchSampler(RandomSampler(range(size)), batch_size, drop_last)}
        own = {"generator": torch.Generator().manual_seed(1)} if kind == "generator" else {}
        return {"batch_size": batch_size, "shuffle": kind != "order", "drop_last": drop_last, **own}

    with isolated_rng(seed=chance.randrange(100)):
        batches, positions = record(Noisy(size), **options())
        if not batches:
            return
        per_epoch = len(batches) // 2
        at = chance.randrange(len(batches))
        rest = per_epoch * (1 + at // per_epoch) - at - 1
        again, read = resume_epoch(Noisy(size), positions[at], rest, **options())
    assert read <= 0  # a counter of the class is restored with the data
    assert len(again) == rest
    assert all(torch.equal(a, b) for a, b in zip(again, batches[at + 1 :], strict=False))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", [0, 2, 4, 9])
def test_workers_continue_with_their_random_states(persistent, at):
    options = {"batch_size": 3, "shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    with isolated_rng(seed=3):
        batches, positions = record(Noisy(21), **options)
        rest = 7 * (1 + at // 7) - at - 1
        again, _ = resume_epoch(Noisy(21), positions[at], rest, **options)
    assert len(batches) == 14
    assert all(torch.equal(a, b) for a, b in zip(again, batches[at + 1 : at + 1 + rest], strict=True))


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("at", [0, 3, 6, 9, 13])
def test_an_iterable_that_draws_while_it_is_read(monkeypatch, prefetches, at):
    """Exact where nobody else draws from the same generators in between; what its first index draws is always exact."""
    monkeypatch.setattr(f"{__name__}.step", lambda: None)
    monkeypatch.setattr(f"{__name__}.epoch_of", functools.partial(epoch_of, draws=False))
    with isolated_rng(seed=3):
        batches, positions = record(Buffered(21, eager=True), prefetches=prefetches, batch_size=3)
        rest = 7 * (1 + at // 7) - at - 1
        again, _ = resume_epoch(Buffered(21, eager=True), positions[at], rest, prefetches, batch_size=3)
    assert len(batches) == 14
    assert all(torch.equal(a, b) for a, b in zip(again, batches[at + 1 : at + 1 + rest], strict=True))


@cases("kind", "stream", "sampler", "sampler and workers", "shuffled", "at first", "stream in workers", "alone")
def test_draws_in_between_are_noticed_only_where_they_matter(kind):
    """A training step draws from the same generators."""
    matters = kind in ("stream", "sampler", "sampler and workers")
    data = Buffered(60) if kind.startswith("stream") else Plain(60) if kind == "alone" else Noisy(60)
    samplers = {"sampler": Drawing(60), "at first": AtFirst(60), "shuffled": RandomSampler(range(60))}
    options = {"sampler": samplers[own]} if (own := kind.removesuffix(" and workers")) in samplers else {}
    loader = DataLoader(data, batch_size=3, num_workers=1 if kind.endswith("workers") else 0, **options)
    with isolated_rng(seed=1):
        tracked = TrackedDataLoader(loader)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
            step()
        position_of(iterator)
        assert tracked.draws_in_between == matters
        position_of(iterator, at_end=True)
        assert not tracked.draws_in_between, "nothing is repeated from here"
    tracked.close()


def test_draws_that_come_late_are_noticed():
    draws, number = GlobalDraws(), iter(range(200))
    with isolated_rng(seed=1):
        for _ in range(120):
            draws.call(lambda: random.random() if next(number) > 40 else None)
            random.random()
    assert draws.are_interleaved


@pytest.mark.parametrize("at", [0, 3, 6, 9, 13])
@pytest.mark.parametrize("kind", ["data", "stream", "sampler", "batches", "ahead", "collate"])
def test_objects_that_keep_generators_and_counters(kind, at):
    def made():
        if kind == "stream":
            return {"data": OwnStream(21), "batch_size": 3}
        if kind == "ahead":
            return {"data": OwnStream(21), "batch_size": 3, "prefetches": True}
        if kind == "batches":
            return {"data": Own(21), "batch_sampler": BatchSampler(OwnSampler(21), 3, drop_last=False)}
        if kind == "collate":
            return {"data": Noisy(21), "batch_size": 3, "collate_fn": OwnCollate()}
        return {"data": Own(21), "batch_size": 3, **({"sampler": OwnSampler(21)} if kind == "sampler" else {})}

    with isolated_rng(seed=3):
        batches, positions = record(epochs=3, **made())
        rest = 7 * (1 + at // 7) - at - 1
        again, _ = resume_epoch(state=positions[at], count=rest, epochs=2 - at // 7, **made())
    assert len(batches) == 21
    assert all(torch.equal(a, b) for a, b in zip(again, batches[at + 1 :], strict=True))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", [0, 6, 9])
@pytest.mark.parametrize("kind", ["data", "stream", "ahead", "collate"])
@pytest.mark.sampled(5)
def test_copies_of_the_data_in_workers(kind, at, persistent):
    def made():
        workers = {"batch_size": 3, "num_workers": 2, "persistent_workers": persistent}
        if kind in ("stream", "ahead"):
            return {"data": OwnStream(21), "prefetches": kind == "ahead", **workers}
        if kind == "collate":
            return {"data": Noisy(21), "collate_fn": OwnCollate(), **workers}
        return {"data": Own(21), "shuffle": True, **workers}

    with isolated_rng(seed=3):
        batches, positions = record(epochs=3, **made())
        per_epoch = len(batches) // 3
        at = min(at, 2 * per_epoch - 1)
        rest = per_epoch * (1 + at // per_epoch) - at - 1
        again, _ = resume_epoch(state=positions[at], count=rest, epochs=2 - at // per_epoch, **made())
    assert len(again) == len(batches) - at - 1
    assert all(torch.equal(a, b) for a, b in zip(again, batches[at + 1 :], strict=True))


def test_another_order_is_reported():
    def loader(seed):
        sampler = RandomSampler(range(21), generator=torch.Generator().manual_seed(seed))
        return {"sampler": sampler, "batch_size": 3, "num_workers": 2}

    with isolated_rng(seed=3):
        _, positions = record(Noisy(21), epochs=1, **loader(1))
        positions[3][0]["created"]["generators"] = []  # as of a sampler whose generator nobody finds
        with pytest.raises(AssertionError, match="the loader gives the samples in another order than before"):
            resume_epoch(Noisy(21), positions[3], 1, **loader(2))


@pytest.mark.parametrize("kind", [Buffered, Plain])
@pytest.mark.parametrize("workers", [0, 2])
def test_another_first_batch_is_reported(kind, workers):
    options = {"batch_size": 3, "num_workers": workers}
    with isolated_rng(seed=3):
        _, positions = record(kind(21), epochs=1, **options)
        other = kind(21)
        other.offset = 1
        with pytest.raises(AssertionError, match="the loader gives another first batch of the epoch"):
            resume_epoch(other, positions[3], 1, **options)


def test_attributes_of_other_data_are_named():
    def tracked(seed):
        data = torch.utils.data.random_split(Own(21), [15, 6], generator=torch.Generator().manual_seed(seed))[0]
        loader = DataLoader(data, batch_size=3)
        fit = LoaderTracker(None, None, StopRequest([]))
        return fit, loader

    before, loader = tracked(1)
    before.track_train([loader], True, None)
    next(iter(loader))
    saved = {"train": [before._train[0].state(None)], "validation": [], "foreign": []}
    for seed in (1, 2):
        fit, loader = tracked(seed)
        fit.track_train([loader], True, saved)
        if seed == 1:
            assert fit.data_differences == []
        else:
            assert (
                "the training loader has other data than in the stopped run: dataset.indices" in fit.data_differences[0]
            )


def test_workers_of_a_stopped_run_end_once_the_fit_was_left():
    """As by an exception; at exit multiprocessing sends each worker one SIGTERM, and waits for it."""
    forks, request = multiprocessing.get_context("fork"), StopRequest(["SIGTERM"])
    begun = forks.Event()

    def work():
        WorkerInit(None, signals=request.signal_numbers, leaving=request.leaving)(0)
        begun.set()
        while True:
            signal.pause()

    worker = forks.Process(target=work, daemon=True)
    worker.start()
    assert begun.wait(60)
    before = signal.getsignal(signal.SIGTERM)
    assert request.install_handlers()
    signal.raise_signal(signal.SIGTERM)
    request.close()
    signal.signal(signal.SIGTERM, before)
    worker.terminate()
    worker.join(20)
    status = worker.exitcode
    worker.kill()
    assert status == -signal.SIGTERM


class Caching(Noisy):
    def __init__(self, size):
        super().__init__(size)
        self.cache, self.count = {}, 0

    def __getitem__(self, index):
        self.count += 1
        self.cache[index] = torch.zeros(4000)
        return super().__getitem__(index)


def test_an_attribute_too_large_for_a_worker_note_is_reported():
    loader = DataLoader(Caching(21), batch_size=3, num_workers=1)
    tracked = TrackedDataLoader(loader)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    data = position_of(iterator)["data"][0]
    assert tracked.objects.new_unsaved() == {"dataset.cache in a worker": "more than 64 KiB"}
    assert data["values"]["dataset.count"]["value"] == 9
    tracked.close()


def test_what_an_iterable_creates_again_is_not_reported():
    class Holding(Plain):
        def __iter__(self):
            self.iterator = iter(range(self.size))
            return self.iterator

    loader = DataLoader(Holding(9))
    tracked = TrackedDataLoader(loader)
    iterator = iter(loader)
    next(iterator)
    position_of(iterator)
    assert tracked.objects.new_unsaved() == {}
    iter(loader)  # of which nobody can know whether it continues with the iterator that is there
    assert [tracked.objects.new_unsaved() for _ in range(2)] == [{"dataset.iterator": "range_iterator"}, {}]


def test_a_shorter_loader_is_named():
    with isolated_rng(seed=3):
        _, positions = record(Noisy(21), batch_size=3)
        with pytest.raises(RuntimeError, match="stopped after 5 batches of an epoch, but its loader now has 2"):
            resume_epoch(Noisy(6), positions[4], 1, batch_size=3)


def test_a_tracked_loader_gives_the_same_batches():
    """Tracking changes neither batches nor random state, and leaves no attribute behind."""
    for options in ({"shuffle": True}, {"shuffle": True, "num_workers": 2}):
        loader, found = DataLoader(Noisy(20), batch_size=3, **options), []
        own = set(vars(loader))
        for tracks in (False, True):
            with isolated_rng(seed=5):
                tracked = TrackedDataLoader(loader) if tracks else None
                found.append([torch.stack([batch.sum() for batch in loader]), torch.rand(2)])
                if tracked:
                    tracked.close()
        assert set(vars(loader)) == own
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_workers_end_with_the_last_reference():
    """No reference cycle leaves an iterator to the garbage collector, which might run in another loader's worker."""
    for persistent in (False, True):
        loader = DataLoader(Noisy(12), batch_size=3, num_workers=2, persistent_workers=persistent)
        tracked, workers = TrackedDataLoader(loader), []
        gc.disable()
        try:
            for _ in range(2):
                iterator = iter(loader)
                next(iterator)
                workers += iterator._workers
            del iterator, loader
            assert not any(worker.is_alive() for worker in workers)
        finally:
            gc.enable()
        with pytest.raises(ReferenceError, match="keep a reference to it"):
            tracked.generator_states()


def test_why_not_trackable():
    class Own(DataLoader):
        def __iter__(self):
            return super().__iter__()

    assert why_not_trackable(DataLoader(range(3))) == ""
    assert "is not a torch.utils.data.DataLoader" in why_not_trackable([1, 2])
    assert "overrides DataLoader.__iter__" in why_not_trackable(Own(range(3)))
    if hasattr(DataLoader(range(3)), "in_order"):
        unordered = DataLoader(range(3), num_workers=2, in_order=False)
        assert "in_order=False" in why_not_trackable(unordered)


@given(st.integers(0, 2**32 - 1), st.integers(0, 700))
@settings(max_examples=20)
def test_a_raw_random_state_is_restored(seed, drawn):
    with isolated_rng(seed=seed):
        for _ in range(drawn % 5):
            random.gauss(0, 1), np.random.randn()
        torch.rand(drawn)
        raw = raw_rng_state()
        wanted = random.gauss(0, 1), np.random.randn(), np.random.rand(), random.random(), torch.randn(5).tolist()
        torch.rand(7)
        restore_rng_state(as_rng_state(raw))
        drawn = random.gauss(0, 1), np.random.randn(), np.random.rand(), random.random(), torch.randn(5).tolist()
        assert drawn == wanted


class _Points(TensorDataset):
    def __init__(self):
        super().__init__(torch.rand(40, 64), torch.arange(40) % 10)


class _DrawsForLater(Net):
    """Draws a data set for the next epoch, while its loader goes on with the one that it was created with."""

    def setup(self, stage):
        self.data = _Points()

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4)

    def on_train_epoch_end(self):
        self.data = _Points()


@pytest.mark.parametrize("stops", [(4,), (13,), (4, 13)])
def test_a_data_set_that_is_replaced_after_its_loader_was_created(tmp_path, stops):
    def train(place, seed, *callbacks):
        with isolated_rng(seed=seed):
            module = _DrawsForLater()
            trainer = Trainer(callbacks=[AutoResume(tmp_path / place), *callbacks], max_epochs=3, **QUIET)
            trainer.fit(module)
        return module

    whole = train("whole", 0)
    for step in stops:
        with pytest.raises(SystemExit):
            train("stopped", 0, Interrupts(step))
    again = train("stopped", 0)
    assert same(dict(again.state_dict()), dict(whole.state_dict()))
    assert same(again.data.tensors, whole.data.tensors)
