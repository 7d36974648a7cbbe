"""The loss, the optimizer and the schedule of all members, in each of the forms that a user may give."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler

from lightning_tricks._shared.checks import check_choice
from lightning_tricks.ensembles.core.combination import Criterion
from lightning_tricks.ensembles.core.members import Members
from lightning_tricks.ensembles.core.stacked_members import StackedMembers
from lightning_tricks.lr_schedules.builders import build_optimizer, build_schedule, steps_in_epochs
from lightning_tricks.lr_schedules.core.optimizer_spec import OptimizerSpec
from lightning_tricks.lr_schedules.core.schedule_spec import ScheduleSpec

Named = str | tuple[str, dict[str, Any]]
CriterionChoice = Criterion | Named | None
OptimizerChoice = OptimizerSpec | Callable[..., Optimizer] | Named | dict[str, Any] | None
ScheduleChoice = ScheduleSpec | Callable[..., Any] | Named | dict[str, Any] | None

# Optimizers whose step treats each element by itself: with stacked parameters it equals the members' own steps
_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
_OPTIMIZERS: Mapping[str, Any] = {
    name: kind for name, kind in vars(optim).items() if inspect.isclass(kind) and name != "Optimizer"
}
_SCHEDULERS: Mapping[str, Any] = {
    name: kind
    for name, kind in vars(lr_scheduler).items()
    if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and name[0] != "_"
}

_LOSSES: Mapping[str, Any] = {
    name: kind for name, kind in vars(nn).items() if inspect.isclass(kind) and name.endswith("Loss")
}


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


def refuse_variance(criterion: Any, predictor: str) -> None:
    """Refuse a loss that takes a variance beside scores and targets, for a predictor that gives none.

    Raises:
        ValueError: If it is such a one.
    """
    if isinstance(criterion, nn.GaussianNLLLoss):
        raise ValueError(
            f"criterion=GaussianNLLLoss() needs a variance, which {predictor} does not give: use VotingRegressor."
        )


def criterion_to_plain(criterion: Any) -> Any:
    """Return the name of a loss of torch's and its options, for a checkpoint; of another one, its name alone."""
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
    if choice is None:
        return "Adam", {"lr": 1e-3}
    if isinstance(choice, Mapping):
        return OptimizerSpec(**choice)
    return _parse("optimizer", choice, _OPTIMIZERS, OptimizerSpec)


def parse_schedule(choice: Any) -> Any:
    """Return the choice of a schedule: a spec, a function of the optimizer, a name with options, or None.

    Raises:
        TypeError: If it has none of these forms.
        ValueError: If the name is unknown.
    """
    if choice is None:
        return None
    if isinstance(choice, Mapping):
        return ScheduleSpec(**choice)
    return _parse("lr_scheduler", choice, _SCHEDULERS, ScheduleSpec)


def to_plain(choice: Any) -> Any:
    """Return a choice as plain values for a checkpoint; None for a function, which has none."""
    if isinstance(choice, OptimizerSpec | ScheduleSpec):
        return {field.name: getattr(choice, field.name) for field in fields(choice)}
    return choice if isinstance(choice, str | tuple | list | dict) else None


def why_not_step_stacked(choice: Any) -> str:
    """Return why the optimizer cannot step stacked parameters, or nothing."""
    if isinstance(choice, OptimizerSpec):
        kind = choice.optimizer()
    elif isinstance(choice, tuple):
        kind = _OPTIMIZERS[choice[0]]
    else:
        kind = type(choice([nn.Parameter(torch.zeros(2, 2))]))
    return "" if kind in _ELEMENTWISE else f"{kind.__name__} does not treat each element of a parameter for itself"


def make_optimizer(members: Members, choice: Any, trainer: Trainer | None) -> Optimizer:
    """Make the optimizer of all members."""
    modules = [members.net] if isinstance(members, StackedMembers) else list(members.children())
    if isinstance(choice, OptimizerSpec):
        return build_optimizer(modules, choice)
    # once, where members share some
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))
    if not parameters:
        raise ValueError("the members have no trainable parameters (requires_grad=True).")
    if not isinstance(choice, tuple):
        return cast(Optimizer, choice(parameters))
    name, options = choice
    clips = trainer is not None and trainer.gradient_clip_val  # which Lightning refuses beside a fused step under AMP
    fused = "fused" in inspect.signature(_OPTIMIZERS[name]).parameters and not clips
    kinds = {(parameter.device.type, parameter.dtype) for parameter in parameters}
    if fused and kinds <= {(device, torch.float32) for device in ("cpu", "cuda")} and not options.keys() & _KERNELS:
        options = {**options, "fused": True}
    return cast(Optimizer, _OPTIMIZERS[name](parameters, **options))


_KERNELS = {"fused", "foreach", "differentiable", "capturable"}


def make_schedule(
    optimizer: Optimizer, choice: Any, trainer: Trainer, has_validation: bool, epochs: int | None = None
) -> dict[str, Any]:
    """Make the schedule of the optimizer, as Lightning takes it from `configure_optimizers`.

    Args:
        optimizer: The optimizer.
        choice: What `parse_schedule` returned.
        trainer: The Trainer of the fit.
        has_validation: Whether there is a validation loss to go by.
        epochs: The length of a schedule that has none of its own; that of the run by default.

    Raises:
        MisconfigurationException: If the length is needed in steps, and the training data has none.
    """
    if isinstance(choice, ScheduleSpec):
        if epochs is not None and choice.needs_total and choice.total is None:
            choice = replace(choice, total=_length(choice, epochs, trainer))
        return build_schedule(optimizer, choice, trainer)
    made = _SCHEDULERS[choice[0]](optimizer, **choice[1]) if isinstance(choice, tuple) else choice(optimizer)
    schedule = {"scheduler": made, "interval": "epoch"}
    if isinstance(made, lr_scheduler.ReduceLROnPlateau):
        schedule["monitor"] = getattr(made, "monitor", "val/loss" if has_validation else "train/loss")
    return schedule


def _length(choice: ScheduleSpec, epochs: int, trainer: Trainer) -> int:
    length = epochs if choice.interval == "epoch" else steps_in_epochs(trainer, epochs)
    if length == math.inf:
        raise MisconfigurationException(
            "The schedule needs the number of steps, and the training data has no length (an IterableDataset): give "
            "ScheduleSpec(total=...)."
        )
    return max(1, int(length))


def _parse(argument: str, choice: Any, known: Mapping[str, Any], spec: type) -> Any:
    if isinstance(choice, spec):
        return choice
    if named := _parse_name_and_options(argument, choice, known):
        return named
    if callable(choice):
        return choice
    raise TypeError(
        f"{argument} must be {spec.__name__}(...), a dict of its arguments, a function, a name, or a name with a dict "
        f"of options, got {choice!r}."
    )


def _parse_name_and_options(argument: str, choice: Any, known: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return a known name and options for it, where that is what the choice is."""
    if isinstance(choice, str):
        choice = (choice, {})
    if isinstance(choice, list | tuple) and len(choice) == 2 and isinstance(choice[1], Mapping):
        return check_choice(argument, choice[0], sorted(known)), dict(choice[1])
    return None
