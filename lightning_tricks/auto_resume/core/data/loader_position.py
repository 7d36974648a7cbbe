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
from lightning_tricks.auto_resume.core.data.iterator_start import Moment
from lightning_tricks.auto_resume.core.data.loader_objects import DATA, different
from lightning_tricks.auto_resume.core.data.random_draws import Draws
from lightning_tricks.auto_resume.core.data.rng_state import RecordingCollate, WorkerStart, WorkerStreams
from lightning_tricks.auto_resume.core.data.sampling_order import Order, WatchedSampler, digest_of, draws_at_first_only
from lightning_tricks.auto_resume.core.data.worker_state import ROOM, read_note
from lightning_tricks.auto_resume.core.temporary_attributes import patched

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.core.data.tracked_loader import FollowedLoader

_SECONDS_TO_BEGIN = 10.0
_PLACE = "_lightning_tricks_place"  # attribute of an iterator that is followed


def is_persistent(loader: Any) -> bool:
    """Whether a loader keeps its workers, and with them their random streams, from one iteration to the next."""
    return bool(getattr(loader, "persistent_workers", False) and loader.num_workers)


def place_of(iterator: Any, read_ahead: int = 0, at_end: bool = False) -> dict[str, Any] | None:
    """Return the place of a followed loader's iterator, as tensors and plain values; None where it has none.

    Args:
        iterator: Of a `FollowedLoader`.
        read_ahead: Batches that were fetched and not yet trained on.
        at_end: Whether the epoch is over.
    """
    place = getattr(iterator, _PLACE, None)
    return None if place is None else place.as_dict(iterator, read_ahead, at_end)


