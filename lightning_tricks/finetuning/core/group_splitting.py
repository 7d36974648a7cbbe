"""Learning rate multipliers: parameter groups, and the lists that schedulers keep for them, are split in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks._torch_compat.optimizers import inner_schedulers, set_last_lr

MULTIPLIER_KEY = "lr_multiplier"  # in a parameter group: the factor by which its learning rates have been multiplied
_RATES_OF_GROUP = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_RATES_OF_SCHEDULER = ("base_lrs", "max_lrs", "min_lrs", "swa_lrs", "base_values")  # one for each group; timm: the last
_OTHERS_OF_SCHEDULER = ("lr_lambdas", "base_momentums", "max_momentums")


@dataclass(frozen=True)
class _Part:
    """Parameters of one group that get one multiplier."""

    source: int
    places: list[int]
    multiplier: float
    factor: float  # by which the learning rates are still to be multiplied


def split_groups_(optimizer: Optimizer, multipliers: Mapping[Tensor, float], schedulers: Iterable[object] = ()) -> int:
    """Split the parameter groups of an optimizer so that chosen parameters have a multiple of their learning rate.

    New groups are appended, and take over the options of theirs; a name is made unique by the multiplier. The learning
    rates of a group (`lr`, `initial_lr`, `max_lr`, `min_lr`, `swa_lr`) and those that schedulers keep for each group
    are scaled; functions and momenta are repeated. What a scheduler has for all groups together, such as `eta_min` of
    CosineAnnealingLR, stays as it is. A group that has been split before is not multiplied again.

    Args:
        optimizer: The optimizer, before its state is restored.
        multipliers: Parameter, told apart by identity -> the multiplier of its learning rates; 1 for all others.
        schedulers: The schedulers of the optimizer, with those inside SequentialLR and ChainedScheduler.

    Returns:
        The number of new groups.

    Raises:
        ValueError: If the optimizer takes only one group, or what a scheduler keeps for each group is not known. Only
            if that shows in the number of learning rates that it then returns, groups have been split already.

    Examples:
        >>> import torch
        >>> body, head = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = torch.optim.SGD([body, head], lr=1.0)
        >>> split_groups_(optimizer, {body: 0.1})
        1
        >>> [group["lr"] for group in optimizer.param_groups]
        [1.0, 0.1]
    """
    groups = optimizer.param_groups
    before = len(groups)
    parts = _parts(groups, multipliers)
    if all(part.factor == 1 for part in parts):
        return 0
    if isinstance(optimizer, LBFGS) and len(parts) > 1:
        raise ValueError("LBFGS takes one parameter group, so it cannot have several learning rates.")
    everyone = _all_schedulers(schedulers)
    changes = [change for scheduler in everyone for change in _expanded(scheduler, parts, before)]
    new = [_group(groups[part.source], part, in_place=place < before) for place, part in enumerate(parts)]
    for group, changed in zip(groups, new[:before], strict=True):
        group.update(changed)
    for group in new[before:]:
        if "param_names" in group:
            group["params"] = list(zip(group.pop("param_names"), group["params"], strict=True))
        optimizer.add_param_group(group)
    for scheduler, name, values in changes:
        if name == "last_lr":
            set_last_lr(scheduler, values)
        else:
            setattr(scheduler, name, values)
    for scheduler in everyone:
        _check_rates(scheduler, len(parts))
    return len(parts) - before


def _parts(groups: Sequence[Mapping[str, Any]], multipliers: Mapping[Tensor, float]) -> list[_Part]:
    """Return one part for each group, in order, and after them those for which groups are appended."""
    first, appended = [], []
    for source, group in enumerate(groups):
        applied = group.get(MULTIPLIER_KEY, 1.0)
        places: dict[float, list[int]] = {}
        for place, parameter in enumerate(group["params"]):
            places.setdefault(multipliers.get(parameter, 1.0), []).append(place)
        stays = applied if applied in places else next(iter(places), applied)
        first.append(_Part(source, places.pop(stays, []), stays, stays / applied))
        appended += [_Part(source, some, wanted, wanted / applied) for wanted, some in places.items()]
    return first + appended


def _group(group: Mapping[str, Any], part: _Part, *, in_place: bool) -> dict[str, Any]:
    """Return the values of a group that are those of a part; all of them if it is a group of its own."""
    new = {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
    for name in ("params", "param_names"):
        if name in group:
            new[name] = [group[name][place] for place in part.places]
    for name in _RATES_OF_GROUP:
        if name in group:
            new[name] = new[name] * part.factor
    if part.multiplier != group.get(MULTIPLIER_KEY, 1.0):
        new[MULTIPLIER_KEY] = part.multiplier
    if not in_place and "name" in group:
        new["name"] = f"{group['name']} x{part.multiplier:g}"
    return new


def _all_schedulers(schedulers: Iterable[object]) -> list[object]:
    """Return schedulers with those inside them, each once."""
    found: dict[int, object] = {}
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) not in found:
            found[id(scheduler)] = scheduler
            waiting += inner_schedulers(scheduler)
    return list(found.values())


def _expanded(scheduler: Any, parts: Sequence[_Part], groups: int) -> Iterator[tuple[Any, str, list[Any]]]:
    """Yield scheduler, attribute and new value of the lists that a scheduler keeps for its groups."""
    own: dict[str, tuple[Any, bool]] = {}
    for names, are_rates in ((_RATES_OF_SCHEDULER, True), (_OTHERS_OF_SCHEDULER, False)):
        own |= {name: (vars(scheduler)[name], are_rates) for name in names if name in vars(scheduler)}
    if isinstance(scheduler, LRScheduler):
        own["last_lr"] = (scheduler.get_last_lr(), True)
    elif not own:
        raise ValueError(
            f"{type(scheduler).__name__} is not an LRScheduler of torch: its state for each parameter group is not "
            "known. Create the groups with their learning rates in configure_optimizers instead."
        )
    for name, (values, are_rates) in own.items():
        if len(values) != groups:
            raise ValueError(
                f"{type(scheduler).__name__} has {len(values)} {name} for {groups} parameter groups of its optimizer."
            )
        yield scheduler, name, [values[p.source] * p.factor if are_rates else values[p.source] for p in parts]
    if vars(scheduler).get("warmup_t") and "warmup_steps" in vars(scheduler):  # timm: by how much each rate rises
        start, steps = scheduler.warmup_lr_init, scheduler.warmup_t
        peaks = [start + steps * rise for rise in scheduler.warmup_steps]
        yield scheduler, "warmup_steps", [(peaks[p.source] * p.factor - start) / steps for p in parts]


def _check_rates(scheduler: Any, groups: int) -> None:
    """Refuse a scheduler that is not torch's and keeps a list of its own, which would leave new groups out."""
    if not isinstance(scheduler, LRScheduler) or type(scheduler).__module__.startswith("torch."):
        return
    before = dict(vars(scheduler))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is called outside of `step`
            count = len(scheduler.get_lr())
    except NotImplementedError:  # it has a `step` of its own
        return
    except IndexError:
        count = 0
    finally:
        vars(scheduler).update(before)
    if count != groups:
        raise ValueError(
            f"{type(scheduler).__name__} does not return a learning rate for each of {groups} parameter groups: its "
            "state for each group is not known. Create the groups with their learning rates in "
            "configure_optimizers instead."
        )
