"""The chain of CheckpointIOs of a Trainer's strategy, in which each may wrap another."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, set_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import Strategy

_INNER_NAMES = ("_checkpoint_io", "inner")  # the attributes in which a CheckpointIO may hold the one that it wraps


def checkpoint_ios(strategy: Strategy) -> list[Any]:
    """Return the CheckpointIOs of a strategy, from the outermost to the innermost."""
    return [checkpoint_io for _, _, checkpoint_io in _slots(strategy)]


@contextmanager
def checkpoint_io_inserted(
    strategy: Strategy, make: Callable[[Any], CheckpointIO], *, innermost: bool = False
) -> Iterator[None]:
    """Insert a CheckpointIO into the chain of a strategy, and take it out again when the context is left.

    Several may be inserted and taken out in any order: what the inserted one wraps then takes its place, also if that
    was replaced in the meantime.

    Args:
        strategy: The strategy of a Trainer.
        make: Returns the CheckpointIO; it gets the outermost one of the chain to wrap it in its attribute `inner`.
        innermost: Whether the CheckpointIO takes the place of the innermost one instead, which `make` gets.
    """
    owner, name, replaced = _slots(strategy)[-1 if innermost else 0]
    inserted = make(replaced)
    with needs_private("AutoResume or CheckpointRemapping"):
        set_private(owner, **{name: inserted})
    try:
        yield
    finally:
        for owner, name, checkpoint_io in _slots(strategy):
            if checkpoint_io is inserted:
                inner = _inner_name(inserted)
                set_private(owner, **{name: replaced if inner is None else vars(inserted)[inner]})


@needs_private("AutoResume or CheckpointRemapping", KeyError)
def _slots(strategy: Strategy) -> list[tuple[Any, str, Any]]:
    """Return for each CheckpointIO the object that holds it, the name of the attribute, and the CheckpointIO."""
    _ = strategy.checkpoint_io  # creates the innermost one
    slots: list[tuple[Any, str, Any]] = [(strategy, "_checkpoint_io", vars(strategy)["_checkpoint_io"])]
    while (name := _inner_name(slots[-1][2])) is not None:
        owner = slots[-1][2]
        slots.append((owner, name, vars(owner)[name]))
    return slots


def _inner_name(checkpoint_io: Any) -> str | None:
    from lightning.fabric.plugins import CheckpointIO

    held = vars(checkpoint_io)
    return next((name for name in _INNER_NAMES if isinstance(held.get(name), CheckpointIO)), None)
