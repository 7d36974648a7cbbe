"""Moments at which any Trainer of the process looks at signal handlers, or starts processes that have their own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, set_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from lightning.pytorch import Trainer


@contextmanager
def observe_trainers(
    before_registering: Callable[[Trainer], object],
    handler_before: Callable[[int, Any], Any],
    while_launched: Callable[[Callable[[int], None], Trainer | None], AbstractContextManager[None]],
) -> Iterator[None]:
    """Call functions when a Trainer registers its signal handlers or launches ranks, until the context is left.

    Args:
        before_registering: Called before any Trainer of this process registers its signal handlers.
        handler_before: Called after that with the number of each signal and the handler that the Trainer found; it
            returns the one that the Trainer restores at its end.
        while_launched: Called before ranks are forked or spawned, with what sends a signal to each of them, and the
            Trainer; the context that it returns is left when they have ended.
    """
    with needs_private("AutoResume"):
        from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as Launcher
        from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector as Connector

        register, launch = Connector.register_signal_handlers, Launcher.launch

    def register_observed(self: Any) -> None:
        before_registering(self.trainer)
        register(self)
        with needs_private("AutoResume"):
            found = self._original_handlers.items()
            set_private(self, _original_handlers={number: handler_before(number, one) for number, one in found})

    def launch_observed(self: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        with while_launched(self.kill, trainer):
            return launch(self, *args, trainer=trainer, **kwargs)

    set_private(Connector, register_signal_handlers=register_observed)
    set_private(Launcher, launch=launch_observed)
    try:
        yield
    finally:
        set_private(Connector, register_signal_handlers=register)
        set_private(Launcher, launch=launch)
