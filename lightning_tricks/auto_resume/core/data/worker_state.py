"""What a DataLoader's worker changes in its copy of the data: recorded after each batch, restored in a new worker."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_tricks.auto_resume.core.attributes.attribute_access import attributes
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeChanges, AttributeTracker

NOTE_BYTES = 64 * 1024  # the largest size of a note
_MAX_ENTRIES = 1000
_MAX_SECONDS_PER_NOTE = 0.02  # time that the worker may spend on a note, on average
_MIN_TIMED_NOTES = 8
_TOO_LARGE = f"more than {NOTE_BYTES >> 10} KiB"


class TrackedWorkerData:
    """Tracks the changes of a worker's copy of the data and of its collate function; created in the worker.

    Attributes that are too large for a note are left out from the start, so that a note takes some hundred
    microseconds; one that grows too large later is reported as unsaved.

    Args:
        collate: The loader's own collate function.
    """

    def __init__(self, collate: Any) -> None:
        info = get_worker_info()
        self._roots = {"dataset": info and info.dataset, "collate_fn": collate}
        self._large_names: dict[int, set[str]] = {}
        self._unsaved: dict[str, str] = {}
        self._is_initialized = False
        self._notes, self._seconds = 0, 0.0
        self._attributes: AttributeTracker | None = AttributeTracker(self._roots, skipped=self._skipped_names)
        self._is_initialized = True

    def restore_changes(self, changes: Mapping[str, Any]) -> None:
        """Restore what the copy of another worker had changed."""
        restore_changes(self._roots, changes, skipped=self._skipped_names)

    def note(self) -> bytes:
        """Return what changed since the start of the worker, as bytes for `read_note`; empty if nothing changed."""
        if self._attributes is None:
            return _pickle_note({"values": {}, "lost": self._unsaved})
        start = time.thread_time()
        found = self._attributes.changes()
        names = set[str]().union(*self._large_names.values())
        values = {path: one for path, one in found["values"].items() if not (_is_deleted(one) and one["name"] in names)}
        note = _pickle_note({"values": values, "lost": {**found["lost"], **self._unsaved}})
        if len(note) > NOTE_BYTES:
            largest = max(values, key=lambda path: len(_pickle_note(values[path])))
            note = _pickle_note({"values": {}, "lost": {largest: _TOO_LARGE}})
        self._notes, self._seconds = self._notes + 1, self._seconds + time.thread_time() - start
        if self._notes >= _MIN_TIMED_NOTES and self._seconds > _MAX_SECONDS_PER_NOTE * self._notes:
            self._attributes, self._unsaved = None, {"dataset": "too much to compare after each batch"}
        return note

    def _skipped_names(self, owner: Any) -> set[str]:
        """Return the names of attributes that are, or were once, too large."""
        names = self._large_names.setdefault(id(owner), {"state_dict"})
        for name, value in attributes(owner):
            if name not in names and _is_large(value):
                names.add(name)
                if self._is_initialized:
                    self._unsaved[f"dataset.{name}"] = _TOO_LARGE
        return names


def read_note(note: bytes) -> AttributeChanges | None:
    """Return the changes that a worker of this process recorded; None for an empty note."""
    found: AttributeChanges | None = pickle.loads(note) if note else None  # noqa: S301  # written by our own worker
    return found


def _pickle_note(found: Mapping[str, Any]) -> bytes:
    return pickle.dumps(found, pickle.HIGHEST_PROTOCOL) if "values" not in found or any(found.values()) else b""


def _is_deleted(change: Mapping[str, Any]) -> bool:
    value = change["value"]
    return isinstance(value, dict) and value.get("kind") == "deleted"


def _is_large(value: Any) -> bool:
    if isinstance(value, list | tuple | dict | set | frozenset):
        if len(value) > _MAX_ENTRIES:
            return True
        parts = value.values() if isinstance(value, dict) else value
        return sum(_num_bytes(part) for part in parts) > NOTE_BYTES
    return _num_bytes(value) > NOTE_BYTES


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes | bytearray) else 0
