"""Parts of a DataLoader's iterator that are exchanged for tracked ones: its sampler and what makes its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_tricks.auto_resume.core.data.random_draws import RecordedDraws


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


class TrackedFetcher:
    """Makes batches in the training process as the given fetcher does, and reports the first one.

    Args:
        fetcher: The fetcher of the iterator.
        draws: Records what each batch draws; None records nothing.
        on_first_batch: Called with the first batch.

    Attributes:
        is_first: Whether the next batch is to be reported.
        exhausted: Whether an iterable dataset was asked for more than it has.
    """

    def __init__(self, fetcher: Any, draws: RecordedDraws | None, on_first_batch: Callable[[Any], object]) -> None:
        self._fetcher, self._draws, self._on_first_batch = fetcher, draws, on_first_batch
        self.is_first, self.exhausted = True, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        """Return the batch of some indices."""
        try:
            if self._draws is None:
                batch = self._fetcher.fetch(indices)
            else:
                batch = self._draws.call(lambda: self._fetcher.fetch(indices))
        except StopIteration:
            self.exhausted = True
            raise
        if self.is_first:
            self.is_first = False
            self._on_first_batch(batch)
        return batch
