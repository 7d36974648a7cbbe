"""What a run is configured with, as plain values, and what another start of it changed."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

OBJECT = "a "  # begins the text that stands for an object that is not a plain value
ABSENT = "none"
_LONGEST = 60  # characters of a value in a message
_MOST_ITEMS = 1000  # of a list that is compared

# Arguments with one of these words in their name say where and how a run is done, not what it computes
_INCIDENTAL_WORDS = re.compile(
    "accelerator|cached?|checkpoints?|ckpt|comment|date|debug|devices?|dir|directory|entity|experiment|file|filename|"
    "folder|gpus?|host|hostname|id|job|log|logger|logging|notes|path|persistent|pid|pin|port|prefetch|profiler|progress|"
    "resume|root|run|save|tags?|tensorboard|timestamp|url|uuid|verbose|wandb|workers?"
)
_DATE_OR_ID = re.compile(r"\d{4}[-_.]?[01]\d[-_.]?[0-3]\d|\d\d:\d\d|[0-9a-f]{8,}", re.IGNORECASE)
_CLOCK_RANGES = ((1.5e9, 2.5e9), (1.5e12, 2.5e12), (1.5e18, 2.5e18))  # seconds, milliseconds and nanoseconds since 1970
_SMALLEST_DRAWN_SEED = 1_000_000  # people choose smaller ones


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

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.before)} -> {_short(self.now)}{f' ({self.why})' if self.why else ''}"


@dataclass
class Configuration:
    """What a run is configured with, by names such as "Adam.lr"; all values are plain.

    Attributes:
        kinds: What there is: classes of layers, optimizers, schedulers, loaders and callbacks.
        values: Their settings. One that only one of two starts knows is none of the user's: libraries add defaults.
        arguments: Hyper-parameters, of which one that only one of two starts has counts.
        groups: For each optimizer, the names of the parameters in its groups.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    groups: list[list[list[str]]] = field(default_factory=list)

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
        values = [Change(name, self.values[name], one) for name, one in now.values.items() if name in self.values]
        arguments = [
            Change(name, self.arguments.get(name, ABSENT), now.arguments.get(name, ABSENT))
            for name in {**self.arguments, **now.arguments}
            if name in self.arguments or not is_default(name, now.arguments[name])
        ]
        found = [one for one in (*kinds, *values, *arguments) if not _are_equal(one.before, one.now)]
        incidental = [one for one in found if _is_incidental(one)]
        return [one for one in found if one not in incidental], incidental


def plain(value: Any) -> Any:
    """Return a value as JSON has it: a scalar, a list or a dict; of any other object the name of its type."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value if value == value else "nan"  # which equals nothing, not even itself
    if isinstance(value, type) or hasattr(value, "__code__"):
        return value.__name__
    if isinstance(value, Namespace) or (dataclasses.is_dataclass(value) and hasattr(value, "__dict__")):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, Set):
        return sorted((plain(part) for part in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray) and len(value) <= _MOST_ITEMS:
        return [plain(part) for part in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return f"{OBJECT}{type(value).__qualname__}"


def flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of nested mappings and namespaces under names that are joined by dots."""
    value = vars(value) if isinstance(value, Namespace) else value
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from flatten(f"{prefix}.{name}", part)
    else:
        yield prefix, plain(value)


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
    kinds = [type(one).__name__ for one in objects]
    counts = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    return [f"{kind}[{count}]" if count else kind for kind, count in zip(kinds, counts, strict=True)]


def is_longer(before: Any, now: Any) -> bool:
    """Whether a limit of epochs or steps allows more than another one; None and -1 are no limit."""
    return _as_limit(now) > _as_limit(before)


def _as_limit(limit: Any) -> float:
    return math.inf if limit in (None, -1) else float(limit)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; floats as far as the last bits, in which machines differ."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def _is_incidental(change: Change) -> bool:
    """Whether an argument may differ between two starts of one command: a path, a date, a number of workers."""
    name = change.name.rpartition(".")[2]
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    if name == "on_change" or any(map(_INCIDENTAL_WORDS.fullmatch, words)):
        return True
    pair = (change.before, change.now)
    if all(isinstance(one, str) for one in pair):
        return any(re.search(r"[/\\]", one) for one in pair) or all(_DATE_OR_ID.search(one) for one in pair)
    if not all(isinstance(one, int | float) for one in pair):
        return False
    is_drawn_seed = "seed" in words and all(abs(one) >= _SMALLEST_DRAWN_SEED for one in pair)
    return is_drawn_seed or any(all(low <= one < high for one in pair) for low, high in _CLOCK_RANGES)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value.isidentifier() else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