class Place:
    """What must be known to make an iterator once more.

    Attributes:
        created: When the iterator was made; the seed of its workers comes from there.
        started: When its sampler was first asked, where that is a moment of its own.
        before_last: Before the batch that was fetched last, where the loop reads ahead.
        initial: The workers' streams at the start of the iteration; None for fresh ones.
        initial_data: What their copies of the data kept then; None for fresh ones.
        iteration: Of the workers, from 1.
        base: Batches that each worker had made at the start of the iteration.
        offset: Batches at which the sampler started in this process.
        draws: What the sampler, or an iterable in this process, draws batch by batch; None where nothing is watched.
        order: Of the indices.
        first: Digest of the first batch, where that can be compared; empty before.
    """

    def __init__(self, followed: FollowedLoader, created: Moment) -> None:
        loader = followed.loader
        self.followed, self.created = followed, created
        self.started: Moment | None = None
        self.before_last: Moment | None = None
        self.initial: list[torch.Tensor | None] = [None] * loader.num_workers
        self.base = [0] * loader.num_workers
        self.offset = 0
        self.initial_data: list[Any] = [None] * loader.num_workers
        self.iteration = 1
        self.streams = WorkerStreams(loader.num_workers, loader.prefetch_factor or 0, room=ROOM)
        self.starts = WorkerStreams(loader.num_workers, 0, room=ROOM) if self._reads_anew else None
        self.draws: Draws | None = None
        self.order = Order()
        self.first = ""

    @classmethod
    def of_new_iterator(cls, followed: FollowedLoader) -> Any:
        """Make an iterator and follow it."""
        place = cls(followed, Moment(followed.loader, followed.objects))
        iterator, held = place._make()
        place._watch(iterator, None if held is None else held.iterator)
        place._follow(iterator)
        if held is not None:
            place._prime(iterator)
        return iterator

    @classmethod
    def of_resumed_iterator(cls, followed: FollowedLoader, saved: Mapping[str, Any]) -> Any:
        """Make an iterator that goes on at a place."""
        loader = followed.loader
        created = Moment.of(saved["created"])
        created.restore(loader, followed.objects)
        place = cls(followed, created)
        place.started = saved["started"] and Moment.of(saved["started"])
        workers = saved["workers"] if len(saved["workers"]) == loader.num_workers else place.initial
        place.initial = list(workers)
        data = saved.get("data", [])
        place.initial_data = list(data) if len(data) == loader.num_workers else place.initial_data
        iterator, held = place._make()
        if place.started is not None:
            place.started.restore(loader, followed.objects)
        if held is not None and loader.num_workers and place.started is not None:
            held.iterator = iter(held.sampler)  # of a later iteration than the iterator's first
        place._watch(iterator, None if held is None else held.iterator, saved)
        place._follow(iterator)
        place._skip(iterator, saved)
        place._compare(saved)
        place._leave_objects(saved)
        if held is not None:
            place._prime(iterator)
        if saved["before_last"] is not None:
            before_last = Moment.of(saved["before_last"])
            _before_next(iterator, lambda: before_last.restore(loader, followed.objects))
        return iterator

    def as_dict(self, iterator: Any, read_ahead: int, at_end: bool) -> dict[str, Any]:
        """Return the place as tensors and plain values."""
        batches = iterator._num_yielded - read_ahead
        before_last = self.before_last if read_ahead else None
        ended = not (self.base or read_ahead) and self._source(iterator).ended
        draws = None if self.draws is None else self.draws.as_dict(None if self.base else batches + ended)
        places = [self._worker_at(worker, batches) for worker in range(len(self.base))]
        for _, data in places:
            self.followed.objects.note_lost({} if data is None else data["lost"])
        return {
            "batches": batches,
            "at_end": at_end,
            "created": self.created.as_dict(),
            "started": None if self.started is None else self.started.as_dict(),
            "before_last": None if before_last is None else before_last.as_dict(),
            "workers": [streams for streams, _ in places],
            "data": [data for _, data in places],
            "draws": draws,
            "order": self.order.digest(batches),
            "first": self.first,
            "ended": ended,
            "objects": self.followed.objects.changes(tell=not self._reads_anew),  # or it is made anew
        }

    def _worker_at(self, worker: int, batches: int) -> tuple[torch.Tensor | None, Any]:
        """Return a worker's streams, and what its copy of the data keeps, at the last batch that was seen."""
        if self._reads_anew:  # as the worker does, from the start of its iteration
            self._note_iteration(worker)
            return self.initial[worker], self.initial_data[worker]
        n_workers = len(self.base)
        made = len(range(self.offset + (worker - self.offset) % n_workers, batches, n_workers))
        if not made:
            return self.initial[worker], self.initial_data[worker]
        count = self.base[worker] + made
        state, data = self.streams.read(worker, count), read_note(self.streams.read_note(worker, count))
        if state is None:
            warnings.warn(
                f"worker {worker} of a DataLoader is further ahead than its prefetch_factor allows: its random numbers "
                "are not saved, and a resumed run draws others.",
                stacklevel=2,
            )
        return state, data

    def _note_iteration(self, worker: int) -> None:
        """Note where a worker was when it began its iteration, which it does as soon as it can."""
        if self.starts is None or self.iteration == 1:
            return
        until = time.monotonic() + _SECONDS_TO_BEGIN
        state = self.starts.read(worker, self.iteration)
        while state is None and time.monotonic() < until:
            time.sleep(0.001)
            state = self.starts.read(worker, self.iteration)
        self.initial[worker] = state
        self.initial_data[worker] = read_note(self.starts.read_note(worker, self.iteration))

    def _source(self, iterator: Any) -> Any:
        """Return what knows its end, of an iterator in this process."""
        return iterator._dataset_fetcher if self._reads_anew else iterator._sampler_iter

    @property
    def _reads_anew(self) -> bool:
        """Whether only the data knows its order."""
        return isinstance(self.followed.loader.dataset, IterableDataset)

    def _make(self) -> tuple[Any, _Held | None]:
        """Let the loader make an iterator whose workers write their streams down, and wait for work at a sampler."""
        loader = self.followed.loader
        replaced: dict[str, Any] = {}
        held = None
        if self.base:
            recording = RecordingCollate(loader.collate_fn, self.streams, self.starts)
            replaced["collate_fn"] = recording
            replaced["worker_init_fn"] = WorkerStart(
                loader.worker_init_fn,
                self.initial,
                self.followed.signals,
                self.followed.stopping,
                recording,
                self.initial_data,
            )
        if not self._reads_anew:
            batches = loader.batch_sampler is not None
            held = _Held(loader.batch_sampler if batches else loader.sampler)
            replaced["batch_sampler" if batches else "sampler"] = held
        with patched(loader, replaced):
            iterator = type(loader)._get_iterator(loader)
        if held is not None:
            iterator._index_sampler = held.sampler
        return iterator, held

    def _watch(self, iterator: Any, indices: Iterator[Any] | None, saved: Mapping[str, Any] | None = None) -> None:
        """Watch what is drawn where others draw from the same streams in between."""
        loader = self.followed.loader
        again = saved and saved.get("draws")
        if indices is None:
            self.draws = None if self.base else Draws(again)
        else:
            self.draws = None if draws_at_first_only(iterator._index_sampler) else Draws(again)
            self.order = Order(ahead=len(self.base) * (loader.prefetch_factor or 0))
            iterator._sampler_iter = WatchedSampler(indices, self.draws, self.order)
        if not self.base:
            iterator._dataset_fetcher = _WatchedFetcher(iterator._dataset_fetcher, self)
        elif indices is None:
            _after_next(iterator, self.saw_first)
        if self.draws is not None:
            self.draws.begin()

    def _follow(self, iterator: Any) -> None:
        setattr(iterator, _PLACE, self)
        if is_persistent(self.followed.loader):
            iterator._reset = _Reset(self, iterator)
        if self.base:
            return
        if self.followed.reads_ahead:
            fetch = iterator._next_data

            def fetch_noting() -> Any:
                objects = None if self._reads_anew else self.followed.objects
                self.before_last = Moment(self.followed.loader, objects)
                return fetch()

            iterator._next_data = fetch_noting
        if self.started is None:
            _before_next(iterator, self._note_start)

    def _skip(self, iterator: Any, saved: Mapping[str, Any]) -> None:
        """Skip batches that were seen, at the sampler where there is one."""
        batches, read = int(saved["batches"]), 0
        for indices in islice(iterator if self._reads_anew else iterator._sampler_iter, batches):
            if read == 0 and not (self._reads_anew or self.base):
                self._look_at_first(iterator._dataset_fetcher, indices, saved.get("first", ""))
            read += 1
        if not self._reads_anew:
            iterator._num_yielded = self.offset = batches
        if saved.get("ended"):
            next(iterator if self._reads_anew else iterator._sampler_iter, None)  # what follows the last is its, too
        if read < batches:
            raise RuntimeError(
                f"the run was stopped after {batches} batches of an epoch, and its loader now has {read}. Give the "
                "loader that the run had, or another dirpath to begin afresh."
            )

    def _look_at_first(self, fetcher: _WatchedFetcher, indices: Any, wanted: str) -> None:
        """Read the epoch's first batch once more, as if it was not; what that does to the dataset is undone later."""
        moment = Moment(self.followed.loader)
        with isolated_rng():
            before = _cuda_states()
            try:
                fetcher.fetch(indices)
            except Exception:  # of the data: it comes when a batch is needed
                self.first = wanted
            if _cuda_states() != before:
                self.first = wanted  # draws from where we cannot take it
        fetcher.is_first = False
        moment.restore(self.followed.loader)

    def _leave_objects(self, saved: Mapping[str, Any]) -> None:
        """Leave the data as it was at the save; the samplers are there by themselves, and ahead where they were."""
        objects, wanted = self.followed.objects, saved.get("objects", {})
        if saved["before_last"] is not None:
            return  # they come to that with the batch that is fetched once more
        if self._reads_anew and not self.base:
            others = different(objects.changes(DATA, tell=False), wanted)
            if others:
                self.followed.differs(
                    f"has read up to its place, and {others[0]} is not what it was, as something changed it between "
                    "the batches. Let the data alone change it"
                )
        objects.put_back(wanted, DATA)

    def _compare(self, saved: Mapping[str, Any]) -> None:
        """Say where the epoch is another one than it was."""
        if saved.get("draws") and saved["draws"]["full"]:
            self.followed.differs(
                "drew from the process' random streams more often than could be kept, and goes on with other data. Let "
                "the data draw from a generator of its own, or read it with num_workers=1"
            )
        order, first = saved.get("order"), saved.get("first")
        if first and self.first and self.first != first:
            self.followed.differs(
                "gives another first batch of the epoch than before. Let its data depend on nothing but its index and "
                "the random streams, and split it with a generator=torch.Generator().manual_seed(...)"
            )
        elif order and self.order.digest(int(saved["batches"])) != order:
            self.followed.differs(
                "gives the samples in another order than before. Seed its sampler (generator=), or call "
                "seed_everything before the data is made"
            )

    def saw_first(self, batch: Any) -> None:
        """Note the first batch of the iteration."""
        self.first = digest_of(batch)

    def begin_again(self, iterator: Any) -> None:
        """Start a persistent iterator's next iteration, and note where its workers are when they are idle."""
        self.started = Moment(self.followed.loader, self.followed.objects, tell=not self._reads_anew)
        with patched(iterator, {"_try_put_index": lambda: None}):
            type(iterator)._reset(iterator, self.followed.loader)
        for worker in range(len(self.base)):
            count = self.streams.last_count(worker)
            if count and not self._reads_anew:
                self.initial[worker] = self.streams.read(worker, count)
                self.initial_data[worker] = read_note(self.streams.read_note(worker, count))
            self.base[worker] = count
        self.offset = 0
        self.iteration += 1
        self._watch(iterator, None if self._reads_anew else iterator._sampler_iter)
        self._prime(iterator)

    def _prime(self, iterator: Any) -> None:
        """Give the workers their first batches, each the one that would have been its."""
        for _ in range(self.offset % max(1, len(self.base))):
            next(iterator._worker_queue_idx_cycle)
        for _ in range((self.followed.loader.prefetch_factor or 0) * len(self.base)):
            iterator._try_put_index()

    def _note_start(self) -> None:
        self.started = Moment(self.followed.loader, self.followed.objects, tell=not self._reads_anew)
        if self.draws is not None:
            self.draws.begin()


