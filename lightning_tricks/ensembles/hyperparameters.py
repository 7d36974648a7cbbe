"""The hyperparameters of an ensemble as plain values, which load with `weights_only=True`."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

from lightning_tricks.ensembles.core.factory import class_name
from lightning_tricks.ensembles.optimizers import criterion_to_plain, to_plain


def save_plain_hyperparameters(ensemble: Any, estimator: Any, frame: FrameType | None) -> None:
    """Save the arguments of an ensemble; those that are no plain values are left out.

    Args:
        ensemble: The ensemble, with its arguments already checked.
        estimator: What its members were built of.
        frame: The frame of the `__init__` that has the arguments.
    """
    objects = ["estimator", "estimators", "final_estimator", "cv", "optimizer", "lr_scheduler", "criterion"]
    ensemble.save_hyperparameters(ignore=objects, frame=frame)
    plain = {
        "estimator": class_name(estimator),
        "n_estimators": ensemble.n_estimators,
        "criterion": criterion_to_plain(ensemble.criterion),
        "optimizer": to_plain(ensemble.optimizer) if ensemble.has_given_optimizer else None,
        "lr_scheduler": to_plain(ensemble.lr_scheduler),
        "seed": ensemble.seed,
    }
    ensemble.save_hyperparameters(plain)
    for name in [name for name, value in ensemble.hparams.items() if not _is_plain(value)]:
        ensemble.hparams.pop(name)
        ensemble._hparams_initial.pop(name, None)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
