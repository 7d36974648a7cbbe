"""`StepCounter`: counts the operators of a training step as the Trainer runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_tricks._guards import overriding
from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer
from lightning_tricks.flops.core.operator_counter import OperatorCounter


class StepCounter:
    """Counts forward and backward passes of a Trainer's training steps, but neither optimizers nor metrics.

    Args:
        trainer: The Trainer.
        pl_module: Its module.

    Attributes:
        counter: What was counted since `start`; None where nothing is counted.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counter: OperatorCounter | None = None
        self._trainer, self._module = trainer, pl_module

    def __getstate__(self) -> dict[str, Any]:
        return {}  # it belongs to its fit

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand between the Trainer and the passes, for the time of a fit."""
        # the backward pass of the plugin: that of a microbatch goes past the strategy
        strategy, precision = self._trainer.strategy, self._trainer.precision_plugin
        step = self._counted(strategy.training_step, self._forward_pass)
        backward = self._counted(precision.backward, OperatorCounter.backward_pass)
        with overriding(strategy, training_step=step), overriding(precision, backward=backward):
            yield

    def start(self) -> None:
        """Count from now on, from zero."""
        self.counter = OperatorCounter(self._module, is_manual=not self._module.automatic_optimization)

    def _counted(
        self, plain: Callable[..., Any], counting: Callable[[OperatorCounter], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.counter is None:
                return plain(*args, **kwargs)
            try:
                with counting(self.counter):
                    return plain(*args, **kwargs)
            except Exception:
                self.start()  # memory may have run out, and the batch is run again
                raise

        return run

    @contextmanager
    def _forward_pass(self, counter: OperatorCounter) -> Iterator[None]:
        torchmetrics = sys.modules.get("torchmetrics")  # else no submodule can be a metric
        metrics = [part for part in self._module.modules() if torchmetrics and isinstance(part, torchmetrics.Metric)]
        methods = [(vars(metric), name, vars(metric)[name]) for metric in metrics for name in ("update", "compute")]
        for attributes, name, method in methods:
            attributes[name] = _counted_if(False, counter, method)
        try:
            with (
                register_optimizer_step_pre_hook(partial(_pause, counter)),
                register_optimizer_step_post_hook(lambda *_: setattr(counter, "is_paused", False)),
                counter.forward_pass(),
            ):
                yield
        finally:
            for attributes, name, method in methods:
                attributes[name] = method


def _pause(counter: OperatorCounter, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Stop counting, but for the closure among the arguments of an optimizer's step, which has the passes in it."""
    counter.is_paused = True

    def count(value: Any) -> Any:
        return _counted_if(True, counter, value) if callable(value) else value

    return tuple(map(count, args)), {name: count(value) for name, value in kwargs.items()}


def _counted_if(is_counted: bool, counter: OperatorCounter, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, counter.is_paused = counter.is_paused, not is_counted
        try:
            return function(*args, **kwargs)
        finally:
            counter.is_paused = before

    return call
