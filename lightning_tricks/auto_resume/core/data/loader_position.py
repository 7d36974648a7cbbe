"""The position in a DataLoader's iteration, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.data.loader_objects import LoaderObjects
from lightning_tricks.auto_resume.core.data.rng_state import (
    global_states,
    pack_rng_state,
    set_global_states,
    unpack_rng_state,
)

POSITION_ATTRIBUTE = "_lightning_tricks_place"  # the attribute of a tracked iterator that knows its position

# Field of `LoaderPosition` -> its key in a checkpoint, where that is another one
_KEYS = {
    "at_creation": "created",
    "at_start": "started",
    "before_prefetched": "before_last",
    "worker_rng_states": "workers",
    "worker_data": "data",
    "first_digest": "first",
    "exhausted": "ended",
}
_SNAPSHOTS = ("at_creation", "at_start", "before_prefetched")


class LoaderSnapshot:
    """The global random state of the process, a loader's generators and its objects, at one moment.

    Args:
        loader: The loader whose generators are captured.
        objects: The objects of the loader; None leaves them out.
        report_unsaved: See `LoaderObjects.changes`.
    """

    def __init__(
        self, loader: DataLoader[Any], objects: LoaderObjects | None = None, report_unsaved: bool = True
    ) -> None:
        self._packed: torch.Tensor | None = None
        self._global_states: Any = global_states()
        self.generators = [generator.get_state() for generator in loader_generators(loader)]
        self.objects: Mapping[str, Any] = {} if objects is None else objects.changes(report_unsaved=report_unsaved)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> LoaderSnapshot:
        """Return the snapshot that `as_dict` wrote."""
        snapshot = cls.__new__(cls)
        snapshot._packed, snapshot._global_states, snapshot.generators = saved["process"], None, saved["generators"]
        snapshot.objects = saved.get("objects", {})
        return snapshot

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as tensors and plain values."""
        if self._packed is None:  # packed only if the snapshot is saved: few of the snapshots of an epoch are
            self._packed = pack_rng_state(self._global_states)
        return {"process": self._packed, "generators": self.generators, "objects": self.objects}

    def restore(self, loader: DataLoader[Any], objects: LoaderObjects | None = None) -> None:
        """Restore the global random state, the generators and, if they are given, the objects."""
        if objects is not None:
            objects.restore_changes(self.objects)
        if self._packed is None:
            set_global_states(self._global_states)
        else:
            unpack_rng_state(self._packed)
        for generator, state in zip(loader_generators(loader), self.generators, strict=False):
            generator.set_state(state)


@dataclass(frozen=True, kw_only=True)
class LoaderPosition:
    """What another process needs to continue an iteration.

    Attributes:
        batches: Batches of the epoch that were trained on.
        at_end: Whether the epoch is over.
        at_creation: The moment when the iterator was created; its workers' seed comes from there.
        at_start: The moment when its sampler was first asked; None where that is `at_creation`.
        before_prefetched: The moment before the batch that was fetched last; None unless the loop prefetches.
        worker_rng_states: For each worker, its packed random state; None for the one with which it starts.
        worker_data: For each worker, what its copy of the data changed; None for nothing.
        draws: What the sampler, or an iterable dataset in the training process, drew; see `RecordedDraws.as_dict`.
        order: Digest of the indices so far; empty where it is not known.
        first_digest: Digest of the first batch; empty where it is not known.
        exhausted: Whether the data were asked for more than they had.
        objects: What changed in the objects that the loader reads from; see `LoaderObjects.changes`.
    """

    batches: int
    at_end: bool
    at_creation: LoaderSnapshot
    at_start: LoaderSnapshot | None
    before_prefetched: LoaderSnapshot | None
    worker_rng_states: Sequence[torch.Tensor | None]
    worker_data: Sequence[Any] = ()
    draws: Mapping[str, Any] | None = None
    order: str = ""
    first_digest: str = ""
    exhausted: bool = False
    objects: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> LoaderPosition:
        """Return the position that `as_dict` wrote; keys that an older release did not write take their defaults."""
        keys = {known.name: _KEYS.get(known.name, known.name) for known in fields(cls)}
        values = {name: saved[key] for name, key in keys.items() if key in saved}
        snapshots = {name: LoaderSnapshot.from_dict(values[name]) for name in _SNAPSHOTS if values[name] is not None}
        return cls(**{**values, **snapshots})

    def as_dict(self) -> dict[str, Any]:
        """Return the position under the keys of a checkpoint."""
        values = {known.name: getattr(self, known.name) for known in fields(self)}
        snapshots = {name: values[name].as_dict() for name in _SNAPSHOTS if values[name] is not None}
        return {_KEYS.get(name, name): value for name, value in {**values, **snapshots}.items()}


def is_tracked(iterator: Any) -> bool:
    """Whether a `TrackedDataLoader` created an iterator."""
    return getattr(iterator, POSITION_ATTRIBUTE, None) is not None


def position_of(iterator: Any, num_prefetched: int = 0, at_end: bool = False) -> dict[str, Any] | None:
    """Return the position of a tracked loader's iterator under the keys of a checkpoint; None if it is not tracked.

    Args:
        iterator: An iterator that a `TrackedDataLoader` created.
        num_prefetched: Batches that were fetched and not yet trained on.
        at_end: Whether the epoch is over.
    """
    tracked = getattr(iterator, POSITION_ATTRIBUTE, None)
    return None if tracked is None else tracked.position(iterator, num_prefetched, at_end).as_dict()


def has_persistent_workers(loader: Any) -> bool:
    """Whether a loader keeps its workers, and with them their random state, from one iteration to the next."""
    return bool(getattr(loader, "persistent_workers", False) and loader.num_workers)


def loader_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators from which a loader and its samplers draw, each once."""
    batches = loader.batch_sampler
    owners = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(value for value in found if isinstance(value, torch.Generator)))
