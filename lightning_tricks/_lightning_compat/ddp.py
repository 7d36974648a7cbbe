"""The wrapper that torch's DDP puts around a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@needs_private("an ensemble that is trained in stages")
def rewrap_ddp(trainer: Trainer) -> None:
    """Wrap the module of the Trainer anew, after other parameters than before have gradients; all ranks call it.

    DDP waits for the gradients of the parameters that had them when it was made. Nothing happens without DDP.
    """
    from lightning.pytorch.strategies import DDPStrategy
    from torch.nn.parallel import DistributedDataParallel

    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel):
        strategy.model = trainer.lightning_module
        strategy.configure_ddp()
