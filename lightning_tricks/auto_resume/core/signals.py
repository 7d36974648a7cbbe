"""Signals that ask a run to stop; how ranks agree on them; the output without a terminal."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import RawValue
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any

import torch

Detach = Callable[[], None]

_SIGHUP = getattr(signal, "SIGHUP", None)  # Windows lacks it
_SECONDS_BETWEEN_EXCHANGES = 0.1  # between ranks, approximately


# Windows lacks SIGHUP and SIGUSR1; no process can handle SIGKILL and SIGSTOP
DEFAULT_SIGNALS = tuple(name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal.Signals, name))
KNOWN_SIGNALS = tuple(name for name in signal.Signals.__members__ if name not in ("SIGKILL", "SIGSTOP"))


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
    """

    def __init__(self, names: Sequence[str], detach: Detach | None = None) -> None:
        self.names, self.detach = tuple(names), detach
        self.leaving = RawValue("b", False)  # the fit: DataLoader workers read it
        self._received = 0
        self._exit_finalizer: Any = None

    @property
    def signal_numbers(self) -> list[int]:
        """Numbers of the signals."""
        return [int(getattr(signal.Signals, name)) for name in self.names]

    @property
    def received(self) -> str:
        """The name of the signal that came to this process; or ""."""
        return signal.Signals(self._received).name if self._received else ""

    def install_handlers(self) -> bool:
        """Install the handlers; return whether that is possible, as it is only in the main thread."""
        # a high priority: runs before multiprocessing sends the workers a SIGTERM at exit
        self._exit_finalizer = Finalize(None, setattr, (self.leaving, "value", True), exitpriority=1000)
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in self.signal_numbers:
            signal.signal(number, self._handle)
        return True

    def close(self) -> None:
        """Cancel what was to be done at exit, and do it now; the Trainer restores the handlers.

        A rank that leaves the fit by an exception may still have workers: multiprocessing sends them one SIGTERM at
        exit, and waits for them.
        """
        self.leaving.value = True
        if self._exit_finalizer is not None:
            self._exit_finalizer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.detach is not None and number == _SIGHUP:
            self.detach()
            return
        if number == self._received == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        self._received = number


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


def redirect_output(path: Path) -> None:
    """Append standard output and error to a file, also for child processes, and let standard input be empty.

    A stream that is a file already stays as it is: only a terminal, or a pipe to a program in it, is closed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe would wait for its reader
            raise OSError
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)  # a closed terminal must not end the run
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        if not _is_file(target):
            os.dup2(source, target)
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(line_buffering=True)  # so that `tail -f` shows each line


def _is_file(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # closed
        return False
