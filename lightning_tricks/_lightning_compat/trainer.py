"""Attributes that Lightning sets without declaring them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler

    from lightning_tricks._lightning_compat.flavor import Callback, LightningDataModule, LightningModule, Trainer

    CallbackT = TypeVar("CallbackT", bound=Callback)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's list of callbacks itself."""
    untyped: Any = trainer
    callbacks: list[Callback] = untyped.callbacks
    return callbacks


def callbacks_of_type(trainer: Trainer, kind: type[CallbackT]) -> list[CallbackT]:
    """Return the callbacks of a type, in their order."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, kind)]


def datamodule_of(trainer: Trainer) -> LightningDataModule | None:
    """Return the datamodule of the run, or None."""
    untyped: Any = trainer
    datamodule: LightningDataModule | None = untyped.datamodule
    return datamodule


def active_scaler(trainer: Trainer) -> GradScaler | None:
    """Return the enabled GradScaler of a Trainer, or None."""
    # Of the precisions, MixedPrecision and FSDPPrecision have one, for float16; else it is None there, or missing.
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Whether the Trainer only tries a few batches (`fast_dev_run`)."""
    untyped: Any = trainer
    return bool(untyped.fast_dev_run)


def overfit_batches_of(trainer: Trainer) -> float:
    """Return how many training batches, or which share of them, all epochs repeat (`overfit_batches`); 0 for none."""
    untyped: Any = trainer
    batches: float = untyped.overfit_batches
    return batches


def model_averager(trainer: Trainer) -> Any:
    """Return what averages the replicas of local SGD from time to time; None in other fits."""
    # Of DDPStrategy with PostLocalSGDState: gradients stay within groups of ranks, and it averages weights now and
    # then.
    return getattr(trainer.strategy, "_model_averager", None)


@needs_private("A check of a module")
def is_compiled_by_lightning(module: LightningModule) -> bool:
    """Whether `torch.compile(module)` was passed to a Trainer, which then calls the compiled steps of the module."""
    # Set by utilities/compile.py, `from_compiled`, which replaces the steps in the module itself: it does not look
    # compiled.
    return module._compiler_ctx is not None
