"""`ThroughputMeter` counts samples by the shapes of the batches, without a read from the device."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import islice
from typing import Any

from lightning_tricks._shared.tensors import tensors_in
from lightning_tricks.run_report.core.record import RunRecord

_MOST_TENSORS = 32  # of a batch that are looked at


def rows_of(batch: Any) -> int | None:
    """Return the number of samples of a batch, the size of all its tensors, or None where these do not agree.

    Examples:
        >>> import torch
        >>> rows_of({"images": torch.zeros(4, 1, 8, 8), "targets": [torch.zeros(4)]}), rows_of([torch.zeros(3, 8)] * 4)
        (4, 3)
        >>> rows_of((torch.zeros(3, 8), torch.zeros(4)))
    """
    sizes = {tensor.shape[0] for tensor in islice(tensors_in(batch), _MOST_TENSORS) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


class ThroughputMeter:
    """Counts batches and samples, and the time in validation, for a record.

    A list of images, whose first sizes are no number of samples, is told by the size of the batches: all but the last
    one of an epoch have it.

    Args:
        record: The record, which has the counts of earlier parts of the run.
        loader: What the batches come from: only those of one loader are counted as samples.
    """

    def __init__(self, record: RunRecord, loader: Any) -> None:
        self._record = record
        size = getattr(loader, "batch_size", None)
        self._batch_size = size if isinstance(size, int) else None
        self._ended_short = False
        self._validation_began: float | None = None
        if isinstance(loader, dict | list | tuple):
            record.samples = None

    def add(self, batch: Any, batch_idx: int) -> None:
        """Count a batch."""
        record = self._record
        record.batches += 1
        if record.samples is None:
            return
        rows, size = None, self._batch_size
        with suppress(Exception):  # objects of users may do anything when they are looked into
            rows = rows_of(batch)
        if rows is None or (size is not None and (rows > size or (self._ended_short and batch_idx > 0))):
            record.samples = None
        else:
            record.samples += rows
            self._ended_short = size is not None and rows < size

    def begin_validation(self) -> None:
        """Note when a validation begins."""
        self._validation_began = time.perf_counter()

    def end_validation(self) -> None:
        """Add the time of the validation that ends."""
        if self._validation_began is not None:
            self._record.validation_seconds += time.perf_counter() - self._validation_began
        self._validation_began = None
