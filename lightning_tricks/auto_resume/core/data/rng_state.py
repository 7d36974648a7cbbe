"""The random state of a process: as one row of bytes, with that of a loader, and whether data draw from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_tricks._shared.rng import loader_generators

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.core.data.loader_objects import LoaderObjects

RNG_STATE_KEY = "streams"  # under which packed states are saved; part of the format of checkpoints and files
_NUM_WATCHED = 32  # of the first calls all are watched, and later two after each so many: a look takes microseconds

Result = TypeVar("Result")


def global_states() -> list[Any]:
    """Return the states of the three generators, each as its library returns it."""
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def set_global_states(states: Any) -> None:
    """Restore what `global_states` returned."""
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


def pack_rng_state(states: Any = None) -> Tensor:
    """Return the state of `random`, `numpy.random` and torch on the CPU: a uint8 tensor of about 10,000 bytes.

    Args:
        states: What `global_states` returned; None for the present ones.
    """
    record = np.zeros(1, record_dtype())
    write_rng_state(record[0], states)
    return torch.from_numpy(record.view(np.uint8))


def unpack_rng_state(packed: Tensor) -> None:
    """Restore the random state that `pack_rng_state` returned."""
    record = packed.contiguous().numpy().view(record_dtype())[0]
    gauss = float(record["python_gauss"]) if record["python_has_gauss"] else None
    numbers = (int(record["numpy_place"]), int(record["numpy_has_gauss"]), float(record["numpy_gauss"]))
    of_python, of_numpy = (3, tuple(record["python"].tolist()), gauss), ("MT19937", record["numpy"], *numbers)
    set_global_states((of_python, of_numpy, torch.from_numpy(record["torch"].copy())))


@cache
def record_dtype() -> np.dtype[Any]:
    """Return the type of a packed state; its `count` is for those who record several."""
    size = torch.get_rng_state().numel()
    return np.dtype(
        [
            ("count", "<i8"),
            ("numpy_place", "<i8"),
            ("numpy_has_gauss", "<i8"),
            ("numpy_gauss", "<f8"),
            ("python_has_gauss", "<i8"),
            ("python_gauss", "<f8"),
            ("numpy", "<u4", 624),
            ("python", "<u4", 625),
            ("torch", "u1", size),
        ]
    )


def write_rng_state(record: Any, states: Any = None) -> None:
    """Write the present random state, or what `global_states` returned, to a record of the type `record_dtype`.

    Raises:
        ValueError: If numpy's global generator is another one than its default.
    """
    python_state, numpy_state, torch_state = global_states() if states is None else states
    if not isinstance(numpy_state, tuple):
        raise ValueError(
            f"numpy's global generator is {numpy_state['bit_generator']}; its state can be saved only when it is "
            "numpy's default, MT19937 (np.random.set_bit_generator chooses it)."
        )
    _, record["python"], gauss = python_state
    record["python_has_gauss"], record["python_gauss"] = gauss is not None, gauss or 0.0
    _, record["numpy"], record["numpy_place"], record["numpy_has_gauss"], record["numpy_gauss"] = numpy_state
    record["torch"] = torch_state.numpy()


class LoaderSnapshot:
    """The global random state of the process, a loader's generators and its objects, at one moment.

    Args:
        loader: The loader whose generators are captured.
        objects: The objects of the loader; None leaves them out.
        report_unsaved: See `LoaderObjects.changes`.
    """

    def __init__(
        self, loader: DataLoader[Any], objects: LoaderObjects | None = None, report_unsaved: bool = True
    ) -> None:
        self._packed: Tensor | None = None
        self._global_states: Any = global_states()
        self.generators = [generator.get_state() for generator in loader_generators(loader)]
        self.objects: Mapping[str, Any] = {} if objects is None else objects.changes(report_unsaved=report_unsaved)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> LoaderSnapshot:
        """Return the snapshot that `as_dict` wrote."""
        snapshot = cls.__new__(cls)
        snapshot._packed, snapshot._global_states, snapshot.generators = saved["process"], None, saved["generators"]
        snapshot.objects = saved.get("objects", {})
        return snapshot

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as tensors and plain values."""
        if self._packed is None:  # packed only if the snapshot is saved: few of the snapshots of an epoch are
            self._packed = pack_rng_state(self._global_states)
        return {"process": self._packed, "generators": self.generators, "objects": self.objects}

    def restore(self, loader: DataLoader[Any], objects: LoaderObjects | None = None) -> None:
        """Restore the global random state, the generators and, if they are given, the objects."""
        if objects is not None:
            objects.restore_changes(self.objects)
        if self._packed is None:
            set_global_states(self._global_states)
        else:
            unpack_rng_state(self._packed)
        for generator, state in zip(loader_generators(loader), self.generators, strict=False):
            generator.set_state(state)


class GlobalDraws:
    """Watches whether calls draw from a global generator, and other code does so in between.

    When they are repeated one after another, such calls draw other numbers.

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

    def __init__(self) -> None:
        self.are_interleaved, self._num_calls = False, 0
        self._between = set[int]()  # the generators from which others have drawn
        self._after: list[Any] | None = None  # the states after the call before, if it was watched

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if self.are_interleaved or (number >= _NUM_WATCHED and number % _NUM_WATCHED > 1):
            self._after = None
            return function()
        before = global_states()
        if self._after is not None:
            self._between |= _differing(self._after, before)
        try:
            return function()
        finally:
            self._after = global_states()
            self.are_interleaved = not self._between.isdisjoint(_differing(before, self._after))


def _differing(before: list[Any], now: list[Any]) -> set[int]:
    """Return the numbers of the generators whose states differ."""
    same = (
        before[0] == now[0],
        before[1][2:] == now[1][2:] and np.array_equal(before[1][1], now[1][1]),
        torch.equal(before[2], now[2]),
    )
    return {number for number, is_same in enumerate(same) if not is_same}
