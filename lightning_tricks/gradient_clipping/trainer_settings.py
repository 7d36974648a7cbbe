"""What the precision, the strategy, the GradScaler and the steps of a Trainer do to gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from traceback import walk_stack
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_tricks._guards import LIGHTNING_PACKAGES, overriding
from lightning_tricks._lightning_compat.flavor import DDPStrategy, MisconfigurationException, Trainer, rank_zero_warn
from lightning_tricks._torch_compat.gradients import observing_clipping
from lightning_tricks._torch_compat.optimizers import is_unscaled, scale_of, takes_scale


def unscales_in_step(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether the gradients are still scaled because the (fused) optimizer unscales them in its step."""
    return takes_scale(optimizer) and not is_unscaled(scaler, optimizer)


def scale_may_have_overflowed(scaler: GradScaler) -> Tensor:
    """Whether the scale may have made the gradients overflow; the scaler then lowers it; a bool of shape ()."""
    return scale_of(scaler) > 1


def on_any_rank(trainer: Trainer, parameters: list[Tensor], nonfinite: Tensor) -> Tensor:
    """Whether a condition holds on any rank; a collective only where the strategy does not reduce the gradients."""
    if (
        trainer.world_size == 1
        or isinstance(trainer.strategy, DDPStrategy)
        or all(hasattr(p, "full_tensor") for p in parameters)
    ):
        return nonfinite
    return trainer.strategy.reduce(nonfinite.float(), reduce_op="max") > 0


def warn_of_other_clipping(trainer: Trainer, own: str) -> AbstractContextManager[None]:
    """Warn once if others clip the gradients, too: the Trainer at once, code that calls torch's functions when it does.

    Args:
        trainer: The Trainer whose optimizers are watched until the context is left.
        own: The argument that says how the callback clips.
    """
    if trainer.gradient_clip_val:
        _warn_of_clipping(f"{own}) and Trainer(gradient_clip_val={trainer.gradient_clip_val}) are both set")
        return nullcontext()
    was_said = False

    def called(parameters: list[Tensor], bound: float) -> None:
        nonlocal was_said
        if was_said or math.isinf(bound):  # which only measures the norm
            return
        optimized = {p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
        if was_said := not optimized.isdisjoint(parameters):
            _warn_of_clipping(f"{own}) and {_caller()}, which clips to {bound:g}, are both used")

    return observing_clipping(called)


def _warn_of_clipping(by_whom: str) -> None:
    rank_zero_warn(f"GradientClipping({by_whom}: gradients are clipped twice. Remove one.")


def _caller() -> str:
    """Return the function, of neither torch, Lightning nor this package, that has called."""
    libraries = {*LIGHTNING_PACKAGES, "torch", "lightning_tricks"}
    calls = ((frame.f_globals.get("__name__", ""), frame, line) for frame, line in walk_stack(None))
    frame, line = next((frame, line) for name, frame, line in calls if name.partition(".")[0] not in libraries)
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})"


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
    for optimizer in trainer.optimizers if refuse_repeated else ():
        if isinstance(optimizer, LBFGS):
            raise _repeated_closure_error(optimizer)
    plain = trainer.strategy.optimizer_step
    is_lightnings = False

    def step(optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_lightnings
        was_called = False

        def outside_of_the_step() -> Any:
            nonlocal is_lightnings, was_called
            if was_called and refuse_repeated:
                raise _repeated_closure_error(optimizer)
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
            raise MisconfigurationException(
                f"GradientClipping cannot clip optimizer {index}: {type(optimizer).__name__}.step did not call its "
                "`closure`, in which gradients are clipped. Call it in that method, before the gradients are used, or "
                "pass it on: `super().step(closure)`."
            )
        return result

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        # torch.distributed.checkpoint makes a step, without gradients and rates, where an optimizer has no state yet
        if is_lightnings or not any(group.get("lr") for group in optimizer.param_groups):
            return
        own = {id(group) for group in optimizer.param_groups}  # an optimizer that is wrapped shares them
        for index, known in enumerate(trainer.optimizers):
            if any(id(group) in own for group in known.param_groups):
                raise MisconfigurationException(
                    f"GradientClipping cannot clip optimizer {index}: it was stepped without Lightning, which then "
                    "calls no hook. Step what `self.optimizers()` returns (use_pl_optimizer=True), or the `optimizer` "
                    "that `optimizer_step` gets."
                )

    hook = register_optimizer_step_pre_hook(refuse)
    with overriding(trainer.strategy, optimizer_step=step):
        try:
            yield
        finally:
            hook.remove()


def _repeated_closure_error(optimizer: Optimizer) -> MisconfigurationException:
    name = type(optimizer).__name__
    return MisconfigurationException(
        f'GradientClipping(on_nonfinite="skip") cannot skip a step of {name}: its step computes the gradients several '
        'times, and moves the weights in between. Use "raise" or "ignore".'
    )
