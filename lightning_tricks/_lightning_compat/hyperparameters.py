"""Hyper-parameters of a module, in the loggers and in checkpoints; modules made of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import import_lightning
from lightning_tricks._lightning_compat.guards import needs_private
from lightning_tricks._lightning_compat.trainer import datamodule_of

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer


def hyperparameters_for_loggers(trainer: Trainer) -> dict[str, Any]:
    """Return what the Trainer is about to send to its loggers as the hyper-parameters of module and datamodule."""
    with needs_private("SeedEverything's record in the loggers"):
        owners = [trainer.lightning_module, datamodule_of(trainer)]
        logged = [owner.hparams_initial for owner in owners if owner is not None and owner._log_hyperparams]
    return {name: value for hparams in logged for name, value in hparams.items() if name != "_class_path"}


@needs_private("TricksMixin.save_hyperparameters")
def replace_hyperparameter(module: LightningModule, name: str, value: Any) -> None:
    """Replace a saved hyper-parameter, both in `hparams` and in the frozen copy that the loggers get."""
    module._hparams[name] = value
    module._hparams_initial[name] = value  # type: ignore[operator, index]


def restricted_classmethod(method: Any) -> Any:
    """Make a classmethod that Lightning's own guard keeps from being called on an instance."""
    helpers = import_lightning("pytorch.utilities.model_helpers")
    return getattr(helpers, "_restricted_classmethod", classmethod)(method)  # the guard is a courtesy
