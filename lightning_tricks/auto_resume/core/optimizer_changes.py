"""Optimizers and schedulers: with what they were created, and their saved states with what another start changed."""

from __future__ import annotations

import copy
import hashlib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.auto_resume.core.configuration import Configuration, is_comparable, numbered, plain

SCHEDULE_OPTIONS = ("interval", "frequency", "monitor", "strict")  # of Lightning's configs of schedulers
# What schedulers count, and what they take from the optimizer
_COUNTERS = re.compile(
    "_get_lr_called_within_step|_in_initial_step|_initial_step|_is_initial|_last_lr|_step_count|base_lrs|last_epoch|"
    "optimizer|verbose"
)
_GROUP_ENTRIES = frozenset({"params", "param_names", "initial_lr", "name"})
_OF_THE_MACHINE = frozenset({"capturable", "foreach", "fused"})  # which kernels make the same step
# At which functions of steps are compared
_SAMPLED_STEPS = (0, 1, 2, 3, 5, 8, 13, 21, 55, 144, 377, 987, 10_000, 100_000)


def describe_optimizers(optimizers: Sequence[Any], configs: Sequence[Any], names: Sequence[Any]) -> Configuration:
    """Return what optimizers and schedulers were created with.

    Functions of the step, as those of `LambdaLR`, are called at some steps, and what they return is compared.

    Args:
        optimizers: The optimizers, before their states are loaded.
        configs: Lightning's configs of the schedulers.
        names: What `param_group_names` returns.
    """
    found = Configuration(groups=[[list(group) for group in groups] for groups in names])
    for number, (label, optimizer) in enumerate(zip(numbered(optimizers), optimizers, strict=True)):
        groups = found.groups[number]
        digest = hashlib.sha256(repr([sorted(map(str, group)) for group in groups]).encode()).hexdigest()[:6]
        sizes = ", ".join(str(len(group)) for group in groups)
        found.values[f"{label}.groups"] = f"parameters: {sizes} ({digest})"
        found.kinds[f"optimizer {number}"] = type(optimizer).__name__
        for prefix, group in zip(_prefixes(label, optimizer.param_groups), optimizer.param_groups, strict=True):
            options = {
                name: plain(value) for name, value in group.items() if name not in _GROUP_ENTRIES | _OF_THE_MACHINE
            }
            options["lr"] = plain(group.get("initial_lr", group.get("lr")))  # a schedule has begun to change the latter
            found.values |= {f"{prefix}.{name}": value for name, value in options.items() if is_comparable(value)}
    schedulers = [config.scheduler for config in configs]
    for number, (label, config) in enumerate(zip(numbered(schedulers), configs, strict=True)):
        found.kinds[f"scheduler {number}"] = type(config.scheduler).__name__
        found.values |= {f"{label}.{name}": plain(getattr(config, name)) for name in SCHEDULE_OPTIONS}
        found.values |= dict(scheduler_values(label, config.scheduler))
    return found


