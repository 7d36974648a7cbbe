"""Limits on the memory and time that reading a file takes, and readers of JSON and YAML that keep to them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from lightning_tricks._shared.files import open_file

_COPY_RATE = 1 << 28  # bytes per second, at least
_CHECK_INTERVAL = 1 << 16  # charged bytes between two checks of the clock
_LARGEST_YAML = 1 << 20  # bytes
_MOST_VALUES = 100_000  # of YAML, where each alias counts as what it stands for


class OverBudgetError(ValueError):
    """A file asks for far more memory or time than its size explains."""


class Budget:
    """The memory and the processor time that reading a file may take.

    A reader calls `spend` before it creates something, with about the number of bytes that this takes; walks that
    create nothing charge what they visit. No list is needed of the ways in which a small file describes large values.

    Args:
        size: Size of the file in bytes; reading may take 40 MiB and 12 times this size.
        seconds: Processor time of the thread that reads, beside the time that copying the file takes.

    Examples:
        >>> Budget(1000).spend(100 * 2**20)
        Traceback (most recent call last):
        lightning_tricks._shared.read_budget.OverBudgetError: reading it takes more than 41,955,040 bytes of memory
    """

    def __init__(self, size: int, seconds: float = 8.0) -> None:
        self._limit = self.left = 0
        self._end = time.thread_time() + seconds
        self._seconds = seconds
        self._next_check = 0
        self.add(size, 40 << 20)

    def add(self, size: int, base: int = 0) -> None:
        """Allow for one more file of this size, in bytes."""
        self._limit += base + 12 * size
        self._end += size / _COPY_RATE
        self.left += base + 12 * size
        self._next_check = self.left

    def spend(self, size: int) -> None:
        """Charge a number of bytes.

        Raises:
            OverBudgetError: If no bytes or no time is left.
        """
        self.left -= size
        if self.left <= self._next_check:
            self._check()

    def _check(self) -> None:
        if self.left < 0:
            raise OverBudgetError(f"reading it takes more than {self._limit:,} bytes of memory")
        if time.thread_time() > self._end:
            raise OverBudgetError(f"reading it takes more than {self._seconds:g} s of processor time")
        self._next_check = max(self.left - _CHECK_INTERVAL, 0)


def parse_json(data: str | bytes, budget: Budget) -> Any:
    """Parse JSON within a budget.

    Raises:
        ValueError: If it is not valid JSON or nested too deeply (`OverBudgetError` if it is too large).
    """
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    budget.spend(2 * len(text) + 128 * (text.count(",") + text.count(":")))  # there is about one of them for each value
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists and mappings are nested too deeply") from None


def read_yaml(path: str | os.PathLike[str], *, max_depth: int, max_scalar_length: int) -> Any:
    """Read a YAML file of at most 1 MiB without aliases, a few lines of which could fill all memory.

    Args:
        path: Path of the file.
        max_depth: Maximum depth of nested lists and dicts.
        max_scalar_length: Maximum number of characters of a scalar.

    Raises:
        OSError: If it does not exist or is not a file.
        ValueError: If it exceeds a limit.
        yaml.YAMLError: If it is not YAML of plain values.
    """
    import yaml

    with open_file(path) as stream:
        data = stream.read(_LARGEST_YAML + 1)
    if len(data) > _LARGEST_YAML:
        raise ValueError(f"it has more than {_LARGEST_YAML:,} bytes.")
    text = data.decode("utf-8-sig")
    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    _check_events(yaml.parse(text, safe), Budget(len(data)), max_depth, max_scalar_length)
    return yaml.load(text, safe)  # noqa: S506  # a safe one


def _check_events(events: Iterable[Any], budget: Budget, max_depth: int, max_scalar_length: int) -> None:
    depth = -2  # the stream and the document
    for event in events:
        budget.spend(512)
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > max_depth:
            raise ValueError(f"it nests lists and mappings more than {max_depth} deep.")
        if kind == "AliasEvent":
            raise ValueError(
                "it has an alias (`*name`), which is not allowed: write the value itself, and put text "
                "with a '*' in quotes."
            )
        if kind == "ScalarEvent" and len(event.value) > max_scalar_length:
            raise ValueError(
                f"it has a scalar of {len(event.value):,} characters; at most {max_scalar_length:,} are allowed."
            )


def check_aliases(text: str) -> None:
    """Refuse YAML whose aliases stand for far more than is written; whoever walks or copies it would never end.

    Raises:
        yaml.YAMLError: If it has more than 100,000 values where each alias is replaced by what it stands for, or if it
            is not YAML.
    """
    import yaml

    sizes: dict[str, int] = {}  # of what is complete, by anchor
    around, anchors, size = [], [], 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if "*" in text else ():
        kind = type(event).__name__
        if kind.endswith("StartEvent"):
            around.append(size)
            anchors.append(str(getattr(event, "anchor", "")))
        elif kind.endswith("EndEvent"):
            sizes[anchors.pop()] = size - around.pop()
        else:
            anchor = str(event.anchor)
            size += sizes.get(anchor, _MOST_VALUES + 1) if kind == "AliasEvent" else 1
            sizes |= {anchor: 1} if kind == "ScalarEvent" else {}
        if size > _MOST_VALUES:
            raise yaml.YAMLError(
                f"its aliases (`*name`) stand for more than {_MOST_VALUES:,} values, or for themselves: write them out."
            )
