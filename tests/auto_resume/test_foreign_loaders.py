"""Loaders that are no DataLoader of torch, and streams with a state: continued at every position of three epochs."""

import copy
import random
import re
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_tricks._lightning_compat.flavor import sized_len
from lightning_tricks._shared.rng import capture_rng_state, isolated_rng, restore_rng_state
from lightning_tricks.auto_resume.core.data.foreign_loader import ForeignLoader, decode_state, encode_state
from tests.small import cases, unseen

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital", "ignore:.*torchdata", "ignore:.*buffer is not writable")

DATA = torch.randn(28, 3, generator=torch.Generator().manual_seed(3))
BATCHES = 7


class Batches:
    """A generator, which begins with its first batch; its state is the number of the epoch and of the next batch."""

    def __init__(self):
        self.epoch = self.next = 0
        self.resumed = False

    def __iter__(self):
        if not self.resumed:
            self.next = 0
        self.resumed = False
        order = torch.randperm(28, generator=torch.Generator().manual_seed(self.epoch))
        while self.next < BATCHES:
            self.next += 1
            yield self.batch(order[4 * self.next - 4 : 4 * self.next])
        self.epoch, self.next = self.epoch + 1, 0

    def batch(self, indices):
        return DATA[indices]

    def state_dict(self):
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state):
        self.epoch, self.next, self.resumed = state["epoch"], state["next"], True


class Sized(Batches):
    def __len__(self):
        return BATCHES


class Drawing(Sized):
    """Its order and its noise are from the global generator."""

    def __iter__(self):
        order = torch.randperm(28)
        start, self.resumed = self.next if self.resumed else 0, False
        for number in range(start, BATCHES):
            self.next = number + 1
            yield DATA[order[4 * number : 4 * number + 4]] + torch.randn(4, 3)


class OwnGenerators(Batches):
    """Its state has arrays, tuples and generators, and is the one that it goes on to change."""

    def __init__(self):
        self.kept = {"numpy": np.random.RandomState(3), "random": random.Random(4), "order": None, "next": 0}

    def __iter__(self):
        if self.kept["order"] is None:
            self.kept |= {"order": self.kept["numpy"].permutation(28), "next": 0}
        while self.kept["next"] < BATCHES:
            number = self.kept["next"]
            self.kept["next"] += 1
            yield DATA[self.kept["order"][4 * number : 4 * number + 4]] * self.kept["random"].random()
        self.kept["order"] = None

    def state_dict(self):
        return self.kept

    def load_state_dict(self, state):
        self.kept = state


class Stream(IterableDataset):
    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 28:
            self.next += 1
            yield DATA[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Shuffled(Stream):
    """Through a buffer, which is not in its state: what is loaded leads to other samples."""

    def __iter__(self):
        draws, buffer = random.Random(5), []
        for number in range(self.next, 28):
            self.next = number + 1
            buffer.append(DATA[number])
            if len(buffer) > 5:
                yield buffer.pop(draws.randrange(len(buffer)))
        self.next = 0
        yield from buffer


class Remembers(Stream):
    """Begins each iteration where its state says, if nobody takes that away."""

    def __init__(self):
        self.start = self.next = 0

    def __iter__(self):
        for number in range(self.start, 28):
            self.next = number + 1
            yield DATA[number]

    def load_state_dict(self, state):
        self.start = state["next"]


def torchdata(data, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, 4, **options)


def nodes():
    from torchdata import nodes

    order = nodes.MapStyleWrapper(DATA, RandomSampler(DATA))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(order, 4), torch.stack))


@cache
def litdata_folder():
    from litdata.streaming import Cache

    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "data").mkdir()
    written = Cache(f"{folder.name}/data", chunk_size=4)
    for number, sample in enumerate(DATA):
        written[number] = sample
    written.done()
    written.merge()
    return folder  # removed at exit


