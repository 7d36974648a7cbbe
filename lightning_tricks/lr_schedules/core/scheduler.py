"""The scheduler that gives every parameter group its base learning rate times one factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.lr_schedules.core.combined_optimizer import PART_KEY, CombinedOptimizer


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
