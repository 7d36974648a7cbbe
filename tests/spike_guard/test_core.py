"""The band of usual values, and copies of what a step changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lightning_tricks._shared.step_state import copy_gradients, copy_step_state, restore_gradients, restore_step_state
from lightning_tricks.microbatching.core.comparison import compare_with_parts
from lightning_tricks.spike_guard.functional import RobustBand
from lightning_tricks.spike_guard.snapshot import copy_optimizer, restore_optimizer
from tests.small import cases

VALUES = st.lists(st.floats(0.1, 10, allow_nan=False), min_size=5, max_size=40)


def limit_by_numpy(values: list[float], threshold: float, window: int) -> float:
    last = np.log(values[-window:])
    deviation = np.median(np.abs(last - np.median(last)))
    robust = np.median(last) + threshold * max(1.4826 * deviation, 0.01)
    plain = np.mean(last) + threshold * max(np.std(last), 0.01)
    return float(np.exp(min(max(robust, plain, 2.5 * last.max() - 1.5 * np.median(last)), 700)))


@settings(max_examples=60)
@given(values=VALUES, window=st.integers(2, 30), threshold=st.floats(0.5, 20))
def test_the_limit_is_that_of_the_last_usual_values(values, window, threshold):
    band, usual = RobustBand(threshold, window, warmup_steps=3), list[float]()
    for value in values:
        limit = band.limit()
        assert limit == pytest.approx(limit_by_numpy(usual, threshold, window) if len(usual) >= 3 else math.inf)
        assert (band.take([value]) is None) == (value <= limit)
        usual += [value] if value <= limit else []
    again = RobustBand(threshold, window, warmup_steps=3)
    again.load_state_dict(band.state_dict())
    assert again.limit() == band.limit()


@settings(max_examples=100)
@given(values=st.lists(st.floats(-10, 10) | st.just(0.0), min_size=1, max_size=30), threshold=st.floats(1e-3, 20))
def test_no_value_up_to_the_largest_of_the_last_ones_is_a_spike(values, threshold):
    band = RobustBand(threshold, window=20, warmup_steps=0)
    for value in values:
        limit, last = band.limit(), band.state_dict()["values"]
        assert not last or limit >= max(last) or limit == pytest.approx(max(last))
        assert (band.take([value]) is None) == (value <= max([limit, *last]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_spike_from_the_first_value_on(value):
    band = RobustBand(math.inf, warmup_steps=100)
    assert band.take([1.0, value]) == (1, math.inf)
    assert band.state_dict()["count"] == 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_is_undone_bit_for_bit(kind):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), MeanMetric())
    optimizer = kind(module.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    def step() -> None:
        out = module[1](module[0](torch.arange(15.0).reshape(5, 3).sin()))
        module[2].update(out.detach())
        optimizer.zero_grad()
        out.pow(2).sum().backward()
        optimizer.step()

    step()
    optimizer.state["of all"] = {"count": 1}
    found, gradients, states = copy_step_state(module, weights=True), copy_gradients(module), copy_optimizer(optimizer)
    mean = module[2].compute()
    step()
    after = copy_step_state(module, weights=True)
    optimizer.state["of all"]["count"] = optimizer.state["new"] = 2
    restore_step_state(module, found)
    restore_gradients(module, gradients)
    restore_optimizer(optimizer, states)
    assert optimizer.state["of all"] == {"count": 1}
    assert "new" not in optimizer.state
    assert torch.equal(module[2].compute(), mean)
    step()
    again = copy_step_state(module, weights=True)
    assert all(torch.equal(after["weights"][name], again["weights"][name]) for name in after["weights"])
    assert all(torch.equal(after["buffers"]["1"][name], again["buffers"]["1"][name]) for name in after["buffers"]["1"])


def test_lazy_layers_are_told():
    module = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"running_mean, running_var of a lazy layer .* run a batch"):
        copy_step_state(module)
    assert not copy_step_state(module[0])["buffers"]
    with pytest.raises(ValueError, match=r"weight, bias of a lazy layer"):
        compare_with_parts(module[0], lambda rows: module[0](rows).mean(), torch.ones(4, 3), 4)


def test_buffers_that_a_step_creates_resizes_or_replaces_are_as_before():
    module = nn.Module()
    module.register_buffer("made", None)
    module.register_buffer("grown", torch.arange(2.0))
    module.register_buffer("kept", torch.arange(3.0), persistent=False)
    kept, before = module.kept, copy_step_state(module)
    module.made, module.grown = torch.ones(1), torch.zeros(5)
    module.kept.add_(7)
    restore_step_state(module, before)
    assert module.made is None
    assert module.grown.tolist() == [0, 1]
    assert module.kept is kept
    assert kept.tolist() == [0, 1, 2]


@cases(
    "metric, of_classes",
    (MinMaxMetric(MeanMetric()), False),
    (RunningMean(window=2), False),
    (ClasswiseWrapper(MulticlassAccuracy(3, average=None)), True),
    (MetricCollection([MulticlassAccuracy(3), MulticlassRecall(3)]), True),
)
def test_metrics_of_metrics_count_on_where_they_were(metric, of_classes):
    def update(*numbers: int) -> None:
        for number in numbers:
            metric.update(*((torch.eye(3), torch.full((3,), number)) if of_classes else (torch.tensor(number),)))

    update(1, 2)
    before = copy_step_state(metric)
    update(0)
    metric.compute()
    restore_step_state(metric, before)
    update(2)
    found = metric.compute()
    metric.reset()
    update(1, 2, 2)
    assert str(found) == str(metric.compute())
