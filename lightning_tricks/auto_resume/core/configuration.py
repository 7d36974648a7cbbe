"""What a run is configured with, as plain values, and what another start of it changed.

This is one of two comparisons. A `Configuration` holds what a start was given, before any hook; it is always saved, as
each later start has to be compared with the first one. The parts of a fit's state compare with the beginning of the
same start, by `ChangedValues` or `AttributeTracker`: only what hooks and training changed is saved, so that all else
may come from the script again.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

OBJECT = "a "  # begins the text that stands for an object that is not a plain value
ABSENT = "none"
_LONGEST = 60  # characters of a value in a message
_MOST_ITEMS = 1000  # of a list or dict that is compared
_DEEPEST = 20  # containers in containers; some contain themselves

# Arguments with one of these words in their name say where and how a run is done, not what it computes; fractions, such
# as a `drop_path_rate`, are never that
_INCIDENTAL_WORDS = re.compile(
    "accelerator|attempts?|cached?|checkpoints?|ckpt|comment|cpus?|cuda|date|debug|devices?|dir|directory|entity|"
    "experiment|files?|filename|folder|gpus?|host|hostname|id|job|jobid|log|logger|logging|nodes|notes|paths?|"
    "persistent|pid|pin|port|prefetch|proc|processes|profiler|progress|restarts?|resume|root|run|save|slurm|tags?|"
    "tensorboard|threads?|timestamp|url|uuid|verbose|version|wandb|workers?|world"
)
_INCIDENTAL_WORDS_OF_TEXTS = re.compile(
    "addr|address|argv|author|branch|cmd|command|commit|day|env|environ|exp|git|hash|machine|node|now|platform|project|"
    "python|sha|started|time|user|username"
)
_INCIDENTAL_PARTS = frozenset(
    {"env", "environ", "hydra", "logger", "loggers", "logging", "mlflow", "paths", "slurm", "tensorboard", "wandb"}
)  # of a configuration
_DATE_OR_ID = re.compile(r"\d{4}[-_.]?[01]\d[-_.]?[0-3]\d|\d\d:\d\d|[0-9a-f]{8,}", re.IGNORECASE)
_CLOCK_RANGES = ((1.5e9, 2.5e9), (1.5e12, 2.5e12), (1.5e18, 2.5e18))  # seconds, milliseconds and nanoseconds since 1970
_SMALLEST_DRAWN_SEED = 1_000_000  # people choose smaller ones
_SHUFFLES = {"RandomSampler": True, "SequentialSampler": False}
_OF_THE_DATA = frozenset({"num_samples", "num_replicas", "rank", "seed"})  # arguments of samplers


@dataclass(frozen=True)
class Change:
    """A value that another start of a run changed.

    Attributes:
        name: Its name, such as "Adam.lr".
        before: The value with which the run was started.
        now: The value of this start.
        why: What it follows from, in words; empty if nothing is known.
    """

    name: str
    before: Any
    now: Any
    why: str = ""

    @property
    def label(self) -> str:
        """What the value belongs to: the name up to its first dot, such as "Adam"."""
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        before, now = _text(self.before), _text(self.now)
        if max(len(before), len(now)) > _LONGEST:  # show where they begin to differ
            same = next((n for n, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), 0)
            start = before.rfind(", ", 0, same) + 1
            before, now = (_shortened(f"...{text[start:]}" if start else text) for text in (before, now))
        return f"{self.name}: {before} -> {now}{f' ({self.why})' if self.why else ''}"


@dataclass
class Configuration:
    """What a run is configured with, by names such as "Adam.lr"; all values are plain.

    Attributes:
        kinds: What there is: classes of layers, optimizers, schedulers, loaders and callbacks.
        values: Their settings. If only one of two starts has a setting, it is not the user's: libraries add defaults.
        arguments: Hyper-parameters. If only one of two starts has a hyper-parameter, that is a change.
        groups: For each optimizer, the names of the parameters in its groups.
        exchanged: Whether the fit exchanged the optimizers, so that a later start cannot be compared with them.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    groups: list[list[list[str]]] = field(default_factory=list)
    exchanged: bool = False

    def changes_to(
        self, now: Configuration, is_default: Callable[[str, Any], bool] = lambda *_: False
    ) -> tuple[list[Change], list[Change]]:
        """Return what another configuration changes, and which of its arguments differ without shaping the training.

        Args:
            now: The configuration of a later start.
            is_default: Whether a value is the default of an argument, which the first start did not have.
        """
        kinds = [
            Change(name, self.kinds.get(name, ABSENT), now.kinds.get(name, ABSENT))
            for name in {**self.kinds, **now.kinds}
        ]
        values = [Change(name, self.values[name], value) for name, value in now.values.items() if name in self.values]
        arguments = [
            Change(name, self.arguments.get(name, ABSENT), now.arguments.get(name, ABSENT))
            for name in {**self.arguments, **now.arguments}
            if name in self.arguments or not is_default(name, now.arguments[name])
        ]
        found = [change for change in (*kinds, *values, *arguments) if not _are_equal(change.before, change.now)]
        incidental = [change for change in found if _is_incidental(change)]
        return [change for change in found if change not in incidental], incidental


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON has it: a scalar, a list or a dict; of any other object the name of its type."""
    if isinstance(value, np.generic) or (
        isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta"
    ):
        value = value.item()
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value if value == value else "nan"  # which equals nothing, not even itself
    if isinstance(value, type) or hasattr(value, "__code__"):
        return value.__name__
    value, is_small = _as_mapping(value), depth < _DEEPEST
    with suppress(Exception):  # values of configs may be missing, or computed
        if isinstance(value, Mapping) and len(value) <= _MOST_ITEMS and is_small:
            return {str(name): plain(part, depth + 1) for name, part in value.items()}
        if isinstance(value, Set) and is_small:
            return sorted((plain(part, depth + 1) for part in value), key=repr)
        is_list = isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)
        if is_list and len(value) <= _MOST_ITEMS and is_small:
            return [plain(part, depth + 1) for part in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return f"{OBJECT}{type(value).__qualname__}"


def flatten(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of nested mappings, namespaces and dataclasses under names that are joined by dots."""
    value = _as_mapping(value)
    try:
        parts = list(value.items()) if isinstance(value, Mapping) and depth < _DEEPEST else None
    except Exception:  # values of configs may be missing, or computed
        parts = None
    if parts is None:
        yield prefix, plain(value)
    for name, part in parts or ():
        yield from flatten(f"{prefix}.{name}", part, depth + 1)


