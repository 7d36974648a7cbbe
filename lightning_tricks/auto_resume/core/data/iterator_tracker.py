"""Iterators of a DataLoader that know their positions: the parts of an iterator that are exchanged for tracked ones."""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks._torch_compat import loaders as private
from lightning_tricks.auto_resume.core.attributes.attribute_access import patched
from lightning_tricks.auto_resume.core.data.loader_objects import value_digest
from lightning_tricks.auto_resume.core.data.loader_position import (
    POSITION_ATTRIBUTE,
    LoaderPosition,
    LoaderSnapshot,
    has_persistent_workers,
)
from lightning_tricks.auto_resume.core.data.rng_state import RecordedDraws
from lightning_tricks.auto_resume.core.data.workers import RecordingCollate, WorkerInit, WorkerPositions

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.core.data.tracked_loader import TrackedDataLoader


class IteratorTracker:
    """Knows what is needed to create an iterator again, at the position that it has.

    Args:
        tracked: The loader of the iterator.
        at_creation: The state right before the iterator is created.

    Attributes:
        at_start: The state right before the sampler is first asked, where that is another moment than the creation.
        before_prefetched: The state before the batch that was fetched last, where the training loop prefetches.
        replays_data: Whether a position is reached by reading the data again, as only an iterable dataset knows its
            order.
        workers: The positions of the workers.
        draws: What the sampler, or an iterable dataset in this process, draws; None where nothing has to be recorded.
        order: Digest of the indices.
        first_digest: Digest of the first batch; empty before it, and where batches are made by workers from indices.
    """

    def __init__(self, tracked: TrackedDataLoader, at_creation: LoaderSnapshot) -> None:
        loader = tracked.loader
        self.tracked, self.at_creation = tracked, at_creation
        self.at_start: LoaderSnapshot | None = None
        self.before_prefetched: LoaderSnapshot | None = None
        self.replays_data = isinstance(loader.dataset, IterableDataset)
        self.workers = WorkerPositions(loader, self.replays_data)
        self.draws: RecordedDraws | None = None
        self.order = OrderDigest()
        self.first_digest = ""

    def create(self) -> tuple[Any, DeferredSampler | None]:
        """Let the loader create an iterator whose workers record their states, and wait for work at a sampler.

        Returns:
            The iterator and, unless the dataset is iterable, the sampler whose indices it is to be given.
        """
        loader = self.tracked.loader
        replaced: dict[str, Any] = {}
        deferred = None
        if self.workers.count:
            recording = RecordingCollate(loader.collate_fn, self.workers.rng_states, self.workers.iteration_starts)
            replaced["collate_fn"] = recording
            replaced["worker_init_fn"] = WorkerInit(
                loader.worker_init_fn,
                self.workers.initial_rng_states,
                self.tracked.signals,
                self.tracked.stopping,
                recording,
                self.workers.initial_data,
            )
        if not self.replays_data:
            has_batches = loader.batch_sampler is not None
            deferred = DeferredSampler(loader.batch_sampler if has_batches else loader.sampler)
            replaced["batch_sampler" if has_batches else "sampler"] = deferred
        with patched(loader, replaced):
            iterator = private.class_iterator(loader)
        if deferred is not None:
            private.set_index_sampler(iterator, deferred.sampler)
        return iterator, deferred

    def track(self, iterator: Any, indices: Iterator[Any] | None, draws: Mapping[str, Any] | None = None) -> None:
        """Track an iterator from now on.

        Args:
            iterator: The iterator that `create` returned.
            indices: What it takes its indices from; None for an iterable dataset.
            draws: What was recorded of the draws before, which are to be repeated.
        """
        self._record_draws(iterator, indices, draws)
        setattr(iterator, POSITION_ATTRIBUTE, self)
        if has_persistent_workers(self.tracked.loader):
            private.override_reset(iterator, _RestartIteration(self, iterator))
        if self.workers.count:
            return
        if self.tracked.prefetches:
            private.call_before_each_batch(iterator, self._record_before_prefetched)
        if self.at_start is None:
            private.call_before_next_batch(iterator, self._record_start)

    def _record_draws(
        self, iterator: Any, indices: Iterator[Any] | None, draws: Mapping[str, Any] | None = None
    ) -> None:
        """Record what is drawn between other draws from the same random state."""
        if indices is None:
            self.draws = None if self.workers.count else RecordedDraws(draws)
        else:
            self.draws = None if draws_only_once(private.index_sampler(iterator)) else RecordedDraws(draws)
            self.order = OrderDigest(max_ahead=self.workers.count * self.workers.prefetch)
            private.set_sampler_iterator(iterator, TrackedSamplerIterator(indices, self.draws, self.order))
        if not self.workers.count:
            draws_of_data = self.draws if self.replays_data else None
            fetcher = TrackedFetcher(private.dataset_fetcher(iterator), draws_of_data, self.record_first_batch)
            private.set_dataset_fetcher(iterator, fetcher)
        elif indices is None:
            private.call_after_next_batch(iterator, self.record_first_batch)
        if self.draws is not None:
            self.draws.start()

    def _record_before_prefetched(self) -> None:
        objects = None if self.replays_data else self.tracked.objects
        self.before_prefetched = LoaderSnapshot(self.tracked.loader, objects)

    def _record_start(self) -> None:
        # what an iterable changes in itself comes again with its data: nothing of that is unsaved
        self.at_start = LoaderSnapshot(self.tracked.loader, self.tracked.objects, report_unsaved=not self.replays_data)
        if self.draws is not None:
            self.draws.start()

    def record_first_batch(self, batch: Any) -> None:
        """Record the first batch of the iteration."""
        self.first_digest = value_digest(batch)

    def position(self, iterator: Any, num_prefetched: int, at_end: bool) -> LoaderPosition:
        """Return the position of the iterator after the batches that were trained on."""
        batches = private.num_yielded(iterator) - num_prefetched
        exhausted = not (self.workers.count or num_prefetched) and self.exhaustible(iterator).exhausted
        draws = None if self.draws is None else self.draws.as_dict(None if self.workers.count else batches + exhausted)
        worker_states = [self.workers.state(worker, batches) for worker in range(self.workers.count)]
        for _, data in worker_states:
            self.tracked.objects.add_unsaved({} if data is None else data["lost"])
        return LoaderPosition(
            batches=batches,
            at_end=at_end,
            at_creation=self.at_creation,
            at_start=self.at_start,
            before_prefetched=self.before_prefetched if num_prefetched else None,
            worker_rng_states=[rng_state for rng_state, _ in worker_states],
            worker_data=[data for _, data in worker_states],
            draws=draws,
            order=self.order.digest(batches),
            first_digest=self.first_digest,
            exhausted=exhausted,
            objects=self.tracked.objects.changes(report_unsaved=not self.replays_data),
        )

    def exhaustible(self, iterator: Any) -> Any:
        """Return the part of an iterator without workers that knows whether it was asked for more than it has."""
        return private.dataset_fetcher(iterator) if self.replays_data else private.sampler_iterator(iterator)

    def restart(self, iterator: Any) -> None:
        """Start the next iteration of a persistent iterator."""
        self.at_start = LoaderSnapshot(self.tracked.loader, self.tracked.objects, report_unsaved=not self.replays_data)
        private.reset_without_prefetching(iterator, self.tracked.loader)
        self.workers.start_iteration()  # while they are idle, as they have no indices yet
        self._record_draws(iterator, None if self.replays_data else private.sampler_iterator(iterator))
        self.fill_prefetch_queues(iterator)

    def fill_prefetch_queues(self, iterator: Any) -> None:
        """Give the workers their first batches; each gets those that an uninterrupted epoch would have given it."""
        for _ in range(self.workers.offset % max(1, self.workers.count)):
            private.skip_worker(iterator)
        for _ in range(self.workers.prefetch * self.workers.count):
            private.request_batch(iterator)


class _RestartIteration:
    """Starts the next iteration of a persistent iterator, in the place of the iterator's own method."""

    def __init__(self, tracker: IteratorTracker, iterator: Any) -> None:
        self.tracker, self.iterator = tracker, ref(iterator)  # the workers end with the last reference to it

    def __call__(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self.tracker.restart(self.iterator())


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


def _encode_indices(indices: Any) -> bytes:
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    try:
        return marshal.dumps(indices, 2)  # later versions also encode which objects are identical
    except ValueError:
        parts = indices if isinstance(indices, list | tuple) else [indices]
        return repr([part.tolist() if isinstance(part, Tensor) else type(part) for part in parts]).encode()
