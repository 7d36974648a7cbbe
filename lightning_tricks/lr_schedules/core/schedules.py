"""Schedules in closed form: pure functions of a step, for any training loop.

Each returns the factor of the base learning rate after `step` steps (0 before the first). None divides by zero where a
phase has no steps, and after its end each stays where it is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence


def ramp(step: float, warmup: float = 0) -> float:
    """Rise in a straight line: `warmup` steps below 1, none of them at 0.

    Args:
        step: Steps made so far, >= 0.
        warmup: Steps below the peak, >= 0.

    Examples:
        >>> [ramp(step, warmup=3) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (step + 1) / (warmup + 1))


def constant(step: float) -> float:
    """Stay at 1."""
    return 1.0


def warmup_cosine(step: float, total: float, warmup: float = 0, end_factor: float = 0.0) -> float:
    """Rise, then fall along half a cosine to `end_factor` at `total`.

    Without a warm-up it is torch's CosineAnnealingLR up to its T_max, after which that one rises again.

    Args:
        step: Steps made so far, >= 0.
        total: Steps until the end of the fall.
        warmup: Steps below the peak, >= 0.
        end_factor: The factor at the end and after it.

    Source: Loshchilov and Hutter, arXiv 1608.03983.

    Examples:
        >>> [round(warmup_cosine(step, total=4, warmup=1), 3) for step in range(6)]
        [0.5, 1.0, 0.75, 0.25, 0.0, 0.0]
    """
    if step < warmup:
        return ramp(step, warmup)
    return _interpolate((1 + math.cos(math.pi * _fraction_done(step, warmup, total))) / 2, end_factor)


def warmup_linear(step: float, total: float, warmup: float = 0, end_factor: float = 0.0) -> float:
    """Rise, then fall in a straight line to `end_factor` at `total`; arguments as in `warmup_cosine`.

    Examples:
        >>> [warmup_linear(step, total=5, warmup=1) for step in range(7)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return polynomial(step, total, 1.0, end_factor, warmup)


def wsd(step: float, total: float, warmup: float = 0, decay: float = 0, end_factor: float = 0.0) -> float:
    """Rise, stay, then fall in a straight line over the last `decay` steps to `end_factor` at `total`.

    Args:
        step: Steps made so far, >= 0.
        total: Steps until the end of the fall.
        warmup: Steps below the peak, >= 0.
        decay: Steps of the fall, >= 0.
        end_factor: The factor at the end and after it.

    Source: Hu et al., MiniCPM, arXiv 2404.06395.

    Examples:
        >>> [wsd(step, total=6, warmup=1, decay=2) for step in range(8)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    return (
        ramp(step, warmup)
        if step < warmup
        else _interpolate(1 - _fraction_done(step, max(warmup, total - decay), total), end_factor)
    )


def inverse_sqrt(step: float, warmup: float = 0, total: float = math.inf) -> float:
    """Rise, then fall with the inverse square root of the step, until `total`.

    Args:
        step: Steps made so far, >= 0.
        warmup: Steps below the peak, >= 0.
        total: The step from which the factor is constant.

    Source: Vaswani et al., arXiv 1706.03762, scaled to a peak of 1.

    Examples:
        >>> [round(inverse_sqrt(step, warmup=1), 3) for step in (0, 1, 7, 31)]
        [0.5, 1.0, 0.5, 0.25]
    """
    return ramp(step, warmup) if step < warmup else math.sqrt((warmup + 1) / (max(warmup, min(step, total)) + 1))


def multistep(step: float, milestones: Sequence[float], gamma: float = 0.1) -> float:
    """Multiply by `gamma` at each milestone, as torch's MultiStepLR.

    Args:
        step: Steps made so far, >= 0.
        milestones: Steps at which the factor falls, increasing.
        gamma: The factor that is applied at each milestone.

    Examples:
        >>> [multistep(step, [2, 3], gamma=0.5) for step in range(5)]
        [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    return float(gamma ** bisect_right(milestones, step))


def step(step: float, step_size: float, gamma: float = 0.1, total: float = math.inf) -> float:
    """Multiply by `gamma` every `step_size` steps, as torch's StepLR, until `total`.

    Examples:
        >>> [step(now, step_size=2, gamma=0.5) for now in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    return float(gamma ** (min(step, total) // step_size))


def exponential(step: float, gamma: float, total: float = math.inf) -> float:
    """Multiply by `gamma` at each step, as torch's ExponentialLR, until `total`.

    Examples:
        >>> [exponential(step, gamma=0.5, total=2) for step in range(4)]
        [1.0, 0.5, 0.25, 0.25]
    """
    return float(gamma ** min(step, total))


def polynomial(step: float, total: float, power: float = 1.0, end_factor: float = 0.0, warmup: float = 0) -> float:
    """Fall as (1 - step / total) to the power of `power`, as torch's PolynomialLR, after a rise if there is a `warmup`.

    Examples:
        >>> [polynomial(step, total=4, power=2.0) for step in range(6)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    return (
        ramp(step, warmup)
        if step < warmup
        else _interpolate((1 - _fraction_done(step, warmup, total)) ** power, end_factor)
    )


def one_cycle(
    step: float, total: float, warmup: float, start_factor: float = 1 / 25, end_factor: float = 1 / 250_000
) -> float:
    """Rise along a cosine to 1 at step `warmup` - 1, and fall along another to `end_factor` at step `total` - 1.

    The learning rate is that of torch's OneCycleLR, which raises an error after its last step; momentum is not cycled.

    Args:
        step: Steps made so far, >= 0.
        total: Steps of the whole cycle.
        warmup: Steps of the rise.
        start_factor: The factor at step 0.
        end_factor: The factor at the end and after it.

    Source: Smith and Topin, arXiv 1708.07120.

    Examples:
        >>> [round(one_cycle(step, total=5, warmup=3), 2) for step in range(6)]
        [0.04, 0.52, 1.0, 0.5, 0.0, 0.0]
    """
    peak = warmup - 1
    if step <= peak:
        return _interpolate((1 - math.cos(math.pi * _fraction_done(step, 0, peak))) / 2, start_factor)
    return _interpolate((1 + math.cos(math.pi * _fraction_done(step, peak, total - 1))) / 2, end_factor)


def _fraction_done(step: float, start: float, end: float) -> float:
    """Return how much of the way from start to end is done, in [0, 1]; all of it where there is none."""
    return 1.0 if step >= end else 0.0 if step <= start else (step - start) / (end - start)


def _interpolate(weight: float, end_factor: float) -> float:
    return end_factor + (1 - end_factor) * weight
