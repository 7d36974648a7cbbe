"""Errors of a run, on the rank on which they are raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, overriding

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@contextmanager
def observe_errors(trainer: Trainer, on_error: Callable[[Exception], None], trick: str) -> Iterator[None]:
    """Call a function with each error that leaves a loop of a Trainer or the setup of its strategy.

    `on_exception` is not called in processes that were forked or spawned, where the error leaves the process. An error
    that passes several loops is reported by each, the innermost first. The error is raised again.

    Args:
        trainer: The Trainer.
        on_error: What is called, on the rank on which the error was raised.
        trick: The name of the trick, for the error if Lightning has changed.
    """
    with ExitStack() as stack:
        with needs_private(trick):
            fit: Any = trainer.fit_loop
            loops = (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
            for owner, name in (*((loop, "run") for loop in loops), (trainer.strategy, "setup")):
                stack.enter_context(overriding(owner, **{name: _reporting(getattr(owner, name), on_error)}))
        yield


def _reporting(plain: Callable[..., Any], on_error: Callable[[Exception], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except Exception as error:
            on_error(error)
            raise

    return call
