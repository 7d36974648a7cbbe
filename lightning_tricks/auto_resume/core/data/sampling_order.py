"""The order in which a sampler gives its indices, tracked and digested."""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from torch import Tensor

from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.data.random_draws import RecordedDraws


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


class TrackedSamplerIterator:
    """An iterator of a sampler whose draws and order are recorded.

    Args:
        iterator: The iterator that gives the indices.
        draws: Records what each index draws; None if all draws happen at the first index.
        order: Takes the indices.

    Attributes:
        exhausted: Whether it was asked for more than it had.
    """

    def __init__(self, iterator: Iterator[Any], draws: RecordedDraws | None, order: OrderDigest) -> None:
        self.iterator, self.draws, self.order = iterator, draws, order
        self.exhausted = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            indices = next(self.iterator) if self.draws is None else self.draws.call(self.iterator.__next__)
        except StopIteration:
            self.exhausted = True
            raise
        self.order.add(indices)
        return indices


def draws_only_once(sampler: Any) -> bool:
    """Whether a sampler is one of torch's, which draw from the global random state at their first index only."""
    inner = getattr(sampler, "sampler", None)
    known = type(sampler).__module__ in ("torch.utils.data.sampler", "torch.utils.data.distributed")
    return known and (inner is None or draws_only_once(inner))


def value_digest(batch: Any) -> str:
    """Return a digest of a batch or another value; of a large one, a sample counts."""
    digest = ValueDigest(same_process=False)
    digest.feed(batch)
    return f"{int(digest):016x}"


def _encode_indices(indices: Any) -> bytes:
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    try:
        return marshal.dumps(indices, 2)  # later versions also encode which objects are identical
    except ValueError:
        return repr([one.tolist() if isinstance(one, Tensor) else type(one) for one in _as_list(indices)]).encode()


def _as_list(indices: Any) -> list[Any]:
    return list(indices) if isinstance(indices, list | tuple) else [indices]
