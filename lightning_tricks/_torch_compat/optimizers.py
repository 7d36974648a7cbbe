"""How fused optimizers and GradScalers share out the unscaling of gradients, and what schedulers keep per group."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

from lightning_tricks._torch_compat.guards import needs_private, set_private


@needs_private("ExponentialMovingAverage")
def register_step_post_hook(optimizer: Any, hook: Any) -> Any:
    """Let a hook be called after each step from the next one on, and return its handle."""
    if not hasattr(optimizer, "_zero_grad_profile_name"):
        # The constructor, or else the first `zero_grad`, lets steps call hooks; timm's Lookahead calls no constructor.
        optimizer._patch_step_function()
    return optimizer.register_step_post_hook(hook)


def takes_scale(optimizer: Optimizer) -> bool:
    """Whether an optimizer unscales gradients, and skips a step, in its own kernel, as torch's fused ones do."""
    # What `GradScaler.step` asks: it then gives `grad_scale` and `found_inf` to the optimizer, and does not unscale
    # itself.
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes the scale itself, and does not merely show the attributes of one that it wraps."""
    # torch's fused optimizers set it in their constructor; a wrapper that passes attributes on has it not in itself,
    # and ignores a scale.
    return takes_scale(optimizer) and "_step_supports_amp_scaling" in vars(optimizer)


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether a scaler has unscaled the gradients of an optimizer since its last step."""
    with needs_private("GradientClipping", KeyError):
        # `unscale_` raises an error if it was called before; without it, gradients have the norm of scaled ones.
        return scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY


def scale_of(scaler: GradScaler) -> Tensor:
    """Return the scale of a scaler that has scaled a loss, without a copy to the host; shape ()."""
    with needs_private("GradientClipping"):
        # `get_scale` reads the number from the device, which waits for all that was queued there.
        scale: Any = scaler._scale
    return cast(Tensor, scale)


def inner_schedulers(scheduler: object) -> list[Any]:
    """Return the schedulers that a SequentialLR or a ChainedScheduler steps; none for any other."""
    # Only these have several; ReduceLROnPlateau and others have no attribute of the name.
    if not isinstance(scheduler, SequentialLR | ChainedScheduler):
        return []
    with needs_private("GradualUnfreezing(lr_multipliers=...)"):
        return list(scheduler._schedulers)


def set_last_lr(scheduler: LRScheduler, rates: list[Any]) -> None:
    """Set the learning rates that `get_last_lr` of a scheduler returns."""
    with needs_private("GradualUnfreezing(lr_multipliers=...)"):
        set_private(scheduler, _last_lr=rates)
