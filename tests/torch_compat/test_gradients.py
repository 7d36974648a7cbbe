"""Probes for private symbols of clipping and checkpointing; run with the oldest and the newest supported torch."""

from functools import partial

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.utils.checkpoint import checkpoint

from lightning_tricks._torch_compat.gradients import observing_clipping, observing_cut_checkpoints


def test_calls_that_clip_are_seen_and_clip_as_before():
    weight, seen = torch.ones(2, requires_grad=True), []
    with observing_clipping(lambda parameters, bound: seen.append((parameters, bound))):
        for clip in (clip_grad_norm_, clip_grad_value_, lambda p, n: clip_grads_with_norm_(p, n, torch.tensor(4.0))):
            weight.grad = torch.tensor([3.0, 4.0])
            clip(iter([weight]), 2)
            assert weight.grad.max() <= 2
    clip_grad_norm_(weight, 1.0)
    assert [(parameter is weight, bound) for (parameter,), bound in seen] == [(True, 2.0)] * 3


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_that_give_no_gradient_are_seen():
    layer, seen = torch.nn.Linear(1, 1), []
    for again in (True, False):
        with observing_cut_checkpoints(partial(seen.append, again)):
            for needs_gradient in (True, False):
                checkpoint(layer, torch.ones(1, 1, requires_grad=needs_gradient), use_reentrant=again)
    assert seen == [True]
