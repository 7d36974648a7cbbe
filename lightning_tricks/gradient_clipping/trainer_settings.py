"""What the precision, the strategy and the GradScaler of a Trainer do to gradients."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_tricks._torch_compat.optimizers import is_unscaled, scale_of, takes_scale


def active_scaler(trainer: Trainer) -> GradScaler | None:
    """Return the enabled GradScaler of a Trainer, or None."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


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
        or "DDPStrategy" in _base_names(trainer.strategy)
        or all(hasattr(p, "full_tensor") for p in parameters)
    ):
        return nonfinite
    return trainer.strategy.reduce(nonfinite.float(), reduce_op="max") > 0


def refuse_unsupported_strategies(trainer: Trainer) -> None:
    """Raise an error for strategies under which no rank sees the whole gradient."""
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
