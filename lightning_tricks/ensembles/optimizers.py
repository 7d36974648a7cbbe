"""The optimizer and the schedule of all members."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler

from lightning_tricks._lightning_compat.flavor import MisconfigurationException, Trainer
from lightning_tricks._shared.tensors import parameters_of
from lightning_tricks.ensembles.arguments import OPTIMIZERS, SCHEDULERS
from lightning_tricks.ensembles.core.members import Members
from lightning_tricks.ensembles.core.stacked_members import StackedMembers
from lightning_tricks.lr_schedules.builders import build_optimizer, build_schedule, steps_in_epochs
from lightning_tricks.lr_schedules.core.optimizer_spec import OptimizerSpec
from lightning_tricks.lr_schedules.core.schedule_spec import ScheduleSpec

# Optimizers whose step treats each element by itself: with stacked parameters it equals the members' own steps
_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip


def why_not_step_stacked(choice: Any, members: Sequence[nn.Module]) -> str:
    """Return why the optimizer of these members cannot step stacked parameters, or nothing."""
    if isinstance(choice, OptimizerSpec):
        kinds = [part.optimizer() for part in choice.chain]
    elif isinstance(choice, tuple):
        kinds = [OPTIMIZERS[choice[0]]]
    else:
        parameters = [_trainable([member]) for member in members]
        if not all(parameters) or any(map(nn.parameter.is_lazy, parameters[0])):
            return ""  # such members are not stacked, or not trained
        made = [_optimizer_of(choice, own) for own in parameters]
        kinds = [type(made[0])]
        first, *others = (_groups_by_place(*pair) for pair in zip(made, parameters, strict=True))
        for index, other in enumerate(others, start=1):
            if len(first) != len(other) or not all(map(_are_equal, first, other)):
                return f"the function optimizer= makes other parameter groups for member {index} than for member 0"
    others = [kind.__name__ for kind in kinds if kind not in _ELEMENTWISE]
    return f"{others[0]} does not treat each element of a parameter separately" if others else ""


def _groups_by_place(optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    places = {parameter: place for place, parameter in enumerate(parameters)}
    return [{**group, "params": [places[one] for one in group["params"]]} for group in optimizer.param_groups]


def make_optimizer(members: Members, choice: Any, trainer: Trainer | None) -> Optimizer:
    """Make the optimizer of all members; a function is applied to each member separately."""
    modules = [members.net] if isinstance(members, StackedMembers) else list(members.children())
    if isinstance(choice, OptimizerSpec):
        return build_optimizer(modules, choice)
    parameters = _trainable(modules)
    if not parameters:
        raise ValueError("the members have no trainable parameters (requires_grad=True).")
    if not isinstance(choice, tuple):
        if isinstance(members, StackedMembers):
            return _of_stacked(members, choice)
        of_members = [own for module in modules if (own := _trainable([module]))]
        return merge_optimizers([_optimizer_of(choice, own) for own in of_members])
    name, options = choice
    clips = trainer is not None and trainer.gradient_clip_val  # which Lightning refuses beside a fused step under AMP
    sparse = any(getattr(part, "sparse", False) for module in modules for part in module.modules())  # of embeddings
    fused = "fused" in inspect.signature(OPTIMIZERS[name]).parameters and not (clips or sparse)
    kinds = {(parameter.device.type, parameter.dtype) for parameter in parameters}
    if fused and kinds <= {(device, torch.float32) for device in ("cpu", "cuda")} and not options.keys() & _KERNELS:
        options = {**options, "fused": True}
    return cast(Optimizer, OPTIMIZERS[name](parameters, **options))


def merge_optimizers(made: Sequence[Optimizer]) -> Optimizer:
    """Merge optimizers of one type into the first: groups of one place with equal options become one.

    A parameter that several of them have is updated as the first of them says.
    """
    merged, *others = made
    known = set(parameters_of(merged))
    first = list(merged.param_groups)
    for other in others:  # not made anew of `defaults`: AdamW has some there that it does not take
        for place, group in enumerate(other.param_groups):
            new = [index for index, parameter in enumerate(group["params"]) if parameter not in known]
            own: dict[str, Any] = {name: [group[name][index] for index in new] for name in _LISTS & group.keys()}
            known.update(own["params"])
            if place < len(first) and _are_equal(first[place], group, group.keys() - _LISTS):
                for name, values in own.items():
                    first[place][name].extend(values)  # in place: LBFGS keeps the list
            elif new:
                merged.add_param_group({**group, **own})
        merged.state.update({key: value for key, value in other.state.items() if key not in merged.state})
    return merged


def _are_equal(group: dict[str, Any], other: dict[str, Any], names: Set[str] | None = None) -> bool:
    """Whether groups have equal values; a learning rate may be a tensor."""
    names = group.keys() if names is None else names
    return group.keys() == other.keys() and all(bool(torch.as_tensor(group[name] == other[name])) for name in names)


def _of_stacked(members: StackedMembers, choice: Any) -> Optimizer:
    """Make the optimizer that a function makes of one member, and put the stacked parameters in the places of its."""
    stacks = {key: (tensor, layer, name) for key, layer, name, tensor in members.stacked_tensors()}
    own = members.member(0).named_parameters()
    names = {parameter: name for name, parameter in own if stacks[name][0].requires_grad}
    made = _optimizer_of(choice, list(names))
    for group in made.param_groups:
        group["params"][:] = [stacks[names[parameter]][0] for parameter in group["params"]]
    for parameter, name in names.items():
        stack, layer, own_name = stacks[name]
        # Adagrad has a state from the beginning
        for key, value in made.state.pop(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value = torch.stack([layer.to_stored(own_name, value)] * len(members))
            made.state[stack][key] = value
    return made


def _optimizer_of(choice: Any, parameters: list[nn.Parameter]) -> Optimizer:
    """Call a function with the parameters of one member.

    Raises:
        TypeError: If it does not return an optimizer.
        ValueError: If the optimizer has other parameters.
    """
    made = choice(parameters)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer must be a function that returns a torch.optim.Optimizer, it returned {made!r}.")
    if others := set(parameters_of(made)) - set(parameters):
        raise ValueError(
            f"optimizer must be a function of parameters: its optimizer has {len(others)} parameters besides the "
            f"{len(parameters)} of the member. Use only the parameters that the function receives."
        )
    return made


def _trainable(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that are trained, once, where modules share some."""
    return list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))


_LISTS = {"params", "param_names"}  # of a group, in one order
_KERNELS = {"fused", "foreach", "differentiable", "capturable"}


def make_schedule(
    optimizer: Optimizer, choice: Any, trainer: Trainer, has_validation: bool, epochs: int | None = None
) -> dict[str, Any]:
    """Make the schedule of the optimizer, as Lightning takes it from `configure_optimizers`.

    Args:
        optimizer: The optimizer.
        choice: The result of `parse_schedule`.
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
    made = SCHEDULERS[choice[0]](optimizer, **choice[1]) if isinstance(choice, tuple) else choice(optimizer)
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
