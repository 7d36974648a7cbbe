"""Hyper-parameters of a module, in the loggers and in checkpoints; modules made of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import import_lightning
from lightning_tricks._lightning_compat.guards import needs_private
from lightning_tricks._lightning_compat.trainer import datamodule_of

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import LightningDataModule, LightningModule, Trainer


# `save_hyperparameters` (utilities/parsing.py) makes the second as a deep copy, which loggers get and `hparams` does
# not show: a change has to be made in both.
SAVED_IN = ("_hparams", "_hparams_initial")  # the attributes of a module
# In a file they name code that Lightning before 2.6.6 imports and calls (#21832, #21914), so they are never arguments.
CLASS_PATH, INSTANTIATOR = "_class_path", "_instantiator"  # what LightningCLI adds to the arguments


def initial_hyperparameters(owner: LightningModule | LightningDataModule | None) -> dict[str, Any]:
    """Return the arguments that a module or a datamodule saved when it was made."""
    return {} if owner is None else {k: v for k, v in owner.hparams_initial.items() if k != CLASS_PATH}


def hyperparameters_for_loggers(trainer: Trainer) -> dict[str, Any]:
    """Return what the Trainer is about to send to its loggers as the hyper-parameters of module and datamodule."""
    with needs_private("SeedEverything's record in the loggers"):
        # TensorBoard shows only the first record of hyper-parameters: a caller that logs before the Trainer has to log
        # these too.
        owners = [trainer.lightning_module, datamodule_of(trainer)]
        # False after `save_hyperparameters(logger=False)` (loggers/utilities.py, `_log_hyperparams`).
        logged = [initial_hyperparameters(owner) for owner in owners if owner is not None and owner._log_hyperparams]
    return {name: value for hparams in logged for name, value in hparams.items()}


@needs_private("TricksMixin.save_hyperparameters")
def replace_hyperparameter(module: LightningModule, name: str, value: Any) -> None:
    """Replace a saved hyper-parameter, both in `hparams` and in the frozen copy that the loggers get."""
    module._hparams[name] = value
    module._hparams_initial[name] = value  # type: ignore[operator, index]


@needs_private("The hyper-parameters of an ensemble")
def remove_hyperparameter(module: LightningModule, name: str) -> None:
    """Remove a saved hyper-parameter, if there is one of the name, also from what the loggers get."""
    for name_of_saved in SAVED_IN:
        getattr(module, name_of_saved).pop(name, None)


def restricted_classmethod(method: Any) -> Any:
    """Make a classmethod that Lightning's own guard keeps from being called on an instance."""
    helpers = import_lightning("pytorch.utilities.model_helpers")
    return getattr(helpers, "_restricted_classmethod", classmethod)(method)  # the guard is a courtesy
