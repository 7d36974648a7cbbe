"""Which difference between a batch and its parts is taken for one of rounding."""

import pytest
import torch
from torch import nn

from lightning_tricks.microbatching.core.comparison import compare_with_parts


@pytest.mark.parametrize(("share", "is_refuted"), [(1.0, False), (1.003, False), (1.005, True)])
def test_a_mean_differs_by_no_more_than_rounding_of_its_size(share, is_refuted):
    net = nn.Linear(4, 1)
    nn.init.zeros_(net.weight)
    nn.init.ones_(net.bias)

    def loss_of(rows):  # the share of the loss is no part of its gradient
        mean = net(rows).mean()
        return mean + (0 if len(rows) == 12 else (share - 1) * mean.detach())

    found = compare_with_parts(net, loss_of, torch.randn(12, 4), 12)
    assert found.is_refuted == is_refuted
    assert found.reduction == (None if is_refuted else "mean")
