"""A DataLoader whose position in its iteration is tracked, and resumed in another process.

A map-style loader continues at its sampler, without reading what was seen; the random states of its workers are
restored. An iterable dataset is read again up to the position, as only it knows its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader

from lightning_tricks._torch_compat import loaders as private
from lightning_tricks.auto_resume.core.data.iterator_tracker import create_iterator
from lightning_tricks.auto_resume.core.data.loader_objects import LoaderObjects, ObjectBaselines
from lightning_tricks.auto_resume.core.data.loader_position import LoaderPosition, has_persistent_workers
from lightning_tricks.auto_resume.core.data.loader_snapshot import loader_generators
from lightning_tricks.auto_resume.core.data.resumed_iterator import resume_iterator


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
            return create_iterator(self)
        if position.at_end and not has_persistent_workers(self.loader):
            self.objects.restore_all(position.objects)
            return iter(())  # no workers are started: the next epoch creates an iterator of its own
        return resume_iterator(self, position)
