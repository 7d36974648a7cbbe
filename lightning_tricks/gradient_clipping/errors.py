"""The errors that stop a fit with GradientClipping."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._shared.text import list_names

_MOST_NAMES = 10


def nonfinite_error(trainer: Trainer, names: Sequence[str], finite: Tensor, reason: str) -> RuntimeError:
    """Return an error that names the layers whose gradients are not finite.

    Args:
        trainer: The Trainer.
        names: The qualified names of all parameters that have a gradient.
        finite: Whether the gradient of each is finite; shape (n,).
        reason: The argument that asks for the error.
    """
    bad = [name for name, is_finite in zip(names, finite.tolist(), strict=True) if not is_finite]
    listed = list_names(bad, _MOST_NAMES)
    if len(bad) == len(names):
        listed += "; since it is all of them, look at the loss itself and at its batch"
    return RuntimeError(
        f"GradientClipping({reason}): {len(bad)} of {len(names)} gradients are not finite at global step "
        f"{trainer.global_step} (epoch {trainer.current_epoch}): {listed}."
    )


def repeated_closure_error(optimizer: Optimizer) -> MisconfigurationException:
    """Return the error for an optimizer, such as LBFGS, whose steps should be skipped."""
    name = type(optimizer).__name__
    return MisconfigurationException(
        f'GradientClipping(on_nonfinite="skip") cannot skip a step of {name}: its step computes the gradients several '
        'times, and moves the weights in between. Use "raise" or "ignore".'
    )


def unseen_step_error(index: int) -> MisconfigurationException:
    """Return the error for an optimizer that was stepped without Lightning."""
    return MisconfigurationException(
        f"GradientClipping cannot clip optimizer {index}: it was stepped past Lightning, which then calls no hook. "
        "Step what `self.optimizers()` returns (use_pl_optimizer=True), or the `optimizer` that `optimizer_step` gets."
    )


def forgotten_closure_error(index: int, optimizer: Optimizer) -> MisconfigurationException:
    """Return the error for an optimizer that did not call its closure."""
    return MisconfigurationException(
        f"GradientClipping cannot clip optimizer {index}: {type(optimizer).__name__}.step did not call its `closure`, "
        "in which gradients are clipped. Call it in that method, before the gradients are used, or hand it on: "
        "`super().step(closure)`."
    )
