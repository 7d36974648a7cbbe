"""Signals that ask a run to stop, and the terminal that may go away."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import RawValue
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any

Detach = Callable[[], None]

# What DataLoader workers are told of their training process
RUNNING, STOPPING, LEAVING = range(3)


def available_signals(*names: str) -> tuple[str, ...]:
    """Return those of some names of signals that this system has; Windows has no SIGHUP and no SIGUSR1."""
    return tuple(name for name in names if hasattr(signal.Signals, name))


DEFAULT_SIGNALS = available_signals("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


def check_signals(names: object) -> tuple[str, ...]:
    """Return the names of signals, or say what is wrong with them.

    Raises:
        TypeError: If `names` is no sequence of strings.
        ValueError: If one is not known here, or cannot be handled.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"signals must be a sequence of names such as ('SIGTERM', 'SIGINT'), got {names!r}.")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str) or not name.startswith("SIG") or not hasattr(signal.Signals, name):
            raise ValueError(
                f"signals must be names of signals of this system such as 'SIGTERM', got {name!r}, which it lacks."
            )
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name} cannot be handled by any process: the run resumes after it from its last save.")
    return found


class StopRequest:
    """Remembers that a signal asked for a stop; nothing else happens in the handler.

    Args:
        names: Of the signals to heed.
        detach: What SIGHUP does instead of asking for a stop; None makes it ask.
    """

    def __init__(self, names: Sequence[str], detach: Detach | None = None) -> None:
        self.names, self.detach = tuple(names), detach
        self.received = ""
        self.stopping = RawValue("b", RUNNING)  # for DataLoader workers
        self._exit_finalizer: Any = None

    @property
    def signal_numbers(self) -> list[int]:
        """Of the signals."""
        return [int(getattr(signal.Signals, name)) for name in self.names]

    def install_handlers(self) -> bool:
        """Take the signals over; return whether that is possible, which it is in the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in self.signal_numbers:
            signal.signal(number, self._handle)
        # first of all that multiprocessing does at exit, of which the last is a SIGTERM for the workers
        self._exit_finalizer = Finalize(None, setattr, (self.stopping, "value", LEAVING), exitpriority=1000)
        return True

    def close(self) -> None:
        """Forget what was to be done at exit; the handlers are the Trainer's to restore."""
        if self._exit_finalizer is not None:
            self._exit_finalizer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP" and self.detach is not None:
            self.detach()
            return
        if name == "SIGINT" and self.received == "SIGINT":
            raise KeyboardInterrupt  # whoever asks twice does not want to wait
        self.received = name
        self.stopping.value = STOPPING


def redirect_output(log_path: Callable[[], Path]) -> None:
    """Let standard output and error go to the end of a file, in child processes too, and input come from nowhere.

    Where they go to a file already, they stay: a terminal, or a pipe to what ends with it, is what goes away.
    """
    try:
        log = os.open(log_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)  # a terminal that is gone must not end the run
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        if not _is_file(target):
            os.dup2(source, target)
    os.close(log)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        reopen = getattr(stream, "reconfigure", None)
        if reopen is not None:
            reopen(line_buffering=True)  # so that the file can be followed


def _is_file(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # closed
        return False
