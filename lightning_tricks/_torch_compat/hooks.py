"""The hooks that modules, tensors and optimizers call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer

from lightning_tricks._torch_compat.guards import needs_private

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@needs_private("AutoResume")
def hooks_of(owner: nn.Module | Tensor | Optimizer) -> list[Any]:
    """Return the hooks of a module, a tensor or an optimizer, without those of pruning masks."""
    if isinstance(owner, Optimizer):
        registered = [getattr(owner, name, {}) for name in _OF_OPTIMIZERS]  # wrappers may not call its constructor
    else:
        registered = [getattr(owner, name) for name in (_OF_TENSORS if isinstance(owner, Tensor) else _OF_MODULES)]
    # tensors have None until a hook is registered
    return [hook for hooks in registered for hook in (hooks or {}).values() if not isinstance(hook, BasePruningMethod)]
