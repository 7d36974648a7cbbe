"""What Lightning keeps in a LightningModule."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from lightning_tricks._lightning_compat.guards import needs_private


@needs_private("A check of a module")
def is_compiled_by_lightning(module: LightningModule) -> bool:
    """Whether `torch.compile(module)` was passed to a Trainer, which then calls the compiled steps of the module."""
    return module._compiler_ctx is not None
