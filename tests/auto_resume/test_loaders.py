"""A loader goes on at its place: compared with an iteration that was never interrupted, in any loop."""

import gc
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lightning_tricks import isolated_rng
from lightning_tricks.auto_resume.loaders import FollowedLoader, objection_to_following, place_of
from lightning_tricks.auto_resume.streams import WorkerStreams, pack_streams, unpack_streams


class Noisy(Dataset):
    """Numbers with noise from each stream; knows what was read in this process."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Eager(Sampler):
    """Draws its order when it is asked for an iterator, not for its first index."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())


def draws(size, **options):
    """Follow a loader over two epochs, and note the streams and the place after each batch."""
    loader = DataLoader(Noisy(size), **options)
    followed, batches, places = FollowedLoader(loader), [], []
    for _ in range(2):
        torch.rand(3)  # as a training step might
        iterator = iter(loader)
        torch.rand(2)
        for batch in iterator:
            batches.append(batch)
            places.append((place_of(iterator), followed.generator_states(), pack_streams()))
            torch.rand(1)
    followed.release()
    return batches, places


def go_on(size, state, count, **options):
    place, generators, streams = state
    loader = DataLoader(Noisy(size), **options)
    followed = FollowedLoader(loader)
    followed.resume(place)
    iterator = iter(loader)
    read = list(loader.dataset.read)
    followed.restore_generators(generators)
    unpack_streams(streams)
    torch.rand(1)
    batches = []
    for _ in range(count):
        batches.append(next(iterator))
        torch.rand(1)
    followed.release()
    return batches, read


@given(
    st.integers(1, 30),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from(["shuffle", "order", "generator", "weights", "eager", "alone", "batches"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_goes_on_anywhere_without_reading_what_was_seen(size, batch_size, drop_last, kind, chance):
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
        batches, places = draws(size, **options())
        if not batches:
            return
        per_epoch = len(batches) // 2
        at = chance.randrange(len(batches))
        rest = per_epoch * (1 + at // per_epoch) - at - 1
        again, read = go_on(size, places[at], rest, **options())
    assert read == []
    assert len(again) == rest
    assert all(torch.equal(a, b) for a, b in zip(again, batches[at + 1 :], strict=False))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", [0, 2, 4, 9])
def test_workers_go_on_with_their_streams(persistent, at):
    options = {"batch_size": 3, "shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    with isolated_rng(seed=3):
        batches, places = draws(21, **options)
        rest = 7 * (1 + at // 7) - at - 1
        again, _ = go_on(21, places[at], rest, **options)
    assert len(batches) == 14
    assert all(torch.equal(a, b) for a, b in zip(again, batches[at + 1 : at + 1 + rest], strict=True))


def test_workers_that_are_others_keep_the_order():
    with isolated_rng(seed=3):
        batches, places = draws(21, batch_size=3, shuffle=True)
        again, _ = go_on(21, places[2], 4, batch_size=3, shuffle=True, num_workers=2)
    assert [batch[:, 0].tolist() for batch in again] == [batch[:, 0].tolist() for batch in batches[3:7]]


def test_a_shorter_loader_is_named():
    with isolated_rng(seed=3):
        _, places = draws(21, batch_size=3)
        with pytest.raises(RuntimeError, match="stopped after 5 batches of an epoch, and its loader now has 2"):
            go_on(6, places[4], 1, batch_size=3)


def test_a_followed_loader_gives_what_it_gave():
    """Following changes neither batches nor streams, and leaves nothing behind."""
    for options in ({"shuffle": True}, {"shuffle": True, "num_workers": 2}):
        loader, found = DataLoader(Noisy(20), batch_size=3, **options), []
        own = set(vars(loader))
        for follows in (False, True):
            with isolated_rng(seed=5):
                followed = FollowedLoader(loader) if follows else None
                found.append([torch.stack([batch.sum() for batch in loader]), torch.rand(2)])
                if followed:
                    followed.release()
        assert set(vars(loader)) == own
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_workers_end_with_the_last_reference():
    """No circle keeps an iterator for the garbage collector, which might run in another loader's worker."""
    for persistent in (False, True):
        loader = DataLoader(Noisy(12), batch_size=3, num_workers=2, persistent_workers=persistent)
        followed, workers = FollowedLoader(loader), []
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
            followed.generator_states()


def test_objections():
    class Own(DataLoader):
        def __iter__(self):
            return super().__iter__()

    assert objection_to_following(DataLoader(range(3))) == ""
    assert "is no torch.utils.data.DataLoader" in objection_to_following([1, 2])
    assert "iterates in a way of its own" in objection_to_following(Own(range(3)))
    if hasattr(DataLoader(range(3)), "in_order"):
        unordered = DataLoader(range(3), num_workers=2, in_order=False)
        assert "in_order=False" in objection_to_following(unordered)


@given(st.integers(0, 2**32 - 1), st.integers(0, 700))
@settings(max_examples=20, deadline=None)
def test_packed_streams_go_on_as_the_streams_do(seed, drawn):
    with isolated_rng(seed=seed):
        for _ in range(drawn % 5):
            random.gauss(0, 1), np.random.randn()
        torch.rand(drawn)
        packed = pack_streams()
        wanted = random.gauss(0, 1), np.random.randn(), np.random.rand(), random.random(), torch.randn(5).tolist()
        torch.rand(7)
        unpack_streams(packed)
        assert wanted == (
            random.gauss(0, 1),
            np.random.randn(),
            np.random.rand(),
            random.random(),
            torch.randn(5).tolist(),
        )


def test_a_ring_holds_the_last_states():
    with isolated_rng(seed=0):
        streams, states = WorkerStreams(2, prefetch=2), {}
        for count in range(1, 12):
            torch.rand(count)
            states[count] = torch.get_rng_state()
            streams.write(1, count)
        assert [streams.last_count(worker) for worker in (0, 1)] == [0, 11]
        assert streams.read(1, 3) is None
        for count in (8, 9, 10, 11):
            unpack_streams(streams.read(1, count))
            assert torch.equal(torch.get_rng_state(), states[count])
