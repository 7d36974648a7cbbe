"""A DataLoader whose position in its iteration is tracked, and resumed in another process.

A map-style loader continues at its sampler, without reading what was seen; the random states of its workers are
restored. An iterable dataset is read again up to the position, as only it knows its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader

from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._torch_compat import loaders as private
from lightning_tricks.auto_resume.core.data.iterator_tracker import IteratorTracker, TrackedFetcher
from lightning_tricks.auto_resume.core.data.loader_objects import (
    DATA_PARTS,
    LoaderObjects,
    ObjectBaselines,
    changed_paths,
)
from lightning_tricks.auto_resume.core.data.loader_position import (
    LoaderPosition,
    LoaderSnapshot,
    has_persistent_workers,
    loader_generators,
)


def why_not_trackable(loader: Any) -> str:
    """Return why the position in a loader's iteration cannot be tracked; empty where it can."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is not a torch.utils.data.DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} overrides DataLoader.__iter__"
    if not getattr(loader, "in_order", True):
        return "in_order=False lets the workers' speed decide the order"
    return ""


class TrackedDataLoader:
    """Tracks the iterations of a DataLoader, which creates its iterators as before; each then knows its position.

    Args:
        loader: A loader for which `why_not_trackable` returns nothing. A weak reference is kept.
        prefetches: Whether the training loop fetches a batch before it trains on the one before, as Lightning does
            where the number of batches is unknown.
        signals: Numbers of the signals that the workers ignore, see `WorkerInit`.
        stopping: A shared byte that tells the workers whether the run stops, see `WorkerInit`.
        name: The name of the loader in messages.
        differences: Takes a sentence for each difference that a resumed iteration finds.
        baselines: Knows what the dataset and the samplers were at the start of the fit.

    Attributes:
        objects: The objects that the loader reads from.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        prefetches: bool = False,
        signals: Sequence[int] = (),
        stopping: Any = None,
        name: str = "the loader",
        differences: list[str] | None = None,
        baselines: ObjectBaselines | None = None,
    ) -> None:
        # a weak reference: in a cycle of references, iterators would end late, or in a worker that was forked meanwhile
        self._loader = ref(loader)
        self.prefetches, self.signals, self.stopping = prefetches, signals, stopping
        self.name, self.differences = name, [] if differences is None else differences
        self.objects = LoaderObjects(loader, baselines or ObjectBaselines())
        self._resume_position: LoaderPosition | None = None
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
        self._resume_position = None if position is None else LoaderPosition.from_dict(position)
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
        position, self._resume_position = self._resume_position, None
        if self._iterator_deferred:
            return iter(())
        if position is None:
            return _create_iterator(self)
        if position.at_end and not has_persistent_workers(self.loader):
            self.objects.restore_all(position.objects)
            return iter(())  # no workers are started: the next epoch creates an iterator of its own
        return _resume_iterator(self, position)


def _create_iterator(tracked: TrackedDataLoader) -> Any:
    """Create a tracked iterator at the start of an epoch."""
    tracker = IteratorTracker(tracked, LoaderSnapshot(tracked.loader, tracked.objects))
    iterator, deferred = tracker.create()
    tracker.track(iterator, None if deferred is None else deferred.iterator)
    if deferred is not None:
        tracker.fill_prefetch_queues(iterator)
    return iterator


def _resume_iterator(tracked: TrackedDataLoader, saved: LoaderPosition) -> Any:
    """Create a tracked iterator that continues at a saved position.

    Raises:
        RuntimeError: If the loader has fewer batches than were read before.
    """
    loader, objects = tracked.loader, tracked.objects
    # from the state of then, torch draws the same seed for the workers, and the sampler the same order
    objects.undo_changes(kept=saved.at_creation.objects)  # of hooks that came after it, and now came before
    saved.at_creation.restore(loader, objects)
    tracker = IteratorTracker(tracked, saved.at_creation)
    tracker.workers.restore(saved)
    iterator, deferred = tracker.create()
    if saved.at_start is not None:
        tracker.at_start = saved.at_start
        tracker.at_start.restore(loader, objects)
        if deferred is not None and loader.num_workers:
            # persistent workers: the epoch is a later one than the first, and its order is drawn at its start
            deferred.iterator = iter(deferred.sampler)
    tracker.track(iterator, None if deferred is None else deferred.iterator, saved.draws)
    _skip_batches(tracker, iterator, saved)
    _report_differences(tracker, saved)
    _restore_objects(tracker, saved)
    if deferred is not None:
        tracker.fill_prefetch_queues(iterator)  # only now, as the workers shall read what comes after the position
    if (before_prefetched := saved.before_prefetched) is not None:
        private.call_before_next_batch(iterator, lambda: before_prefetched.restore(loader, objects))
    return iterator


def _skip_batches(tracker: IteratorTracker, iterator: Any, saved: LoaderPosition) -> None:
    """Skip the batches that were read before: at the sampler or, without one, by reading them again."""
    indices_or_batches = iterator if tracker.replays_data else private.sampler_iterator(iterator)
    batches, num_read = int(saved.batches), 0
    for indices in islice(indices_or_batches, batches):
        if num_read == 0 and not (tracker.replays_data or tracker.workers.count):
            _read_first_batch(tracker, private.dataset_fetcher(iterator), indices, saved.first_digest)
        num_read += 1
    if not tracker.replays_data:
        tracker.workers.offset = batches
        private.set_num_yielded(iterator, batches)
    if saved.exhausted:
        next(indices_or_batches, None)  # what runs after the last item, such as draws, belongs to the epoch as well
    if num_read < batches:
        raise RuntimeError(
            f"the run was stopped after {batches} batches of an epoch, and its loader now has {num_read}. Give the "
            "loader that the run had, or choose another dirpath to start again."
        )


def _read_first_batch(tracker: IteratorTracker, fetcher: TrackedFetcher, indices: Any, expected: str) -> None:
    """Read the epoch's first batch once more to compare it, and leave no trace of that in any random state.

    What reading it changes in the dataset is restored afterwards, with all that the run had changed there.
    """
    loader = tracker.tracked.loader
    snapshot = LoaderSnapshot(loader)
    with isolated_rng():
        before = _cuda_states()
        try:
            fetcher.fetch(indices)
        except Exception:  # an error of the dataset shall come where the batch is needed
            tracker.first_digest = expected
        if _cuda_states() != before:
            tracker.first_digest = expected  # it depends on a CUDA random state, which is not the one of then
    fetcher.is_first = False
    snapshot.restore(loader)


def _restore_objects(tracker: IteratorTracker, saved: LoaderPosition) -> None:
    """Restore the data as they were at the save; the samplers got there by themselves, with what they gave ahead."""
    objects = tracker.tracked.objects
    if saved.before_prefetched is not None:
        return  # restored with the batch that is fetched once more
    if tracker.replays_data and not tracker.workers.count:
        others = changed_paths(objects.changes(DATA_PARTS, report_unsaved=False), saved.objects)
        if others:
            tracker.tracked.report_difference(
                f"was read again up to its position, and {others[0]} is not what it was, as something changed it "
                "between the batches. Let nothing but the data change it"
            )
    objects.restore_changes(saved.objects, DATA_PARTS)


def _report_differences(tracker: IteratorTracker, saved: LoaderPosition) -> None:
    """Report where the epoch differs from the stopped run's."""
    report = tracker.tracked.report_difference
    if saved.draws and saved.draws["full"]:
        report(
            "drew from the global random state more often than could be saved, and continues with other data. Let the "
            "data draw from a generator of its own, or read it with num_workers=1"
        )
    if saved.first_digest and tracker.first_digest and tracker.first_digest != saved.first_digest:
        report(
            "gives another first batch of the epoch than before. Let its data depend on nothing but its index and the "
            "random state, and split it with a generator=torch.Generator().manual_seed(...)"
        )
    elif saved.order and tracker.order.digest(int(saved.batches)) != saved.order:
        report(
            "gives the samples in another order than before. Seed its sampler (generator=), or call seed_everything "
            "before the data is made"
        )


def _cuda_states() -> list[bytes]:
    if not torch.cuda.is_initialized():
        return []
    return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
