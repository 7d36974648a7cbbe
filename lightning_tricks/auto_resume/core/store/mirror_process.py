"""The process that copies the checkpoints of a run to an object store, and back before the run begins.

It is one of its own: training never waits for the network, none of its random numbers is drawn for the delay of a
retry (botocore takes those of `random`), and a run that is killed has its newest checkpoint sent all the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from lightning_tricks._shared.text import describe_error
from lightning_tricks.auto_resume.core.checkpoint_folder import PRIVATE_DIR, CheckpointFolder
from lightning_tricks.auto_resume.core.store.lease import Lease, LeaseLostError
from lightning_tricks.auto_resume.core.store.mirror import SECONDS_BETWEEN_LOOKS, STATE_FILE, Mirror

_LOG_FILE = "mirror.log"  # in the private folder: what libraries print
_LAST_ATTEMPTS = 3
_SCHEDULERS_SIGNALS = [
    getattr(signal, name) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]  # Windows has none of them


def default_scratch(address: str) -> Path:
    """Return a folder for an address in the cache of the user, which nodes may share."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - Path's raises
    # With the name of the machine, as nodes may share the home folder, and each has its own copy of the run.
    digest = hashlib.sha256(f"{address.rstrip('/')} {platform.node()}".encode()).hexdigest()[:16]
    return cache / "lightning_tricks" / "runs" / digest


