"""What precision, strategy and scaler of a Trainer do to gradients."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer


def active_scaler(trainer: Trainer) -> GradScaler | None:
    """Return the GradScaler of a Trainer that has one at work."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def unscales_in_step(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether the gradients are still scaled because the (fused) optimizer unscales them itself."""
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return getattr(optimizer, "_step_supports_amp_scaling", False) and stage is OptState.READY


def scale_may_have_overflowed(scaler: GradScaler) -> Tensor:
    """Whether the scale may be what made the gradients overflow; the scaler then looks for a lower one; shape ()."""
    return scaler._scale > 1  # type: ignore[operator, return-value]


def on_any_rank(trainer: Trainer, parameters: list[Tensor], nonfinite: Tensor) -> Tensor:
    """Return what the ranks must hold alike; only gradients that nobody has reduced can differ between them."""
    strategies = _base_names(trainer.strategy)
    if trainer.world_size == 1 or "DDPStrategy" in strategies or all(hasattr(p, "full_tensor") for p in parameters):
        return nonfinite
    return trainer.strategy.reduce(nonfinite.float(), reduce_op="max") > 0


def refuse_unsupported_strategies(trainer: Trainer) -> None:
    """Refuse the strategies under which no rank sees the whole gradient."""
    strategies = _base_names(trainer.strategy)
    if "DeepSpeedStrategy" in strategies:
        remedy = "set `gradient_clipping` in DeepSpeed's own configuration"
    elif "FSDPStrategy" in strategies:
        remedy = "use ModelParallelStrategy (FSDP2), whose sharded gradients it can see"
    else:
        return
    raise MisconfigurationException(
        f"GradientClipping cannot see the whole gradient under {type(trainer.strategy).__name__}: {remedy}."
    )


def _base_names(strategy: object) -> set[str]:
    return {base.__name__ for base in type(strategy).__mro__}  # by name: of `lightning` and `pytorch_lightning` alike
