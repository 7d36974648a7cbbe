"""The place in a DataLoader's iteration: what it is made of, and how an iterator is taken there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.auto_resume.core.data.loader_objects import DATA_PARTS, changed_paths
from lightning_tricks.auto_resume.core.data.loader_snapshot import LoaderSnapshot
from lightning_tricks.auto_resume.core.data.random_draws import RecordedDraws
from lightning_tricks.auto_resume.core.data.rng_state import RecordingCollate, WorkerInit, WorkerRngStates
from lightning_tricks.auto_resume.core.data.sampling_order import (
    OrderDigest,
    TrackedSamplerIterator,
    draws_only_once,
    value_digest,
)
from lightning_tricks.auto_resume.core.data.worker_state import NOTE_BYTES, read_note
from lightning_tricks.auto_resume.core.temporary_attributes import patched

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.core.data.tracked_loader import TrackedDataLoader

_SECONDS_TO_START = 10.0
_POSITION_ATTRIBUTE = "_lightning_tricks_place"  # attribute of an iterator that is followed


def has_persistent_workers(loader: Any) -> bool:
    """Whether a loader keeps its workers, and with them their random streams, from one iteration to the next."""
    return bool(getattr(loader, "persistent_workers", False) and loader.num_workers)


def position_of(iterator: Any, num_prefetched: int = 0, at_end: bool = False) -> dict[str, Any] | None:
    """Return the place of a followed loader's iterator, as tensors and plain values; None where it has none.

    Args:
        iterator: Of a `TrackedDataLoader`.
        num_prefetched: Batches that were fetched and not yet trained on.
        at_end: Whether the epoch is over.
    """
    position = getattr(iterator, _POSITION_ATTRIBUTE, None)
    return None if position is None else position.as_dict(iterator, num_prefetched, at_end)


class IteratorPosition:
    """What must be known to make an iterator once more.

    Attributes:
        at_creation: When the iterator was made; the seed of its workers comes from there.
        at_start: When its sampler was first asked, where that is a moment of its own.
        before_prefetched: Before the batch that was fetched last, where the loop reads ahead.
        initial_rng_states: The workers' streams at the start of the iteration; None for fresh ones.
        initial_worker_data: What their copies of the data kept then; None for fresh ones.
        iteration: Of the workers, from 1.
        batches_before: Batches that each worker had made at the start of the iteration.
        offset: Batches at which the sampler started in this process.
        draws: What the sampler, or an iterable in this process, draws batch by batch; None where nothing is watched.
        order: Of the indices.
        first_digest: Digest of the first batch, where that can be compared; empty before.
    """

    def __init__(self, tracked: TrackedDataLoader, at_creation: LoaderSnapshot) -> None:
        loader = tracked.loader
        self.tracked, self.at_creation = tracked, at_creation
        self.at_start: LoaderSnapshot | None = None
        self.before_prefetched: LoaderSnapshot | None = None
        self.initial_rng_states: list[torch.Tensor | None] = [None] * loader.num_workers
        self.batches_before = [0] * loader.num_workers
        self.offset = 0
        self.initial_worker_data: list[Any] = [None] * loader.num_workers
        self.iteration = 1
        self.worker_rng_states = WorkerRngStates(loader.num_workers, loader.prefetch_factor or 0, note_bytes=NOTE_BYTES)
        self.worker_starts = (
            WorkerRngStates(loader.num_workers, 0, note_bytes=NOTE_BYTES) if self._replays_data else None
        )
        self.draws: RecordedDraws | None = None
        self.order = OrderDigest()
        self.first_digest = ""

    @classmethod
    def new_iterator(cls, tracked: TrackedDataLoader) -> Any:
        """Make an iterator and follow it."""
        position = cls(tracked, LoaderSnapshot(tracked.loader, tracked.objects))
        iterator, deferred = position._create_iterator()
        position._record_draws(iterator, None if deferred is None else deferred.iterator)
        position._attach(iterator)
        if deferred is not None:
            position._fill_prefetch_queues(iterator)
        return iterator

    @classmethod
    def resumed_iterator(cls, tracked: TrackedDataLoader, saved: Mapping[str, Any]) -> Any:
        """Make an iterator that goes on at a place."""
        loader = tracked.loader
        at_creation = LoaderSnapshot.from_dict(saved["created"])
        at_creation.restore(loader, tracked.objects)
        position = cls(tracked, at_creation)
        position.at_start = saved["started"] and LoaderSnapshot.from_dict(saved["started"])
        workers = saved["workers"] if len(saved["workers"]) == loader.num_workers else position.initial_rng_states
        position.initial_rng_states = list(workers)
        data = saved.get("data", [])
        position.initial_worker_data = list(data) if len(data) == loader.num_workers else position.initial_worker_data
        iterator, deferred = position._create_iterator()
        if position.at_start is not None:
            position.at_start.restore(loader, tracked.objects)
        if deferred is not None and loader.num_workers and position.at_start is not None:
            deferred.iterator = iter(deferred.sampler)  # of a later iteration than the iterator's first
        position._record_draws(iterator, None if deferred is None else deferred.iterator, saved)
        position._attach(iterator)
        position._skip_batches(iterator, saved)
        position._report_differences(saved)
        position._restore_objects(saved)
        if deferred is not None:
            position._fill_prefetch_queues(iterator)
        if saved["before_last"] is not None:
            before_prefetched = LoaderSnapshot.from_dict(saved["before_last"])
            _call_before_next(iterator, lambda: before_prefetched.restore(loader, tracked.objects))
        return iterator

    def as_dict(self, iterator: Any, num_prefetched: int, at_end: bool) -> dict[str, Any]:
        """Return the place as tensors and plain values."""
        batches = iterator._num_yielded - num_prefetched
        before_prefetched = self.before_prefetched if num_prefetched else None
        exhausted = not (self.batches_before or num_prefetched) and self._exhaustible(iterator).exhausted
        draws = None if self.draws is None else self.draws.as_dict(None if self.batches_before else batches + exhausted)
        worker_states = [self._worker_state(worker, batches) for worker in range(len(self.batches_before))]
        for _, data in worker_states:
            self.tracked.objects.add_unsaved({} if data is None else data["lost"])
        return {
            "batches": batches,
            "at_end": at_end,
            "created": self.at_creation.as_dict(),
            "started": None if self.at_start is None else self.at_start.as_dict(),
            "before_last": None if before_prefetched is None else before_prefetched.as_dict(),
            "workers": [worker_rng_states for worker_rng_states, _ in worker_states],
            "data": [data for _, data in worker_states],
            "draws": draws,
            "order": self.order.digest(batches),
            "first": self.first_digest,
            "ended": exhausted,
            "objects": self.tracked.objects.changes(report_unsaved=not self._replays_data),  # or it is made anew
        }

    def _worker_state(self, worker: int, batches: int) -> tuple[torch.Tensor | None, Any]:
        """Return a worker's streams, and what its copy of the data keeps, at the last batch that was seen."""
        if self._replays_data:  # as the worker does, from the start of its iteration
            self._record_iteration_start(worker)
            return self.initial_rng_states[worker], self.initial_worker_data[worker]
        n_workers = len(self.batches_before)
        made = len(range(self.offset + (worker - self.offset) % n_workers, batches, n_workers))
        if not made:
            return self.initial_rng_states[worker], self.initial_worker_data[worker]
        count = self.batches_before[worker] + made
        state, data = (
            self.worker_rng_states.read(worker, count),
            read_note(self.worker_rng_states.read_note(worker, count)),
        )
        if state is None:
            warnings.warn(
                f"worker {worker} of a DataLoader is further ahead than its prefetch_factor allows: its random numbers "
                "are not saved, and a resumed run draws others.",
                stacklevel=2,
            )
        return state, data

    def _record_iteration_start(self, worker: int) -> None:
        """Note where a worker was when it began its iteration, which it does as soon as it can."""
        if self.worker_starts is None or self.iteration == 1:
            return
        until = time.monotonic() + _SECONDS_TO_START
        state = self.worker_starts.read(worker, self.iteration)
        while state is None and time.monotonic() < until:
            time.sleep(0.001)
            state = self.worker_starts.read(worker, self.iteration)
        self.initial_rng_states[worker] = state
        self.initial_worker_data[worker] = read_note(self.worker_starts.read_note(worker, self.iteration))

    def _exhaustible(self, iterator: Any) -> Any:
        """Return what knows its end, of an iterator in this process."""
        return iterator._dataset_fetcher if self._replays_data else iterator._sampler_iter

    @property
    def _replays_data(self) -> bool:
        """Whether only the data knows its order."""
        return isinstance(self.tracked.loader.dataset, IterableDataset)

    def _create_iterator(self) -> tuple[Any, _DeferredSampler | None]:
        """Let the loader make an iterator whose workers write their streams down, and wait for work at a sampler."""
        loader = self.tracked.loader
        replaced: dict[str, Any] = {}
        deferred = None
        if self.batches_before:
            recording = RecordingCollate(loader.collate_fn, self.worker_rng_states, self.worker_starts)
            replaced["collate_fn"] = recording
            replaced["worker_init_fn"] = WorkerInit(
                loader.worker_init_fn,
                self.initial_rng_states,
                self.tracked.signals,
                self.tracked.stopping,
                recording,
                self.initial_worker_data,
            )
        if not self._replays_data:
            batches = loader.batch_sampler is not None
            deferred = _DeferredSampler(loader.batch_sampler if batches else loader.sampler)
            replaced["batch_sampler" if batches else "sampler"] = deferred
        with patched(loader, replaced):
            iterator = type(loader)._get_iterator(loader)
        if deferred is not None:
            iterator._index_sampler = deferred.sampler
        return iterator, deferred

    def _record_draws(
        self, iterator: Any, indices: Iterator[Any] | None, saved: Mapping[str, Any] | None = None
    ) -> None:
        """Watch what is drawn where others draw from the same streams in between."""
        loader = self.tracked.loader
        saved_draws = saved and saved.get("draws")
        if indices is None:
            self.draws = None if self.batches_before else RecordedDraws(saved_draws)
        else:
            self.draws = None if draws_only_once(iterator._index_sampler) else RecordedDraws(saved_draws)
            self.order = OrderDigest(max_ahead=len(self.batches_before) * (loader.prefetch_factor or 0))
            iterator._sampler_iter = TrackedSamplerIterator(indices, self.draws, self.order)
        if not self.batches_before:
            iterator._dataset_fetcher = _TrackedFetcher(iterator._dataset_fetcher, self)
        elif indices is None:
            _call_after_next(iterator, self.record_first_batch)
        if self.draws is not None:
            self.draws.start()

    def _attach(self, iterator: Any) -> None:
        setattr(iterator, _POSITION_ATTRIBUTE, self)
        if has_persistent_workers(self.tracked.loader):
            iterator._reset = _TrackedReset(self, iterator)
        if self.batches_before:
            return
        if self.tracked.prefetches:
            fetch = iterator._next_data

            def fetch_with_snapshot() -> Any:
                objects = None if self._replays_data else self.tracked.objects
                self.before_prefetched = LoaderSnapshot(self.tracked.loader, objects)
                return fetch()

            iterator._next_data = fetch_with_snapshot
        if self.at_start is None:
            _call_before_next(iterator, self._record_start)

    def _skip_batches(self, iterator: Any, saved: Mapping[str, Any]) -> None:
        """Skip batches that were seen, at the sampler where there is one."""
        batches, read = int(saved["batches"]), 0
        for indices in islice(iterator if self._replays_data else iterator._sampler_iter, batches):
            if read == 0 and not (self._replays_data or self.batches_before):
                self._read_first_batch(iterator._dataset_fetcher, indices, saved.get("first", ""))
            read += 1
        if not self._replays_data:
            iterator._num_yielded = self.offset = batches
        if saved.get("ended"):
            next(iterator if self._replays_data else iterator._sampler_iter, None)  # what follows the last is its, too
        if read < batches:
            raise RuntimeError(
                f"the run was stopped after {batches} batches of an epoch, and its loader now has {read}. Give the "
                "loader that the run had, or another dirpath to begin afresh."
            )

    def _read_first_batch(self, fetcher: _TrackedFetcher, indices: Any, wanted: str) -> None:
        """Read the epoch's first batch once more, as if it was not; what that does to the dataset is undone later."""
        snapshot = LoaderSnapshot(self.tracked.loader)
        with isolated_rng():
            before = _cuda_states()
            try:
                fetcher.fetch(indices)
            except Exception:  # of the data: it comes when a batch is needed
                self.first_digest = wanted
            if _cuda_states() != before:
                self.first_digest = wanted  # draws from where we cannot take it
        fetcher.is_first = False
        snapshot.restore(self.tracked.loader)

    def _restore_objects(self, saved: Mapping[str, Any]) -> None:
        """Leave the data as it was at the save; the samplers are there by themselves, and ahead where they were."""
        objects, wanted = self.tracked.objects, saved.get("objects", {})
        if saved["before_last"] is not None:
            return  # they come to that with the batch that is fetched once more
        if self._replays_data and not self.batches_before:
            others = changed_paths(objects.changes(DATA_PARTS, report_unsaved=False), wanted)
            if others:
                self.tracked.report_difference(
                    f"has read up to its place, and {others[0]} is not what it was, as something changed it between "
                    "the batches. Let the data alone change it"
                )
        objects.restore_changes(wanted, DATA_PARTS)

    def _report_differences(self, saved: Mapping[str, Any]) -> None:
        """Say where the epoch is another one than it was."""
        if saved.get("draws") and saved["draws"]["full"]:
            self.tracked.report_difference(
                "drew from the process' random streams more often than could be kept, and goes on with other data. Let "
                "the data draw from a generator of its own, or read it with num_workers=1"
            )
        order, first_digest = saved.get("order"), saved.get("first")
        if first_digest and self.first_digest and self.first_digest != first_digest:
            self.tracked.report_difference(
                "gives another first batch of the epoch than before. Let its data depend on nothing but its index and "
                "the random streams, and split it with a generator=torch.Generator().manual_seed(...)"
            )
        elif order and self.order.digest(int(saved["batches"])) != order:
            self.tracked.report_difference(
                "gives the samples in another order than before. Seed its sampler (generator=), or call "
                "seed_everything before the data is made"
            )

    def record_first_batch(self, batch: Any) -> None:
        """Note the first batch of the iteration."""
        self.first_digest = value_digest(batch)

    def restart(self, iterator: Any) -> None:
        """Start a persistent iterator's next iteration, and note where its workers are when they are idle."""
        self.at_start = LoaderSnapshot(self.tracked.loader, self.tracked.objects, report_unsaved=not self._replays_data)
        with patched(iterator, {"_try_put_index": lambda: None}):
            type(iterator)._reset(iterator, self.tracked.loader)
        for worker in range(len(self.batches_before)):
            count = self.worker_rng_states.last_count(worker)
            if count and not self._replays_data:
                self.initial_rng_states[worker] = self.worker_rng_states.read(worker, count)
                self.initial_worker_data[worker] = read_note(self.worker_rng_states.read_note(worker, count))
            self.batches_before[worker] = count
        self.offset = 0
        self.iteration += 1
        self._record_draws(iterator, None if self._replays_data else iterator._sampler_iter)
        self._fill_prefetch_queues(iterator)

    def _fill_prefetch_queues(self, iterator: Any) -> None:
        """Give the workers their first batches, each the one that would have been its."""
        for _ in range(self.offset % max(1, len(self.batches_before))):
            next(iterator._worker_queue_idx_cycle)
        for _ in range((self.tracked.loader.prefetch_factor or 0) * len(self.batches_before)):
            iterator._try_put_index()

    def _record_start(self) -> None:
        self.at_start = LoaderSnapshot(self.tracked.loader, self.tracked.objects, report_unsaved=not self._replays_data)
        if self.draws is not None:
            self.draws.start()


