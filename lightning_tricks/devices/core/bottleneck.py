"""How long a run waits for its data, and sentences about what it waited for and what to try."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_BOTTLENECK = 0.1  # the share of the time from which waiting is worth a remedy
_FEWEST_BATCHES = 10  # below, a share of the time says nothing
_BUSY = 50  # percent of utilization
_HAND_OVER = 1e-3  # seconds: about what it takes to send a batch from a worker process


@dataclass
class WaitTotals:
    """The time of a stage, and how much of it was spent waiting for batches, in seconds.

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
        """Begin an epoch of a stage; nothing if it runs already, as when a resumed epoch repeats its first hooks."""
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


def judge_wait(wait: WaitTotals, loaders: Sequence[Any], cores: int, cpu_utilization: float | None = None) -> list[str]:
    """Say which share of the time a stage waited for data, and what to try if that is much.

    With a GPU it is the time in which the GPU had nothing to do meanwhile.

    Args:
        wait: What was measured.
        loaders: The loaders, if they are known. A remedy that names their arguments needs that it is one DataLoader.
        cores: The cores that the workers of this rank may use.
        cpu_utilization: The mean utilization of all cores, in percent, if it is known.

    Returns:
        A sentence; none if there were too few batches.
    """
    if wait.n_batches < _FEWEST_BATCHES or wait.seconds <= 0:
        return []
    share = _percent(wait.lost / wait.seconds)
    if remedy := find_remedy(wait, loaders, cores, cpu_utilization):
        return [f"Waited for data {share} of the time: the loader is the bottleneck; {remedy}."]
    if wait.idle is not None and wait.waited >= _BOTTLENECK * wait.seconds:
        share = _percent(wait.waited / wait.seconds)
        return [f"The host waited for data {share} of the time, and the GPU had work meanwhile: the loader keeps up."]
    return [f"Waited for data {share} of the time: the loader keeps up."]


def waits_for_data(wait: WaitTotals) -> bool:
    """Whether so much of the time is lost in waiting for data that it is worth a remedy."""
    return wait.n_batches >= _FEWEST_BATCHES and wait.lost > 0 and wait.lost >= _BOTTLENECK * wait.seconds


def find_remedy(wait: WaitTotals, loaders: Sequence[Any], cores: int, cpu_utilization: float | None = None) -> str:
    """Return what to try against the wait, in words, or "" if it is short; the arguments are those of `judge_wait`."""
    if not waits_for_data(wait):
        return ""
    loader: Any = loaders[0] if len(loaders) == 1 else None
    if not isinstance(getattr(loader, "num_workers", None), int):
        return "load in worker processes, or make loading cheaper"
    lasting = getattr(loader, "persistent_workers", False)
    if wait.waited_first > wait.waited / 2 and loader.num_workers and not lasting:
        return "most of it was at the start of epochs, when the workers start again; try persistent_workers=True"
    per_batch = wait.waited / wait.n_batches
    if loader.num_workers == 0 and per_batch < _HAND_OVER:
        return (
            f"loading a batch takes only {1000 * per_batch:.2g} ms, which worker processes would not make faster; use "
            "larger batches, or index each batch at once out of tensors in memory"
        )
    needed = num_workers_needed(wait, loader.num_workers)
    if loader.num_workers >= cores:
        if cpu_utilization is not None and cpu_utilization < _BUSY:  # it computes little: more can wait at once
            return (
                f"try num_workers={needed}, now {loader.num_workers}: the CPU is not busy, so the workers wait for a "
                "disk or a network"
            )
        return (
            f"{loader.num_workers} workers on {_count(cores)} are not enough, so make loading cheaper: decoded, "
            "smaller or cached data, fewer augmentations"
        )
    more = "" if needed <= cores else f" ({needed} would keep up, on {_count(cores)}: make loading cheaper, too)"
    return f"try num_workers={min(needed, cores)}, now {loader.num_workers}{more}"


def _count(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"


def num_workers_needed(wait: WaitTotals, num_workers: int) -> int:
    """Return how many workers load batches as fast as they are trained on.

    Without workers a batch takes the time that was waited for it. With n of them, which were always behind, n batches
    were loaded in the time of one step and its wait each.
    """
    working = max(wait.seconds - wait.lost, 1e-9)
    loading = num_workers * wait.seconds if num_workers else wait.waited
    return max(num_workers + 1, math.ceil(loading / working))


def judge_gpu(
    name: str, utilization: float | None, reasons: Mapping[str, int], n_measurements: int, has_data: bool
) -> list[str]:
    """Say if a GPU was idle for another reason than data, and if it was slowed down.

    Args:
        name: What it is called, such as "gpu0".
        utilization: The mean of its utilization, in percent, if it is known.
        reasons: How often it was slowed down for a reason.
        n_measurements: How often that was measured.
        has_data: Whether it does not wait for data.

    Returns:
        Sentences; none if there is nothing to say.
    """
    sentences = []
    if utilization is not None and utilization < _BUSY and has_data:
        sentences.append(
            f"{name} worked {_percent(utilization / 100)} of the time although data was available: the host starts "
            "kernels too slowly, or something else runs between the steps; try larger batches or torch.compile."
        )
    shares = {reason: count / n_measurements for reason, count in reasons.items()}
    often = [f"{reason} {_percent(share)}" for reason, share in shares.items() if share >= _BOTTLENECK]
    if often:
        sentences.append(f"{name} ran below its clock rate: {', '.join(often)} of the time.")
    return sentences


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
