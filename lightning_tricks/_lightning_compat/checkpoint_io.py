"""The chain of what reads and writes a Trainer's checkpoints: each may wrap another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch.strategies import Strategy


def checkpoint_ios(strategy: Strategy) -> Iterator[Any]:
    """Yield the CheckpointIOs of a strategy, from the outermost to the innermost."""
    for _, _, checkpoint_io in _slots(strategy):
        yield checkpoint_io


def replace_checkpoint_io(strategy: Strategy, present: Any, new: Any) -> None:
    """Put another CheckpointIO where one stands in the chain; nothing is done where it does not."""
    for owner, name, checkpoint_io in _slots(strategy):
        if checkpoint_io is present:
            setattr(owner, name, new)
            return


def _slots(strategy: Strategy) -> Iterator[tuple[Any, str, Any]]:
    _ = strategy.checkpoint_io  # which makes the innermost
    owner: Any = strategy
    name: str | None = "_checkpoint_io"
    while name is not None:
        checkpoint_io = vars(owner)[name]
        yield owner, name, checkpoint_io
        owner, name = (
            checkpoint_io,
            next((key for key in ("_checkpoint_io", "inner") if key in vars(checkpoint_io)), None),
        )