class MirrorProcess:
    """Starts the process, tells it of new checkpoints, and waits for it.

    Args:
        address: Of the directory in the store.
        scratch: The local folder.
        keep: The number of checkpoints of each fit to keep in the store.
        timeout: Seconds that it may take after this process was killed.
        nodes: The number of nodes of the run.
        is_part: Whether it sends no more than the shards of a node, which is not that of rank zero.
    """

    def __init__(
        self, address: str, scratch: Path, keep: int, timeout: float, nodes: int = 1, *, is_part: bool = False
    ) -> None:
        self.address, self.folder = address, CheckpointFolder(scratch)
        self.timeout = timeout
        self._order = {"address": address, "scratch": str(scratch), "keep": keep, "timeout": timeout, "nodes": nodes}
        self._order["is_part"] = self._is_part = is_part
        self._orders: IO[str] | None = None
        # Set when it starts: for a store in memory it is a thread, which cannot be killed and has no exit status.
        self._wait: Callable[[float | None], object] = lambda _: None
        self._poll: Callable[[], object] = lambda: None  # returns its exit status, once it has ended
        self._kill: Callable[[], object] = lambda: None
        self._reported, self._end, self._why_none = 0, "", ""
        self._asked_at: int | None = None  # the last attempt when it was told of a checkpoint

    def start(
        self, say: Callable[[str], object], only: tuple[str, str] | None = None, *, is_again: bool = False
    ) -> str:
        """Let the local folder hold what the store has; return why that is impossible, or "".

        Args:
            say: Called with sentences about it.
            only: Fetch this checkpoint alone: the beginning of its fit's names ("fit2/"), and its name. Then it ends,
                unless it sends a part.
            is_again: Whether a run goes on whose process was killed, in which case nothing is fetched.
        """
        problem = f"the process that sends to {self.address} ended; {self.folder.private / _LOG_FILE} may say why"
        try:
            with self._launch_thread() if self.address.startswith("memory://") else self._launch() as answers:
                more = {"worker": os.getpid(), "config": _fsspec_config(), "only": only, "is_again": is_again}
                # By its standard input: arguments of a process are shown to all users of the machine, and the
                # configuration may hold keys.
                self._tell(json.dumps({**self._order, **more}))
                for answer in map(json.loads, answers):
                    if "say" in answer:
                        say(answer["say"])
                    else:
                        problem = answer["problem"]
                        break
        except (OSError, ValueError) as error:
            problem = describe_error(error)
        if problem or (only and not self._is_part):
            self.close(self.timeout)
        return problem

    def notify(self) -> None:
        """Let the newest checkpoint be sent, by a new process if the last one has ended."""
        # It may have been killed for its memory. Where another run took over, there is nothing more to send.
        if (status := self._poll()) is not None and not self.folder.read_private(STATE_FILE).get("lost"):
            self.close(0)
            self._reported = 0
            self._why_none = self.start(lambda sentence: None, is_again=True)
            self._end = self._why_none or (
                f"the process that sends ended with status {status}. Another one was started."
            )
        if self._orders is not None:
            self._asked_at = self._attempt()
        with suppress(OSError):
            self._tell("send")

    def is_idle(self) -> bool:
        """Return whether nothing that it was told of is still to be sent, except by other nodes."""
        return self._poll() is not None or self._attempt() != self._asked_at

    def _attempt(self) -> int:
        return int(self.folder.read_private(STATE_FILE).get("attempt", 0))

    def report(self) -> tuple[str, bool]:
        """Return why the last attempt failed, once, or ""; and whether nothing more will be sent."""
        end, self._end = self._end, ""
        # In a file, as nobody reads the pipe in training, and a full pipe would hold the process.
        state = self.folder.read_private(STATE_FILE)
        is_lost = bool(state.get("lost"))
        if not is_lost and (end or state.get("attempt", 0) == self._reported or not state.get("problem")):
            return end, False
        self._reported = state.get("attempt", 0)
        return str(state.get("problem")), is_lost

    def close(self, timeout: float | None) -> str:
        """Wait until all is sent, at most for some seconds; return why it was not, or ""."""
        if self._orders is None:
            return self._why_none
        with suppress(OSError), self._orders:
            self._tell("end")  # forked workers of the run may keep the pipe open
        self._orders = None
        try:
            self._wait(timeout)
        except subprocess.TimeoutExpired:
            # A request to a server that hangs does not end by itself.
            self._kill()
            self._wait(None)
            return f"sending to {self.address} took longer than {timeout:g} s"
        problem = self.report()[0]
        return problem or (f"the process that sends ended with status {self._poll()}" if self._poll() else "")

    def _tell(self, line: str) -> None:
        if self._orders is not None:
            self._orders.write(line + "\n")
            self._orders.flush()

    def _launch(self) -> IO[str]:
        self.folder.private.mkdir(parents=True, exist_ok=True)
        with (self.folder.private / _LOG_FILE).open("wb") as log:
            # Not `multiprocessing`: "fork" would share connections, which break (fsspec's event loop is a thread that a
            # fork lacks), "spawn" would import the user's script once more.
            process = subprocess.Popen(  # noqa: S603 - this file
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                # The program may have changed `sys.path`, and may run where the package is not installed.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl+C is for the run
            )
        self._orders, self._wait, self._kill, self._poll = process.stdin, process.wait, process.kill, process.poll
        return cast("IO[str]", process.stdout)

    def _launch_thread(self) -> IO[str]:
        """Take a thread for a store that lives in this process."""
        # fsspec's `memory://` is a dict of the process: another one would copy to a store of its own, which ends with
        # it.
        (orders, self_orders), (answers, thread_answers) = os.pipe(), os.pipe()
        files = [os.fdopen(orders, encoding="utf-8"), os.fdopen(thread_answers, "w", encoding="utf-8")]
        thread = threading.Thread(target=_serve, args=files, daemon=True)
        thread.start()
        self._orders, self._wait, self._kill = os.fdopen(self_orders, "w", encoding="utf-8"), thread.join, lambda: None
        return os.fdopen(answers, encoding="utf-8")


def _fsspec_config() -> dict[str, Any]:
    """Return what the program has set for fsspec, as far as it is plain."""
    with suppress(ImportError, TypeError, ValueError):
        from fsspec.config import conf

        # Credentials and endpoints that the script has set in `fsspec.config.conf` would not be known to another
        # process.
        return dict(json.loads(json.dumps(conf)))
    return {}


