"""Creates an iterator of a DataLoader that continues at a saved position, and reports where the data differ."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._torch_compat import loaders as private
from lightning_tricks.auto_resume.core.data.iterator_parts import TrackedFetcher
from lightning_tricks.auto_resume.core.data.iterator_tracker import IteratorTracker
from lightning_tricks.auto_resume.core.data.loader_objects import DATA_PARTS, changed_paths
from lightning_tricks.auto_resume.core.data.loader_position import LoaderPosition
from lightning_tricks.auto_resume.core.data.loader_snapshot import LoaderSnapshot

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.core.data.tracked_loader import TrackedDataLoader


def resume_iterator(tracked: TrackedDataLoader, saved: LoaderPosition) -> Any:
    """Create a tracked iterator that continues at a saved position.

    Raises:
        RuntimeError: If the loader has fewer batches than were read before.
    """
    loader, objects = tracked.loader, tracked.objects
    # from the state of then, torch draws the same seed for the workers, and the sampler the same order
    at_creation = LoaderSnapshot.from_dict(saved.at_creation)
    objects.undo_changes(kept=at_creation.objects)  # of hooks that came after it, and now came before
    at_creation.restore(loader, objects)
    tracker = IteratorTracker(tracked, at_creation)
    tracker.workers.restore(saved)
    iterator, deferred = tracker.create()
    if saved.at_start is not None:
        tracker.at_start = LoaderSnapshot.from_dict(saved.at_start)
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
    if saved.before_prefetched is not None:
        before_prefetched = LoaderSnapshot.from_dict(saved.before_prefetched)
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
