"""The chain of what reads and writes a Trainer's checkpoints: each may wrap another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch.strategies import Strategy


def checkpoint_ios(strategy: Strategy) -> Iterator[Any]:
    """Yield the CheckpointIOs of a strategy, from the outermost to the innermost."""
    for _, _, part in _places(strategy):
        yield part


def replace_checkpoint_io(strategy: Strategy, present: Any, new: Any) -> None:
    """Put another CheckpointIO where one stands in the chain; nothing is done where it does not."""
    for owner, name, part in _places(strategy):
        if part is present:
            setattr(owner, name, new)
            return


def _places(strategy: Strategy) -> Iterator[tuple[Any, str, Any]]:
    _ = strategy.checkpoint_io  # which makes the innermost
    owner: Any = strategy
    name: str | None = "_checkpoint_io"
    while name is not None:
        part = vars(owner)[name]
        yield owner, name, part
        owner, name = part, next((key for key in ("_checkpoint_io", "inner") if key in vars(part)), None)
