"""Loaders of a Trainer that end on all ranks where the first rank has no more batches."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from lightning_tricks._lightning_compat.flavor import sized_len
from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning_tricks._lightning_compat.flavor import Trainer

_UNKNOWN = float("inf")


@contextmanager
def loaders_ending_together(
    trainer: Trainer, ends: Mapping[str, Any], is_certain: Callable[[Any], bool]
) -> Iterator[None]:
    """Let the loaders of a run end on all ranks together, until the context is left.

    Args:
        trainer: The Trainer, which has not asked for its loaders yet.
        ends: A `SharedEnd` of `end_together`, for each of "train", "val", "test" and "predict" that is to end together.
        is_certain: Whether a loader gives as many batches as its length says.
    """
    with ExitStack() as stack:
        with needs_private("EndTogether"):
            fit: Any = trainer.fit_loop
            # of training, a method between the creation of the loaders and that of their iterators
            loops = (
                ("train", fit, "_load_combined_loader_states", ""),
                ("val", fit.epoch_loop.val_loop, "setup_data", "_max_batches"),
                ("val", trainer.validate_loop, "setup_data", "_max_batches"),
                ("test", trainer.test_loop, "setup_data", "_max_batches"),
                ("predict", trainer.predict_loop, "setup_data", "max_batches"),
            )
            for stage, loop, method, limits in loops:
                if stage in ends:
                    plain = getattr(loop, method)
                    set_up = partial(_set_up, loop, plain, limits, ends[stage], is_certain, stack)
                    stack.enter_context(overriding(loop, **{method: set_up}))
        yield


def _set_up(
    loop: Any, plain: Callable[[], None], limits: str, end: Any, is_certain: Callable[[Any], bool], stack: ExitStack
) -> None:
    """Set up the loaders of a loop, let them end together, and the loop know how many batches come."""
    before = getattr(loop, limits, None)
    plain()
    with needs_private("EndTogether"):
        combined = loop._combined_loader
        now: Any = getattr(loop, limits, None)
    if combined is None:
        return
    # Validations of a fit keep their loaders, and `setup_data` returns early: their limits have been shared before.
    if now is not before:  # new loaders of an evaluation
        set_private(loop, **{limits: end.shortest(now, is_certain=True)})
    kind = type(combined)
    if not hasattr(kind, "fetch_own"):
        # Python looks up `__iter__` and `__next__` in the class; another object in its place would not be the one that
        # hooks hold.
        combined.__class__ = _ending_class(kind, end, is_certain)
        # A weak reference, as the stack lives as long as the run, and a loader that was reloaded would keep its
        # workers.
        stack.callback(_restore_class, ref(combined), kind)


def _restore_class(reference: Any, kind: type) -> None:
    if (combined := reference()) is not None:  # not one that was reloaded since
        combined.__class__ = kind


def _ending_class(kind: Any, end: Any, is_certain: Callable[[Any], bool]) -> type:
    """Return the subclass of a `CombinedLoader`'s class that ends on all ranks together."""

    class EndingTogether(kind):  # type: ignore[misc]
        def __iter__(self) -> Any:
            """Create the iterators, with the limits of the shortest rank."""
            super().__iter__()
            parts = self.flattened
            with needs_private("EndTogether"):
                # In a sequential loader each part has its own end; in other modes all are read at once, and end at
                # once.
                is_sequential, limits = self._mode == "sequential", self._iterator.limits or [_UNKNOWN] * len(parts)
            if is_sequential:
                lengths = [min(_length(part), limit) for part, limit in zip(parts, limits, strict=True)]
                shortest = end.shortest(lengths, all(map(is_certain, parts)))
            else:
                shortest = end.shortest([_length(self)], all(map(is_certain, parts))) * len(parts)
            set_private(self._iterator, limits=shortest)
            return self

        def __next__(self) -> Any:
            """Return the next batch if each rank has one of the same part."""
            if not end.asks:
                return super().__next__()
            # Each rank says in which part its batch is: a rank that ended alone would leave the others waiting in a
            # gradient's exchange.
            item, num_parts = self.fetch_own(), len(self.flattened)
            while True:
                least, furthest = end.compare(item[2])
                if least < 0:
                    raise RuntimeError("EndTogether: the loader of another rank raised an error; see its output.")
                if furthest == num_parts:
                    raise StopIteration
                if least == furthest:
                    return item
                if item[2] < furthest:
                    with needs_private("EndTogether"):
                        while self._iterator._iterator_idx < furthest:
                            self._iterator._use_next_iterator()
                    item = self.fetch_own()

        def fetch_own(self) -> Any:
            """Return a batch, its index and that of its part; at the end of this rank, the number of parts."""
            try:
                return super().__next__()
            except StopIteration:
                return None, 0, len(self.flattened)
            # The others wait in `compare`: without a word they would hang until the process group times out.
            except Exception:
                end.compare(-1)
                raise

    EndingTogether.__name__ = EndingTogether.__qualname__ = kind.__qualname__
    return EndingTogether


def _length(loader: Any) -> float:
    length = sized_len(loader)
    return _UNKNOWN if length is None else length
