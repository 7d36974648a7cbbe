"""The random state of a process and of a loader at one moment, and whether data draw from a global generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_tricks._shared.rng import capture_rng_state, loader_generators, restore_rng_state

RNG_STATE_KEY = "streams"  # under which random states are saved; part of the format of checkpoints and files
_NUM_WATCHED = 32  # of the first calls all are watched, and later two after each so many: a look takes microseconds

Result = TypeVar("Result")


class ChangingObjects(Protocol):
    """Objects that know what changed in them, as `LoaderObjects` does."""

    def changes(self, names: Collection[str] = ..., report_unsaved: bool = ...) -> Mapping[str, Any]:
        """Return what changed."""

    def restore_changes(self, saved: Mapping[str, Any], names: Collection[str] = ...) -> None:
        """Restore what `changes` returned."""


def raw_rng_state() -> list[Any]:
    """Return the states of Python's, numpy's and torch's generator as JSON, which is made and compared fast."""
    _, words, *numbers = np.random.get_state()
    return [
        random.getstate(),
        [np.asarray(words).tobytes().hex(), *numbers],
        torch.get_rng_state().numpy().tobytes().hex(),
    ]


def as_rng_state(raw: list[Any]) -> dict[str, Any]:
    """Return the state that `restore_rng_state` takes, given what `raw_rng_state` returned."""
    (version, python_words, gauss), (numpy_words, *numbers), torch_state = raw
    key = np.frombuffer(bytes.fromhex(numpy_words), np.uint32).astype(np.int64)
    return {
        "python": (version, torch.tensor(python_words), gauss),
        "numpy": ("MT19937", torch.from_numpy(key), *numbers),
        "torch": torch.frombuffer(bytearray.fromhex(torch_state), dtype=torch.uint8),
        "cuda": [],
    }


def loader_snapshot(
    loader: DataLoader[Any], objects: ChangingObjects | None = None, report_unsaved: bool = True
) -> dict[str, Any]:
    """Return the global random state, the states of a loader's generators, and what changed in its objects.

    Args:
        loader: The loader.
        objects: The objects of the loader; None leaves them out.
        report_unsaved: See `LoaderObjects.changes`.
    """
    return {
        "process": capture_rng_state(),
        "generators": [generator.get_state() for generator in loader_generators(loader)],
        "objects": {} if objects is None else objects.changes(report_unsaved=report_unsaved),
    }


def restore_snapshot(
    snapshot: Mapping[str, Any], loader: DataLoader[Any], objects: ChangingObjects | None = None
) -> None:
    """Restore what `loader_snapshot` returned; the objects if they are given."""
    if objects is not None:
        objects.restore_changes(snapshot["objects"])
    restore_rng_state(snapshot["process"])
    for generator, state in zip(loader_generators(loader), snapshot["generators"], strict=False):
        generator.set_state(state)


class GlobalDraws:
    """Watches whether calls draw from a global generator, and other code does so in between.

    When they are repeated one after another, such calls draw other numbers.

    Args:
        is_watching: False calls functions that are known to draw at their first call only, and looks at nothing.

    Attributes:
        are_interleaved: Whether a call has drawn from a generator from which others had drawn after the first call.

    Examples:
        >>> draws = GlobalDraws()
        >>> for _ in range(3):
        ...     _ = draws.call(random.random), torch.rand(1)
        >>> draws.are_interleaved
        False
        >>> for _ in range(3):
        ...     _ = draws.call(random.random), random.random()
        >>> draws.are_interleaved
        True
    """

    def __init__(self, is_watching: bool = True) -> None:
        self.are_interleaved, self._is_watching, self._num_calls = False, is_watching, 0
        self._between = set[int]()  # the generators from which others have drawn
        self._after: list[Any] | None = None  # the states after the call before, if it was watched

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        is_watched = number < _NUM_WATCHED or number % _NUM_WATCHED < 2
        if self.are_interleaved or not (self._is_watching and is_watched):
            self._after = None
            return function()
        before = raw_rng_state()
        if self._after is not None:
            self._between |= _differing(self._after, before)
        try:
            return function()
        finally:
            self._after = raw_rng_state()
            self.are_interleaved = not self._between.isdisjoint(_differing(before, self._after))


def _differing(before: list[Any], now: list[Any]) -> set[int]:
    """Return the numbers of the generators whose states differ."""
    return {number for number, (old, new) in enumerate(zip(before, now, strict=True)) if old != new}
