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

from lightning_tricks.auto_resume.core.data.iterator_start import generators_of
from lightning_tricks.auto_resume.core.data.loader_objects import Baselines, LoaderObjects
from lightning_tricks.auto_resume.core.data.loader_position import Place, is_persistent


def objection_to_following(loader: Any) -> str:
    """Return why the place in a loader's iteration cannot be followed, or nothing."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is no torch.utils.data.DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in a way of its own"
    if not getattr(loader, "in_order", True):
        return "in_order=False lets the workers' speed decide about the order"
    return ""


class FollowedLoader:
    """A DataLoader whose iterations are followed: it makes its iterators as before, and each knows its place.

    Args:
        loader: To which `objection_to_following` has none.
        reads_ahead: Whether the training loop fetches a batch before it trains on it, as Lightning does where the
            number of batches is unknown.
        signals: That the workers pass over, see `WorkerStart`.
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
        reads_ahead: bool = False,
        signals: Sequence[int] = (),
        stopping: Any = None,
        name: str = "the loader",
        differences: list[str] | None = None,
        baselines: Baselines | None = None,
    ) -> None:
        # weakly: in a circle, iterators would end late, or in a worker that was forked meanwhile
        self._loader = ref(loader)
        self.reads_ahead, self.signals, self.stopping = reads_ahead, signals, stopping
        self.name, self.differences = name, [] if differences is None else differences
        self.objects = LoaderObjects(loader, baselines or Baselines())
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
        return [generator.get_state() for generator in generators_of(self.loader)]

    def restore_generators(self, states: Sequence[torch.Tensor]) -> None:
        """Put the generators back."""
        for generator, state in zip(generators_of(self.loader), states, strict=False):
            generator.set_state(state)

    def spare(self) -> None:
        """Make the next iterator an empty one, which `resume` replaces."""
        self._spares = True

    def resume(self, place: Mapping[str, Any] | None) -> None:
        """Make the next iterator one that goes on at a place; the process' streams are wherever that left them."""
        self._resumed, self._spares = place, False
        if is_persistent(self.loader):
            self.loader._iterator = None

    def differs(self, what: str) -> None:
        """Note in what the loader differs from the stopped run's."""
        self.differences.append(f"{self.name} {what}.")

    def _get_iterator(self) -> Any:
        place, self._resumed = self._resumed, None
        if self._spares:
            return iter(())
        if place is None:
            return Place.of_new_iterator(self)
        if place["at_end"] and not is_persistent(self.loader):
            self.objects.put_back(place.get("objects", {}))
            return iter(())  # spares the workers: the next epoch asks for an iterator of its own
        return Place.of_resumed_iterator(self, place)
