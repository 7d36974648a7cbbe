"""The Lightning shell of the gradient clipping room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat import logs_at_this_step
from lightning_tricks.gradient_clipping.functional import (
    GradientNorms,
    check_max_norm,
    check_norm_type,
    clip_grads_with_norm_,
    gradient_norms,
)


class GradientClipping(TrickCallback):
    """Clip the gradient norm of each optimizer right before its step.

    It sees the gradients unscaled and accumulated: once for each optimizer step, under automatic and manual
    optimization, in every precision, with fused optimizers, under DDP and ModelParallelStrategy (FSDP2). LBFGS is
    clipped at each evaluation of its closure. The Trainer's own `gradient_clip_val` is not needed beside it. A module's
    own `on_before_optimizer_step` comes later and sees the clipped gradients.

    Logs `grad_norm/pre_clip`, `grad_norm/post_clip` and `grad_norm/clipped_fraction` (the share of this fit's steps
    whose norm was above `max_norm`); with several optimizers `grad_norm/0/pre_clip`, `grad_norm/1/pre_clip`, ...

    Args:
        max_norm: The largest norm allowed, > 0. Neutral: `float("inf")` clips nothing and goes on logging.
        norm_type: The p of the p-norm, > 0; `float("inf")` for the maximum norm.
        log: Whether to log the norms, without a host read beyond the logger's own.
        log_layers: Whether to log `grad_norm/<qualified name>` of each parameter tensor as well, every
            `log_every_n_steps`; the norms come from the pass that clips.

    The clipping itself: `lightning_tricks.gradient_clipping.functional.clip_grad_norm_`.

    Raises:
        TypeError: If `max_norm` or `norm_type` is no number.
        ValueError: If one of them is not positive.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[GradientClipping(max_norm=1.0)], accelerator="cpu", logger=False)
    """

    def __init__(
        self, max_norm: float = 1.0, norm_type: float = 2.0, *, log: bool = True, log_layers: bool = False
    ) -> None:
        self.max_norm = check_max_norm(max_norm)
        self.norm_type = check_norm_type(norm_type)
        self._log = log  # not `self.log`: Lightning binds the module's `log` method to that name
        self.log_layers = log_layers
        self._steps: dict[int, int] = {}
        self._clipped: dict[int, Tensor] = {}
        self._had_backward = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, warn about a second clip, and count from zero."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        _refuse_hidden_gradients(trainer)
        if trainer.gradient_clip_val:
            rank_zero_warn(
                f"GradientClipping(max_norm={self.max_norm}) and Trainer(gradient_clip_val="
                f"{trainer.gradient_clip_val}) are both set: gradients are clipped twice. Remove one."
            )
        self._steps, self._clipped = {}, {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Expect a backward."""
        self._had_backward = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that there are new gradients."""
        self._had_backward = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Clip the gradients of this optimizer, and log their norms."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and pl_module.automatic_optimization and not self._had_backward:
            return  # `training_step` returned None: Lightning has unscaled nothing and leaves the step out
        if scaler is not None and _is_scaled(scaler, optimizer):
            scaler.unscale_(optimizer)  # a fused optimizer would do it inside its step, so Lightning has not
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norms = gradient_norms(parameters, self.norm_type)
        if not norms.per_parameter.numel():
            return
        factor = clip_grads_with_norm_(parameters, self.max_norm, norms.total)

        index = trainer.optimizers.index(optimizer)
        self._count(index, norms.total)
        if self._log and not trainer.barebones:
            self._log_norms(trainer, pl_module, index, norms.total, factor)
        if self.log_layers and logs_at_this_step(trainer):
            pl_module.log_dict(_by_name(pl_module, parameters, norms), batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so when there was nothing to clip."""
        batches = trainer.fit_loop.total_batch_idx + 1
        unseen = [index for index in range(len(trainer.optimizers)) if index not in self._steps]
        if batches and unseen:
            reason = (
                "no batch had a loss, or `optimizer_step` of the module goes past Lightning"
                if pl_module.automatic_optimization
                else "step what `self.optimizers()` gives (use_pl_optimizer=True), Lightning calls no hook for others"
            )
            rank_zero_warn(f"GradientClipping saw 0 steps of optimizers {unseen} in {batches} batches: {reason}.")

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of steps and of clipped steps by optimizer."""
        return {"steps": dict(self._steps), "clipped": {i: count.cpu() for i, count in self._clipped.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting where the checkpoint stopped."""
        self._steps, self._clipped = dict(state_dict["steps"]), dict(state_dict["clipped"])

    def _log_norms(
        self, trainer: Trainer, pl_module: LightningModule, index: int, total: Tensor, factor: Tensor
    ) -> None:
        prefix = "grad_norm" if len(trainer.optimizers) == 1 else f"grad_norm/{index}"
        pl_module.log_dict(
            {
                f"{prefix}/pre_clip": total,
                f"{prefix}/post_clip": total * factor,
                f"{prefix}/clipped_fraction": self._clipped[index] / self._steps[index],
            },
            batch_size=1,  # of no meaning for a step's value, and Lightning asks for it under `dataloader_iter`
        )

    def _count(self, index: int, total: Tensor) -> None:
        above = ((total > self.max_norm) & total.isfinite()).float()
        before = self._clipped.get(index)
        self._clipped[index] = above if before is None else before.to(above.device) + above
        self._steps[index] = self._steps.get(index, 0) + 1


def _is_scaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return getattr(optimizer, "_step_supports_amp_scaling", False) and stage is OptState.READY


def _refuse_hidden_gradients(trainer: Trainer) -> None:
    # by name: those of `lightning` and of `pytorch_lightning` alike
    strategies = {base.__name__ for base in type(trainer.strategy).__mro__}
    if "DeepSpeedStrategy" in strategies:
        remedy = "set `gradient_clipping` in DeepSpeed's own configuration"
    elif "FSDPStrategy" in strategies:
        remedy = "use ModelParallelStrategy (FSDP2), whose sharded gradients it can see"
    else:
        return
    raise MisconfigurationException(
        f"GradientClipping cannot see the whole gradient under {type(trainer.strategy).__name__}: {remedy}."
    )


def _by_name(pl_module: LightningModule, parameters: list[Tensor], norms: GradientNorms) -> dict[str, Tensor]:
    names = {parameter: name.replace("_orig_mod.", "") for name, parameter in pl_module.named_parameters()}
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    return {
        f"grad_norm/{names.get(parameter, f'parameter {position}')}": norm  # type: ignore[call-overload]
        for position, (parameter, norm) in enumerate(zip(with_gradient, norms.per_parameter.unbind(), strict=True))
    }
