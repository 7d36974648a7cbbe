"""The workers of a DataLoader: what each of them records after each batch, and restores in a new one."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import parent_process
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_tricks._shared.rng import restore_rng_state
from lightning_tricks._torch_compat.loaders import call_on_iteration_start
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeChanges, AttributeTracker
from lightning_tricks.auto_resume.core.data.loader_objects import LargeSkipped
from lightning_tricks.auto_resume.core.data.rng_state import as_rng_state, raw_rng_state

_SECONDS_TO_START = 10.0  # for a worker to start its iteration
NOTE_BYTES = 64 * 1024  # the largest size of a note
_HEADER_BYTES, _RNG_STATE_BYTES = 16, 32 * 1024  # of a record beside its note; about 20 KiB are used
# The random state of a worker, and the changes of its copy of the data; None for what is not known
WorkerState = tuple[Mapping[str, Any] | None, AttributeChanges | None]
_TOO_LARGE = f"more than {NOTE_BYTES >> 10} KiB"


class WorkerPositions:
    """Tracks the workers of one iterator through its iterations.

    Args:
        loader: The loader whose workers they are.
        replays_data: Whether each worker reads its data again from the start of the iteration, as only an iterable
            dataset knows its order: then the state of that start is what counts.

    Attributes:
        count: Number of workers; 0 where the training process makes the batches.
        initial: For each worker, its random state at the start of the iteration, and what its copy of the data had
            changed then; None for a fresh one.
        records: Where the workers record their states after each batch or, where data are replayed, whenever an
            iteration starts.
        iteration: Number of the iteration, from 1.
        batches_before: Batches that each worker had made at the start of the iteration.
        offset: Batches of the epoch that the sampler skipped in this process.
    """

    def __init__(self, loader: DataLoader[Any], replays_data: bool) -> None:
        self.count = loader.num_workers
        self.prefetch = loader.prefetch_factor or 0
        self._replays_data = replays_data
        self.initial: list[WorkerState] = [(None, None)] * self.count
        self.records = WorkerRngStates(self.count, self.prefetch)
        self.iteration = 1
        self.batches_before = [0] * self.count
        self.offset = 0

    def restore(self, rng_states: Sequence[Any], data: Sequence[Any]) -> None:
        """Let the workers start from where those of a saved position were, if there are as many of them."""
        if len(rng_states) == self.count:
            self.initial = list(zip(rng_states, data or [None] * self.count, strict=True))

    def start_iteration(self) -> None:
        """Record where the workers of a persistent iterator are, which are idle, before its next iteration."""
        for worker in range(0 if self._replays_data else self.count):
            self.batches_before[worker] = made = self.records.last_count(worker)
            if made:
                self.initial[worker] = self.records.read(worker, made)
        self.offset = 0
        self.iteration += 1

    def state(self, worker: int, batches: int) -> WorkerState:
        """Return a worker's random state, and what its copy of the data changed, after `batches` of the epoch."""
        if self._replays_data:  # the worker of a resumed run reads from the start of its iteration
            self._read_iteration_start(worker)
            return self.initial[worker]
        # workers take turns: this one has made every `count`-th batch since the offset, from its first turn on
        made = len(range(self.offset + (worker - self.offset) % self.count, batches, self.count))
        if not made:
            return self.initial[worker]
        return self.records.read(worker, self.batches_before[worker] + made)

    def _read_iteration_start(self, worker: int) -> None:
        """Wait for what a worker records when it starts its iteration, which it does as soon as it can."""
        if self.iteration == 1:
            return
        until = time.monotonic() + _SECONDS_TO_START
        while (found := self.records.read(worker, self.iteration))[0] is None and time.monotonic() < until:
            time.sleep(0.001)
        self.initial[worker] = found


class WorkerRngStates:
    """Shared memory in which each worker of a DataLoader records its random state, such as after each batch.

    A worker is ahead of training by at most its prefetched batches: a ring buffer with more slots than those still
    holds the state after the last batch that was trained on.

    Args:
        n_workers: Number of workers.
        prefetch: Number of batches that a worker prefetches (`prefetch_factor`).
    """

    def __init__(self, n_workers: int, prefetch: int) -> None:
        self.slots = prefetch + 3
        size = _HEADER_BYTES + _RNG_STATE_BYTES + NOTE_BYTES
        self.memory = torch.zeros(n_workers, self.slots, size, dtype=torch.uint8)
        if n_workers:
            self.memory.share_memory_()

    def write(self, worker: int, count: int, note: bytes = b"") -> None:
        """Record the random state of this process after its `count`-th batch (from 1), and a note."""
        record = pickle.dumps((raw_rng_state(), note))
        header, slot = self._headers(worker)[count % self.slots], self.memory[worker, count % self.slots].numpy()
        header[:] = 0, len(record)
        slot[_HEADER_BYTES : _HEADER_BYTES + len(record)] = np.frombuffer(record, np.uint8)
        header[0] = count  # last: marks the record as complete

    def read(self, worker: int, count: int) -> WorkerState:
        """Return a worker's random state after its `count`-th batch, and its note; None if that is not there."""
        header, slot = self._headers(worker)[count % self.slots], self.memory[worker, count % self.slots].numpy()
        record = slot[_HEADER_BYTES : _HEADER_BYTES + int(header[1])].tobytes()
        if header[0] != count:  # not yet, or no longer
            return None, None
        raw, note = pickle.loads(record)  # noqa: S301  # written by our own worker
        return as_rng_state(raw), pickle.loads(note) if note else None  # noqa: S301

    def last_count(self, worker: int) -> int:
        """Return the number of batches that a worker has made."""
        return int(self._headers(worker)[:, 0].max())

    def _headers(self, worker: int) -> Any:
        """Return for each slot the number of its batch and the size of its record."""
        return self.memory[worker, :, :_HEADER_BYTES].numpy().view(np.int64)


