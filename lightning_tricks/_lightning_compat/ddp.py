"""The wrapper that torch's DDP puts around a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from lightning_tricks._lightning_compat.flavor import Trainer


_USERS = "a callback or an ensemble that changes which parameters train"


def ddp_wrapper(trainer: Trainer) -> DistributedDataParallel | None:
    """Return the wrapper around the module of the Trainer, or None where DDP does not wrap it."""
    from torch.nn.parallel import DistributedDataParallel

    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def stops_at_unused_parameters(trainer: Trainer) -> bool:
    """Whether DDP averages the gradients of this backward pass, and fails if a parameter has none."""
    wrapper = ddp_wrapper(trainer)
    if wrapper is None:
        return False
    with needs_private(_USERS):
        return bool(
            wrapper.require_backward_grad_sync and not wrapper.find_unused_parameters and not wrapper.static_graph
        )


@needs_private(_USERS)
def rewrap_ddp(trainer: Trainer) -> None:
    """Wrap the module of the Trainer anew, after other parameters than before have gradients; all ranks call it.

    DDP waits for the gradients of the parameters that had them when it was made. Nothing happens without DDP.
    """
    from lightning_tricks._lightning_compat.flavor import DDPStrategy

    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and ddp_wrapper(trainer) is not None:
        strategy.model = trainer.lightning_module
        strategy.configure_ddp()


@needs_private("an ensemble with stacked BatchNorm layers")
def syncs_batchnorm(trainer: Trainer) -> bool:
    """Whether the strategy puts layers with statistics of all ranks in place of BatchNorm (`sync_batchnorm=True`)."""
    from lightning_tricks._lightning_compat.flavor import ParallelStrategy

    strategy = trainer.strategy
    return isinstance(strategy, ParallelStrategy) and strategy._layer_sync is not None
