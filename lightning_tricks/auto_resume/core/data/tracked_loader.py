"""Where a DataLoader stands in its iteration, and how another process takes it to the same place.

A map-style loader goes on at its sampler, without reading what was seen; the streams of its workers are put back. An
iterable one is read anew up to there, as only it knows its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.data.loader_objects import LoaderObjects, ObjectBaselines
from lightning_tricks.auto_resume.core.data.loader_position import IteratorPosition, has_persistent_workers
from lightning_tricks.auto_resume.core.data.loader_snapshot import loader_generators


def why_not_trackable(loader: Any) -> str:
    """Return why the place in a loader's iteration cannot be followed, or nothing."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is no torch.utils.data.DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in a way of its own"
    if not getattr(loader, "in_order", True):
        return "in_order=False lets the workers' speed decide about the order"
    return ""


class TrackedDataLoader:
    """A DataLoader whose iterations are followed: it makes its iterators as before, and each knows its place.

    Args:
        loader: To which `why_not_trackable` has none.
        prefetches: Whether the training loop fetches a batch before it trains on it, as Lightning does where the
            number of batches is unknown.
        signals: That the workers pass over, see `WorkerInit`.
        stopping: See there.
        name: Of the loader, for sentences.
        differences: Takes sentences on what a resumed iteration finds to be another than it was.
        baselines: Know what the data and the samplers were at the start.

    Attributes:
        objects: That the loader reads from.
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
        # weakly: in a circle, iterators would end late, or in a worker that was forked meanwhile
        self._loader = ref(loader)
        self.prefetches, self.signals, self.stopping = prefetches, signals, stopping
        self.name, self.differences = name, [] if differences is None else differences
        self.objects = LoaderObjects(loader, baselines or ObjectBaselines())
        self._resume_position: Mapping[str, Any] | None = None
        self._iterator_deferred = False
        vars(loader)["_get_iterator"] = self._get_iterator

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader, which lives as long as somebody else wants it."""
        loader = self._loader()
        if loader is None:
            raise ReferenceError("the loader that was followed is gone: keep a reference to it.")
        return loader

    def close(self) -> None:
        """Let the loader go; iterators that exist keep working."""
        loader = self._loader()
        if loader is not None:
            vars(loader).pop("_get_iterator", None)

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of the generators that the loader and its samplers draw from."""
        return [generator.get_state() for generator in loader_generators(self.loader)]

    def restore_generator_states(self, states: Sequence[torch.Tensor]) -> None:
        """Put the generators back."""
        for generator, state in zip(loader_generators(self.loader), states, strict=False):
            generator.set_state(state)

    def defer_iterator(self) -> None:
        """Make the next iterator an empty one, which `resume_from` replaces."""
        self._iterator_deferred = True

    def resume_from(self, position: Mapping[str, Any] | None) -> None:
        """Make the next iterator one that goes on at a place; the process' streams are wherever that left them."""
        self._resume_position, self._iterator_deferred = position, False
        if has_persistent_workers(self.loader):
            self.loader._iterator = None

    def report_difference(self, what: str) -> None:
        """Note in what the loader differs from the stopped run's."""
        self.differences.append(f"{self.name} {what}.")

    def _get_iterator(self) -> Any:
        position, self._resume_position = self._resume_position, None
        if self._iterator_deferred:
            return iter(())
        if position is None:
            return IteratorPosition.new_iterator(self)
        if position["at_end"] and not has_persistent_workers(self.loader):
            self.objects.restore_changes(position.get("objects", {}))
            return iter(())  # spares the workers: the next epoch asks for an iterator of its own
        return IteratorPosition.resumed_iterator(self, position)
