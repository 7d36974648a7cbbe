"""How fused optimizers and GradScalers share out the unscaling of gradients."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from lightning_tricks._torch_compat.guards import needs_private


def takes_scale(optimizer: Optimizer) -> bool:
    """Whether an optimizer unscales gradients, and skips a step, in its own kernel, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether a scaler has unscaled the gradients of an optimizer since its last step."""
    with needs_private("GradientClipping", KeyError):
        return scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY


def scale_of(scaler: GradScaler) -> Tensor:
    """Return the scale of a scaler that has scaled a loss, without a copy to the host; shape ()."""
    with needs_private("GradientClipping"):
        scale: Any = scaler._scale
    return cast(Tensor, scale)