class ChangedOptimizers:
    """Makes the states that optimizers and schedulers resume from, with what another start changed in them.

    The moments are kept. A changed option takes its new value. Schedules whose arguments or learning rates changed
    have the values that they would have had at this step if they had been there from the start.

    Args:
        optimizers: The optimizers as they were created, before their states are loaded; schedulers are stepped.
        configs: Lightning's configs of the schedulers.
        before: What the first start was configured with.
        now: What this start is configured with.
        changed: The names of the values and kinds that differ.
        regrouped: Whether hooks changed the groups in the fit, so that the saved states are those of other groups.
        ranks: How many there were and are. Where that differs, schedules of steps whose arguments changed go on from
            the same share of their length.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        configs: Sequence[Any],
        before: Configuration,
        now: Configuration,
        changed: Collection[str],
        *,
        regrouped: bool = False,
        ranks: tuple[int, int] = (1, 1),
    ) -> None:
        self._optimizers, self._configs, self._ranks = optimizers, configs, ranks
        self._before, self._now, self._changed = before, now, set(changed)
        self._regrouped = regrouped
        self._labels = numbered([config.scheduler for config in configs])

    def states(
        self, optimizer_states: Sequence[Any], scheduler_states: Sequence[Any], steps: int, epochs: int
    ) -> tuple[list[Any], list[Any]]:
        """Return the states of optimizers and schedulers.

        Args:
            optimizer_states: The saved states of the optimizers.
            scheduler_states: The saved states of the schedulers.
            steps: Number of optimizer steps that the run has made.
            epochs: Number of epochs that it has completed.

        Raises:
            ValueError: If a schedule ends before the step that the run has reached.
        """
        schedules = [
            self._schedule(number, scheduler_states[number] if number < len(scheduler_states) else None, steps, epochs)
            for number in range(len(self._configs))
        ]
        optimizers = [
            self._optimizer(number, optimizer_states[number] if number < len(optimizer_states) else None)
            for number in range(len(self._optimizers))
        ]
        return optimizers, schedules

    def _schedule(self, number: int, saved: Any, steps: int, epochs: int) -> Any:
        scheduler, label = self._configs[number].scheduler, self._labels[number]
        is_known = saved is not None and f"scheduler {number}" not in self._changed
        if is_known and not self._is_rescheduled(_optimizer_of(self._configs[number])):
            return saved
        if _is_replayable(scheduler):
            count = _num_steps(saved) if saved is not None else None
            if count is None:
                config = self._configs[number]
                count = (epochs if config.interval == "epoch" else steps) // config.frequency
            if (pace := self._pace(number)) != 1.0:
                count = max(0, int(count * pace) - 1)  # what is left of an epoch may have a step more than its share
            _replay(scheduler, count)
            return copy.deepcopy(scheduler.state_dict())
        state = scheduler.state_dict()
        changed = {name for name in state if f"{label}.{name}" in self._changed}
        return copy.deepcopy({**saved, **{name: state[name] for name in changed}} if is_known else state)

    def _pace(self, number: int) -> float:
        """Return how many steps of a schedule take the place of one, where another number of ranks changed it."""
        names = [name for name in self._changed if name.startswith(f"{self._labels[number]}.")]
        if self._configs[number].interval != "step" or self._ranks[0] == self._ranks[1] or not names:
            return 1.0
        if not (lengths := self._positive_numbers(names)):
            return 1.0 if self._positive_numbers(["Trainer.max_steps"]) else self._ranks[0] / self._ranks[1]
        now, old = max(lengths)  # the length of the whole, of which the run may have another number of epochs
        for epochs_now, epochs in self._positive_numbers(["Trainer.max_epochs", "Trainer.max_steps"]):
            now, old = now * epochs, old * epochs_now
        return now / old

    def _positive_numbers(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Return the values of now and of before that are whole numbers above zero."""
        pairs = [(self._now.values.get(name), self._before.values.get(name)) for name in names]
        return [(n, old) for n, old in pairs if isinstance(n, int) and isinstance(old, int) and n > 0 and old > 0]

    def _is_rescheduled(self, optimizer: Any) -> bool:
        """Whether learning rates of an optimizer, or a schedule of it, changed."""
        owned = [place for place, known in enumerate(self._optimizers) if known is optimizer]
        names = {f"optimizer {place}" for place in owned}
        for place in owned:
            label = numbered(self._optimizers)[place]
            names.add(f"{label}.groups")
            for prefix, group in zip(_prefixes(label, optimizer.param_groups), optimizer.param_groups, strict=True):
                names |= {f"{prefix}.{option}" for option in _of_schedules(optimizer, group)}
        schedules = [place for place, config in enumerate(self._configs) if _optimizer_of(config) is optimizer]
        names |= {f"scheduler {place}" for place in schedules}
        begins = tuple(f"{self._labels[place]}." for place in schedules)
        return any(name in names or name.startswith(begins) for name in self._changed) or self._lost_schedules()

    def _lost_schedules(self) -> bool:
        names = {name for name in self._changed if name.startswith("scheduler ")}
        return any(name not in self._now.kinds for name in names)

    def _optimizer(self, number: int, saved: Any) -> Any:
        optimizer = self._optimizers[number]
        present = copy.deepcopy(optimizer.state_dict())
        if saved is None or number >= len(self._before.groups):
            return present
        before, now = self._before.groups[number], self._now.groups[number]
        label = numbered(self._optimizers)[number]
        is_new = f"optimizer {number}" in self._changed
        if is_new or f"{label}.groups" in self._changed:
            moved = {**saved, "param_groups": present["param_groups"]}
            moved["state"] = _moved_state(saved, before, now, present)
            return _with_all_entries(optimizer, moved, present["state"] if is_new else None)
        if before != now and not self._regrouped:  # in another order, as from a set
            saved = {**saved, "state": {**saved["state"], **_moved_state(saved, before, now, saved)}}
        if not self._changed:
            return saved
        prefixes = _prefixes(label, optimizer.param_groups)
        groups = [dict(group) for group in saved["param_groups"]]  # hooks may have added some
        for prefix, group, created in zip(prefixes, groups, present["param_groups"], strict=False):
            names = {name for name in created if f"{prefix}.{name}" in self._changed} - {"lr"}
            group.update({name: created[name] for name in names})
            if self._is_rescheduled(optimizer):
                group.update(self._rates(optimizer, prefix, group, created))
        return _with_all_entries(optimizer, {**saved, "param_groups": groups})

    def _rates(
        self, optimizer: Any, prefix: str, saved: Mapping[str, Any], created: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what schedules set in a group: from the schedules that were stepped, or as they had changed it."""
        schedules = [config.scheduler for config in self._configs if _optimizer_of(config) is optimizer]
        if schedules and all(map(_is_replayable, schedules)):
            momenta = ("momentum", "betas") if any(hasattr(part, "cycle_momentum") for part in schedules) else ()
            return {name: created[name] for name in {*_of_schedules(optimizer, created), *momenta} & created.keys()}
        if not schedules and self._lost_schedules():
            return {"lr": created["lr"]}
        before, now = self._before.values.get(f"{prefix}.lr"), self._now.values.get(f"{prefix}.lr")
        if not before or now is None or before == now:
            return {}
        rate = now if plain(saved["lr"]) == before else saved["lr"] * (now / before)
        rate = torch.as_tensor(rate) if isinstance(saved["lr"], torch.Tensor) else rate
        return {"lr": rate, **({"initial_lr": created["initial_lr"]} if "initial_lr" in created else {})}


def _prefixes(label: str, groups: Sequence[Any]) -> list[str]:
    return [f"{label}.groups[{number}]" for number in range(len(groups))] if len(groups) != 1 else [label]


def _of_schedules(optimizer: Any, group: Mapping[str, Any]) -> set[str]:
    """Return the options of a group that schedules set: "lr", and what they add, such as "max_lr"."""
    return {"lr", *group.keys() - getattr(optimizer, "defaults", group).keys() - _GROUP_ENTRIES, "initial_lr"}


def _with_all_entries(optimizer: Any, state: Mapping[str, Any], instead: Any = None) -> dict[str, Any]:
    """Return a state dict with what the optimizer keeps for each parameter, as options of it may require more.

    Args:
        optimizer: The optimizer, which is not changed.
        state: Its new state dict.
        instead: What to return for the states of the parameters if these lack something; None adds zeros.
    """
    states = {}
    for group in state["param_groups"]:
        entries = _entries(optimizer, group)
        for number in group["params"]:
            known = state["state"].get(number)
            if known is None:
                continue
            like = next((value for value in known.values() if isinstance(value, torch.Tensor) and value.dim()), None)
            missing = {name: entry for name, entry in entries.items() if name not in known}
            if missing and instead is not None:
                return {**state, "state": instead}
            for name, entry in missing.items():
                is_full = isinstance(entry, torch.Tensor) and entry.dim() > 0
                known = {**known, name: torch.zeros_like(like) if is_full and like is not None else entry}
            states[number] = known
    return {**state, "state": {**state["state"], **states}}


def _entries(optimizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer with these options keeps for a parameter, by a step of a copy; {} if it cannot."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    try:
        probe = copy.copy(optimizer)
        probe.state, probe.param_groups = defaultdict(dict), [{**options, "params": [parameter]}]
        probe.step()
        return dict(probe.state[parameter])
    except Exception:  # one that needs a closure, or other tensors
        return {}


def scheduler_values(
    label: str, scheduler: Any, of_function: Callable[[Any], Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield what a scheduler was created with, by name; what `of_function` returns for its functions of the step."""
    of_function = of_function or _samples
    for name, value in getattr(scheduler, "__dict__", {}).items():
        parts = value if isinstance(value, list | tuple) else [value]
        if _COUNTERS.fullmatch(name) or not parts:
            continue
        if all(isinstance(part, LRScheduler) for part in parts):
            for number, part in enumerate(parts):
                yield from scheduler_values(f"{label}.{name.lstrip('_')}[{number}]", part, of_function)
        elif all(callable(part) for part in parts):
            if not any(hasattr(part, "__self__") and part.__self__ is scheduler for part in parts):
                yield f"{label}.{name}()", [of_function(part) for part in parts]
        elif is_comparable(plain(value)):
            yield f"{label}.{name}", plain(value)


def _samples(function: Any) -> list[Any]:
    """Return what a function returns at some steps, until it fails."""
    found = []
    for step in _SAMPLED_STEPS:
        try:
            found.append(float(function(step)))
        except Exception:  # another kind of function, or one that is defined up to a step
            break
    return found


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


def _replay(scheduler: Any, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer makes no steps meanwhile
        for _ in range(count):
            scheduler.step()


def _moved_state(
    saved: Mapping[str, Any], before: Sequence[Sequence[str]], now: Sequence[Sequence[str]], present: Mapping[str, Any]
) -> dict[int, Any]:
    """Return the saved states of parameters under the numbers that they have in other groups."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_name = dict(zip([name for group in before for name in group], numbers, strict=False))
    new_numbers = [number for group in present["param_groups"] for number in group["params"]]
    names = [name for group in now for name in group]
    return {
        number: saved["state"][by_name[name]]
        for number, name in zip(new_numbers, names, strict=False)  # hooks may have added groups
        if name and name in by_name and by_name[name] in saved["state"]
    }