class _TrackedFetcher:
    """Makes batches in this process as the given one does."""

    def __init__(self, fetcher: Any, position: IteratorPosition) -> None:
        self._fetcher, self._position, self.is_first = fetcher, position, True
        self.exhausted = False  # an iterable was asked for more than it had

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        position = self._position
        try:
            if position._replays_data and position.draws is not None:
                batch = position.draws.call(lambda: self._fetcher.fetch(indices))
            else:
                batch = self._fetcher.fetch(indices)
        except StopIteration:
            self.exhausted = True
            raise
        if self.is_first:
            self.is_first = False
            position.record_first_batch(batch)
        return batch


class _TrackedReset:
    """`_reset` of a persistent iterator, which starts its next iteration."""

    def __init__(self, position: IteratorPosition, iterator: Any) -> None:
        self.position, self.iterator = position, ref(iterator)  # whose end must end the workers

    def __call__(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self.position.restart(self.iterator())


class _DeferredSampler:
    """A sampler that is asked as ever, and keeps what it would have given."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.iterator: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.sampler)
        return iter(())


def _cuda_states() -> list[bytes]:
    if not torch.cuda.is_initialized():
        return []
    return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]


def _call_before_next(iterator: Any, call: Callable[[], object]) -> None:
    """Call something once, before the iterator's next batch is made."""
    own = vars(iterator)
    replaced = own.get("_next_data")

    def fetch_first() -> Any:
        call()
        del own["_next_data"]
        if replaced is not None:
            own["_next_data"] = replaced
        return iterator._next_data()

    own["_next_data"] = fetch_first


def _call_after_next(iterator: Any, call: Callable[[Any], object]) -> None:
    """Call something once, with the batch that the iterator gives next."""
    own = vars(iterator)
    reference: Any = ref(iterator)  # in a circle, it would end late

    def fetch_and_call() -> Any:
        del own["_next_data"]
        batch = reference()._next_data()
        call(batch)
        return batch

    own["_next_data"] = fetch_and_call
