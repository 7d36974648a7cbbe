"""The states of module and optimizers under `ModelParallelStrategy`, as other strategies give and take them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import ModelParallelStrategy, Strategy
from lightning_tricks._lightning_compat.guards import overriding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def is_sharding(strategy: Strategy) -> bool:
    """Whether each rank holds its part of the parameters, as DTensors."""
    return isinstance(strategy, ModelParallelStrategy)


@contextmanager
def plain_states(strategy: Strategy) -> Iterator[None]:
    """Let a strategy give the states of module and optimizers as they give them themselves, with DTensors in them."""

    def module_state() -> dict[str, Any]:
        return Strategy.lightning_module_state_dict(strategy)

    def optimizer_state(optimizer: Any) -> dict[str, Any]:
        return Strategy.optimizer_state(strategy, optimizer)

    methods = {"lightning_module_state_dict": module_state, "optimizer_state": optimizer_state}
    with overriding(strategy, **(methods if is_sharding(strategy) else {})):
        yield


@contextmanager
def restored_before_setup(strategy: Strategy) -> Iterator[Callable[[], None]]:
    """Let the Trainer restore a checkpoint with plain states when it does so under other strategies.

    It restores hooks and loops then, the weights once the strategy has given them memory, and the optimizers after the
    hooks of the fit's start. What is yielded undoes that, for a checkpoint that the strategy has to read itself.
    """
    if not is_sharding(strategy):
        yield lambda: None
        return
    own_class: Any = type(strategy)
    waiting: list[Callable[[], None]] = []

    class PlainStates(own_class):  # type: ignore[misc]  # the only way to override properties of one object
        restore_checkpoint_after_setup = False
        lightning_restore_optimizer = True

        def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            waiting.append(lambda: Strategy.load_model_state_dict(self, checkpoint, strict))

        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
            Strategy.load_optimizer_state_dict(self, checkpoint)

        def setup_optimizers(self, trainer: Any) -> None:
            while waiting:
                waiting.pop()()
            own_class.setup_optimizers(self, trainer)  # the class may be undone by then

    def undo() -> None:
        if type(strategy) is PlainStates:
            strategy.__class__ = own_class

    PlainStates.__name__, PlainStates.__qualname__ = own_class.__name__, own_class.__qualname__
    strategy.__class__ = PlainStates
    try:
        yield undo
    finally:
        undo()
