"""Optimizers and schedules for a LightningModule and its Trainer."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_tricks._lightning_compat.flavor import (
    GradientAccumulationScheduler,
    MisconfigurationException,
    Timer,
    Trainer,
    other_flavor,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.trainer import callbacks_of, is_fast_dev_run
from lightning_tricks._shared.text import counted, list_names
from lightning_tricks.lr_schedules.core.combined_optimizer import CombinedOptimizer
from lightning_tricks.lr_schedules.core.optimizer_spec import OptimizerSpec
from lightning_tricks.lr_schedules.core.parameter_groups import Part, groups_of_part, parts_of
from lightning_tricks.lr_schedules.core.schedule_spec import Factor, RunTooShortError, ScheduleSpec
from lightning_tricks.lr_schedules.core.schedules import FactorLR, constant

_REMEDY = "give ScheduleSpec(total=...), or the Trainer max_steps"


def build_optimizer(module: nn.Module | Sequence[nn.Module], spec: OptimizerSpec) -> Optimizer:
    """Build the optimizer of a spec for the trainable parameters of a module.

    Its parameter groups have names, which LearningRateMonitor shows and a log line lists. A spec with a `rest` makes a
    `CombinedOptimizer`, and a log line for each of its parts says which parameters it steps.

    Args:
        module: The model, or a LightningModule in `configure_optimizers`; or multiple modules, such as the members of
            an ensemble, whose groups of the same name are merged.
        spec: The description.

    Raises:
        ValueError: If nothing is trainable, a pattern matches nothing, or `layer_decay` finds one layer only; if an
            optimizer of several has no parameters, some have no optimizer, or Muon does not say which it takes.

    Examples:
        >>> optimizer = build_optimizer(nn.Linear(2, 2), OptimizerSpec("SGD", weight_decay=5e-4))
        >>> [(group["name"], group["weight_decay"]) for group in optimizer.param_groups]
        [('parameters', 0.0005), ('parameters, no decay', 0.0)]
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    parts = zip(*(parts_of(module, spec) for module in modules), strict=True)  # of each optimizer, in all modules
    optimizers = [_build_part(modules, of_modules) for of_modules in parts]
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


def _build_part(modules: Sequence[nn.Module], parts: Sequence[Part]) -> Optimizer:
    spec, name = parts[0].spec, parts[0].name
    groups = _merge_groups_by_name([g for pair in zip(modules, parts, strict=True) for g in groups_of_part(*pair)])
    optimizer = spec.optimizer()
    defaults: dict[str, Any] = {"lr": spec.lr, **(spec.kwargs or {})}
    if "weight_decay" in inspect.signature(optimizer).parameters:
        defaults["weight_decay"] = spec.decay
    else:
        for group in groups:
            del group["weight_decay"]
    other_kernel = defaults.get("foreach") or defaults.get("differentiable")  # which torch refuses beside it
    if spec.fused is True or (spec.fused == "auto" and not other_kernel and _can_fuse(modules, optimizer, groups)):
        defaults["fused"] = True
    sizes = [f"{group['name']} ({sum(p.numel() for p in group['params']):,} values)" for group in groups]
    text = f"{spec.name} with {counted(len(groups), 'parameter group')}: {'; '.join(sizes)}."
    if name:
        paths = [path for part in parts for path in part.parameters.values()]
        text += f" It steps {counted(len(paths), 'parameter')}: {list_names(paths)}."
    if passed_on := [path for part in parts for path in part.passed_on]:
        count = counted(len(passed_on), "parameter")
        text += f" {count} that `only` names and that are not 2-D go to `rest`: {list_names(passed_on)}."
    rank_zero_info(text)
    built: Optimizer = optimizer(groups, **defaults)
    return built


def build_schedule(
    optimizer: Optimizer, spec: ScheduleSpec, trainer: Trainer, *, n_optimizers: int | None = None
) -> dict[str, Any]:
    """Build the schedule of a spec for an optimizer, as `configure_optimizers` returns it.

    Args:
        optimizer: The optimizer to schedule.
        spec: The description.
        trainer: The Trainer of the run, which gives the number of steps.
        n_optimizers: See `total_steps`.

    Returns:
        The configuration, with its `interval`: without it, LightningCLI would step once per epoch.

    Raises:
        ValueError: If the warm-up is longer than the `total` of the spec, milestones do not increase, a length is
            unknown, or there are more schedules than optimizers. In a run that is too short for its schedule, the rate
            stays constant, with a warning.
        MisconfigurationException: If the length of the run is needed and unknown.
    """
    schedules, parts = spec.chain, getattr(optimizer, "parts", [optimizer])
    if len(schedules) > len(parts):
        raise ValueError(
            f"ScheduleSpec(rest=...) describes {len(schedules)} schedules, and there are only {len(parts)} optimizers: "
            "give the OptimizerSpec a rest, too."
        )
    factors = [_factor(one, trainer, n_optimizers) for one in schedules]
    several = [*factors, *[factors[-1]] * (len(parts) - len(factors))]
    scheduler = FactorLR(optimizer, several if len(factors) > 1 else factors[0])
    return {"scheduler": scheduler, "interval": spec.interval, "frequency": 1}


