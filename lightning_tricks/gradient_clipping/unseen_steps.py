"""Steps of optimizers that Lightning does not announce, so that nothing could clip their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_tricks._guards import overriding
from lightning_tricks.gradient_clipping.errors import forgotten_closure_error, repeated_closure_error, unseen_step_error


@contextmanager
def refuse_unseen_steps(
    trainer: Trainer, after_step: Callable[[int], None], *, refuse_repeated: bool
) -> Iterator[None]:
    """Raise an error for a step that is not made through Lightning, or whose closure the optimizer does not call.

    What an optimizer does inside a step of Lightning, such as calling the steps of its base class or of an optimizer
    that it wraps, is a part of that step; what the closure does is not.

    Args:
        trainer: The Trainer whose optimizers are watched until the context is left.
        after_step: Called with the index of an optimizer after each of its steps.
        refuse_repeated: Whether to refuse an optimizer that calls its closure more than once in a step, too.
    """
    plain = trainer.strategy.optimizer_step
    is_lightnings = False

    def step(optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_lightnings
        was_called = False

        def outside_of_the_step() -> Any:
            nonlocal is_lightnings, was_called
            if was_called and refuse_repeated:
                raise repeated_closure_error(optimizer)
            is_lightnings, was_called = False, True
            result = closure()
            is_lightnings = True
            return result

        outer, is_lightnings = is_lightnings, True
        try:
            result = plain(optimizer, outside_of_the_step, *args, **kwargs)
        finally:
            is_lightnings = outer
        index = trainer.optimizers.index(optimizer)
        after_step(index)
        if not was_called and not trainer.lightning_module.automatic_optimization:  # else Lightning raises an error
            raise forgotten_closure_error(index, optimizer)
        return result

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        # torch.distributed.checkpoint makes a step, without gradients and rates, where an optimizer has no state yet
        if is_lightnings or not any(group.get("lr") for group in optimizer.param_groups):
            return
        own = {id(group) for group in optimizer.param_groups}  # an optimizer that is wrapped shares them
        for index, known in enumerate(trainer.optimizers):
            if any(id(group) in own for group in known.param_groups):
                raise unseen_step_error(index)

    hook = register_optimizer_step_pre_hook(refuse)
    with overriding(trainer.strategy, optimizer_step=step):
        try:
            yield
        finally:
            hook.remove()
