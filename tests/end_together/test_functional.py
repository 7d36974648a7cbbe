"""What ranks tell each other: against lists that were cut by hand, for random lengths and ways to combine loaders."""

import random
import traceback
from contextlib import ExitStack
from itertools import islice
from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lightning_tricks._lightning_compat.ending_loaders import _ending_class
from lightning_tricks.end_together import until_a_rank_ends
from lightning_tricks.end_together.functional import SharedEnd, has_certain_length, least_and_furthest
from tests.end_together.contract import Stream
from tests.small import cases, fork, loader

RANKS = 3


def on_ranks(test):
    """Run a function of the rank on several, which talk to each other; show the error of one that fails."""

    def run(rank):
        distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
        try:
            test(rank)
        except BaseException:
            traceback.print_exc()
            raise

    fork(run, RANKS)


class Numbers:
    """An iterable of numbers, whose length is known, unknown or wrong."""

    def __init__(self, count, kind, first):
        self.count, self.kind, self.first = count, kind, first

    def __iter__(self):
        return iter(range(self.first, self.first + self.count))


class Sized(Numbers):
    def __len__(self):
        return self.count + (2 if self.kind == "lying" else 0)


def parts_of(chance, rank):
    """The parts of a random loader on each of the ranks, those of this rank first."""
    kinds = [chance.choice(("known", "unknown", "lying")) for _ in range(chance.randint(1, 3))]
    several = []
    for number in range(RANKS):
        counts = [chance.choice((0, 1, 2, 3, 5)) for _ in kinds]
        pairs = enumerate(zip(counts, kinds, strict=True))
        make = [(Numbers if k == "unknown" else Sized)(c, k, 1000 * number + 100 * i) for i, (c, k) in pairs]
        several.append(make)
    return several[rank], several


def items(parts, mode, limits=None):
    combined = CombinedLoader(parts, mode)
    combined.limits = limits
    return list(combined)


def cut_by_hand(mode, rank, several):
    """What a rank gets if the lists of all are cut to the shortest: side by side together, in sequence each."""
    if mode == "sequential":
        counts = [min(parts[i].count for parts in several) for i in range(len(several[0]))]
        return items(several[rank], mode, counts)
    whole = [items(parts, mode) for parts in several]
    return whole[rank][: min(map(len, whole))]


@pytest.mark.trap("asked_most: unequal ranks")
def test_random_loaders_end_where_lists_cut_by_hand_end():
    def test(rank):
        chance, said = random.Random(3), []
        for number in range(150):
            mode = chance.choice(("min_size", "max_size", "max_size_cycle", "sequential"))
            own, several = parts_of(chance, rank)
            if mode == "max_size_cycle" and not all(one.count for parts in several for one in parts):
                continue  # Lightning's own cannot restart an empty part
            combined = CombinedLoader(own, mode)
            combined.__class__ = _ending_class(CombinedLoader, SharedEnd("it", None, said.append), lambda _: False)
            for _ in range(2):
                found = list(combined)
                assert found == cut_by_hand(mode, rank, several), (number, mode, found)
        assert said

    on_ranks(test)


def test_certain_lengths_are_compared_once(monkeypatch):
    def test(rank):
        said, asked = [], []
        end = SharedEnd("an epoch", None, said.append)
        monkeypatch.setattr(end, "compare", asked.append)
        combined = CombinedLoader([Sized(4 + 3 * rank, "known", 0), Sized(2, "known", 0)], "max_size")
        combined.__class__ = _ending_class(CombinedLoader, end, lambda _: True)
        for _ in range(2):
            iter(combined)
            assert len(combined) == 4
        assert not asked
        assert said == [
            "EndTogether: an epoch ends with the fewest batches, those of rank 0. Left out: 3 of rank 1, 6 of rank 2."
        ]

    on_ranks(test)


def test_an_error_of_one_rank_is_one_of_all():
    class Broken(Numbers):
        def __iter__(self):
            yield 0
            raise ZeroDivisionError

    def test(rank):
        combined = CombinedLoader([(Broken if rank == 1 else Numbers)(5, "unknown", 0)], "min_size")
        combined.__class__ = _ending_class(CombinedLoader, SharedEnd("it", None, print), lambda _: False)
        batches = iter(combined)
        next(batches)
        with pytest.raises(
            ZeroDivisionError if rank == 1 else RuntimeError, match=None if rank == 1 else "another rank"
        ):
            next(batches)

    on_ranks(test)


def test_a_loop_of_ones_own():
    def test(rank):
        for counts in ([3, 5, 4], [0, 2, 2], [4, 4, 4]):
            assert list(until_a_rank_ends(range(counts[rank]))) == list(range(min(counts)))
        assert least_and_furthest(rank - 1) == (-1, RANKS - 2)

    on_ranks(test)


def test_what_is_said_names_ranks_and_numbers():
    end = SharedEnd("validation", None, (said := []).append)
    end._tell(["", "2", ""])
    end._tell(["", "2", ""])
    end._tell(["", "", ""])
    end._tell(["at least 1"] * 20 + [""])
    assert (
        said[0]
        == "EndTogether: validation ends with the fewest batches, those of rank 0, rank 2. Left out: 2 of rank 1."
    )
    assert len(said) == 2
    assert said[1].endswith("at least 1 of rank 7 and 12 more.")


class Buckets(BatchSampler):
    pass


class OwnOrder(Sampler):
    pass


class Leaves(DataLoader):
    def __iter__(self):
        return islice(super().__iter__(), 2)


class Shorter(DataLoader):
    def __len__(self):
        return 2


class Items(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index


@cases(
    "made, is_certain",
    (lambda: loader(), True),
    (lambda: loader(shuffle=True), True),
    (lambda: DataLoader(Items(), sampler=WeightedRandomSampler([1.0] * 5, 3)), True),
    (lambda: DataLoader(Items(), batch_size=None), True),
    (lambda: DataLoader(Items(), batch_sampler=BatchSampler(RandomSampler(range(5)), 2, drop_last=True)), True),
    (lambda: DataLoader(Items(), batch_sampler=Buckets(RandomSampler(range(5)), 2, drop_last=True)), False),
    (lambda: DataLoader(Items(), batch_sampler=BatchSampler(OwnOrder(), 2, drop_last=True)), False),
    (lambda: Leaves(Items()), False),
    (lambda: Shorter(Items()), False),
    (lambda: DataLoader(Items(), sampler=OwnOrder()), False),
    (lambda: DataLoader(Items(), sampler=[1, 2]), False),
    (lambda: DataLoader(Stream()), False),
    (lambda: [1, 2], False),
    (lambda: SimpleNamespace(dataset=[1], sampler=None), False),
)
def test_which_lengths_are_certain(made, is_certain):
    assert has_certain_length(made()) is is_certain


def test_a_class_is_changed_and_given_back():
    with ExitStack() as stack:
        combined = CombinedLoader([[1, 2], [3]], "max_size")
        kind = _ending_class(CombinedLoader, SharedEnd("it", None, print), lambda _: True)
        stack.callback(setattr, combined, "__class__", CombinedLoader)
        combined.__class__ = kind
        assert [item[0] for item in combined] == [[1, 3], [2, None]]
        assert isinstance(combined, CombinedLoader)
    assert type(combined) is CombinedLoader
