"""The saved states of optimizers and schedulers, with what another start changed in them."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.auto_resume.core.configuration import GROUP_ENTRIES, Configuration, group_labels, numbered, plain


class ChangedOptimizers:
    """Makes the states that optimizers and schedulers resume from, with what another start changed in them.

    The moments are kept, unless the class of the optimizer changed or an option of it was switched on or off, such as
    amsgrad: it may need others. A changed option takes its new value. Schedules whose arguments or learning rates
    changed have the values that they would have had at this step if they had been there from the start: a deep copy of
    them is stepped, with the callable objects in it, and what these remember.

    Args:
        optimizers: The optimizers as they were created, before their states are loaded; they are not changed.
        configs: Lightning's configs of the schedulers, which are not changed.
        configurations: What the first start was configured with, and what this start is.
        changed: The names of the values and kinds that differ.
        shared: Objects that are not copied with a schedule, such as the module whose method it calls.
        regrouped: Whether hooks changed the groups in the fit, so that the saved states are those of other groups.
        other_ranks: Whether there are more or fewer than then: schedules of steps go on from the same share of their
            length.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        configs: Sequence[Any],
        configurations: tuple[Configuration, Configuration],
        changed: Collection[str],
        shared: Sequence[object] = (),
        *,
        regrouped: bool = False,
        other_ranks: bool = False,
    ) -> None:
        self._optimizers, self._configs = optimizers, configs
        (self._before, self._now), self._changed = configurations, set(changed)
        self._regrouped, self._other_ranks = regrouped, other_ranks
        self._labels = numbered([config.scheduler for config in configs])
        self._is_rescheduled = self._changes_schedules()
        self._lost_schedules = any(
            name.startswith("scheduler ") and name not in self._now.kinds for name in self._changed
        )
        # copies of the optimizers share their parameters; copies of schedules set the groups of these copies
        parameters = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        self._memo: dict[int, Any] = {id(one): one for one in (*shared, *parameters)}
        self._memo |= {id(optimizer.state): defaultdict(dict) for optimizer in optimizers}
        self._stepped = [copy.deepcopy(optimizer, self._memo) for optimizer in optimizers]

    def states(
        self, optimizer_states: Sequence[Any], scheduler_states: Sequence[Any], steps: int, epochs: int
    ) -> tuple[list[Any], list[Any]]:
        """Return the states of optimizers and schedulers.

        Args:
            optimizer_states: The saved states of the optimizers.
            scheduler_states: The saved states of the schedulers.
            steps: Number of optimizer steps that the run has made.
            epochs: Number of epochs that it has completed.
        """
        saved = dict(enumerate(scheduler_states))
        schedules = [self._schedule(number, saved.get(number), steps, epochs) for number in range(len(self._configs))]
        saved = dict(enumerate(optimizer_states))
        return [self._optimizer(number, saved.get(number)) for number in range(len(self._optimizers))], schedules

    def _schedule(self, number: int, saved: Any, steps: int, epochs: int) -> Any:
        config, label = self._configs[number], self._labels[number]
        is_known = saved is not None and f"scheduler {number}" not in self._changed
        if is_known and not self._is_rescheduled:
            return saved
        if not _is_replayable(config.scheduler):
            state = copy.deepcopy(config.scheduler.state_dict())
            changed = {name: value for name, value in state.items() if f"{label}.{name}" in self._changed}
            return {**saved, **changed} if is_known else state
        count = _num_steps(saved or {})
        if count is None:
            count = (epochs if config.interval == "epoch" else steps) // config.frequency
        if (pace := self._pace(number)) != 1.0:
            count = max(0, int(count * pace) - 1)  # what is left of an epoch may have a step more than its share
        scheduler = copy.deepcopy(config.scheduler, self._memo)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer makes no steps meanwhile
            for _ in range(count):
                scheduler.step()
        return copy.deepcopy(scheduler.state_dict())

    def _pace(self, number: int) -> float:
        """Return how many steps of a schedule take the place of one, where another number of ranks changed it."""
        names = [name for name in self._changed if name.startswith(f"{self._labels[number]}.")]
        lengths = self._positive_numbers(names)
        if self._configs[number].interval != "step" or not self._other_ranks or not lengths:
            return 1.0
        now, old = max(lengths)  # the length of the whole, of which the run may have another number of epochs
        limits = self._positive_numbers(["Trainer.max_epochs", "Trainer.max_steps"]) or [(1, 1)]
        return now / old * limits[0][1] / limits[0][0]

    def _positive_numbers(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Return the values of now and of before that are whole numbers above zero."""
        pairs = [(self._now.values.get(name), self._before.values.get(name)) for name in names]
        return [(n, old) for n, old in pairs if isinstance(n, int) and isinstance(old, int) and n > 0 and old > 0]

    def _changes_schedules(self) -> bool:
        """Whether optimizers, learning rates or schedules changed: then all schedules are stepped anew."""
        pairs = [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]
        options = {"lr"}.union(*(_of_schedules(*pair) for pair in pairs))
        begins = ("optimizer ", "scheduler ", *(f"{label}." for label in self._labels))
        return any(name.startswith(begins) or name.rpartition(".")[2] in {*options, "groups"} for name in self._changed)

    def _optimizer(self, number: int, saved: Any) -> Any:
        optimizer, groups = self._optimizers[number], self._stepped[number].param_groups
        present = copy.deepcopy(optimizer.state_dict())
        if not saved or number >= len(self._before.groups):
            return present
        before, now, label = self._before.groups[number], self._now.groups[number], numbered(self._optimizers)[number]
        pairs = zip(groups, present["param_groups"], strict=True)
        created = [{**stepped, "params": group["params"]} for stepped, group in pairs]
        if f"optimizer {number}" in self._changed:
            return {**present, "param_groups": created}
        if any(map(self._is_switched, [name for name in self._changed if name.startswith(f"{label}.")])):
            saved = {**saved, "state": {}}  # it may need other moments
        if f"{label}.groups" in self._changed:
            return {**saved, "param_groups": created, "state": _moved(saved, before, now, created)}
        if before != now and not self._regrouped:  # in another order, as from a set
            saved = {**saved, "state": _moved(saved, before, now, saved["param_groups"])}
        if not self._changed:
            return saved
        kept = [dict(group) for group in saved["param_groups"]]  # hooks may have added some
        for prefix, group, new in zip(group_labels(label, optimizer.param_groups), kept, created, strict=False):
            names = {name for name in new if f"{prefix}.{name}" in self._changed} - {"lr"}
            group |= {name: new[name] for name in names}
            group |= self._rates(optimizer, prefix, group, new) if self._is_rescheduled else {}
        return {**saved, "param_groups": kept}

    def _is_switched(self, name: str) -> bool:
        """Whether an option such as "Adam.amsgrad" is switched on or off; weight decay needs no moments."""
        before, now = self._before.values.get(name), self._now.values.get(name)
        return bool(before) != bool(now) and not name.endswith((".lr", ".weight_decay"))

    def _rates(self, optimizer: Any, prefix: str, saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        """Return what schedules set in a group: from the copies that were stepped, or as they had changed it."""
        schedules = [config.scheduler for config in self._configs if _optimizer_of(config) is optimizer]
        if schedules and all(map(_is_replayable, schedules)):
            momenta = ("momentum", "betas") if any(hasattr(part, "cycle_momentum") for part in schedules) else ()
            return {name: new[name] for name in {*_of_schedules(optimizer, new), *momenta} & new.keys()}
        if not schedules and self._lost_schedules:
            return {"lr": new["lr"]}
        before, now = self._before.values.get(f"{prefix}.lr"), self._now.values.get(f"{prefix}.lr")
        if not before or now is None or before == now:
            return {}
        rate = now if plain(saved["lr"]) == before else saved["lr"] * (now / before)
        rate = torch.as_tensor(rate) if isinstance(saved["lr"], torch.Tensor) else rate
        return {"lr": rate, **({"initial_lr": new["initial_lr"]} if "initial_lr" in new else {})}


def _of_schedules(optimizer: Any, group: Mapping[str, Any]) -> set[str]:
    """Return the options of a group that schedules set: "lr", and what they add, such as "max_lr"."""
    return {"lr", *group.keys() - getattr(optimizer, "defaults", group).keys() - GROUP_ENTRIES, "initial_lr"}


def _is_replayable(scheduler: Any) -> bool:
    """Whether a scheduler counts its steps and depends on nothing else."""
    arguments = signature(scheduler.step).parameters.values()  # ReduceLROnPlateau requires a metric
    return isinstance(scheduler, LRScheduler) and all(argument.default is not argument.empty for argument in arguments)


def _optimizer_of(config: Any) -> Any:
    return getattr(config.scheduler, "optimizer", None)


def _num_steps(state: Mapping[str, Any]) -> int | None:
    """Return the number of steps of a saved scheduler; of a chain, that of its first part."""
    if isinstance(state.get("last_epoch"), int):
        return int(state["last_epoch"])
    parts = state.get("_schedulers")
    return _num_steps(parts[0]) if parts else None


def _moved(
    saved: Mapping[str, Any],
    before: Sequence[Sequence[str]],
    now: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[int, Any]:
    """Return the saved states of parameters under the numbers that they have in other groups."""
    names = [name for group in before for name in group]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_name = {name: saved["state"].get(number) for name, number in zip(names, numbers, strict=False) if name}
    # hooks may have added groups
    places = zip(
        [number for group in groups for number in group["params"]], [n for one in now for n in one], strict=False
    )
    return {number: by_name[name] for number, name in places if by_name.get(name) is not None}
