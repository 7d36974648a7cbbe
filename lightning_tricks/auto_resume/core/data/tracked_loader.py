"""A DataLoader whose position in its iteration is tracked, and resumed in another process.

A map-style loader continues at its sampler, without reading what was seen; the random states of its workers are
restored. An iterable dataset is read again up to the position, as only it knows its order; one with a state of its own
that is read in this process is a `ForeignLoader`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_tricks._shared.rng import loader_generators
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat import loaders as private
from lightning_tricks.auto_resume.core.attributes.attribute_access import patched
from lightning_tricks.auto_resume.core.attributes.encoding import differing_paths
from lightning_tricks.auto_resume.core.data.loader_objects import (
    DATA_PARTS,
    LoaderObjects,
    ObjectBaselines,
    OrderDigest,
    TrackedFetcher,
    TrackedIndices,
    changed_values,
    has_persistent_workers,
    value_digest,
)
from lightning_tricks.auto_resume.core.data.rng_state import GlobalDraws, loader_snapshot, restore_snapshot
from lightning_tricks.auto_resume.core.data.workers import RecordingCollate, WorkerInit, WorkerPositions
from lightning_tricks.auto_resume.core.signals import StopRequest

POSITION_KEY = "place"  # of a loader's position in its state; part of the format of checkpoints
MOVED_KEY = "moved"  # of a position: whether it is one of another loader than the one that had it; never saved
LEFT_KEY = "left"  # the indices of the batches that follow a position, where a sampler does not give them; never saved
_TRACKER_ATTRIBUTE = "_lightning_tricks_place"  # the attribute of a tracked iterator that knows its position


def why_not_trackable(loader: Any) -> str:
    """Return why the position in a loader's iteration cannot be tracked; empty where it can."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is not a torch.utils.data.DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} overrides DataLoader.__iter__"
    if not getattr(loader, "in_order", True):
        return "with in_order=False, the order depends on the speed of the workers"
    return ""


def num_shares(loader: DataLoader[Any]) -> int:
    """Return among how many ranks the sampler of a loader shares out its samples."""
    return int(loader.sampler.num_replicas) if isinstance(loader.sampler, DistributedSampler) else 1


def draws_only_once(sampler: Any) -> bool:
    """Whether a sampler is one of torch's, which draw from the global random state at their first index only."""
    inner = getattr(sampler, "sampler", None)
    known = type(sampler).__module__ in ("torch.utils.data.sampler", "torch.utils.data.distributed")
    return known and (inner is None or draws_only_once(inner))


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