class _WatchedFetcher:
    """Makes batches in this process as the given one does."""

    def __init__(self, fetcher: Any, place: Place) -> None:
        self._fetcher, self._place, self.is_first = fetcher, place, True
        self.ended = False  # an iterable was asked for more than it had

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        place = self._place
        try:
            if place._reads_anew and place.draws is not None:
                batch = place.draws.call(lambda: self._fetcher.fetch(indices))
            else:
                batch = self._fetcher.fetch(indices)
        except StopIteration:
            self.ended = True
            raise
        if self.is_first:
            self.is_first = False
            place.saw_first(batch)
        return batch


class _Reset:
    """`_reset` of a persistent iterator, which starts its next iteration."""

    def __init__(self, place: Place, iterator: Any) -> None:
        self.place, self.iterator = place, ref(iterator)  # whose end must end the workers

    def __call__(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self.place.begin_again(self.iterator())


class _Held:
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


def _before_next(iterator: Any, call: Callable[[], object]) -> None:
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


def _after_next(iterator: Any, call: Callable[[Any], object]) -> None:
    """Call something once, with the batch that the iterator gives next."""
    own = vars(iterator)
    weakly: Any = ref(iterator)  # in a circle, it would end late

    def fetch_and_call() -> Any:
        del own["_next_data"]
        batch = weakly()._next_data()
        call(batch)
        return batch

    own["_next_data"] = fetch_and_call
