"""Signals that come before the fit handles them: while modules are imported, data is prepared, a model is built."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from lightning_tricks._lightning_compat.flavor import Trainer, TrainerFn
from lightning_tricks._lightning_compat.observers import observe_trainers
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks.auto_resume.core.signals import StopRequest


class EarlySignals:
    """Notes signals for the `AutoResume` callbacks that wait for their fit; there is one object in a process.

    A noted signal is claimed by the next fit. If none can come any more, it is delivered to the handlers of the
    process, which are restored when nobody waits, and where a Trainer runs that has none of the callbacks. A second
    signal leaves at once, as whoever sends it does not wait for the first batch; nothing is trained yet.
    """

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._waiting: weakref.WeakKeyDictionary[object, StopRequest] = weakref.WeakKeyDictionary()
        self._noted_for: weakref.WeakSet[object] = weakref.WeakSet()  # the callbacks that waited then
        self._handlers: dict[int, Any] = {}  # those of the process
        self._process = 0  # a fork that is not a rank has not asked for this
        self._kill_ranks: Callable[[int], None] | None = None
        self._observed = ExitStack()

    def wait(self, callback: object, request: StopRequest) -> None:
        """Note signals from here on, in the main thread: no other one can handle signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._process != os.getpid():
            self._process, self._kill_ranks = os.getpid(), None
            self._waiting.clear()
        if not self._waiting:
            self._observed.close()
            self._observed.enter_context(
                observe_trainers(self._before_registering, self._handler_before, self._while_launched)
            )
        self._waiting[callback] = request
        weakref.finalize(callback, self._after_death).atexit = False
        for number in request.early_numbers:
            self._install(number)
        self._restore_handlers()

    def claim(self, request: StopRequest) -> None:
        """Let a request that handles signals itself from now on have those that were noted."""
        for number in request.early_numbers:
            if number in self._noted:
                self._noted.remove(number)
                request.record(number)

    def leave(self, callback: object) -> None:
        """Note nothing more for a callback; what was noted is for the next fit."""
        self._waiting.pop(callback, None)
        for number in self._wanted():
            if signal.getsignal(number) == self._handlers.get(number, self._note):  # as after the fit of another one
                self._install(number)
        self._restore_handlers()

    def deliver(self) -> None:
        """Let the handlers that are there now have the signals that nobody waits for."""
        wanted = self._wanted()
        self._noted, others = [number for number in self._noted if number in wanted], set(self._noted) - wanted
        for number in others:
            os.kill(os.getpid(), number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():
            self._waiting.clear()
        requests = [request for request in self._waiting.values() if number in request.early_numbers]
        if not requests:
            self._restore_handlers()
            os.kill(os.getpid(), number)
        elif (detach := requests[-1].detach) is not None and number == getattr(signal, "SIGHUP", None):
            detach()
        elif self._kill_ranks is not None:
            self._kill_ranks(number)
        else:
            self._noted.append(number)
            self._noted_for = weakref.WeakSet(self._waiting)
            if len(self._noted) > 1 and all(request.is_alone for request in requests):
                self._noted.clear()
                self._release()
                raise SystemExit(requests[-1].exit_code)

    def _install(self, number: int) -> None:
        handler = signal.getsignal(number)
        if handler is not None and handler != self._note:  # one that is not Python's could not be restored
            self._handlers[number] = handler
            signal.signal(number, self._note)

    def _restore_handlers(self) -> None:
        """Restore what nobody waits for, and what nobody else has changed since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._handlers.keys() - self._wanted():
            handler = self._handlers.pop(number)
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        if not list(self._waiting):  # of which dead ones may be counted
            self._observed.close()

    def _wanted(self) -> set[int]:
        return {number for request in self._waiting.values() for number in request.early_numbers}

    def _after_death(self) -> None:
        self._restore_handlers()
        if not list(self._noted_for):
            self.deliver()

    def _before_registering(self, trainer: Trainer) -> None:
        if not any(callback in self._waiting for callback in callbacks_of(trainer)):
            self._release()

    def _handler_before(self, number: int, found: Any) -> Any:
        return self._handlers[number] if found == self._note and number in self._handlers else found

    @contextmanager
    def _while_launched(self, kill_ranks: Callable[[int], None], trainer: Trainer | None) -> Iterator[None]:
        """Hand signals to the ranks, in the process that forks or spawns them."""
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            self._release()
            yield
            return
        requests = list(self._waiting.values())
        if self._noted and requests:
            self._noted.clear()
            raise SystemExit(requests[-1].exit_code)
        self._kill_ranks = kill_ranks
        try:
            yield
        finally:
            self._kill_ranks = None
            self._waiting.clear()
            self._restore_handlers()

    def _release(self) -> None:
        self._waiting.clear()
        self._restore_handlers()
        self.deliver()


EARLY_SIGNALS = EarlySignals()