def litdata(**options):
    from litdata import StreamingDataLoader, StreamingDataset

    stream = StreamingDataset(f"{litdata_folder().name}/data", shuffle=True, seed=3)
    return StreamingDataLoader(stream, batch_size=4, **options)


KINDS = {
    "generator": Batches,
    "generator with a length": Sized,
    "draws": Drawing,
    "own generators": OwnGenerators,
    "stream": lambda: DataLoader(Stream(), 4),
    "stream with a buffer": lambda: DataLoader(Shuffled(), 4),
    "stream that remembers": lambda: DataLoader(Remembers(), 4),
    "torchdata, shuffled": lambda: torchdata(DATA, shuffle=True),
    "torchdata, its generator": lambda: torchdata(DATA, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "torchdata, stream": lambda: torchdata(Stream()),
    "torchdata, workers": lambda: torchdata(DATA, shuffle=True, num_workers=2, persistent_workers=True),
    "torchdata, nodes": nodes,
    "litdata": litdata,
    "litdata, workers": lambda: litdata(num_workers=2),
}


class Loop:
    """Reads a loader as Lightning's loop does: one batch ahead where it does not know the length.

    After each batch it draws, as training does, and keeps what a save would hold.
    """

    def __init__(self, loader, limit):
        self.warnings, self.differences, self.fetched = [], [], 0
        self.length = limit or sized_len(loader)
        is_ahead = lambda: self.length is None  # noqa: E731
        self.part = ForeignLoader(loader, "the loader", is_ahead, self.warnings.append, self.differences)
        self.saves, self.batches = [], []

    def begin(self, done=0):
        self.iterator, self.fetched = iter(self.part), 0
        self.next = None if self.length else next(self.iterator, None)
        self.fetched = done

    def run(self, epoch, done=0):
        """Read the rest of an epoch, after the batches that are done."""
        while self.next is not None if self.length is None else self.fetched < self.length:
            if self.length is None:
                batch, self.next = self.next, next(self.iterator, None)
            else:
                batch = next(self.iterator, None)
                if batch is None:
                    return
                self.fetched += 1
            done += 1
            torch.rand(3)
            self.batches.append((epoch, batch))
            self.save(epoch, done, self.next is None if self.length is None else self.fetched == self.length)

    def save(self, epoch, done, at_end):
        ahead = int(self.next is not None)
        position = copy.deepcopy(self.part.position(ahead, at_end))
        self.saves.append((epoch, done, at_end, position, capture_rng_state(), len(self.batches)))


def trained(make, limit, save=None, epochs=3):
    """Return a loop after some epochs, or after the rest of them that follows a save."""
    loop = Loop(make(), limit)
    epoch = 0
    if save is not None:
        epoch, done, at_end, position, rng_state, _ = save
        loop.part.defer_iterator()
        loop.begin()
        loop.part.resume_from(position)
        loop.begin(done)
        restore_rng_state(rng_state)
        if not at_end:
            loop.run(epoch, done)
        epoch += 1
    for number in range(epoch, epochs):
        loop.begin()
        if number:
            loop.save(number, 0, False)  # as between two epochs
        loop.run(number)
    return loop


@cases("kind, limit", *((kind, None) for kind in KINDS), *((kind, 3) for kind in KINDS if "workers" not in kind))
def test_a_loader_goes_on_at_every_position_as_if_nothing_had_happened(kind, limit):
    with isolated_rng(seed=1):
        whole = trained(KINDS[kind], limit)
    saves = whole.saves[4::9] if "workers" in kind else whole.saves
    for number, save in enumerate(saves):
        with isolated_rng(seed=2):
            rest = trained(KINDS[kind], limit, save)
            compare(whole, rest, save, kind)
        if number % 4 == 0 and rest.saves:  # a resume of a resume
            again = rest.saves[len(rest.saves) // 3]
            with isolated_rng(seed=3):
                compare(rest, trained(KINDS[kind], limit, again), again, kind)


def compare(before, rest, save, kind):
    for (epoch, batch), (epoch_now, now) in zip(before.batches[save[-1] :], rest.batches, strict=True):
        assert epoch == epoch_now
        assert torch.equal(batch, now), save[:3]
    assert rest.differences == []
    assert not rest.warnings or kind == "stream with a buffer"


@cases("kind", "generator", "own generators", "torchdata, shuffled", "litdata")
def test_positions_in_epochs_of_one_batch_do_not_grow(kind):
    """Each epoch's would hold that of the epoch before."""
    with isolated_rng(seed=1):
        whole = trained(KINDS[kind], 1, epochs=6)
    for save in whole.saves:
        depth, position = 0, save[3]
        while position is not None:
            depth, position = depth + 1, position["before"]
        assert depth <= 3
        with isolated_rng(seed=2):
            rest = trained(KINDS[kind], 1, save, epochs=6)
        assert [batch.tolist() for _, batch in rest.batches] == [b.tolist() for _, b in whole.batches[save[-1] :]]
        assert rest.differences == []


def test_one_batch_is_read_again_and_no_more():
    read = unseen([])

    class Notes(Stream):
        def __iter__(self):
            for sample in super().__iter__():
                read().append(self.next)
                yield sample

    with isolated_rng(seed=1):
        whole = trained(lambda: DataLoader(Notes(), 4), None)
        save = next(one for one in whole.saves if one[:2] == (1, 5))
        read().clear()
        trained(lambda: DataLoader(Notes(), 4), None, save, epochs=2)
    assert read() == [*range(17, 29)]  # of 28, of which 20 were trained on


def test_what_is_wrong_with_a_loader_is_said():
    class BeginsThereAgain(Sized):
        """Forgets what was loaded only once it has come to its end, which a loop that knows the length never sees."""

        def __iter__(self):
            while self.next < BATCHES:
                self.next += 1
                yield DATA[4 * self.next - 4 : 4 * self.next]
            self.next = 0

    class Buffered(Batches):
        def __init__(self):
            super().__init__()
            self.gain = 1.0

        def batch(self, indices):
            self.gain *= 1.5
            return DATA[indices] * self.gain

    for kind, found in (
        (BeginsThereAgain, "gave . batches in the epoch after"),
        (Buffered, "gives other batches than"),
    ):
        whole = trained(kind, None, epochs=2)
        rest = trained(kind, None, next(one for one in whole.saves if one[:2] == (0, 5)))
        assert re.search(found, " ".join([*rest.warnings, *rest.differences])), kind


def test_a_stream_without_its_buffer_is_read_again():
    whole = trained(KINDS["stream with a buffer"], None)
    rest = trained(KINDS["stream with a buffer"], None, whole.saves[4])
    assert "read again up to its position" in rest.warnings[0]


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_batch():
    class Threads(Batches):
        def state_dict(self):
            return {"epoch": 0, "lock": DataLoader(DATA)}

    loop = Loop(Threads(), None)
    loop.begin()
    with pytest.raises(TypeError, match=r"AutoResume: the state of the loader cannot be saved: .*DataLoader.*plain"):
        loop.part.check_state(1)


def test_a_loader_that_became_shorter():
    saves = trained(lambda: torch.split(DATA, 4), None).saves
    with pytest.raises(RuntimeError, match="stopped after 6 batches of an epoch, but the loader now has 3"):
        trained(lambda: torch.split(DATA[:12], 4), None, saves[5])


def test_the_state_is_written_as_plain_data(tmp_path):
    state = OwnGenerators().state_dict() | {"tensor": torch.arange(3), 5: (1, [2.5, None])}
    torch.save(encode_state(state, "the loader"), tmp_path / "state.pt")
    read = decode_state(torch.load(tmp_path / "state.pt", weights_only=True), "the loader")
    assert read["numpy"].random() == np.random.RandomState(3).random()
    assert read["random"].random() == random.Random(4).random()
    assert torch.equal(read["tensor"], torch.arange(3))
    assert read[5] == (1, [2.5, None])
