"""An iteration that nothing after it shows, for loaders of each kind."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from lightning_tricks.validate_first import unseen_iteration
from tests.small import same


def drawn():
    return random.random(), np.random.rand(), torch.rand(2)


@settings(max_examples=30)
@given(batches=st.integers(0, 7), own=st.sampled_from(("global", "loader", "sampler")), raises=st.booleans())
def test_what_follows_is_as_without_it(batches, own, raises):
    found = []
    for looks in (True, False):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        generator = torch.Generator().manual_seed(4) if own != "global" else None
        sampler = RandomSampler(range(7), generator=generator) if own == "sampler" else None
        loader = DataLoader(range(7), shuffle=sampler is None, sampler=sampler, generator=generator)
        list(loader)
        if looks:
            try:
                with unseen_iteration([loader, [1, 2]]):
                    for _, _ in zip(range(batches), loader, strict=False):
                        drawn()
                    if raises:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                assert raises
        found.append([*map(int, loader), *drawn()])
    assert same(*found)


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(())


@pytest.mark.parametrize("is_warm", [True, False])
def test_workers_that_stay_go_on_where_they_were(is_warm):
    found = []
    for looks in (True, False):
        torch.manual_seed(3)
        loader = DataLoader(Noise(), num_workers=1, persistent_workers=True)
        if is_warm:
            list(loader)
        if looks:
            with unseen_iteration([loader]):
                list(loader)
        found.append(torch.cat(list(loader)).tolist())
    assert found[0] == found[1]