def _exit_if_parent_died() -> None:
    """Exit a worker whose training process was killed while the worker started: it would wait for work for ever.

    The watchdog in torch's workers takes the parent that they have when it starts for the training process.
    """
    if sys.platform == "win32":  # where signal 0 is Ctrl-C, and workers are spawned by the process that waits for them
        return
    parent = parent_process()
    if parent is None or parent.pid == os.getppid():
        return
    try:
        os.kill(parent.pid or 0, 0)
    except ProcessLookupError:
        os._exit(1)


class WorkerInit:
    """A `worker_init_fn` that calls the given one, and then sets the random state from which the worker continues.

    A signal to the whole process group, such as Ctrl-C or a scheduler's SIGTERM, is handled by the training process,
    which still needs its workers to finish the step: they ignore it. Once that process leaves the fit, a SIGTERM is its
    own and ends the worker.

    Args:
        wrapped: The loader's own function.
        signals: Numbers of the signals to ignore.
        leaving: A shared byte: whether the training process leaves the fit.
        recording: The collate function that records the state of the worker.
        initial: For each worker, its random state and the changes of its copy of the data, see
            `TrackedWorkerData`; None for fresh ones.
    """

    def __init__(
        self,
        wrapped: Callable[[int], None] | None,
        signals: Sequence[int] = (),
        leaving: Any = None,
        recording: RecordingCollate | None = None,
        initial: Sequence[WorkerState] = (),
    ) -> None:
        self.wrapped, self.signals, self.leaving = wrapped, list(signals), leaving
        self.recording, self.initial = recording, list(initial)

    def __call__(self, worker: int) -> None:
        """Initialize a worker, in its process."""
        _exit_if_parent_died()
        if self.wrapped is not None:
            self.wrapped(worker)
        for number in self.signals:
            signal.signal(number, self._on_sigterm if number == signal.SIGTERM else signal.SIG_IGN)
        state, data = self.initial[worker] if self.initial else (None, None)
        if self.recording is not None:
            self.recording.start_worker(data)
        if state is not None:
            restore_rng_state(state)

    def _on_sigterm(self, number: int, frame: object) -> None:
        if self.leaving.value:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class RecordingCollate:
    """A `collate_fn` with which a worker records its random state and the changes of its data.

    Args:
        wrapped: The loader's own function.
        records: Where to record.
        at_starts: Whether to record whenever the worker asks its iterable dataset for an iterator, not after each
            batch.
    """

    def __init__(self, wrapped: Callable[[Any], Any], records: WorkerRngStates, at_starts: bool) -> None:
        self.wrapped, self.records, self.at_starts, self.count = wrapped, records, at_starts, 0
        self.data: TrackedWorkerData | None = None  # only in the worker

    def start_worker(self, changes: Any) -> None:
        """Track the data in the worker, after restoring what those of another worker had changed."""
        self.data = TrackedWorkerData(self.wrapped)
        if changes is not None:
            self.data.restore_changes(changes)
        info = get_worker_info()
        if self.at_starts and info is not None:
            call_on_iteration_start(info.dataset, self._record)

    def _record(self) -> None:
        worker = get_worker_info()
        if worker is not None and self.data is not None:
            self.count += 1
            self.records.write(worker.id, self.count, self.data.note())

    def __call__(self, samples: Any) -> Any:
        """Return a batch."""
        batch = self.wrapped(samples)
        if not self.at_starts:
            self._record()
        return batch


class TrackedWorkerData:
    """Tracks the changes of a worker's copy of the data and of its collate function; created in the worker.

    Attributes that are too large for a note are left out, so that a note takes some hundred microseconds; one that has
    grown too large is reported as unsaved.

    Args:
        collate: The loader's own collate function.
    """

    def __init__(self, collate: Any) -> None:
        info = get_worker_info()
        self._roots = {"dataset": info and info.dataset, "collate_fn": collate}
        self._skipped = LargeSkipped(NOTE_BYTES)
        self._attributes = AttributeTracker(self._roots, skipped=self._skipped, owns_memory=False)

    def restore_changes(self, changes: Mapping[str, Any]) -> None:
        """Restore what the copy of another worker had changed."""
        restore_changes(self._roots, changes, skipped=self._skipped)

    def note(self) -> bytes:
        """Return what changed since the start of the worker, pickled; empty if nothing changed."""
        found = self._attributes.changes()
        values, lost = found["values"], found["lost"]
        for path, change in list(values.items()):
            encoded = change["value"]
            is_deleted = isinstance(encoded, dict) and encoded.get("kind") == "deleted"
            if is_deleted and change["name"] in self._skipped.names:
                del values[path]
                lost[path] = _TOO_LARGE
        note = pickle.dumps({**found, "values": values, "lost": lost}) if values or lost else b""
        if len(note) > NOTE_BYTES:
            largest = max(values, key=lambda path: len(pickle.dumps(values[path])))
            note = pickle.dumps({"values": {}, "lost": {largest: _TOO_LARGE}, "unwatched": {}})
        return note
