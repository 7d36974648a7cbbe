"""Replacements for parts of a DataLoader's iterator, which record what is drawn and in which order."""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from torch import Tensor

from lightning_tricks.auto_resume.core.data.rng_state import RecordedDraws


class DeferredSampler:
    """A sampler that is asked for an iterator as usual, and gives an empty one: nothing is fetched at once.

    Args:
        sampler: The loader's own sampler.

    Attributes:
        iterator: The iterator of the loader's own sampler, from which the indices are to come later.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.iterator: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.sampler)
        return iter(())


class _RecordingPart:
    """Calls a part of an iterator.

    Attributes:
        exhausted: Whether it was asked for more than it had.
    """

    def __init__(self, draws: RecordedDraws | None) -> None:
        self._draws, self.exhausted = draws, False

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function() if self._draws is None else self._draws.call(function)
        except StopIteration:
            self.exhausted = True
            raise


class TrackedFetcher(_RecordingPart):
    """Makes batches in the training process as the given fetcher does, and reports the first one.

    Args:
        fetcher: The fetcher of the iterator.
        draws: Records what each batch draws; None records nothing.
        on_first_batch: Called with the first batch.

    Attributes:
        is_first: Whether the next batch is to be reported.
    """

    def __init__(self, fetcher: Any, draws: RecordedDraws | None, on_first_batch: Callable[[Any], object]) -> None:
        super().__init__(draws)
        self._fetcher, self._on_first_batch, self.is_first = fetcher, on_first_batch, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        """Return the batch of some indices."""
        batch = self._call(lambda: self._fetcher.fetch(indices))
        if self.is_first:
            self.is_first = False
            self._on_first_batch(batch)
        return batch


class TrackedSamplerIterator(_RecordingPart):
    """An iterator of a sampler whose draws and order are recorded.

    Args:
        iterator: The iterator that gives the indices.
        draws: Records what each index draws; None if all draws happen at the first index.
        order: Takes the indices.
    """

    def __init__(self, iterator: Iterator[Any], draws: RecordedDraws | None, order: OrderDigest) -> None:
        super().__init__(draws)
        self._iterator, self._order = iterator, order

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        indices = self._call(self._iterator.__next__)
        self._order.add(indices)
        return indices


class OrderDigest:
    """A running digest of the indices that a sampler gave: equal digests mean equal orders.

    Args:
        max_ahead: Batches that the sampler may be ahead of training: of so many the digests before are kept.
    """

    def __init__(self, max_ahead: int = 0) -> None:
        self.count = 0
        self._digests = deque([b""], maxlen=max_ahead + 4)

    def add(self, indices: Any) -> None:
        """Add the indices of a batch."""
        self.count += 1
        self._digests.append(blake2b(self._digests[-1] + _encode_indices(indices), digest_size=8).digest())

    def digest(self, count: int) -> str:
        """Return the digest of the first `count` batches; empty if it is no longer kept."""
        back = self.count - count
        return self._digests[-1 - back].hex() if 0 <= back < len(self._digests) else ""


def draws_only_once(sampler: Any) -> bool:
    """Whether a sampler is one of torch's, which draw from the global random state at their first index only."""
    inner = getattr(sampler, "sampler", None)
    known = type(sampler).__module__ in ("torch.utils.data.sampler", "torch.utils.data.distributed")
    return known and (inner is None or draws_only_once(inner))


def _encode_indices(indices: Any) -> bytes:
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    try:
        return marshal.dumps(indices, 2)  # later versions also encode which objects are identical
    except ValueError:
        parts = indices if isinstance(indices, list | tuple) else [indices]
        return repr([part.tolist() if isinstance(part, Tensor) else type(part) for part in parts]).encode()
