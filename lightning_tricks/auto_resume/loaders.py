"""Where a DataLoader stands in its iteration, and how another process takes it to the same place.

A map-style loader goes on at its sampler, without reading what was seen; the streams of its workers are put back. An
iterable one is read anew up to there, as only it knows its order.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks.auto_resume.streams import (
    RecordingCollate,
    WorkerStart,
    WorkerStreams,
    pack_streams,
    unpack_streams,
)

_PLACE = "_lightning_tricks_place"  # attribute of an iterator that is followed


def objection_to_following(loader: Any) -> str:
    """Return why the place in a loader's iteration cannot be followed, or nothing."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is no torch.utils.data.DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in a way of its own"
    if not getattr(loader, "in_order", True):
        return "in_order=False lets the workers' speed decide about the order"
    return ""


def is_persistent(loader: Any) -> bool:
    """Whether a loader keeps its workers, and with them their random streams, from one iteration to the next."""
    return bool(getattr(loader, "persistent_workers", False) and loader.num_workers)


class FollowedLoader:
    """A DataLoader whose iterations are followed: it makes its iterators as before, and each knows its place.

    Args:
        loader: To which `objection_to_following` has none.
        reads_ahead: Whether the training loop fetches a batch before it trains on it, as Lightning does where the
            number of batches is unknown.
        signals: That the workers pass over, see `WorkerStart`.
        stopping: See there.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        reads_ahead: bool = False,
        signals: Sequence[int] = (),
        stopping: Any = None,
    ) -> None:
        # weakly: in a circle, iterators would end late, or in a worker that was forked meanwhile
        self._loader = ref(loader)
        self.reads_ahead, self.signals, self.stopping = reads_ahead, signals, stopping
        self._resumed: Mapping[str, Any] | None = None
        self._spares = False
        vars(loader)["_get_iterator"] = self._get_iterator

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader, which lives as long as somebody else wants it."""
        loader = self._loader()
        if loader is None:
            raise ReferenceError("the loader that was followed is gone: keep a reference to it.")
        return loader

    def release(self) -> None:
        """Let the loader go; iterators that exist keep working."""
        loader = self._loader()
        if loader is not None:
            vars(loader).pop("_get_iterator", None)

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of the generators that the loader and its samplers draw from."""
        return [generator.get_state() for generator in _generators(self.loader)]

    def restore_generators(self, states: Sequence[torch.Tensor]) -> None:
        """Put the generators back."""
        for generator, state in zip(_generators(self.loader), states, strict=False):
            generator.set_state(state)

    def spare(self) -> None:
        """Make the next iterator an empty one, which `resume` replaces."""
        self._spares = True

    def resume(self, place: Mapping[str, Any] | None) -> None:
        """Make the next iterator one that goes on at a place; the process' streams are wherever that left them."""
        self._resumed, self._spares = place, False
        if is_persistent(self.loader):
            self.loader._iterator = None

    def _get_iterator(self) -> Any:
        place, self._resumed = self._resumed, None
        if self._spares:
            return iter(())
        if place is None:
            return _Place.of_new_iterator(self)
        if place["at_end"] and not is_persistent(self.loader):
            return iter(())  # spares the workers: the next epoch asks for an iterator of its own
        return _Place.of_resumed_iterator(self, place)


def place_of(iterator: Any, read_ahead: int = 0, at_end: bool = False) -> dict[str, Any] | None:
    """Return the place of a followed loader's iterator, as tensors and plain values; None where it has none.

    Args:
        iterator: Of a `FollowedLoader`.
        read_ahead: Batches that were fetched and not yet trained on.
        at_end: Whether the epoch is over.
    """
    place = getattr(iterator, _PLACE, None)
    return None if place is None else place.as_dict(iterator, read_ahead, at_end)