class TrackedDataLoader:
    """Tracks the iterations of a DataLoader, which creates its iterators as before; each then knows its position.

    Args:
        loader: A loader for which `why_not_trackable` returns nothing. A weak reference is kept.
        prefetches: Whether the training loop fetches a batch before it trains on the one before, as Lightning does
            where the number of batches is unknown.
        stop_request: The signals that the workers ignore, and whether the run stops; see `WorkerInit`.
        name: The name of the loader in messages.
        differences: Takes a sentence for each difference that a resumed iteration finds.
        baselines: Knows what the dataset and the samplers were at the start of the fit.

    Attributes:
        objects: The objects that the loader reads from.
        other_attributes: The paths of what differs in the dataset from the stopped run, though it may be no data.
        draws_in_between: Whether what was to be repeated after a position draws from the global random state, and so
            do others in between: another process would read other data.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        prefetches: bool = False,
        stop_request: StopRequest | None = None,
        name: str = "the loader",
        differences: list[str] | None = None,
        baselines: ObjectBaselines | None = None,
    ) -> None:
        # a weak reference: in a cycle of references, iterators would end late, or in a worker that was forked meanwhile
        self._loader = ref(loader)
        self.prefetches, self.stop_request = prefetches, stop_request or StopRequest(())
        self.name, self.differences = name, [] if differences is None else differences
        self.objects = LoaderObjects(loader, baselines or ObjectBaselines())
        self.other_attributes: list[str] = []
        self.draws_in_between = False
        self._resume_position: Mapping[str, Any] | None = None
        self._iterator_deferred = False
        self._installed = ExitStack()
        self._installed.enter_context(private.overridden_iterator_factory(loader, self._create_iterator))

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader.

        Raises:
            ReferenceError: If nobody else refers to it any more.
        """
        loader = self._loader()
        if loader is None:
            raise ReferenceError("the tracked loader no longer exists: keep a reference to it.")
        return loader

    def close(self) -> None:
        """Stop tracking the loader; iterators that exist keep working."""
        self._installed.close()

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of the generators from which the loader and its samplers draw."""
        return [generator.get_state() for generator in loader_generators(self.loader)]

    def state(self, iterator: Any, num_prefetched: int = 0, at_end: bool = True) -> dict[str, Any]:
        """Return the state of the loader in a checkpoint, with the position of an iterator; None for none."""
        position = None if iterator is None else position_of(iterator, num_prefetched, at_end)
        return {
            "n_workers": self.loader.num_workers,
            "generators": self.generator_states(),
            "objects": self.objects.changes() if position is None else position["objects"],
            "fingerprint": self.objects.fingerprint,
            POSITION_KEY: position,
        }

    def restore_generator_states(self, states: Sequence[torch.Tensor]) -> None:
        """Restore what `generator_states` returned."""
        for generator, state in zip(loader_generators(self.loader), states, strict=False):
            generator.set_state(state)

    def defer_iterator(self) -> None:
        """Let the next iterator be an empty one, until `resume_from` is called."""
        self._iterator_deferred = True

    def resume_from(self, position: Mapping[str, Any] | None) -> None:
        """Let the next iterator continue at a position, and change the global random state as its creation did.

        Args:
            position: What `position_of` returned; None for the start of an epoch.
        """
        self._resume_position = position
        self._iterator_deferred = False
        if has_persistent_workers(self.loader):
            private.set_persistent_iterator(self.loader, None)

    def create_persistent_iterator(self) -> None:
        """Create the iterator whose workers live on now, not when the loader is first iterated over."""
        private.set_persistent_iterator(self.loader, self._create_iterator())

    def report_difference(self, what: str) -> None:
        """Add a sentence on a difference from the stopped run, which begins with the loader's name."""
        self.differences.append(f"{self.name} {what}.")

    def _create_iterator(self) -> Any:
        saved, self._resume_position = self._resume_position, None
        if self._iterator_deferred:
            return iter(())
        if saved is None:
            tracker = IteratorTracker(self, loader_snapshot(self.loader, self.objects))
            iterator, deferred = tracker.create()
            tracker.track(iterator, deferred)
            if deferred is not None:
                tracker.fill_prefetch_queues(iterator)
            return iterator
        if saved["at_end"] and not has_persistent_workers(self.loader):
            self.objects.restore_all(saved["objects"])
            return iter(())  # no workers are started: the next epoch creates an iterator of its own
        return _resume_iterator(self, saved)


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
        draws: Watches what the sampler, or an iterable dataset in this process, draws.
        order: Digest of the indices.
        first_digest: Digest of the first batch; empty before it, and where batches are made from indices.
        rest: What was left of the epoch when another number of ranks went on with it; None in an epoch of its own.
    """

    def __init__(self, tracked: TrackedDataLoader, at_creation: Mapping[str, Any]) -> None:
        loader = tracked.loader
        self.tracked, self.at_creation = tracked, at_creation
        self.at_start: Mapping[str, Any] | None = None
        self.before_prefetched: Mapping[str, Any] | None = None
        self.replays_data = isinstance(loader.dataset, IterableDataset)
        self.workers = WorkerPositions(loader, self.replays_data)
        self.draws = GlobalDraws()
        self.order = OrderDigest()
        self.first_digest = ""
        self.rest: Mapping[str, Any] | None = None

    def create(self) -> tuple[Any, DeferredSampler | None]:
        """Let the loader create an iterator whose workers record their states, and wait for work at a sampler.

        Returns:
            The iterator and, unless the dataset is iterable, the sampler whose indices it is to be given.
        """
        loader = self.tracked.loader
        replaced: dict[str, Any] = {}
        deferred = None
        if self.workers.count:
            recording = RecordingCollate(loader.collate_fn, self.workers.records, self.replays_data)
            request = self.tracked.stop_request
            numbers, leaving = request.signal_numbers, request.leaving
            init = WorkerInit(loader.worker_init_fn, numbers, leaving, recording, self.workers.initial)
            replaced |= {"collate_fn": recording, "worker_init_fn": init}
        if not self.replays_data:
            has_batches = loader.batch_sampler is not None
            deferred = DeferredSampler(loader.batch_sampler if has_batches else loader.sampler)
            replaced["batch_sampler" if has_batches else "sampler"] = deferred
        with patched(loader, replaced):
            iterator = private.class_iterator(loader)
        if deferred is not None:
            private.set_index_sampler(iterator, deferred.sampler)
        return iterator, deferred

    def track(self, iterator: Any, deferred: DeferredSampler | None) -> None:
        """Track an iterator from now on, given what `create` returned, with the iterator of the indices."""
        self._track_parts(iterator, None if deferred is None else deferred.iterator)
        setattr(iterator, _TRACKER_ATTRIBUTE, self)
        if has_persistent_workers(self.tracked.loader):
            reference = ref(iterator)  # the workers end with the last reference to it
            private.override_reset(iterator, lambda loader, first_iter=False: self._restart(reference()))
        if self.workers.count:
            return
        if self.tracked.prefetches:
            private.call_before_each_batch(iterator, self._record_before_prefetched)
        if self.at_start is None:
            private.call_before_next_batch(iterator, self._record_start)

    def _track_parts(self, iterator: Any, indices: Iterator[Any] | None) -> None:
        self.draws = GlobalDraws(is_watching=indices is None or not draws_only_once(private.index_sampler(iterator)))
        if indices is not None:
            self.order = OrderDigest()
            private.set_sampler_iterator(iterator, TrackedIndices(indices, self.draws, self.order))
        elif self.workers.count:
            private.call_after_next_batch(iterator, self.record_first_batch)
        else:
            fetcher = TrackedFetcher(private.dataset_fetcher(iterator), self.draws, self.record_first_batch)
            private.set_dataset_fetcher(iterator, fetcher)

    def _record_before_prefetched(self) -> None:
        objects = None if self.replays_data else self.tracked.objects
        self.before_prefetched = loader_snapshot(self.tracked.loader, objects)

    def _record_start(self) -> None:
        # what an iterable changes in itself comes again with its data: nothing of that is unsaved
        self.at_start = loader_snapshot(self.tracked.loader, self.tracked.objects, report_unsaved=not self.replays_data)

    def record_first_batch(self, batch: Any) -> None:
        """Record the first batch of the iteration."""
        self.first_digest = value_digest(batch)

    def position(self, iterator: Any, num_prefetched: int, at_end: bool) -> dict[str, Any]:
        """Return what another process needs to continue after the batches that were trained on; its keys are a format.

        - "batches": the batches of the epoch that were trained on; "at_end": whether the epoch is over.
        - "created": the moment when the iterator was created; its workers' seed comes from there. "started": when its
          sampler was first asked, None where that is the same moment. "before_last": before the batch that was fetched
          last, None unless the loop prefetches. Each is a `loader_snapshot`.
        - "workers": for each worker, its random state, None for the one with which it starts; "data": what its
          copy of the data changed, None for nothing.
        - "order" and "first": digests of the indices so far and of the first batch, empty where they are not known.
        - "ended": whether the data were asked for more than they had.
        - "objects": what changed in the objects that the loader reads from; see `LoaderObjects.changes`.
        - "rest": what was left of the epoch when the number of ranks changed, None where it did not; see `EpochRest`.
        - "shares": among how many ranks the samples are shared out.
        """
        batches = private.num_yielded(iterator) - num_prefetched
        ended = False
        if not (self.workers.count or num_prefetched):
            part = private.dataset_fetcher(iterator) if self.replays_data else private.sampler_iterator(iterator)
            ended = part.exhausted
        worker_states = [self.workers.state(worker, batches) for worker in range(self.workers.count)]
        for _, data in worker_states:
            self.tracked.objects.add_unsaved({} if data is None else data["lost"])
        self.tracked.draws_in_between = self.draws.are_interleaved and not at_end
        return {
            "batches": batches,
            "at_end": at_end,
            "created": self.at_creation,
            "started": self.at_start,
            "before_last": self.before_prefetched if num_prefetched else None,
            "workers": [rng_state for rng_state, _ in worker_states],
            "data": [data for _, data in worker_states],
            "order": self.order.digest(batches),
            "first": self.first_digest,
            "ended": ended,
            "objects": self.tracked.objects.changes(report_unsaved=not self.replays_data),
            "rest": self.rest,
            "shares": num_shares(self.tracked.loader),
        }

    def _restart(self, iterator: Any) -> None:
        """Start the next iteration of a persistent iterator, in the place of its own method."""
        self.rest = None
        self._record_start()
        private.reset_without_prefetching(iterator, self.tracked.loader)
        self.workers.start_iteration()  # while they are idle, as they have no indices yet
        self._track_parts(iterator, None if self.replays_data else private.sampler_iterator(iterator))
        self.fill_prefetch_queues(iterator)

    def fill_prefetch_queues(self, iterator: Any) -> None:
        """Give the workers their first batches; each gets those that an uninterrupted epoch would have given it."""
        for _ in range(self.workers.offset % max(1, self.workers.count)):
            private.skip_worker(iterator)
        for _ in range(self.workers.prefetch * self.workers.count):
            private.request_batch(iterator)


def is_tracked(iterator: Any) -> bool:
    """Whether a `TrackedDataLoader` created an iterator."""
    return getattr(iterator, _TRACKER_ATTRIBUTE, None) is not None


def position_of(iterator: Any, num_prefetched: int = 0, at_end: bool = False) -> dict[str, Any] | None:
    """Return the position of a tracked loader's iterator under the keys of a checkpoint; None if it is not tracked.

    Args:
        iterator: An iterator that a `TrackedDataLoader` created.
        num_prefetched: Batches that were fetched and not yet trained on.
        at_end: Whether the epoch is over.
    """
    tracker: IteratorTracker | None = getattr(iterator, _TRACKER_ATTRIBUTE, None)
    return None if tracker is None else tracker.position(iterator, num_prefetched, at_end)


def _resume_iterator(tracked: TrackedDataLoader, saved: Mapping[str, Any]) -> Any:
    """Create a tracked iterator that continues at a saved position.

    Raises:
        RuntimeError: If the loader has fewer batches than were read before.
    """
    loader, objects = tracked.loader, tracked.objects
    at_creation, at_start, before_prefetched = saved["created"], saved["started"], saved["before_last"]
    # from the state of then, torch draws the same seed for the workers, and the sampler the same order
    objects.undo_changes(kept=at_creation["objects"])  # of hooks that came after it, and now came before
    restore_snapshot(at_creation, loader, objects)
    tracker = IteratorTracker(tracked, at_creation)
    tracker.workers.restore(saved["workers"], saved["data"])
    iterator, deferred = tracker.create()
    if at_start is not None:
        tracker.at_start = at_start
        restore_snapshot(at_start, loader, objects)
        if deferred is not None and loader.num_workers:
            # persistent workers: the epoch is a later one than the first, and its order is drawn at its start
            deferred.iterator = iter(deferred.sampler)
    if deferred is not None and LEFT_KEY in saved:
        tracker.rest = saved["rest"]
        deferred.iterator = iter([*([[]] * saved["batches"]), *saved[LEFT_KEY]])
    tracker.track(iterator, deferred)
    _skip_batches(tracker, iterator, saved)
    _report_differences(tracker, saved)
    _restore_objects(tracker, saved)
    if deferred is not None:
        tracker.fill_prefetch_queues(iterator)  # only now, as the workers shall read what comes after the position
    if before_prefetched is not None:
        private.call_before_next_batch(iterator, lambda: restore_snapshot(before_prefetched, loader, objects))
    return iterator


def _skip_batches(tracker: IteratorTracker, iterator: Any, saved: Mapping[str, Any]) -> None:
    """Skip the batches that were read before: at the sampler or, without one, by reading them again."""
    batches = int(saved["batches"])
    if tracker.replays_data:
        indices_or_batches = iterator
        num_read = sum(1 for _ in islice(iterator, batches))
    else:
        indices_or_batches = private.sampler_iterator(iterator)
        indices_or_batches.skip(batches)
        num_read = tracker.order.count
        tracker.workers.offset = batches
        private.set_num_yielded(iterator, batches)
    if saved["ended"]:
        next(indices_or_batches, None)  # what runs after the last item, such as draws, belongs to the epoch as well
    if num_read < batches and not saved.get(MOVED_KEY):
        raise RuntimeError(
            f"the run was stopped after {batches} batches of an epoch, but its loader now has {num_read}. Pass the "
            "same loader as before, or choose another dirpath to start a new run."
        )


def _restore_objects(tracker: IteratorTracker, saved: Mapping[str, Any]) -> None:
    """Restore the data as they were at the save; the samplers got there by themselves, with what they gave ahead."""
    objects = tracker.tracked.objects
    if saved["before_last"] is not None:
        return  # restored with the batch that is fetched once more
    if tracker.replays_data and not tracker.workers.count:
        now = objects.changes(DATA_PARTS, report_unsaved=False)
        for path in islice(differing_paths(changed_values(saved["objects"]), changed_values(now)), 1):
            tracker.tracked.report_difference(
                f"was read again up to its position, and {path} differs, as something changed it between the batches. "
                "Let only the dataset change it"
            )
    objects.restore_changes(saved["objects"], DATA_PARTS)


def _report_differences(tracker: IteratorTracker, saved: Mapping[str, Any]) -> None:
    """Report where the epoch differs from the stopped run's."""
    report = tracker.tracked.report_difference
    if saved["first"] and tracker.first_digest and tracker.first_digest != saved["first"]:
        others = tracker.tracked.other_attributes
        remedy = (
            "Give what shuffles it a seed, as shuffle(1000, seed=7) does with WebDataset"
            if tracker.replays_data
            else "Let its samples depend only on the index and the random state, and split the data with a "
            "generator=torch.Generator().manual_seed(...)"
        )
        report(
            f"gives another first batch of the epoch than before. {remedy}"
            + (f"; {list_names(others, 3)} differ in the data" if others else "")
        )
    elif saved["order"] and tracker.order.digest(int(saved["batches"])) != saved["order"]:
        report(
            "gives the samples in another order than before. Seed its sampler (generator=), or call seed_everything "
            "before you create the data"
        )
