"""The hyperparameters of an ensemble as plain values, which load with `weights_only=True`."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_tricks._lightning_compat.hyperparameters import replace_hyperparameter
from lightning_tricks.ensembles.core.factory import class_name
from lightning_tricks.ensembles.optimizers import criterion_to_plain, to_plain

_OBJECTS = ["estimator", "estimators", "final_estimator", "cv", "optimizer", "lr_scheduler", "criterion"]


def save_plain_hyperparameters(ensemble: Any, estimator: Any, frame: FrameType | None) -> list[str]:
    """Save the arguments of an ensemble, without those that are no plain values.

    Args:
        ensemble: The ensemble, with its arguments already checked.
        estimator: What its members were built of.
        frame: The frame of the `__init__` that has the arguments.

    Returns:
        The names of the arguments that were left out, which a checkpoint does not tell.
    """
    ensemble.save_hyperparameters(ignore=_OBJECTS, frame=frame)
    plain = {
        "estimator": class_name(estimator),
        "n_estimators": ensemble.n_estimators,
        "criterion": criterion_to_plain(ensemble.criterion),
        "optimizer": to_plain(ensemble.optimizer) if ensemble.has_given_optimizer else None,
        "lr_scheduler": to_plain(ensemble.lr_scheduler),
        "seed": ensemble.seed,
    }
    given = {name: _without_numpy(value) for name, value in ensemble.hparams.items() if name not in _OBJECTS}
    if isinstance(given.get("weights"), Tensor | np.ndarray):
        given["weights"] = given["weights"].tolist()
    for name, value in (given | plain).items():  # not by `save_hyperparameters`, which compares arrays with `==`
        replace_hyperparameter(ensemble, name, value)
    left_out = [name for name, value in ensemble.hparams.items() if not _is_plain(value)]
    for name in left_out:
        ensemble.hparams.pop(name)
        ensemble._hparams_initial.pop(name, None)
    return left_out


def refuse_unsaved_arguments(kept: Any, given: Mapping[str, Any]) -> None:
    """Refuse to build an ensemble whose checkpoint lacks arguments: their defaults would predict something else.

    Args:
        kept: What a checkpoint holds under the key "ensemble".
        given: The arguments of the caller.

    Raises:
        ValueError: If one is missing.
    """
    unsaved = kept.get("unsaved") if isinstance(kept, Mapping) else None
    members = given.get("estimator", given.get("estimators"))
    needless = {"estimator_args"} if isinstance(members, nn.Module | list | tuple) else set()
    for name in unsaved if isinstance(unsaved, list) else ():
        if name not in {*given, *needless}:
            raise ValueError(
                f"{name} is no plain value and was not saved: give it again, load_from_checkpoint(path, {name}=...)."
            )


def _without_numpy(value: Any) -> Any:
    """Return a value with Python's numbers in the place of numpy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy, value))
    return {name: _without_numpy(part) for name, part in value.items()} if type(value) is dict else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
