"""The closed forms against torch's schedulers where those are right, and at the edges where they are not."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from lightning_tricks.lr_schedules import (
    constant,
    exponential,
    inverse_sqrt,
    multistep,
    one_cycle,
    polynomial,
    ramp,
    step,
    warmup_cosine,
    warmup_linear,
    wsd,
)
from tests.small import cases, without_warnings


def _torchs(make, steps, lr=1.0):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@cases(
    "ours, make, steps",
    (partial(warmup_cosine, total=20, end_factor=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 20, 0.1), 21),
    (partial(polynomial, total=20, power=1.5), lambda o: lr_scheduler.PolynomialLR(o, 20, 1.5), 40),
    (partial(warmup_linear, total=20, end_factor=0.2), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, 20), 40),
    (partial(multistep, milestones=[3, 7, 15]), lambda o: lr_scheduler.MultiStepLR(o, [3, 7, 15], 0.1), 30),
    (partial(step, step_size=10), lambda o: lr_scheduler.StepLR(o, 10, 0.1), 35),
    (partial(exponential, gamma=0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9), 30),
    (constant, lambda o: lr_scheduler.ConstantLR(o, 1.0, 5), 30),
    (partial(one_cycle, total=30, warmup=9), lambda o: lr_scheduler.OneCycleLR(o, 1.0, 30), 30),
    (partial(one_cycle, total=10, warmup=4.5), lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10, pct_start=0.45), 10),
    ids=["cosine", "polynomial", "linear", "multistep", "step", "exponential", "constant", "one cycle", "short cycle"],
)
def test_equals_torch(ours, make, steps):
    with without_warnings():  # the last step of OneCycleLR
        if "OneCycle" in make.__code__.co_names[1]:
            steps -= 1
        expected = _torchs(make, steps)
    assert [ours(now) for now in range(steps)] == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.trap("gradient_clipping: CosineAnnealingLR climbs back after T_max")
def test_cosine_stays_at_its_end():
    torchs = _torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, 10), 21)
    assert torchs[20] > 0.9
    assert [warmup_cosine(now, total=10) for now in range(10, 30)] == [0.0] * 20


@pytest.mark.trap("gradient_clipping: OneCycleLR raises past its end")
def test_one_cycle_stays_at_its_end():
    with pytest.raises(ValueError, match="Tried to step"):
        _torchs(lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10), 12)
    assert len({one_cycle(now, total=10, warmup=3) for now in range(9, 40)}) == 1


@pytest.mark.trap("gradient_clipping: pl_bolts' warm-up starts at 0, climbs again, divides by zero for warmup == max")
def test_warm_up_never_rests_at_zero():
    for kind in (warmup_cosine, warmup_linear, wsd):
        rising = [kind(now, total=10, warmup=4) for now in range(5)]
        assert rising == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert [kind(now, total=4, warmup=4) for now in (3, 4, 5)] == [0.8, 0.0, 0.0]
        assert kind(0, total=1, warmup=1) == 0.5


_EVERY = {
    "warmup_cosine": lambda now, total, warmup, end: warmup_cosine(now, total, warmup, end),
    "warmup_linear": lambda now, total, warmup, end: warmup_linear(now, total, warmup, end),
    "wsd": lambda now, total, warmup, end: wsd(now, total, warmup, (total - warmup) / 2, end),
    "inverse_sqrt": lambda now, total, warmup, end: inverse_sqrt(now, warmup, total),
    "polynomial": lambda now, total, warmup, end: polynomial(now, total, 2.0, end, warmup),
    "one_cycle": lambda now, total, warmup, end: one_cycle(now, total, warmup, 0.04, end),
    "exponential": lambda now, total, warmup, end: exponential(now, 0.9, total),
    "step": lambda now, total, warmup, end: step(now, max(1, total // 3), 0.5, total),
    "multistep": lambda now, total, warmup, end: multistep(now, [warmup, total], 0.5),
    "constant": lambda now, total, warmup, end: constant(now),
    "ramp": lambda now, total, warmup, end: ramp(now, warmup),
}


@pytest.mark.parametrize("kind", _EVERY)
@settings(derandomize=True)
@given(total=st.integers(0, 200), share=st.floats(0, 1), end=st.floats(0, 1))
def test_rises_then_falls_then_stays(kind, total, share, end):
    warmup = int(share * total)
    factors = [_EVERY[kind](now, total, warmup, end) for now in range(total + 20)]
    assert all(math.isfinite(factor) and 0 <= factor <= 1 for factor in factors)
    rising, falling = factors[:warmup], factors[warmup:]
    if kind not in ("step", "exponential", "multistep"):
        assert all(later >= earlier - 1e-12 for earlier, later in pairwise(rising))
    if kind != "ramp":
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(falling))
    assert len(set(factors[total:])) == 1
    if kind in ("warmup_cosine", "warmup_linear", "wsd", "polynomial", "one_cycle"):
        assert factors[-1] == pytest.approx(end)