def _open(order: dict[str, Any], answer: Callable[..., None]) -> tuple[Mirror, Lease] | None:
    """Open the store as it was ordered; None if nothing is to be sent, after an answer with the problem, if any."""
    try:
        with suppress(ImportError):
            from fsspec.config import conf

            conf.update(order["config"])
        mirror, is_again, problem = Mirror(order["address"], Path(order["scratch"])), order["is_again"], ""
        lease = Lease(mirror.store, f"{PRIVATE_DIR}/", order["worker"], order["timeout"])
        if order["is_part"] or order["only"]:
            problem = mirror.open_part(order["only"], is_again=is_again)
        else:
            mirror.open(lease, lambda sentence: answer(say=sentence), is_again=is_again)
            if order["nodes"] > 1 and not is_again:  # the other nodes fetch what is resumed
                mirror.send(order["keep"], lease, lambda _: True)
    except Exception as error:  # of one of fsspec's many libraries, or the disk
        if isinstance(error, LeaseLostError):
            mirror.note(problem=str(error), lost=True, attempt=1)
        answer(problem=str(error) if isinstance(error, OSError) else describe_error(error))
        return None
    if problem or (order["only"] and not order["is_part"]):
        answer(problem=problem)
        return None
    return mirror, lease


def _serve(orders: IO[str], answers: IO[str]) -> int:
    """Open the store, say so, and send whenever a line comes, until the orders end; return the exit status."""
    parent, order = os.getppid(), json.loads(orders.readline())
    is_asked, is_open, until = threading.Event(), threading.Event(), math.inf

    def finish() -> None:
        nonlocal until
        if not lease.is_finishing:
            lease.is_finishing, until = True, time.monotonic() + order["timeout"]
        is_asked.set()

    def read_orders() -> None:
        with orders:
            for line in orders:
                if line == "end\n":
                    break
                is_asked.set()
        finish()

    def watch_parent() -> None:
        # By a thread, as a request that hangs does not return. The parent is another process when the one that trains
        # has ended, whose forked workers may hold the pipe open.
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if is_open.is_set():
            lease.is_alone = True
            finish()
            time.sleep(order["timeout"])
        os._exit(1)  # nobody is left who would kill it

    def answer(**values: str) -> None:
        with suppress(OSError):
            answers.write(json.dumps(values) + "\n")
            answers.flush()

    if order["worker"] != os.getpid():
        threading.Thread(target=watch_parent, name="AutoResume-parent", daemon=True).start()
    with answers:
        opened = _open(order, answer)
        if opened is None:
            return 0
        mirror, lease = opened
        is_open.set()
        answer(problem="")
    threading.Thread(target=read_orders, name="AutoResume-orders", daemon=True).start()
    attempt, left, status = 0, _LAST_ATTEMPTS, 0

    def gives_up(has_newer: bool) -> bool:
        mirror.note(attempt=attempt + 1, problem="", lost=False)  # more may be asked for while it waits
        return (has_newer and is_asked.is_set()) or time.monotonic() > until

    while left:
        is_asked.wait(SECONDS_BETWEEN_LOOKS)
        is_last = lease.is_finishing  # before it sends: what is saved meanwhile is for another attempt
        left -= is_last
        try:
            lease.check()
            if not is_last and not is_asked.is_set():
                continue
            is_asked.clear()
            if order["is_part"]:
                mirror.send_part()
            else:
                mirror.send(order["keep"], lease, gives_up)
            problem, is_lost = "", False
        except Exception as error:
            problem, is_lost = str(error), isinstance(error, LeaseLostError)
        attempt, status = attempt + 1, 1  # which is all that a process hears whose disk takes no note
        with suppress(OSError):
            mirror.note(problem=problem, lost=is_lost, attempt=attempt)
            status = 0
        if is_lost:
            return status
        if is_last and (not problem or (order["nodes"] > 1 and time.monotonic() > until)):
            break
    with suppress(Exception):  # it is released as well when this process has exited
        if not order["is_part"]:
            lease.release()
    return status


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, *_SCHEDULERS_SIGNALS):
        # Slurm signals all processes of a job step, also this one, which has the last save to send.
        signal.signal(_number, signal.SIG_IGN)  # it ends with the run
    _status = 1
    try:
        _status = _serve(sys.stdin, sys.stdout)
    except Exception:
        traceback.print_exc()  # into the file of the log
    os._exit(_status)  # connections that are still open do no harm
