"""How long a run waits for its data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class WaitTotals:
    """The time of a stage, and what of it was spent in waiting for batches, in seconds.

    Attributes:
        seconds: The time of the stage, without other stages inside it and without the wait for its very first batch.
        waited: The time in which the host waited for a batch.
        waited_first: That part of it which was for the first batch of a later epoch, and for the start of its workers.
        idle: That part of it in which the GPU had nothing to do; None without a GPU.
        n_batches: How many batches were fetched.
    """

    seconds: float = 0.0
    waited: float = 0.0
    waited_first: float = 0.0
    idle: float | None = None
    n_batches: int = 0

    @property
    def lost(self) -> float:
        """The time that better loading would save: that in which the device had nothing to do."""
        return self.waited if self.idle is None else self.idle


class IdleClock:
    """Measures for how long a CUDA device is idle between two moments, without waiting for it.

    The first moment comes on the device when all earlier work is done, the second when the host has reached it: where
    the device still works until then, nothing lies between them. Only work on the current stream is seen.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: torch.cuda.Event | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._idle = 0.0

    def start(self) -> None:
        """Mark the first moment."""
        self._started = self._mark()

    def stop(self, counts: bool = True) -> None:
        """Mark the second moment, or forget the first one if the time between them does not count."""
        if self._started is not None and counts:
            self._pending.append((self._started, self._mark()))
        self._started = None
        while self._pending and self._pending[0][1].query():
            first, second = self._pending.popleft()
            self._idle += first.elapsed_time(second) / 1000

    def take(self) -> float:
        """Return the idle seconds that were measured since this was last called."""
        idle, self._idle = self._idle, 0.0
        return idle

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class DataWait:
    """Measures the time of stages, and how long they wait for batches; stages may lie inside each other.

    Args:
        idle_clock: What measures the idle time of the device; None for a device that works when the host does.
        clock: Returns the time in seconds.
    """

    def __init__(self, idle_clock: IdleClock | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.totals: dict[str, WaitTotals] = {}
        self._idle_clock = idle_clock
        self._clock = clock
        self._stages: list[str] = []
        self._since = 0.0
        self._waits = 0
        self._fetching_since = 0.0
        self._first_of_epoch = False
        self._taken: dict[str, tuple[float, float, float]] = {}

    @property
    def stage(self) -> str | None:
        """The innermost stage that runs; None outside of all."""
        return self._stages[-1] if self._stages else None

    def enter(self, stage: str) -> None:
        """Begin an epoch of a stage; nothing if it runs already, as where a resumed epoch repeats its first hooks."""
        if stage in self._stages:
            return
        self._count_time()
        self._stages.append(stage)
        self._first_of_epoch = True
        if stage not in self.totals:
            self.totals[stage] = WaitTotals(idle=None if self._idle_clock is None else 0.0)

    def leave(self, stage: str) -> None:
        """End an epoch of a stage, and what was left open inside it; nothing if the stage does not run."""
        if stage in self._stages:
            self._count_time()
            self._first_of_epoch = False
            del self._stages[self._stages.index(stage) :]

    def fetch_started(self, stage: str) -> None:
        """Note that the loaders are waited for from now on."""
        self._waits += 1
        if self._waits > 1:  # a batch is fetched in advance while the iterator is made
            return
        self._fetching_since = self._clock()
        if self._idle_clock is not None:
            self._idle_clock.start()

    def fetch_ended(self, stage: str, is_batch: bool = True) -> None:
        """Note that the batch is there, or only the iterator that will fetch it; other stages do not pay for it."""
        self._waits -= 1
        if self._waits:
            return
        waited = self._clock() - self._fetching_since
        counts = stage == self.stage and self.totals[stage].n_batches > 0
        if self._idle_clock is not None:
            self._idle_clock.stop(counts)
        if stage != self.stage:  # sanity checking, or what happens before a stage
            self._since += waited
            return
        totals = self.totals[stage]
        totals.n_batches += is_batch
        if not counts:  # the run's first batch, for which workers and caches start
            self._since += waited
        else:
            totals.waited += waited
            totals.waited_first += waited * self._first_of_epoch
        self._first_of_epoch = self._first_of_epoch and not is_batch

    def take(self, stage: str) -> dict[str, float]:
        """Return which share of the time since this was last called was "waited" and, on a GPU, "idle", in percent."""
        self._count_time()
        totals = self.totals.get(stage)
        if totals is None:
            return {}
        if self._idle_clock is not None and totals.idle is not None:
            totals.idle += self._idle_clock.take()
        now = (totals.seconds, totals.waited, totals.idle or 0.0)
        seconds, waited, idle = (a - b for a, b in zip(now, self._taken.get(stage, (0.0,) * 3), strict=True))
        self._taken[stage] = now
        if seconds <= 0:
            return {}
        shares = {"waited": 100 * waited / seconds}
        return shares | ({} if totals.idle is None else {"idle": 100 * idle / seconds})

    def _count_time(self) -> None:
        now = self._clock()
        if self._stages:
            self.totals[self._stages[-1]].seconds += now - self._since
        self._since = now
