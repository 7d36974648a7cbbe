"""What an order is drawn from, call by call, and a digest of the order itself."""

from __future__ import annotations

import marshal
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_tricks.auto_resume.digests import Digest

MAX_BYTES = 64 * 2**20  # of states that are kept in an epoch
_SPARSE = 3  # a change is kept byte by byte where less than a third of a state is another

Result = TypeVar("Result")


class Draws:
    """Watches calls that may draw from the process' streams, between which others draw from them, too.

    To make the same calls give the same again, each must find the streams as it found them then. That is kept only for
    a stream that a call draws from, where it is not what the calls before have left, and as what changed since the
    state that was kept before: most often a position.

    Args:
        saved: What `as_dict` returned: the same calls are made again, from there.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self.calls = 0
        self.full = bool(saved and saved["full"])
        self._left: list[Any] = [None, None, None]  # by the calls so far, had nobody else drawn
        self._kept: list[tuple[int, int, np.ndarray[Any, Any] | None, np.ndarray[Any, Any]]] = []
        self._last: list[np.ndarray[Any, Any] | None] = [None, None, None]
        self._bytes = 0
        self._again = _states(saved) if saved else iter(())
        self._next = next(self._again, None)

    def begin(self) -> None:
        """The first call finds the streams as they are, also when it is made again."""
        self._left = _raw()

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function and watch what it draws from."""
        number, self.calls = self.calls, self.calls + 1
        while self._next is not None and self._next[0] <= number:
            if self._next[0] == number:
                _set_state(*self._next[1:])
            self._next = next(self._again, None)
        before = _raw()
        try:
            return function()
        finally:
            after = _raw()
            for stream, same in enumerate(_SAME):
                if not same(before[stream], after[stream]):
                    left = self._left[stream]
                    if left is None or not same(left, before[stream]):
                        self._keep(number, stream, before[stream])
                    self._left[stream] = after[stream]

    def as_dict(self, calls: int | None = None) -> dict[str, Any]:
        """Return what was kept, of the first `calls` where that is given, as tensors and plain values."""
        kept = [one for one in self._kept if calls is None or one[0] < calls]
        places = [where for _, _, where, _ in kept if where is not None]
        return {
            "full": self.full,
            "calls": torch.tensor([one[0] for one in kept], dtype=torch.int64),
            "streams": torch.tensor([one[1] for one in kept], dtype=torch.uint8),
            "changed": torch.tensor([-1 if one[2] is None else len(one[2]) for one in kept], dtype=torch.int64),
            "places": torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *places])),
            "bytes": torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *(one[3] for one in kept)])),
        }

    def _keep(self, number: int, stream: int, state: Any) -> None:
        if self.full:
            return
        row, last = _row(stream, state), self._last[stream]
        where = None if last is None else np.flatnonzero(row != last).astype(np.int32)
        if where is None or len(where) * _SPARSE >= len(row):
            where, values = None, row
        else:
            values = row[where]
        size = len(values) + (0 if where is None else where.nbytes)
        if self._bytes + size > MAX_BYTES:
            self.full = True
            warnings.warn(
                "AutoResume: a training loader draws from the process' random streams in between the training steps, "
                f"and their states take more than {MAX_BYTES >> 20} MiB in this epoch: a run that is resumed later in "
                "it reads other data. Let the data draw from a generator of its own, or read it with num_workers=1.",
                stacklevel=2,
            )
            return
        self._bytes += size
        self._last[stream] = row
        self._kept.append((number, stream, where, values))


