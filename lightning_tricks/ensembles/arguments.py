"""The arguments of an ensemble: the forms that a user may give them in, and the plain values that are saved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler

from lightning_tricks._lightning_compat.hyperparameters import remove_hyperparameter, replace_hyperparameter
from lightning_tricks._shared.checks import check_choice
from lightning_tricks.ensembles.core.combination import Criterion
from lightning_tricks.ensembles.core.factory import class_name
from lightning_tricks.lr_schedules.core.optimizer_spec import OptimizerSpec
from lightning_tricks.lr_schedules.core.schedule_spec import ScheduleSpec

Named = str | tuple[str, dict[str, Any]]
CriterionChoice = Criterion | Named | None
OptimizerChoice = OptimizerSpec | Callable[..., Optimizer] | Named | dict[str, Any] | None
ScheduleChoice = ScheduleSpec | Callable[..., Any] | Named | dict[str, Any] | None

OPTIMIZERS: Mapping[str, Any] = {
    name: kind for name, kind in vars(optim).items() if inspect.isclass(kind) and name != "Optimizer"
}
SCHEDULERS: Mapping[str, Any] = {
    name: kind
    for name, kind in vars(lr_scheduler).items()
    if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and name[0] != "_"
}

_LOSSES: Mapping[str, Any] = {
    name: kind for name, kind in vars(nn).items() if inspect.isclass(kind) and name.endswith("Loss")
}


def passed_on(init: Callable[..., None], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor that the next one takes as well.

    Each class writes its arguments out, for LightningCLI, `help` and type checkers, and passes them on by this.

    Args:
        init: The next constructor, `super().__init__`.
        values: The arguments, `locals()`.
    """
    return {name: values[name] for name in inspect.signature(init).parameters if name in values}


# --- the forms that a user may give


def parse_criterion(choice: Any) -> Any:
    """Return the chosen loss, given itself or by its name as from `criterion_to_plain`, or None.

    Raises:
        TypeError: If it is not callable.
        ValueError: If the name is not one of torch's.
    """
    if isinstance(choice, str) and ":" in choice:
        raise ValueError(
            f"criterion={choice!r} is not a loss of torch.nn and is not saved: give the function itself "
            "(load_from_checkpoint(path, criterion=...))."
        )
    if named := _parse_name_and_options("criterion", choice, _LOSSES):
        lists = {name: torch.tensor(value) for name, value in named[1].items() if isinstance(value, list)}
        return _LOSSES[named[0]](**{**named[1], **lists})
    if inspect.isclass(choice):
        raise TypeError(f"criterion must be a loss, not its class: give {choice.__name__}(), got {choice!r}.")
    if choice is None or callable(choice):
        return choice
    raise TypeError(f"criterion must be a function of outputs and targets, got {choice!r}.")


def criterion_to_plain(criterion: Any) -> Any:
    """Return the name and options of a torch loss, for a checkpoint; of another loss, only its name."""
    kind = type(criterion)
    if _LOSSES.get(kind.__name__) is kind:
        # of tensors, such as the weights of classes, their values
        known = {**vars(criterion), **{name: buffer.tolist() for name, buffer in criterion.named_buffers()}}
        return kind.__name__, {name: known[name] for name in inspect.signature(kind).parameters if name in known}
    named = criterion if inspect.isroutine(criterion) else kind
    return f"{named.__module__}:{named.__qualname__}"


def parse_optimizer(choice: Any) -> Any:
    """Return the choice of an optimizer: a spec, a function of parameters, or a name with options.

    Raises:
        TypeError: If it has none of these forms.
        ValueError: If the name is unknown.
    """
    return ("Adam", {"lr": 1e-3}) if choice is None else _parse("optimizer", choice, OPTIMIZERS, OptimizerSpec)


def parse_schedule(choice: Any) -> Any:
    """Return the choice of a schedule: a spec, a function of the optimizer, a name with options, or None.

    Raises:
        TypeError: If it has none of these forms.
        ValueError: If the name is unknown.
    """
    return None if choice is None else _parse("lr_scheduler", choice, SCHEDULERS, ScheduleSpec)


def to_plain(choice: Any) -> Any:
    """Return a choice as plain values for a checkpoint; None for a function, which has none."""
    if isinstance(choice, OptimizerSpec | ScheduleSpec):
        return asdict(choice)
    return choice if isinstance(choice, str | tuple | list | dict) else None


def _parse(argument: str, choice: Any, known: Mapping[str, Any], spec: type) -> Any:
    if isinstance(choice, Mapping):
        return spec(**choice)
    if named := _parse_name_and_options(argument, choice, known):
        return named
    if isinstance(choice, spec) or callable(choice):
        return choice
    raise TypeError(
        f"{argument} must be {spec.__name__}(...), a dict of its arguments, a function, a name, or a name with a dict "
        f"of options, got {choice!r}."
    )


def _parse_name_and_options(argument: str, choice: Any, known: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return a known name and its options, if the choice is of that form."""
    if isinstance(choice, str):
        choice = (choice, {})
    if isinstance(choice, list | tuple) and len(choice) == 2 and isinstance(choice[1], Mapping):
        return check_choice(argument, choice[0], sorted(known)), dict(choice[1])
    return None


# --- the saved values

_OBJECTS = ["estimator", "estimators", "final_estimator", "cv", "optimizer", "lr_scheduler", "criterion"]


def save_plain_hyperparameters(ensemble: Any, estimator: Any, frame: FrameType | None) -> list[str]:
    """Save the arguments of an ensemble, without those that are not plain values.

    Args:
        ensemble: The ensemble, with its arguments already checked.
        estimator: The class, factory or modules of which its members were built.
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
        remove_hyperparameter(ensemble, name)
    return left_out


def refuse_unsaved_arguments(kept: Any, given: Mapping[str, Any]) -> None:
    """Refuse to build an ensemble whose checkpoint lacks arguments: their defaults would predict something else.

    Args:
        kept: The entry of a checkpoint under the key "ensemble".
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
                f"{name} is not a plain value and was not saved: give it again, load_from_checkpoint(path, {name}=...)."
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
