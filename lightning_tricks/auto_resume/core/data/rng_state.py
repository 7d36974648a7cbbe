"""The global random state of a process: as one row of bytes, and what is drawn from it call by call."""

from __future__ import annotations

import ctypes
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

RNG_STATE_KEY = "streams"  # under which packed states are saved; part of the format of checkpoints and files
MAX_BYTES = 64 * 2**20  # of the states that are recorded in an epoch
_SPARSE_FACTOR = 3  # a state is recorded as its changed bytes where these are less than a third
_GENERATORS_KEY = "streams"  # which generator each record is of; part of the format of checkpoints

Result = TypeVar("Result")

# The fields of a packed state beside the words of a generator
_PYTHON_NUMBERS = ("python_has_gauss", "python_gauss")
_NUMPY_NUMBERS = ("numpy_place", "numpy_has_gauss", "numpy_gauss")
# The generators by number: 0 is Python's, 1 numpy's, 2 torch's
_SETTERS: tuple[Callable[[Any], object], ...] = (random.setstate, np.random.set_state, torch.set_rng_state)


def global_states() -> list[Any]:
    """Return the states of the three generators, each as its library returns it."""
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def set_global_states(states: Any) -> None:
    """Restore what `global_states` returned."""
    for set_state, state in zip(_SETTERS, states, strict=True):
        set_state(state)


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
    of_python = _joined(0, record["python"], [record[name] for name in _PYTHON_NUMBERS])
    of_numpy = _joined(1, record["numpy"], [record[name] for name in _NUMPY_NUMBERS])
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
    record["python"], numbers = _split(0, python_state)
    record["numpy"], others = _split(1, numpy_state)
    for name, number in zip((*_PYTHON_NUMBERS, *_NUMPY_NUMBERS), (*numbers, *others), strict=True):
        record[name] = number
    record["torch"] = torch_state.numpy()


class RecordedDraws:
    """Records the global random state before calls that may draw from it, where other code draws in between.

    For a repeated call to draw the same numbers, it must find the same random state. A generator's state is recorded
    only if the call draws from it and if it is not the state that the recorded calls left behind; and only the bytes
    that changed since the record before: most often the position in the generator's buffer.

    Args:
        saved: What `as_dict` returned; the calls are then repeated with the recorded states. None records new calls.

    Attributes:
        calls: Number of calls so far.
        is_full: Whether the records exceed their limit: later states are not recorded.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self.calls = 0
        self.is_full = bool(saved and saved["full"])
        self._states_after: list[Any] = [None, None, None]  # what the recorded calls left behind, for each generator
        self._records: list[tuple[int, int, np.ndarray[Any, Any] | None, np.ndarray[Any, Any]]] = []
        self._last_states: list[np.ndarray[Any, Any] | None] = [None, None, None]
        self._bytes = 0
        self._replayed = _decode_states(saved) if saved else iter(())
        self._next_replayed = next(self._replayed, None)

    def start(self) -> None:
        """Start with the present random state, which the caller restores before the calls are repeated."""
        _numpy.invalidate()
        self._states_after = _read_states()

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function, from its recorded state if there is one, and record from what it draws."""
        number, self.calls = self.calls, self.calls + 1
        while self._next_replayed is not None and self._next_replayed[0] <= number:
            if self._next_replayed[0] == number:
                _set_state(*self._next_replayed[1:])
            self._next_replayed = next(self._replayed, None)
        before = _read_states()
        try:
            return function()
        finally:
            after = _read_states()
            for generator, same in enumerate(_IS_SAME_STATE):
                if not same(before[generator], after[generator]):
                    expected = self._states_after[generator]
                    if expected is None or not same(expected, before[generator]):
                        self._record(number, generator, before[generator])
                    self._states_after[generator] = after[generator]

    def as_dict(self, calls: int | None = None) -> dict[str, Any]:
        """Return the records as tensors and plain values; those of the first `calls` calls if that is given."""
        records = [record for record in self._records if calls is None or record[0] < calls]
        numbers, generators, places, values = zip(*records, strict=True) if records else ((), (), (), ())
        byte_indices = [where for where in places if where is not None]
        return {
            "full": self.is_full,
            "calls": torch.tensor(numbers, dtype=torch.int64),
            _GENERATORS_KEY: torch.tensor(generators, dtype=torch.uint8),
            "changed": torch.tensor([-1 if where is None else len(where) for where in places], dtype=torch.int64),
            "places": torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *byte_indices])),
            "bytes": torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *values])),
        }

    def _record(self, number: int, generator: int, state: Any) -> None:
        if self.is_full:
            return
        row, last = _state_bytes(generator, state), self._last_states[generator]
        where = None if last is None else np.flatnonzero(row != last).astype(np.int32)
        if where is None or len(where) * _SPARSE_FACTOR >= len(row):
            where, values = None, row
        else:
            values = row[where]
        size = len(values) + (0 if where is None else where.nbytes)
        if self._bytes + size > MAX_BYTES:
            self.is_full = True
            warnings.warn(
                "AutoResume: a training loader draws from the global random state in between the training steps, and "
                f"the states take more than {MAX_BYTES >> 20} MiB in this epoch. A run that is resumed later in this "
                "epoch reads other data. Let the data draw from a generator of its own, or read it with num_workers=1.",
                stacklevel=2,
            )
            return
        self._bytes += size
        self._last_states[generator] = row
        self._records.append((number, generator, where, values))


