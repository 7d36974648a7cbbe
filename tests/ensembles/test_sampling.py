"""Each member's own order: every sample once an epoch, the same on all ranks, with the settings of the loader."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_tricks.ensembles.core.sampling import MemberLoader, member_orders, tensors_in_memory, why_not_reorder
from lightning_tricks.ensembles.training_data import batch_of_member
from tests.small import cases


class Squares(Dataset):
    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index**2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5.0))


def _in_memory(size=23):
    numbers = torch.arange(size)
    return TensorDataset(numbers.float().unsqueeze(1), numbers**2)


def _loader(loader, n=3, seed=0, shard=(0, 1)):
    return MemberLoader(loader, member_orders(loader, range(n), seed, None, shard))


def _samples_of_members(loader, n=3, epoch=0):
    loader.sampler.set_epoch(epoch)
    parts = [[] for _ in range(n)]
    for x, y in loader:
        assert torch.equal(y, x.squeeze(1).long() ** 2)
        for member, rows in enumerate(x.view(n, -1)):
            parts[member].append(rows)
    return [torch.cat(rows).long().tolist() for rows in parts]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.trap("ensembles: under DDP every member saw the same order unless its sampler had its own seed")
def test_ranks_share_the_samples_of_each_member(world):
    shard = [_loader(DataLoader(_in_memory(), 4, shuffle=True), shard=(rank, world)) for rank in range(world)]
    seen = [_samples_of_members(loader) for loader in shard]
    assert len({len(loader) for loader in shard}) == 1  # in step
    for member in range(3):
        together = [sample for rank in seen for sample in rank[member]]
        assert set(together) == set(range(23))
        assert len(together) == -(-23 // world) * world
    assert len({tuple(order) for order in seen[0]}) == 3


@pytest.mark.trap("ensembles: bagging drops pin_memory, drop_last, sampler, worker_init_fn, generator")
def test_settings_of_the_loader_are_kept():
    def collate(samples):
        return {"x": torch.stack([x for x, _ in samples]), "names": [str(y) for _, y in samples]}

    given = DataLoader(
        Squares(), 5, shuffle=True, drop_last=True, collate_fn=collate, num_workers=1, worker_init_fn=print,
        persistent_workers=True, prefetch_factor=3, timeout=60, multiprocessing_context="fork",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    loader = _loader(given)
    batches = list(loader)
    assert len(batches) == len(loader) == 4
    assert batches[0]["x"].shape == (15, 1)
    inner = loader._batch_loader
    for name in ("num_workers", "worker_init_fn", "persistent_workers", "prefetch_factor", "timeout", "generator"):
        assert getattr(inner, name) == getattr(given, name), name
    part = batch_of_member(batches[0], 1, 3, rows=15)
    assert part["x"].shape == (5, 1)
    assert part["names"] == [str(int(x) ** 2) for x in part["x"]]


def test_tensors_behind_subsets_are_found():
    dataset = _in_memory()
    nested = Subset(Subset(dataset, range(5, 20)), [2, 4, 6])
    loader = DataLoader(nested, 2, shuffle=True)
    tensors, rows = tensors_in_memory(loader)
    assert tensors is dataset.tensors
    assert rows.tolist() == [7, 9, 11]
    assert all(sorted(order) == [7, 9, 11] for order in _samples_of_members(_loader(loader)))
    assert tensors_in_memory(DataLoader(Squares())) is None
    assert tensors_in_memory(DataLoader(dataset, collate_fn=list)) is None


class _Own(DataLoader):
    def __iter__(self):
        return iter(())


@cases(
    "loader, reason",
    ([1, 2], "a list is not a DataLoader"),
    (DataLoader(Stream(), 2), "Stream is an IterableDataset, which has only one order"),
    (DataLoader(Squares(), batch_size=None), "Squares makes the batches itself"),
    (DataLoader(Squares(), batch_sampler=[[1, 2], [3]]), "list makes the batches itself"),
    (_Own(Squares()), "_Own has its own __iter__"),
    (DataLoader(Squares(), batch_sampler=BatchSampler(SequentialSampler(Squares()), 2, False)), ""),
    (DataLoader(Squares()), ""),
)
def test_loaders_whose_batches_members_have_to_share(loader, reason):
    assert why_not_reorder(loader) == reason


class Noisy(Squares):
    """Numbers with noise of each library, as augmentation has it."""

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_draw_new_numbers_in_each_batch_epoch_and_rank(workers):
    def noise(epoch, rank):
        loader = _loader(DataLoader(Noisy(24), 4, shuffle=True, num_workers=workers), shard=(rank, 2))
        loader.sampler.set_epoch(epoch)
        return torch.cat(list(loader))

    every = torch.stack([noise(epoch, rank) for epoch in (0, 1, 2) for rank in (0, 1)])
    assert every.shape == (6, 36, 3)  # 12 samples of each of three members
    for library in range(3):
        assert len(every[..., library].unique()) == 6 * 36
    assert torch.equal(noise(1, 1), every[3])


@pytest.mark.parametrize("dataset", [_in_memory(), Squares()], ids=["in memory", "one by one"])
def test_a_state_of_the_start_of_an_epoch_has_no_batches(dataset):
    loader = _loader(DataLoader(dataset, 4))
    assert loader.state_dict() == {"epoch": 0, "batches": 0, "ranks": 1}, "before the first epoch"
    list(loader)
    assert loader.state_dict() == {"epoch": 0, "batches": 6, "ranks": 1}
    loader.sampler.set_epoch(1)
    iterator = iter(loader)
    assert loader.state_dict() == {"epoch": 1, "batches": 0, "ranks": 1}, "a checkpoint of an epoch's start"
    next(iterator)
    resumed = _loader(DataLoader(dataset, 4))
    resumed.load_state_dict(loader.state_dict())
    resumed.sampler.set_epoch(1)
    assert resumed.state_dict() == {"epoch": 1, "batches": 1, "ranks": 1}, "before the resumed iteration starts"
    assert [x.tolist() for x, _ in resumed] == [x.tolist() for x, _ in iterator]
    assert resumed.state_dict() == {"epoch": 1, "batches": 6, "ranks": 1}


def test_the_middle_of_an_epoch_is_not_resumed_on_other_ranks():
    loader = _loader(DataLoader(_in_memory(), 4), shard=(0, 2))
    iterator = iter(loader)
    next(iterator)
    resumed = _loader(DataLoader(_in_memory(), 4))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"2 ranks divided the samples .* and 1 would see other samples: resume on 2"):
        next(iter(resumed))