class Order:
    """A running digest of what a sampler gave: two orders are the same where their digests are.

    Args:
        ahead: How many of the last digests can be asked for.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.count = 0
        self._digests = deque([b""], maxlen=ahead + 4)

    def add(self, indices: Any) -> None:
        """Add the indices of a batch."""
        self.count += 1
        self._digests.append(blake2b(self._digests[-1] + _bytes_of(indices), digest_size=8).digest())

    def digest(self, count: int) -> str:
        """Return the digest of the first `count` batches, or nothing where it is no longer there."""
        back = self.count - count
        return self._digests[-1 - back].hex() if 0 <= back < len(self._digests) else ""


class WatchedSampler:
    """An iterator of a sampler, whose draws and order are watched.

    Args:
        iterator: That gives the indices.
        draws: None where only the first index is drawn, from where the streams are then.
        order: Of what is given.

    Attributes:
        ended: Whether it was asked for more than it had.
    """

    def __init__(self, iterator: Iterator[Any], draws: Draws | None, order: Order) -> None:
        self.iterator, self.draws, self.order = iterator, draws, order
        self.ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            indices = next(self.iterator) if self.draws is None else self.draws.call(self.iterator.__next__)
        except StopIteration:
            self.ended = True
            raise
        self.order.add(indices)
        return indices


def draws_at_first_only(sampler: Any) -> bool:
    """Whether a sampler is one of torch's, which draw from the process' streams for their first index only."""
    inner = getattr(sampler, "sampler", None)
    known = type(sampler).__module__ in ("torch.utils.data.sampler", "torch.utils.data.distributed")
    return known and (inner is None or draws_at_first_only(inner))


def digest_of(batch: Any) -> str:
    """Return a digest of what a batch, or another value, holds; of a large one, some of it is looked at."""
    digest = Digest(here=False)
    digest.feed(batch)
    return f"{int(digest):016x}"


def _bytes_of(indices: Any) -> bytes:
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    try:
        return marshal.dumps(indices, 2)  # a later version writes down who refers to what
    except ValueError:
        return repr([one.tolist() if isinstance(one, Tensor) else type(one) for one in _as_list(indices)]).encode()


def _as_list(indices: Any) -> list[Any]:
    return list(indices) if isinstance(indices, list | tuple) else [indices]


# -- streams one by one


def _raw() -> list[Any]:
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def _same_python(one: Any, other: Any) -> bool:
    return bool(one == other)


def _same_numpy(one: Any, other: Any) -> bool:
    return bool(one[2:] == other[2:] and one[1].tobytes() == other[1].tobytes())  # faster than element by element


def _same_torch(one: Tensor, other: Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()


_SAME: tuple[Callable[[Any, Any], bool], ...] = (_same_python, _same_numpy, _same_torch)


def _row(stream: int, state: Any) -> np.ndarray[Any, Any]:
    """Return the state of a stream as a row of bytes."""
    if stream == 2:
        return np.asarray(state.numpy())
    words, numbers = (
        (state[1], (state[2] is not None, state[2] or 0.0)) if stream == 0 else (state[1], tuple(state[2:]))
    )
    return np.concatenate([np.asarray(words, np.uint32).view(np.uint8), np.asarray(numbers, np.float64).view(np.uint8)])


def _set_state(stream: int, row: np.ndarray[Any, Any]) -> None:
    if stream == 2:
        torch.set_rng_state(torch.from_numpy(row.copy()))
        return
    size = 4 * (625 if stream == 0 else 624)
    words, numbers = row[:size].copy().view(np.uint32), row[size:].copy().view(np.float64).tolist()
    if stream == 0:
        random.setstate((3, tuple(words.tolist()), numbers[1] if numbers[0] else None))
    else:
        np.random.set_state(("MT19937", words, int(numbers[0]), int(numbers[1]), numbers[2]))


def _states(saved: Mapping[str, Any]) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
    """Yield what was kept: the number of a call, the stream, and its state."""
    last: list[Any] = [None, None, None]
    places, values = saved["places"].numpy(), saved["bytes"].numpy()
    size_of = [len(_row(stream, state)) for stream, state in enumerate(_raw())]
    at_place = at_value = 0
    rows = zip(saved["calls"].tolist(), saved["streams"].tolist(), saved["changed"].tolist(), strict=True)
    for number, stream, changed in rows:
        size = size_of[stream] if changed < 0 else changed
        part = values[at_value : at_value + size]
        at_value += size
        if changed < 0:
            last[stream] = part.copy()
        else:
            last[stream] = last[stream].copy()
            last[stream][places[at_place : at_place + changed]] = part
            at_place += changed
        yield number, stream, last[stream]
