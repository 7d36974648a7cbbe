"""A probe for each private symbol of schedulers; run with the oldest and the newest supported torch."""

import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as lrs

from lightning_tricks._torch_compat.optimizers import inner_schedulers, set_last_lr


def test_inner_schedulers_and_last_rates():
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    parts = [lrs.ConstantLR(optimizer), lrs.StepLR(optimizer, 1)]
    assert inner_schedulers(lrs.SequentialLR(optimizer, parts, [2])) == parts
    assert inner_schedulers(lrs.ChainedScheduler(parts)) == parts
    assert inner_schedulers(parts[0]) == []
    for scheduler in (parts[0], lrs.ReduceLROnPlateau(optimizer)):
        set_last_lr(scheduler, [0.5])
        assert scheduler.get_last_lr() == [0.5]
