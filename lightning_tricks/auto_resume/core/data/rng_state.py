"""The global random state of a process as one row of bytes, and how DataLoader workers record theirs."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import parent_process
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lightning_tricks._torch_compat.loaders import call_on_iteration_start
from lightning_tricks.auto_resume.core.data.worker_state import TrackedWorkerData
from lightning_tricks.auto_resume.core.signals import LEAVING, STOPPING

RNG_STATE_KEY = "streams"  # under which packed states are saved; part of the format of checkpoints and files
_SECONDS_TO_WAIT = 0.5  # for a SIGTERM to reach the training process as well


def pack_rng_state() -> Tensor:
    """Return the state of `random`, `numpy.random` and torch on the CPU: a uint8 tensor of about 10,000 bytes."""
    record = np.zeros(1, _record_dtype())
    _write_rng_state(record[0])
    return torch.from_numpy(record.view(np.uint8))


def unpack_rng_state(packed: Tensor) -> None:
    """Restore the random state that `pack_rng_state` returned."""
    record = packed.contiguous().numpy().view(_record_dtype())[0]
    words = tuple(record["python"].tolist())
    random.setstate((3, words, float(record["python_gauss"]) if record["python_has_gauss"] else None))
    numpy_state = (record["numpy"], int(record["numpy_place"]), int(record["numpy_has_gauss"]))
    np.random.set_state(("MT19937", *numpy_state, float(record["numpy_gauss"])))
    torch.set_rng_state(torch.from_numpy(record["torch"].copy()))


class WorkerRngStates:
    """Shared memory in which each worker of a DataLoader records its random state after each batch.

    A worker is ahead of training by at most its prefetched batches: a ring buffer with more slots than those still
    holds the state after the last batch that was trained on.

    Args:
        n_workers: Number of workers.
        prefetch: Number of batches that a worker prefetches (`prefetch_factor`).
        note_bytes: Size of a note beside the random state.
    """

    def __init__(self, n_workers: int, prefetch: int, note_bytes: int = 0) -> None:
        self.slots = prefetch + 3
        self.notes = torch.zeros(n_workers, self.slots, 8 + note_bytes, dtype=torch.uint8)
        self.memory = torch.zeros(n_workers, self.slots, _record_dtype().itemsize, dtype=torch.uint8)
        if n_workers:
            self.memory.share_memory_()
            self.notes.share_memory_()

    def write(self, worker: int, count: int, note: bytes = b"") -> None:
        """Record the random state of this process after its `count`-th batch (from 1), and a note."""
        record = self._records(worker)[count % self.slots]
        record["count"] = 0
        _write_rng_state(record)
        row = self.notes[worker, count % self.slots].numpy()
        row[:8].view(np.int64)[0] = len(note)
        row[8 : 8 + len(note)] = np.frombuffer(note, np.uint8)
        record["count"] = count  # last: marks the record as complete

    def read(self, worker: int, count: int) -> Tensor | None:
        """Return a worker's random state after its `count`-th batch; None if it is not or no longer there."""
        record = self._records(worker)[count % self.slots]
        packed = self.memory[worker, count % self.slots].clone()
        return packed if record["count"] == count else None

    def read_note(self, worker: int, count: int) -> bytes:
        """Return the note of a worker after its `count`-th batch; empty if it is not or no longer there."""
        record, row = self._records(worker)[count % self.slots], self.notes[worker, count % self.slots].numpy().copy()
        note = row[8 : 8 + int(row[:8].view(np.int64)[0])].tobytes()
        return note if record["count"] == count else b""

    def last_count(self, worker: int) -> int:
        """Return the number of batches that a worker has made."""
        return int(self._records(worker)["count"].max())

    def _records(self, worker: int) -> Any:
        return self.memory[worker].numpy().reshape(-1).view(_record_dtype())


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
    which still needs its workers to finish the step: they ignore it. A SIGTERM that did not reach the training process,
    or comes while that exits, was sent by it and ends the worker; so does a second one.

    Args:
        wrapped: The loader's own function.
        states: What `pack_rng_state` returned, for each worker; None keeps its fresh random state.
        signals: Numbers of the signals to ignore.
        stopping: A shared byte: one of `signals.RUNNING`, `STOPPING` and `LEAVING`.
        recording: The collate function that records the state of the worker.
        data: Changes of the workers' copies of the data, see `TrackedWorkerData`; None for none.
    """

    def __init__(
        self,
        wrapped: Callable[[int], None] | None,
        states: Sequence[Tensor | None] = (),
        signals: Sequence[int] = (),
        stopping: Any = None,
        recording: RecordingCollate | None = None,
        data: Sequence[Any] = (),
    ) -> None:
        self.wrapped, self.states, self.signals, self.stopping = wrapped, list(states), list(signals), stopping
        self.recording, self.data = recording, list(data)

    def __call__(self, worker: int) -> None:
        """Initialize a worker, in its process."""
        _exit_if_parent_died()
        if self.wrapped is not None:
            self.wrapped(worker)
        for number in self.signals:
            signal.signal(number, self._on_sigterm if number == signal.SIGTERM else signal.SIG_IGN)
        if self.recording is not None:
            self.recording.start_worker(self.data[worker] if worker < len(self.data) else None)
        state = self.states[worker] if worker < len(self.states) else None
        if state is not None:
            unpack_rng_state(state)

    def _on_sigterm(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.stopping is None or self.stopping.value == LEAVING:
            os.kill(os.getpid(), signal.SIGTERM)
        if sys.platform == "win32":  # where no process is sent a SIGTERM by another one
            return
        signal.signal(signal.SIGALRM, self._exit_unless_stopping)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_WAIT)

    def _exit_unless_stopping(self, number: int, frame: object) -> None:
        if self.stopping.value != STOPPING:
            os.kill(os.getpid(), signal.SIGTERM)


class RecordingCollate:
    """A `collate_fn` that, in a worker, records the random state and the changes of the data after each batch.

    Args:
        wrapped: The loader's own function.
        rng_states: Where to record after each batch.
        iteration_starts: Where to record whenever the worker asks its iterable dataset for an iterator.
    """

    def __init__(
        self,
        wrapped: Callable[[Any], Any],
        rng_states: WorkerRngStates,
        iteration_starts: WorkerRngStates | None = None,
    ) -> None:
        self.wrapped, self.rng_states, self.iteration_starts = wrapped, rng_states, iteration_starts
        self.count = self.started = 0
        self.data: TrackedWorkerData | None = None  # only in the worker

    def start_worker(self, changes: Any) -> None:
        """Track the data in the worker, after restoring what those of another worker had changed."""
        self.data = TrackedWorkerData(self.wrapped)
        if changes is not None:
            self.data.restore_changes(changes)
        info = get_worker_info()
        if self.iteration_starts is not None and info is not None:
            call_on_iteration_start(info.dataset, self._record_iteration_start)

    def _record_iteration_start(self) -> None:
        info = get_worker_info()
        if self.iteration_starts is not None and info is not None:
            self.started += 1
            self.iteration_starts.write(info.id, self.started, self._note())

    def _note(self) -> bytes:
        return b"" if self.data is None else self.data.note()

    def __call__(self, samples: Any) -> Any:
        """Return a batch."""
        batch = self.wrapped(samples)
        worker = get_worker_info()
        if worker is not None:
            self.count += 1
            self.rng_states.write(worker.id, self.count, self._note() if self.iteration_starts is None else b"")
        return batch


@cache
def _record_dtype() -> np.dtype[Any]:
    size = torch.get_rng_state().numel()
    return np.dtype(
        [
            ("count", "<i8"),
            ("numpy_place", "<i8"),
            ("numpy_has_gauss", "<i8"),
            ("numpy_gauss", "<f8"),
            ("python_has_gauss", "<i8"),
            ("python_gauss", "<f8"),
            ("numpy", "<u4", 624),
            ("python", "<u4", 625),
            ("torch", "u1", size),
        ]
    )


def _write_rng_state(record: Any) -> None:
    _, words, gauss = random.getstate()
    record["python"] = words
    record["python_has_gauss"], record["python_gauss"] = gauss is not None, gauss or 0.0
    state: Any = np.random.get_state(legacy=True)
    if not isinstance(state, tuple):
        raise ValueError(
            f"numpy's global generator is {state['bit_generator']}; its state can be saved only when it is numpy's "
            "default, MT19937 (np.random.set_bit_generator chooses it)."
        )
    _, record["numpy"], record["numpy_place"], record["numpy_has_gauss"], record["numpy_gauss"] = state
    record["torch"] = torch.get_rng_state().numpy()
