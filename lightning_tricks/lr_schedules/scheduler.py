"""The scheduler that gives every parameter group its base learning rate times one factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class FactorLR(LRScheduler):
    """Set the learning rate of each group to its base times a closed-form factor of the steps made.

    Groups that are added in mid-run are welcome, where torch's LambdaLR, SequentialLR and OneCycleLR raise: the rate
    that such a group comes with is its base, and the factor holds from the next step of the optimizer on. As nothing is
    accumulated, a resumed run has the learning rates of an uninterrupted one.

    Args:
        optimizer: Whose learning rates to set.
        factor: Steps made, from 0 -> factor of the base learning rate.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        >>> scheduler = FactorLR(optimizer, lambda step: 1 / (1 + step))
        >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()
        [1.0]
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self.factor = factor
        super().__init__(optimizer)
        this = ref(self)  # no circle of scheduler and hook

        def adopt(*_: Any) -> None:
            scheduler = this()
            if scheduler is not None:
                scheduler.adopt_groups()

        optimizer.register_step_pre_hook(adopt)

    def adopt_groups(self) -> None:
        """Take the learning rates of new groups for their bases, and apply the factor of now to them."""
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:
                rate = group["lr"]
                group["initial_lr"] = rate.clone() if isinstance(rate, Tensor) else rate
                if isinstance(rate, Tensor):
                    rate.mul_(self.factor(self.last_epoch))
                else:
                    group["lr"] = rate * self.factor(self.last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at `last_epoch`."""
        self.adopt_groups()
        factor = self.factor(self.last_epoch)
        return [group["initial_lr"] * factor for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, without the factor: it belongs to the code."""
        return {name: value for name, value in super().state_dict().items() if name != "factor"}
