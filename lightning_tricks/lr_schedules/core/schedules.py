"""Schedules in closed form: pure functions of a step, for any training loop, and the scheduler that applies one.

Each function returns the factor of the base learning rate after `step` steps (0 before the first). None divides by
zero where a phase has no steps, and after its end each stays where it is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.lr_schedules.core.combined_optimizer import PART_KEY, CombinedOptimizer


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


class FactorLR(LRScheduler):
    """Set the learning rate of each group to its base times a closed-form factor of the completed steps.

    Parameter groups may be added during a run, for which torch's LambdaLR, SequentialLR and OneCycleLR raise an error.
    The learning rate of an added group is its base, and the factor applies from the next optimizer step. Nothing is
    accumulated, so a resumed run has the learning rates of an uninterrupted one.

    Args:
        optimizer: The optimizer whose learning rates are set.
        factor: A function from the number of completed steps to the factor of the base learning rate; or one for each
            part of a `CombinedOptimizer`, in their order.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        >>> scheduler = FactorLR(optimizer, lambda step: 1 / (1 + step))
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()
        [1.0]
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float] | Sequence[Callable[[int], float]]) -> None:
        self.factor = factor
        super().__init__(optimizer)
        self._register_step_hook()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register_step_hook()  # hooks are not copied with an optimizer

    def _register_step_hook(self) -> None:
        this = ref(self)  # no circle of scheduler and hook

        def adopt(*_: Any) -> None:
            scheduler = this()
            if scheduler is not None:
                scheduler.adopt_groups()

        self.optimizer.register_step_pre_hook(adopt)

    def adopt_groups(self) -> None:
        """Take the learning rates of new groups as their base rates, and apply the current factor to them."""
        groups = self.optimizer.param_groups
        for group in groups:
            if "initial_lr" in group:
                continue
            rate = group["lr"]
            if isinstance(rate, Tensor):
                # the optimizer's default is one tensor for all groups, which holds the current rate
                known = (other["initial_lr"] for other in groups if other["lr"] is rate and "initial_lr" in other)
                group["initial_lr"] = next(known, rate).clone()
                rate.copy_(group["initial_lr"] * self._factor(group))
            else:
                group["initial_lr"] = rate
                group["lr"] = rate * self._factor(group)

    def _factor(self, group: dict[str, Any]) -> float:
        """Return the factor of the learning rate of a group at `last_epoch`."""
        if callable(self.factor):
            return self.factor(self.last_epoch)
        parts = list(cast(CombinedOptimizer, self.optimizer).parts)
        return self.factor[parts.index(group[PART_KEY])](self.last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at `last_epoch`."""
        self.adopt_groups()
        return [group["initial_lr"] * self._factor(group) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, without the factor: it belongs to the code."""
        return {name: value for name, value in super().state_dict().items() if name != "factor"}
