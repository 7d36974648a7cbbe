"""Skip an optimizer's next step, so that weights and optimizer state stay bit-identical, in any training loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_tricks._torch_compat.optimizers import is_fused

# What was installed for a step that has not come: only one hook of ours may be removed while torch calls the hooks
_WAITING: WeakKeyDictionary[Any, ExitStack] = WeakKeyDictionary()


def skip_step_(optimizer: Optimizer) -> Callable[[], None]:
    """Drop the gradients, so that the next step does nothing.

    Zero gradients would not suffice: weight decay and momentum still move the weights. Counters in the optimizer's
    parameter groups (schedule-free optimizers have them) are restored after the step. If it is called again before that
    step, the second call replaces the first.

    Args:
        optimizer: Any optimizer that ignores parameters without a gradient, as torch's do, and evaluates no closure
            more than once (LBFGS does).

    Returns:
        A function that ends the skipping at once, for a step that never comes. After the step it restores what the
        optimizer has changed since, or does nothing.

    Examples:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.AdamW([weight])
        >>> weight.grad = torch.tensor([1.0, torch.nan])
        >>> close = skip_step_(optimizer)
        >>> optimizer.step()
        >>> weight, len(optimizer.state)
        (tensor([1., 1.], requires_grad=True), 0)
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    options, depth, hooks = copy_group_options(optimizer), 0, _waiting_anew(optimizer)

    def enter(*_: Any) -> None:
        nonlocal depth
        if depth == 0:  # the last post hook, as torch does not allow removing one of those before it
            hooks.callback(optimizer.register_step_post_hook(leave).remove)
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth <= 0:  # torch runs the hooks once more where a subclass calls the step of its base class
            end()

    def end() -> None:
        hooks.close()
        restore_group_options(optimizer, options)

    with suppress(AttributeError):  # it wraps another optimizer, and has no hooks of its own
        hooks.callback(optimizer.register_step_pre_hook(enter).remove)
    return end


def _waiting_anew(optimizer: Any) -> ExitStack:
    """Take back what was installed for a step that never came, and return a place for what is installed now."""
    if (earlier := _WAITING.get(optimizer)) is not None:
        earlier.close()
    _WAITING[optimizer] = ExitStack()
    return _WAITING[optimizer]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether `skip_step_on_device_` works for the next step of an optimizer.

    It works for torch's fused optimizers, except for the first step of an SGD with momentum: a fused kernel that skips
    this step keeps uninitialised memory as its momentum.
    """
    if not is_fused(optimizer):
        return False
    groups = optimizer.param_groups
    if not all(group.get("fused") for group in groups):
        return False
    return not isinstance(optimizer, SGD) or all(
        optimizer.state[parameter].get("momentum_buffer") is not None
        for group in groups
        if group["momentum"]
        for parameter in group["params"]
        if parameter.grad is not None
    )


def skip_step_on_device_(optimizer: Optimizer, condition: Tensor) -> Callable[[], None]:
    """Make the next step do nothing if a condition holds, without reading it back to the host.

    If it is called again before that step, the condition of the second call counts.

    Args:
        optimizer: An optimizer for which `skips_on_device` holds.
        condition: A bool, shape ().

    Returns:
        A function that withdraws the condition, for a step that never comes. After the step it does nothing.
    """
    # a GradScaler sets the same attributes to tell a fused optimizer that it found an overflow
    installed = _waiting_anew(optimizer)
    for name, value in (("found_inf", condition.float()), ("grad_scale", None)):
        setattr(optimizer, name, value)
        installed.callback(delattr, proxy(optimizer), name)
    is_in_step = False

    def enter(*_: Any) -> None:
        nonlocal is_in_step
        if not is_in_step:  # as in `skip_step_`
            is_in_step = True
            installed.callback(optimizer.register_step_post_hook(lambda *_: installed.close()).remove)

    installed.callback(optimizer.register_step_pre_hook(enter).remove)
    return installed.close


def copy_group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copy the options in the parameter groups of an optimizer, which is all but the parameters."""
    return [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    ]


@torch.no_grad()
def restore_group_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    """Restore the options that `copy_group_options` copied; groups that were added since stay as they are."""
    for group, values in zip(optimizer.param_groups, options, strict=False):
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)  # a captured graph and a scheduler hold this very tensor
            else:
                group[name] = value


def hold_schedulers(optimizer: Optimizer, schedulers: list[Any]) -> Callable[[], None]:
    """Copy the state of learning rate schedulers and the options that they set; return a function that restores both.

    Args:
        optimizer: The optimizer whose step is skipped.
        schedulers: Its schedulers that may be stepped before.
    """
    options = copy_group_options(optimizer)
    states = [(scheduler, dict(scheduler.state_dict())) for scheduler in schedulers]

    def restore() -> None:
        for scheduler, state in states:
            scheduler.load_state_dict(state)
        restore_group_options(optimizer, options)

    return restore
