"""The hooks that modules, tensors and optimizers call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer

from lightning_tricks._torch_compat.guards import needs_private

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@needs_private("AutoResume")
def hooks_of(owner: nn.Module | Tensor | Optimizer) -> Iterator[Any]:
    """Yield the hooks of a module, a tensor or an optimizer, without those of pruning masks."""
    of_optimizer = _OF_OPTIMIZERS if isinstance(owner, Optimizer) else ()
    of_tensor = _OF_TENSORS if isinstance(owner, Tensor) else ()
    for name in of_optimizer or of_tensor or _OF_MODULES:
        hooks = getattr(owner, name, None) or {}  # tensors have none until one is registered
        yield from (hook for hook in hooks.values() if not isinstance(hook, BasePruningMethod))
