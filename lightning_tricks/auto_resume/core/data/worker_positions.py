"""The positions of a DataLoader's workers: their random states, and what their copies of the data changed."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.data.loader_position import LoaderPosition
from lightning_tricks.auto_resume.core.data.rng_state import WorkerRngStates
from lightning_tricks.auto_resume.core.data.worker_state import NOTE_BYTES, read_note

_SECONDS_TO_START = 10.0  # for a worker to start its iteration


class WorkerPositions:
    """Tracks the workers of one iterator through its iterations.

    Args:
        loader: The loader whose workers they are.
        replays_data: Whether each worker reads its data again from the start of the iteration, as only an iterable
            dataset knows its order: then the state of that start is what counts.

    Attributes:
        count: Number of workers; 0 where the training process makes the batches.
        initial_rng_states: The workers' random states at the start of the iteration; None for fresh ones.
        initial_data: What the workers' copies of the data had changed then; None for fresh ones.
        rng_states: Where the workers record their random states after each batch.
        iteration_starts: Where they record those of the start of an iteration; None unless data are replayed.
        iteration: Number of the iteration, from 1.
        batches_before: Batches that each worker had made at the start of the iteration.
        offset: Batches of the epoch that the sampler skipped in this process.
    """

    def __init__(self, loader: DataLoader[Any], replays_data: bool) -> None:
        self.count = loader.num_workers
        self.prefetch = loader.prefetch_factor or 0
        self._replays_data = replays_data
        self.initial_rng_states: list[torch.Tensor | None] = [None] * self.count
        self.initial_data: list[Any] = [None] * self.count
        self.rng_states = WorkerRngStates(self.count, self.prefetch, note_bytes=NOTE_BYTES)
        self.iteration_starts = WorkerRngStates(self.count, 0, note_bytes=NOTE_BYTES) if replays_data else None
        self.iteration = 1
        self.batches_before = [0] * self.count
        self.offset = 0

    def restore(self, saved: LoaderPosition) -> None:
        """Let the workers start from where those of a saved position were, if there are as many of them."""
        if len(saved.worker_rng_states) == self.count:
            self.initial_rng_states = list(saved.worker_rng_states)
        if len(saved.worker_data) == self.count:
            self.initial_data = list(saved.worker_data)

    def start_iteration(self) -> None:
        """Record where the workers of a persistent iterator are, which are idle, before its next iteration."""
        for worker in range(self.count):
            made = self.rng_states.last_count(worker)
            if made and not self._replays_data:
                self.initial_rng_states[worker] = self.rng_states.read(worker, made)
                self.initial_data[worker] = read_note(self.rng_states.read_note(worker, made))
            self.batches_before[worker] = made
        self.offset = 0
        self.iteration += 1

    def state(self, worker: int, batches: int) -> tuple[torch.Tensor | None, Any]:
        """Return a worker's random state, and what its copy of the data changed, after `batches` of the epoch."""
        if self._replays_data:  # the worker of a resumed run reads from the start of its iteration
            self._read_iteration_start(worker)
            return self.initial_rng_states[worker], self.initial_data[worker]
        # workers take turns: this one has made every `count`-th batch since the offset, from its first turn on
        made = len(range(self.offset + (worker - self.offset) % self.count, batches, self.count))
        if not made:
            return self.initial_rng_states[worker], self.initial_data[worker]
        number = self.batches_before[worker] + made
        state, data = self.rng_states.read(worker, number), read_note(self.rng_states.read_note(worker, number))
        if state is None:
            warnings.warn(
                f"worker {worker} of a DataLoader is further ahead than its prefetch_factor allows: its random state "
                "is not saved, and a resumed run draws other random numbers in it.",
                stacklevel=2,
            )
        return state, data

    def _read_iteration_start(self, worker: int) -> None:
        """Wait for what a worker records when it starts its iteration, which it does as soon as it can."""
        if self.iteration_starts is None or self.iteration == 1:
            return
        until = time.monotonic() + _SECONDS_TO_START
        state = self.iteration_starts.read(worker, self.iteration)
        while state is None and time.monotonic() < until:
            time.sleep(0.001)
            state = self.iteration_starts.read(worker, self.iteration)
        self.initial_rng_states[worker] = state
        self.initial_data[worker] = read_note(self.iteration_starts.read_note(worker, self.iteration))
