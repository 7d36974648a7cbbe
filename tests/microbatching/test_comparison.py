"""Which difference between a batch and its parts is taken for one of rounding."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_tricks.microbatching.core.comparison import ComparisonError, compare_with_parts


@pytest.mark.parametrize(("share", "is_refuted"), [(1.0, False), (1.0019, False), (1.0021, True)])
def test_a_mean_differs_by_no_more_than_rounding_of_its_size(share, is_refuted):
    net = nn.Linear(4, 1)
    nn.init.zeros_(net.weight)
    nn.init.ones_(net.bias)

    def loss_of(rows):
        return net(rows).mean() * (1 if len(rows) == 12 else share)

    with pytest.raises(ComparisonError, match="differ by") if is_refuted else nullcontext():
        assert compare_with_parts(net, loss_of, torch.ones(12, 4), 12) == ("mean", False)
