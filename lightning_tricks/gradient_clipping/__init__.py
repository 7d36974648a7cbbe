"""Clip the norm of the gradients right before the optimizer sees them, and log what was clipped.

When to use it: where a rare large gradient (recurrent nets, transformers, small batches, early training) throws the
weights away. `max_norm` about the 90th percentile of the norms that `GradientClipping(float("inf"))` logs is a start.

What it does that the Trainer's `gradient_clip_val` does not: works under manual optimization, with fused optimizers in
fp16 and bf16, with sharded gradients (FSDP2), and logs the norms that it has computed anyway.

Caveats: the norm is one number over all parameters of one optimizer; a NaN or Inf gradient is passed on as
`torch.nn.utils.clip_grad_norm_` does (a GradScaler then skips the step).

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", arXiv 1211.5063.
"""

from typing import TYPE_CHECKING

from lightning_tricks._lazy import lazy_names

if TYPE_CHECKING:
    from lightning_tricks.gradient_clipping.callback import GradientClipping as GradientClipping
    from lightning_tricks.gradient_clipping.functional import GradientNorms as GradientNorms
    from lightning_tricks.gradient_clipping.functional import clip_grad_norm_ as clip_grad_norm_
    from lightning_tricks.gradient_clipping.functional import clip_grads_with_norm_ as clip_grads_with_norm_
    from lightning_tricks.gradient_clipping.functional import gradient_norms as gradient_norms

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "callback": ("GradientClipping",),
        "functional": ("GradientNorms", "clip_grad_norm_", "clip_grads_with_norm_", "gradient_norms"),
    },
)