def _factor(spec: ScheduleSpec, trainer: Trainer, n_optimizers: int | None) -> Factor:
    total: float | None = None
    if spec.needs_total and spec.total is None:
        if spec.interval == "epoch":
            total = _total_epochs(trainer, n_optimizers)
        else:
            total = total_steps(trainer, n_optimizers=n_optimizers)
    try:
        return spec.bind(total, partial(steps_in_epochs, trainer))
    except ValueError as error:
        if not is_fast_dev_run(trainer) and (total is None or not isinstance(error, RunTooShortError)):
            raise
        tell = rank_zero_info if is_fast_dev_run(trainer) else rank_zero_warn
        tell(f"The learning rate stays constant in this run, which is too short for its schedule: {error}")
        return constant


def total_steps(trainer: Trainer, *, n_optimizers: int | None = None, remedy: str = _REMEDY) -> int:
    """Count the steps that one optimizer makes in a run, from its beginning.

    Correct for accumulation (also by GradientAccumulationScheduler), `limit_train_batches`, `max_steps`, `max_epochs`
    and multiple ranks; `Trainer.estimated_stepping_batches` is wrong for some of them.

    Args:
        trainer: A Trainer that has its training data, as in `configure_optimizers`.
        n_optimizers: The number of optimizers that step in each batch under manual optimization: Lightning's
            `max_steps` counts the steps of all. None means 1.
        remedy: The advice in the error if the number cannot be known.

    Raises:
        MisconfigurationException: If the number cannot be known, with the reason and the remedy.
    """
    if flavor := other_flavor(type(trainer)):
        raise MisconfigurationException(f"The steps of a run cannot be counted: {flavor}")
    limit = math.inf
    if trainer.max_steps != -1:
        limit = math.ceil(trainer.max_steps / (n_optimizers or 1))
    epochs = trainer.max_epochs
    by_epochs = math.inf if epochs in (None, -1) else steps_in_epochs(trainer, epochs or 0)
    total = min(limit, by_epochs)
    timers = [callback for callback in callbacks_of(trainer) if isinstance(callback, Timer)]
    if total == math.inf:
        if timers:
            reason = "max_time does not tell how many steps the run will have"
        elif epochs in (None, -1):
            reason = "the run has no end (max_epochs=-1, max_steps=-1)"
        else:
            reason = "the training data has no length (an IterableDataset)"
        raise MisconfigurationException(f"The schedule needs the number of steps, and {reason}: {remedy}.")
    if timers:
        rank_zero_info(f"max_time may end the run before the schedule does, which has {total:g} steps.")
    if limit < by_epochs and n_optimizers is None and not trainer.lightning_module.automatic_optimization:
        rank_zero_warn(
            f"Under manual optimization max_steps={trainer.max_steps} counts the steps of all optimizers; the schedule "
            "takes it as the steps of one. Give build_schedule(..., n_optimizers=...)."
        )
    return int(total)


def _total_epochs(trainer: Trainer, n_optimizers: int | None) -> float:
    if trainer.max_steps == -1 and trainer.max_epochs not in (None, -1):
        return trainer.max_epochs or 0
    steps = total_steps(trainer, n_optimizers=n_optimizers)
    if steps_in_epochs(trainer, 1) == math.inf:
        raise MisconfigurationException(
            f"The schedule needs the number of epochs, and the training data has no length: {_REMEDY}, and "
            'interval="step".'
        )
    return bisect_left(range(steps + 1), float(steps), key=partial(steps_in_epochs, trainer))


def steps_in_epochs(trainer: Trainer, epochs: float) -> float:
    """Count the steps of one optimizer in the first epochs, with the accumulation of each; Inf without a length."""
    if trainer.limit_train_batches == 0:
        return 0  # the Trainer then looks at no data
    trainer.fit_loop.setup_data()
    batches = trainer.num_training_batches
    if batches == math.inf:
        return math.inf

    schedulers = [c for c in callbacks_of(trainer) if isinstance(c, GradientAccumulationScheduler)]

    def steps(epoch: int) -> int:
        accumulated = trainer.accumulate_grad_batches
        for scheduler in schedulers:
            accumulated = scheduler.get_accumulate_grad_batches(epoch)
        return math.ceil(batches / accumulated)

    whole = int(epochs)
    return sum(map(steps, range(whole))) + round((epochs - whole) * steps(whole))


def _merge_groups_by_name(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for group in groups:
        merged.setdefault(group["name"], {**group, "params": []})["params"].extend(group["params"])
    return list(merged.values())


def _can_fuse(modules: Sequence[nn.Module], optimizer: type[Optimizer], groups: list[dict[str, Any]]) -> bool:
    if "fused" not in inspect.signature(optimizer).parameters:
        return False
    try:
        trainer = getattr(modules[0], "trainer", None)
    except RuntimeError:  # a LightningModule without one
        trainer = None
    if getattr(trainer, "gradient_clip_val", None):  # which Lightning refuses beside it
        return False
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(torch.is_floating_point(parameter) and parameter.is_cuda for parameter in parameters)
