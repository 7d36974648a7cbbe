"""Signals that ask a run to stop, before and in its fit; how ranks agree; Ray's drains; output without a terminal."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing import RawValue
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

Detach = Callable[[], None]

_SIGHUP = getattr(signal, "SIGHUP", None)  # Windows lacks it
_OVER, _STOPS = -1, -2  # instead of a signal: the fit of the ranks has ended, or they stop at one
_SECONDS_BETWEEN_EXCHANGES = 0.1  # between ranks, approximately
_SECONDS_BETWEEN_QUESTIONS = 5  # to Ray Train, whose answer is as old at most


# Windows lacks SIGHUP and SIGUSR1; no process can handle SIGKILL and SIGSTOP
DEFAULT_SIGNALS = tuple(name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal.Signals, name))
KNOWN_SIGNALS = tuple(name for name in signal.Signals.__members__ if name not in ("SIGKILL", "SIGSTOP"))
# Python's handler of SIGINT, Lightning's and ours are handed nothing
_MODULES_OF_KNOWN_HANDLERS = ("_signal", "lightning", "lightning_tricks", "pytorch_lightning")


def misses_slurm_signals() -> bool:
    """Whether this process belongs to a Slurm job, and the job's signals pass it by.

    Slurm sends them to what `srun` started. Without it, only the job script gets those that are sent to the batch
    shell, or what has taken its place by `exec`.
    """
    # `srun` sets SLURM_STEP_ID for what it starts.
    if "SLURM_JOB_ID" not in os.environ or "SLURM_STEP_ID" in os.environ:
        return False
    try:
        # Its parent is the step daemon where the job script has replaced itself by the program.
        return not Path(f"/proc/{os.getppid()}/comm").read_bytes().startswith(b"slurmstepd")
    except OSError:
        return False


def missed_submitit_signal(names: Sequence[str]) -> str:
    """Return the signal at which submitit requeues this job without a save, as it is not among names; or ""."""
    # The default since submitit #1697, as NCCL handles SIGUSR1.
    name = "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
    if "SUBMITIT_EXECUTOR" not in os.environ or name not in KNOWN_SIGNALS or name in names:
        return ""
    return name if callable(signal.getsignal(signal.Signals[name])) else ""


def signal_names(ranks: Sequence[Sequence[int]]) -> list[str]:
    """Return the names of the signals that ranks received, by their numbers."""
    return [signal.Signals(number).name for number in chain(*ranks)]


def _can_handle_signals() -> bool:
    # `signal.signal` raises ValueError in other threads; Ray trains in one.
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """Records that signals asked for a stop; the handler does nothing else.

    At the stop, the handlers that the process had before get them: one may exit in its own way, as submitit's does.

    Args:
        names: Names of the signals to handle.
        detach: Called at SIGHUP instead of a stop; None lets SIGHUP ask for a stop as well.
        exit_code: The exit status after a stop.

    """

    def __init__(self, names: Sequence[str], detach: Detach | None = None, exit_code: int = 0) -> None:
        self.names, self.detach, self.exit_code = tuple(names), detach, exit_code
        self.leaving = RawValue("b", False)  # the fit: DataLoader workers read it
        self._received: list[int] = []
        self._exit_finalizer: Any = None

    @property
    def signal_numbers(self) -> list[int]:
        """Numbers of the signals."""
        return [int(getattr(signal.Signals, name)) for name in self.names]

    @property
    def received(self) -> list[int]:
        """The numbers of the signals that came to this process, in their order, also before the fit."""
        came = [number for number in (EARLY_SIGNALS.noted, *self._received) if number]
        return [number for number in came if number in self.signal_numbers]

    def install_handlers(self) -> bool:
        """Install the handlers; return whether that is possible, as it is only in the main thread."""
        # a high priority: runs before multiprocessing sends the workers a SIGTERM at exit
        self._exit_finalizer = Finalize(None, setattr, (self.leaving, "value", True), exitpriority=1000)
        if not _can_handle_signals():
            return False
        for number in self.signal_numbers:
            signal.signal(number, self._handle)
        return True

    def leave(self, ranks: Sequence[Sequence[int]], rank: int = 0) -> NoReturn:
        """Hand what the ranks received to the handlers of the process, outside of a fit, and exit if none of them does.

        Each rank hands on what came to itself, and rank zero what came to any: submitit requeues from there alone. A
        fork of the process that launched it hands nothing on, as the handlers are those of that process.
        """
        # submitit (job_environment.py, `checkpoint_and_try_requeue`) requeues on its rank zero, and returns on others.
        numbers = [] if EARLY_SIGNALS.is_forked else chain(*ranks) if rank == 0 else ranks[rank]
        EARLY_SIGNALS.forget()
        try:
            for number in dict.fromkeys(numbers):
                handler = EARLY_SIGNALS.found(number)
                module = getattr(handler, "__module__", None) or ""
                if callable(handler) and module.partition(".")[0] not in _MODULES_OF_KNOWN_HANDLERS:
                    handler(number, sys._getframe())
        finally:
            EARLY_SIGNALS.forget()  # a handler that was found may call the one that notes
        raise SystemExit(self.exit_code)

    def close(self) -> None:
        """Cancel what was to be done at exit, and do it now; the Trainer restores the handlers.

        A rank that leaves the fit by an exception may still have workers: multiprocessing sends them one SIGTERM at
        exit, and waits for them.
        """
        self.leaving.value = True
        if self._exit_finalizer is not None:
            self._exit_finalizer.cancel()

    # Runs between any two instructions of the program, in the middle of a write or a lock too: it only notes. Saving
    # here hangs now and then (Lightning #21406).
    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.detach is not None and number == _SIGHUP:
            self.detach()
            return
        if number == signal.SIGINT and number in self._received:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        self._received.append(number)


class EarlySignals:
    """Notes the signals that come before a fit handles them itself; there is one object in a process.

    An `AutoResume` waits from its construction in the main thread on; its fit asks what was noted. A second signal
    exits at once, as whoever sends it does not wait for the first batch, and nothing is trained yet. Where nobody waits
    any more, as in a fork that is no rank, the handler that was found gets the signal.

    Ctrl+C raises KeyboardInterrupt at once, as before any fit, and in a notebook or a shell nothing is noted: no
    scheduler has started it. In a job of Slurm, a signal that nothing handles is left alone: Lightning lets Slurm
    requeue the job only then, in a Trainer without an `AutoResume` too. SIGTERM it passes on.
    """

    def __init__(self) -> None:
        self._noted = 0
        self._launcher = RawValue("i")  # what the process noted that forked the ranks; shared with them
        self._waiting: weakref.WeakKeyDictionary[object, StopRequest] = weakref.WeakKeyDictionary()
        self._paused: weakref.WeakSet[object] = weakref.WeakSet()  # those of them that note nothing now
        self._found: dict[int, Any] = {}  # the handlers of the process
        self._process = 0
        self.is_forked = False  # this process is a rank that the process of the script forked

    def wait(self, callback: object, request: StopRequest) -> None:
        """Note signals for a callback from here on, in the main thread: no other one can handle signals."""
        if hasattr(sys, "ps1") or not _can_handle_signals():
            return
        # A fork has the handlers of its parent, and the parent's objects in their state of then.
        if self._process != os.getpid():
            self.is_forked = callback in self._waiting
            if not self.is_forked:  # it was made in this process, which is no rank of its parent's fit
                self._launcher = RawValue("i")
            self._process, self._noted = os.getpid(), 0
            self._waiting.clear()
        self._waiting[callback] = request
        self._paused.discard(callback)
        # At exit, Python's own order holds; a signal that is raised again then would change the exit status.
        weakref.finalize(callback, self._after_death).atexit = False
        self._launcher.value = max(self._launcher.value, 0)
        self._update_handlers()

    @property
    def noted(self) -> int:
        """The number of the signal that was noted here, or in the process that forked this rank; or 0."""
        return self._noted or max(self._launcher.value, 0)

    def found(self, number: int) -> Any:
        """Return the handler of the process, also while signals are noted."""
        handler = signal.getsignal(number)
        return self._found.get(number) if handler == self._note else handler

    def forget(self) -> None:
        """Forget the signal, at which a fit stops now."""
        self._noted, self._launcher.value = 0, _STOPS

    def leave(self, callback: object) -> None:
        """Let a callback whose fit is over wait no longer."""
        self._waiting.pop(callback, None)
        self._update_handlers()

    def pause(self, callback: object) -> None:
        """Note nothing until the fit of a callback begins, unless others wait; what was noted is kept for it."""
        self._paused.add(callback)
        self._restore_unused_handlers()

    def restore_handlers(self) -> None:
        """Restore the handlers that were found, where nobody else has changed them since."""
        for number in list(self._found) if _can_handle_signals() else ():
            if signal.getsignal(number) == self._note:
                signal.signal(number, self._found.pop(number))

    def _active_requests(self) -> list[StopRequest]:
        return [request for callback, request in self._waiting.items() if callback not in self._paused]

    def _restore_unused_handlers(self) -> None:
        """Restore the handlers if nobody waits; install none, as a fit may handle signals itself meanwhile."""
        # Weak keys: `list` leaves out callbacks that nobody holds any more.
        if not list(self._waiting):
            self._launcher.value = min(self._launcher.value, _OVER)
        if not self._active_requests():
            self.restore_handlers()

    def _update_handlers(self) -> None:
        if not _can_handle_signals():
            return
        self._restore_unused_handlers()
        requests = self._active_requests()
        for number in {number for request in requests for number in request.signal_numbers} - {signal.SIGINT}:
            found = signal.getsignal(number)
            # signal_connector.py of Lightning 2.6.6, `register_signal_handlers`: with `_has_already_handler(sigusr)`,
            # requeueing is left to whoever has the signal.
            is_left = "SLURM_JOB_ID" in os.environ and found == signal.SIG_DFL and number != signal.SIGTERM
            if found not in (None, self._note) and not is_left:  # one that is not Python's could not be restored
                self._found[number] = found
                signal.signal(number, self._note)

    def _after_death(self) -> None:
        """Let the process have a signal at which nobody can stop any more."""
        if self._process != os.getpid():
            return
        self._restore_unused_handlers()
        if self._noted and not list(self._waiting):
            number, self._noted = self._noted, 0
            # With the handler that was found, or the system's: the process ends as if nobody had waited.
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two instructions of the program, in a fork of it too.
        is_over = self._process != os.getpid() or self._launcher.value == _OVER
        requests = [] if is_over else list(self._waiting.values())
        if not requests:
            self._pass_on(number, frame)
        elif (detach := requests[-1].detach) is not None and number == _SIGHUP:
            detach()
        elif self._noted:
            requests[-1].leave([[self._noted, number]])
        else:
            self._noted = self._launcher.value = number

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) == self._note:
            signal.signal(number, self._found.pop(number, signal.SIG_DFL))
            signal.raise_signal(number)
        elif callable(found := self._found.get(number)):  # a handler that calls this one has taken its place
            found(number, frame)


EARLY_SIGNALS = EarlySignals()


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
        # NCCL would queue the exchange behind all kernels of the step, and reading the answer would wait for them.
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
        # All ranks have to compute the same number of steps: what was measured is exchanged too, and the slowest
        # counts.
        now = time.monotonic()
        seconds_per_step = (now - self._last_exchange) / self._steps_between
        answers = torch.tensor([*map(float, questions), seconds_per_step], dtype=torch.float64)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX, group=self._group)
        *highest, slowest = answers.tolist()
        self._steps_between = self._steps_left = max(1, min(1000, int(_SECONDS_BETWEEN_EXCHANGES / max(slowest, 1e-9))))
        self._last_exchange = time.monotonic()
        return [answer > 0 for answer in highest]


class RayDrains:
    """Asks Ray Train whether it will lose a node of this run; a fit outside of its workers asks nobody.

    Args:
        world_size: Number of ranks of the fit: a question is an exchange between all workers of Ray.

    Attributes:
        can_ask: Whether Ray tells.
    """

    def __init__(self, world_size: int) -> None:
        # Not imported: a worker of Ray has it, and others need not pay for it.
        train: Any = sys.modules.get("ray.train")
        self.can_ask, self._asked_at, self._known = False, time.monotonic(), None
        self._get_info: Any = getattr(train, "get_preemption_info", None)
        # Added by ray #64360.
        if self._get_info is not None:  # older versions lack it
            with suppress(RuntimeError, DeprecationWarning):  # this process is no worker, or one of Ray Tune
                self.can_ask = train.get_context().get_world_size() == world_size

    def is_due(self) -> bool:
        """Whether it is time to ask."""
        return self.can_ask and time.monotonic() - self._asked_at >= _SECONDS_BETWEEN_QUESTIONS

    def has_news(self) -> bool:
        """Ask whether nodes will be lost that were not before; all ranks have to ask after the same step."""
        self._asked_at, before = time.monotonic(), self._known
        self._known = self._get_info()
        return self._known not in (None, before)


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
    # By descriptors, which child processes and libraries in C share; a write to a closed terminal is EIO, and would end
    # the run.
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
