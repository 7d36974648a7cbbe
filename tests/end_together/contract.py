"""What EndTogether promises."""

from unittest.mock import patch

import torch
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks import EndTogether
from tests.contract.case import Case
from tests.contract.checks import assert_same_run
from tests.contract.lab import Lab, Setting
from tests.small import BATCHES, digits


class Stream(IterableDataset):
    """The share of the digits of a rank; with `more`, rank zero has two batches more than the others."""

    def __init__(self, more: int = 0) -> None:
        self.more = more

    def __iter__(self):
        rank, ranks = 0, 1
        if distributed.is_initialized():
            rank, ranks = distributed.get_rank(), distributed.get_world_size()
        count = 4 * (BATCHES // ranks) + 4 * self.more * (ranks > 1 and rank == 0)
        return (digits()[(4 * BATCHES // ranks * rank + index) % (4 * BATCHES)] for index in range(count))


def verify(lab: Lab, setting: Setting, callback: type = EndTogether) -> None:
    """A rank with more batches than the others trains on those that it would have without the last ones."""
    runs = []
    for more, callbacks in ((2, [callback()]), (0, [])):
        torch.manual_seed(0)
        with patch("tests.contract.lab.loader", lambda more=more: DataLoader(Stream(more), batch_size=4)):
            runs.append(lab.fit(callbacks, setting))
    assert len(runs[0]) == setting.ranks
    assert_same_run(*runs)


CASES = (
    Case(
        callback=EndTogether,
        arguments={"stages": ["train", "val"]},
        kind="observer",  # of one rank, and of ranks with the same number of batches
        neutral={"stages": []},
        instances=1,
        verify=verify,
    ),
)
