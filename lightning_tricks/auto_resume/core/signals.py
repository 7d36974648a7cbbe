"""Signals that ask a run to stop, on which its ranks agree, and the output of a run whose terminal is closed."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import RawValue
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any

import torch

Detach = Callable[[], None]

# States of the training process that its DataLoader workers read
RUNNING, STOPPING, LEAVING = range(3)

_SECONDS_BETWEEN_EXCHANGES = 0.1  # between ranks, approximately


def available_signals(*names: str) -> tuple[str, ...]:
    """Return the names of signals that this system has; Windows lacks SIGHUP and SIGUSR1, for example."""
    return tuple(name for name in names if hasattr(signal.Signals, name))


DEFAULT_SIGNALS = available_signals("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


def check_signals(names: object) -> tuple[str, ...]:
    """Return the names of signals as a tuple, after checking them.

    Raises:
        TypeError: If `names` is not a sequence.
        ValueError: If a name is unknown on this system, or its signal cannot be handled.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"signals must be a sequence of names such as ('SIGTERM', 'SIGINT'), got {names!r}.")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str) or not name.startswith("SIG") or not hasattr(signal.Signals, name):
            raise ValueError(
                f"signals must be names of signals of this system such as 'SIGTERM', got {name!r}, which is not one."
            )
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(
                f"signals must not hold {name}, which no process can handle: after it, the run resumes from its "
                "last save."
            )
    return found


def misses_slurm_signals() -> bool:
    """Whether this process belongs to a Slurm job, and the job's signals pass it by.

    Slurm sends them to what `srun` started. Without it, only the job script gets those that are sent to the batch
    shell, or what has taken its place by `exec`.
    """
    if "SLURM_JOB_ID" not in os.environ or "SLURM_STEP_ID" in os.environ:
        return False
    try:
        return not Path(f"/proc/{os.getppid()}/comm").read_bytes().startswith(b"slurmstepd")
    except OSError:
        return False


class StopRequest:
    """Records that a signal asked for a stop; the handler does nothing else.

    Args:
        names: Names of the signals to handle.
        detach: Called at SIGHUP instead of a stop; None lets SIGHUP ask for a stop as well.
        exit_code: The exit status after a stop.

    Attributes:
        received: The name of the signal, or "".
        is_alone: Whether no other rank has to stop at the same moment.
    """

    def __init__(self, names: Sequence[str], detach: Detach | None = None, exit_code: int = 0) -> None:
        self.names, self.detach, self.exit_code = tuple(names), detach, exit_code
        self.received, self.is_alone = "", True
        self.stopping = RawValue("b", RUNNING)  # for DataLoader workers
        self._exit_finalizer: Any = None

    @property
    def signal_numbers(self) -> list[int]:
        """Numbers of the signals."""
        return [int(getattr(signal.Signals, name)) for name in self.names]

    @property
    def early_numbers(self) -> list[int]:
        """Numbers of the signals that matter before the fit: there, Ctrl+C raises KeyboardInterrupt at once."""
        return [number for number in self.signal_numbers if number != signal.SIGINT]

    def record(self, number: int) -> None:
        """Record a signal."""
        self.received = signal.Signals(number).name
        self.stopping.value = STOPPING

    def install_handlers(self) -> bool:
        """Install the handlers; return whether that is possible, as it is only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in self.signal_numbers:
            signal.signal(number, self._handle)
        # a high priority: runs before multiprocessing sends the workers a SIGTERM at exit
        self._exit_finalizer = Finalize(None, setattr, (self.stopping, "value", LEAVING), exitpriority=1000)
        return True

    def close(self) -> None:
        """Cancel what was to be done at exit, and do it now; the Trainer restores the handlers.

        A rank that leaves the fit by an exception may still have workers: multiprocessing sends them one SIGTERM at
        exit, and waits for them.
        """
        self.stopping.value = LEAVING
        if self._exit_finalizer is not None:
            self._exit_finalizer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP" and self.detach is not None:
            self.detach()
            return
        if name == "SIGINT" and self.received == "SIGINT":
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        self.record(number)


class RankAgreement:
    """Combines the answers of all ranks, rarely enough to cost no time beside the training steps.

    A single rank answers at once. Of several ranks each calls `any_rank` at the same steps; the number of steps between
    two exchanges follows from the pace of the slowest rank, which is exchanged as well. The exchange uses the CPU, so
    that it does not wait for a GPU.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._is_distributed = self._is_distributed and torch.distributed.get_world_size() > 1
        if self._is_distributed and torch.distributed.get_backend() != "gloo":
            self._group = torch.distributed.new_group(backend="gloo")
        self._steps_left = 1  # steps until the next exchange
        self._steps_between = 1
        self._last_exchange = time.monotonic()

    def any_rank(self, *questions: bool) -> list[bool]:
        """Return for each question whether any rank answers True; False for all between two exchanges."""
        if not self._is_distributed:
            return list(questions)
        self._steps_left -= 1
        if self._steps_left:
            return [False] * len(questions)
        now = time.monotonic()
        seconds_per_step = (now - self._last_exchange) / self._steps_between
        answers = torch.tensor([*map(float, questions), seconds_per_step], dtype=torch.float64)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX, group=self._group)
        *highest, slowest = answers.tolist()
        self._steps_between = self._steps_left = max(1, min(1000, int(_SECONDS_BETWEEN_EXCHANGES / max(slowest, 1e-9))))
        self._last_exchange = time.monotonic()
        return [answer > 0 for answer in highest]


def redirect_output(log_path: Callable[[], Path]) -> None:
    """Append standard output and error to a file, also for child processes, and let standard input be empty.

    A stream that is a file already stays as it is: only a terminal, or a pipe to a program in it, is closed.
    """
    try:
        log = os.open(log_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)  # a closed terminal must not end the run
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        if not _is_file(target):
            os.dup2(source, target)
    os.close(log)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        reopen = getattr(stream, "reconfigure", None)
        if reopen is not None:
            reopen(line_buffering=True)  # so that `tail -f` shows each line


def _is_file(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # closed
        return False