class _NumpyStateReader:
    """Reads the state of numpy's global generator; fast if it did not change, as `np.random.get_state` is slow."""

    def __init__(self) -> None:
        self._bits: Any = None
        self._memory: Any = None
        self._last_memory = b""
        self._state: Any = None

    def read(self) -> Any:
        """Return what `np.random.get_state` returns; the same object if nothing was drawn."""
        if self._bits is None or self._bits is not _bit_generator():
            self._map_memory()
        if self._memory is None:
            return np.random.get_state()
        memory_bytes = bytes(self._memory)
        # a normal deviate that is cached for the next call leaves no trace in this memory
        if memory_bytes != self._last_memory or self._state[3]:
            self._last_memory, self._state = memory_bytes, np.random.get_state()
        return self._state

    def invalidate(self) -> None:
        """Read the whole state next time: setting it may have added a cached normal deviate."""
        self._bits = None

    def _map_memory(self) -> None:
        """Find the generator's words and position in memory, if they are laid out as in MT19937."""
        self._bits, self._memory = _bit_generator(), None
        if not isinstance(self._bits, np.random.MT19937):
            return
        memory = (ctypes.c_char * (4 * 624 + 4)).from_address(self._bits.ctypes.state_address)
        state: Any = np.random.get_state()
        memory_bytes = bytes(memory)
        if memory_bytes == state[1].tobytes() + np.int32(state[2]).tobytes():
            self._memory, self._last_memory, self._state = memory, memory_bytes, state


def _bit_generator() -> Any:
    get = getattr(np.random, "get_bit_generator", None)  # since NumPy 1.24
    return None if get is None else get()


_numpy = _NumpyStateReader()


def _read_states() -> list[Any]:
    return [random.getstate(), _numpy.read(), torch.get_rng_state()]


# Whether two states of a generator are the same
_IS_SAME_STATE: tuple[Callable[[Any, Any], bool], ...] = (
    # position, cached deviate and some words are enough: all words change when the buffer is generated again
    lambda before, now: before[1][-1] == now[1][-1] and before[2] == now[2] and before[1][:4] == now[1][:4],
    lambda before, now: before is now or (before[2:] == now[2:] and before[1].tobytes() == now[1].tobytes()),
    lambda before, now: before.numpy().tobytes() == now.numpy().tobytes(),
)


def _state_bytes(generator: int, state: Any) -> np.ndarray[Any, Any]:
    """Return the state of a generator as a row of bytes."""
    if generator == 2:
        return np.asarray(state.numpy())
    words, numbers = _split(generator, state)
    return np.concatenate([np.asarray(words, np.uint32).view(np.uint8), np.asarray(numbers, np.float64).view(np.uint8)])


def _set_state(generator: int, row: np.ndarray[Any, Any]) -> None:
    if generator == 2:
        _SETTERS[2](torch.from_numpy(row.copy()))
        return
    size = 4 * (625 if generator == 0 else 624)
    words, numbers = row[:size].copy().view(np.uint32), row[size:].copy().view(np.float64)
    _SETTERS[generator](_joined(generator, words, numbers))
    if generator == 1:
        _numpy.invalidate()


def _split(generator: int, state: Any) -> tuple[Any, Sequence[Any]]:
    """Return the words of a state of Python's generator or numpy's, and the numbers that belong to them."""
    return state[1], (state[2] is not None, state[2] or 0.0) if generator == 0 else state[2:]


def _joined(generator: int, words: Any, numbers: Sequence[Any] | np.ndarray[Any, Any]) -> Any:
    """Return the state that `_split` took apart."""
    if generator == 0:
        return 3, tuple(words.tolist()), float(numbers[1]) if numbers[0] else None
    return "MT19937", words, int(numbers[0]), int(numbers[1]), float(numbers[2])


def _decode_states(saved: Mapping[str, Any]) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
    """Yield the records: number of the call, number of the generator, state as a row of bytes."""
    last: list[Any] = [None, None, None]
    byte_indices, values = saved["places"].numpy(), saved["bytes"].numpy()
    size_of = [len(_state_bytes(generator, state)) for generator, state in enumerate(_read_states())]
    index_offset = value_offset = 0
    rows = zip(saved["calls"].tolist(), saved[_GENERATORS_KEY].tolist(), saved["changed"].tolist(), strict=True)
    for number, generator, changed in rows:
        size = size_of[generator] if changed < 0 else changed
        part = values[value_offset : value_offset + size]
        value_offset += size
        if changed < 0:
            last[generator] = part.copy()
        else:
            last[generator] = last[generator].copy()
            last[generator][byte_indices[index_offset : index_offset + changed]] = part
            index_offset += changed
        yield number, generator, last[generator]