def _as_mapping(value: Any) -> Any:
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    return vars(value) if isinstance(value, Namespace) or is_record else value


def is_comparable(value: Any) -> bool:
    """Whether a plain value stands for no object."""
    if isinstance(value, list):
        return all(is_comparable(part) for part in value)
    if isinstance(value, dict):
        return all(is_comparable(part) for part in value.values())
    return not (isinstance(value, str) and value.startswith(OBJECT))


def arguments_of(instance: object) -> dict[str, Any]:
    """Return the arguments of an object's constructor that it stores under their names, if they are comparable."""
    try:
        names = inspect.signature(type(instance).__init__).parameters
        held = vars(instance)
    except (TypeError, ValueError):
        return {}
    return {name: held[name] for name in names if name in held and is_comparable(plain(held[name]))}


def numbered(objects: Sequence[object]) -> list[str]:
    """Return a name for each object: that of its class, from the second one of a class on with its number."""
    kinds = [type(instance).__name__ for instance in objects]
    counts = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    return [f"{kind}[{count}]" if count else kind for kind, count in zip(kinds, counts, strict=True)]


def describe_loaders(loaders: Sequence[Any], name: str) -> Configuration:
    """Return the batch sizes, orders and samplers of loaders, the same on any number of ranks and workers."""
    found = Configuration()
    for number, loader in enumerate(loaders):
        label = name if len(loaders) == 1 else f"{name}[{number}]"
        batch_sampler, sampler = (getattr(loader, part, None) for part in ("batch_sampler", "sampler"))
        # Lightning wraps samplers to split them among ranks
        sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
        owner = batch_sampler if isinstance(batch_sampler, BatchSampler) else loader
        for option in ("batch_size", "drop_last"):
            value = plain(getattr(owner, option, None))
            if isinstance(value, int):
                found.values[f"{label}.{option}"] = value
        kind = type(sampler).__name__
        shuffle = _SHUFFLES.get(kind, getattr(sampler, "shuffle", None))
        if isinstance(shuffle, bool):
            found.values[f"{label}.shuffle"] = shuffle
        for part, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
            kind = type(value).__name__
            is_ours = type(value).__module__.startswith("lightning_tricks.")  # it depends on the stage of the fit
            if value is None or is_ours or kind.startswith("_") or kind in {*_SHUFFLES, "BatchSampler"}:
                continue
            if not isinstance(shuffle, bool) or part == "batch_sampler":
                found.kinds[f"{label}.{part}"] = kind
            size = _size(getattr(loader, "dataset", None))
            for option, given in arguments_of(value).items():
                is_of_the_data = option in _OF_THE_DATA or isinstance(plain(given), list | dict) or given == size
                if not is_of_the_data and option != "shuffle":
                    found.values[f"{label}.{part}.{option}"] = plain(given)
    return found


def is_longer(before: Any, now: Any) -> bool:
    """Whether a limit of epochs or steps allows more than another one; None and -1 are not limits."""
    return _as_limit(now) > _as_limit(before)


def _as_limit(limit: Any) -> float:
    return math.inf if limit in (None, -1) else float(limit)


def _are_equal(before: Any, now: Any) -> bool:
    """Whether two plain values are equal; floats as far as the last bits, in which machines differ."""
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_are_equal, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_are_equal(before[name], now[name]) for name in before)
    if isinstance(before, float) and isinstance(now, int | float):
        return math.isclose(before, now, rel_tol=1e-9)
    return bool(before == now)


def _is_incidental(change: Change) -> bool:
    """Whether an argument may differ between two starts of one command: a path, a date, a number of workers."""
    (*parts_above, name), pair = change.name.split("."), (change.before, change.now)
    if all(isinstance(value, list) for value in pair):
        parts = (replace(change, before=old, now=new) for old, new in zip_longest(*pair, fillvalue=ABSENT))
        return all(_are_equal(part.before, part.now) or _is_incidental(part) for part in parts)
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    has_fractions = any(isinstance(value, float) for value in pair)
    if (
        name == "on_change"
        or not _INCIDENTAL_PARTS.isdisjoint(parts_above)
        or (not has_fractions and any(map(_INCIDENTAL_WORDS.fullmatch, words)))
    ):
        return True
    if all(isinstance(value, str) for value in pair):
        is_about_the_run = name == "name" or any(map(_INCIDENTAL_WORDS_OF_TEXTS.fullmatch, words))
        is_path = any(re.search(r"[/\\]", value) for value in pair)
        return is_about_the_run or is_path or all(_DATE_OR_ID.search(value) for value in pair)
    if not all(isinstance(value, int | float) for value in pair):
        return False
    is_drawn_seed = "seed" in words and all(abs(value) >= _SMALLEST_DRAWN_SEED for value in pair)
    return is_drawn_seed or any(all(low <= value < high for value in pair) for low, high in _CLOCK_RANGES)


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _size(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # not every data set has one
        return None
