"""Clip gradients right before the optimizer step, and skip steps with gradients that are not finite.

When to use it: if rare large gradients (recurrent nets, transformers, small batches, early training) spoil the weights.
Clip by norm (a good first `max_norm` is the 90th percentile of the norms that `GradientClipping(float("inf"))` logs),
by value (`ClipValue`), unit by unit relative to the weights (`AGC`, for nets without batch normalization), or by a
threshold that follows the norms (`PercentileClip`, `ZScoreClip`); for all parameters or per group.

What the Trainer's `gradient_clip_val` does not do: work under manual optimization, with fused optimizers in fp16 and
bf16, and with sharded gradients (FSDP2); log the norm, which is computed anyway; and skip a step exactly, with weights
and optimizer state unchanged.

Caveats: a norm is one number over all parameters of one optimizer (or of one group of `groups`); with
`on_nonfinite="ignore"` a NaN or Inf gradient passes as in `torch.nn.utils.clip_grad_norm_` (a GradScaler then skips the
step).

Sources: Pascanu et al., "On the difficulty of training recurrent neural networks", arXiv 1211.5063; Brock et al.,
"High-performance large-scale image recognition without normalization", arXiv 2102.06171 (AGC); Seetharaman et al.,
"AutoClip", arXiv 2007.14469; Kumar et al., "ZClip", arXiv 2504.02507.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.gradient_clipping.callback import GradientClipping as GradientClipping
    from lightning_tricks.gradient_clipping.core.clipping import GradientNorms as GradientNorms
    from lightning_tricks.gradient_clipping.core.clipping import UnitClipResult as UnitClipResult
    from lightning_tricks.gradient_clipping.core.clipping import adaptive_clip_grad_ as adaptive_clip_grad_
    from lightning_tricks.gradient_clipping.core.clipping import clip_grad_norm_ as clip_grad_norm_
    from lightning_tricks.gradient_clipping.core.clipping import clip_grad_value_ as clip_grad_value_
    from lightning_tricks.gradient_clipping.core.clipping import clip_grads_with_norm_ as clip_grads_with_norm_
    from lightning_tricks.gradient_clipping.core.clipping import gradient_norms as gradient_norms
    from lightning_tricks.gradient_clipping.core.methods import AGC as AGC
    from lightning_tricks.gradient_clipping.core.methods import ClipMethod as ClipMethod
    from lightning_tricks.gradient_clipping.core.methods import ClipNorm as ClipNorm
    from lightning_tricks.gradient_clipping.core.methods import ClipValue as ClipValue
    from lightning_tricks.gradient_clipping.core.methods import PercentileClip as PercentileClip
    from lightning_tricks.gradient_clipping.core.methods import PercentileThreshold as PercentileThreshold
    from lightning_tricks.gradient_clipping.core.methods import ZScoreClip as ZScoreClip
    from lightning_tricks.gradient_clipping.core.methods import ZScoreThreshold as ZScoreThreshold
    from lightning_tricks.gradient_clipping.core.step_skipping import skip_step_ as skip_step_
    from lightning_tricks.gradient_clipping.core.step_skipping import skip_step_on_device_ as skip_step_on_device_
    from lightning_tricks.gradient_clipping.core.step_skipping import skips_on_device as skips_on_device
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