class _Place:
    """What must be known to make an iterator once more.

    Attributes:
        created: Streams when the iterator was made; the seed of its workers comes from them.
        started: Streams when its sampler was first asked, where that is a moment of its own.
        before_last: Streams before the batch that was fetched last, where the loop reads ahead.
        initial: The workers' streams at the start of the iteration; None for fresh ones.
        base: Batches that each worker had made at the start of the iteration.
        offset: Batches at which the sampler started in this process.
    """

    def __init__(self, followed: FollowedLoader, created: _Streams) -> None:
        n_workers = followed.loader.num_workers
        self.followed, self.created = followed, created
        self.started: _Streams | None = None
        self.before_last: _Streams | None = None
        self.initial: list[torch.Tensor | None] = [None] * n_workers
        self.base = [0] * n_workers
        self.offset = 0
        self.streams = WorkerStreams(n_workers, followed.loader.prefetch_factor or 0)

    @classmethod
    def of_new_iterator(cls, followed: FollowedLoader) -> Any:
        """Make an iterator and follow it."""
        place = cls(followed, _Streams(followed.loader))
        iterator = place._make()
        place._follow(iterator)
        return iterator

    @classmethod
    def of_resumed_iterator(cls, followed: FollowedLoader, saved: Mapping[str, Any]) -> Any:
        """Make an iterator that goes on at a place."""
        loader = followed.loader
        created = _Streams.of(saved["created"])
        created.restore(loader)
        place = cls(followed, created)
        place.started = saved["started"] and _Streams.of(saved["started"])
        workers = saved["workers"] if len(saved["workers"]) == loader.num_workers else place.initial
        place.initial = list(workers)
        batches = int(saved["batches"])
        if isinstance(loader.dataset, IterableDataset):
            iterator = place._make()
            place._restore_start()
            place._follow(iterator)
            read = sum(1 for _ in islice(iterator, batches))
        else:
            held = _Held(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
            iterator = place._make(held)
            place._restore_start()
            begins_anew = loader.num_workers > 0 and place.started is not None
            iterator._sampler_iter = iter(held.sampler) if begins_anew else held.iterator
            iterator._index_sampler = held.sampler
            read = sum(1 for _ in islice(iterator._sampler_iter, batches))
            iterator._num_yielded = place.offset = batches
            place._follow(iterator)
            place._prime(iterator)
        if read < batches:
            raise RuntimeError(
                f"the run was stopped after {batches} batches of an epoch, and its loader now has {read}. Give the "
                "loader that the run had, or another dirpath to begin afresh."
            )
        if saved["before_last"] is not None:
            before_last = _Streams.of(saved["before_last"])
            _before_next(iterator, lambda: before_last.restore(loader))
        return iterator

    def as_dict(self, iterator: Any, read_ahead: int, at_end: bool) -> dict[str, Any]:
        """Return the place as tensors and plain values."""
        batches = iterator._num_yielded - read_ahead
        before_last = self.before_last if read_ahead else None
        return {
            "batches": batches,
            "at_end": at_end,
            "created": self.created.as_dict(),
            "started": None if self.started is None else self.started.as_dict(),
            "before_last": None if before_last is None else before_last.as_dict(),
            "workers": [self._worker_at(worker, batches) for worker in range(len(self.base))],
        }

    def _worker_at(self, worker: int, batches: int) -> torch.Tensor | None:
        if isinstance(self.followed.loader.dataset, IterableDataset):
            return self.initial[worker]  # which the worker reads anew from
        n_workers = len(self.base)
        made = len(range(self.offset + (worker - self.offset) % n_workers, batches, n_workers))
        if not made:
            return self.initial[worker]
        state = self.streams.read(worker, self.base[worker] + made)
        if state is None:
            warnings.warn(
                f"worker {worker} of a DataLoader is further ahead than its prefetch_factor allows: its random numbers "
                "are not saved, and a resumed run draws others.",
                stacklevel=2,
            )
        return state

    def _make(self, held: _Held | None = None) -> Any:
        """Let the loader make an iterator whose workers write their streams down; with `held`, they wait for work."""
        loader = self.followed.loader
        replaced: dict[str, Any] = {}
        if self.base:
            replaced["collate_fn"] = RecordingCollate(loader.collate_fn, self.streams)
            replaced["worker_init_fn"] = WorkerStart(
                loader.worker_init_fn, self.initial, self.followed.signals, self.followed.stopping
            )
        if held is not None:
            replaced["sampler" if loader.batch_sampler is None else "batch_sampler"] = held
        with _attributes(loader, replaced):
            return type(loader)._get_iterator(loader)

    def _follow(self, iterator: Any) -> None:
        setattr(iterator, _PLACE, self)
        if is_persistent(self.followed.loader):
            iterator._reset = _Reset(self, iterator)
        if self.base:
            return
        if self.followed.reads_ahead:
            fetch = iterator._next_data

            def fetch_noting() -> Any:
                self.before_last = _Streams(self.followed.loader)
                return fetch()

            iterator._next_data = fetch_noting
        if self.started is None:
            _before_next(iterator, self._note_start)

    def begin_again(self, iterator: Any) -> None:
        """Start a persistent iterator's next iteration, and note where its workers are when they are idle."""
        self.started = _Streams(self.followed.loader)
        with _attributes(iterator, {"_try_put_index": lambda: None}):
            type(iterator)._reset(iterator, self.followed.loader)
        for worker in range(len(self.base)):
            count = self.streams.last_count(worker)
            if count:
                self.initial[worker] = self.streams.read(worker, count)
            self.base[worker] = count
        self.offset = 0
        self._prime(iterator)

    def _prime(self, iterator: Any) -> None:
        """Give the workers their first batches, each the one that would have been its."""
        for _ in range(self.offset % max(1, len(self.base))):
            next(iterator._worker_queue_idx_cycle)
        for _ in range((self.followed.loader.prefetch_factor or 0) * len(self.base)):
            iterator._try_put_index()

    def _note_start(self) -> None:
        self.started = _Streams(self.followed.loader)

    def _restore_start(self) -> None:
        if self.started is not None:
            self.started.restore(self.followed.loader)


class _Reset:
    """`_reset` of a persistent iterator, which starts its next iteration."""

    def __init__(self, place: _Place, iterator: Any) -> None:
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


class _Streams:
    """The process' random streams and a loader's generators at one moment; packed when they are asked for."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._packed: torch.Tensor | None = None
        self._raw: Any = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self.generators = [generator.get_state() for generator in _generators(loader)]

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> _Streams:
        """Return what `as_dict` was made of."""
        streams = cls.__new__(cls)
        streams._packed, streams._raw, streams.generators = saved["process"], None, saved["generators"]
        return streams

    def as_dict(self) -> dict[str, Any]:
        if self._packed is None:
            now = pack_streams()
            _set_raw(self._raw)
            self._packed = pack_streams()
            unpack_streams(now)
        return {"process": self._packed, "generators": self.generators}

    def restore(self, loader: DataLoader[Any]) -> None:
        if self._packed is None:
            _set_raw(self._raw)
        else:
            unpack_streams(self._packed)
        for generator, state in zip(_generators(loader), self.generators, strict=False):
            generator.set_state(state)


def _set_raw(raw: Any) -> None:
    random.setstate(raw[0])
    np.random.set_state(raw[1])
    torch.set_rng_state(raw[2])


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    batches = loader.batch_sampler
    owners = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


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


@contextmanager
def _attributes(owner: Any, replaced: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of one object for a block, past its `__setattr__`."""
    own = vars(owner)
    before = {name: own[name] for name in replaced if name in own}
    own.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            own.pop(name, None)
        own.update(before)
