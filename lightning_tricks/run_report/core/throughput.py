"""How fast a run trained: samples are counted by the shapes of the batches, without a read from the device."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import islice
from typing import Any

from lightning_tricks._shared.report_parts import DeviceUse, Facts
from lightning_tricks._shared.tensors import tensors_in
from lightning_tricks.run_report.core.numbers import format_number, format_percent
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


def samples_per_second(record: RunRecord) -> float | None:
    """Return the samples that a rank trained on in a second of the fit, or None if it is not known."""
    is_whole = record.batches >= record.step > 0  # else an older version recorded the beginning
    return record.samples / record.seconds if is_whole and record.samples and record.seconds > 0 else None


def throughput(record: RunRecord) -> Facts | None:
    """Return how fast a run trained and what it waited for, or None if nothing of that is known."""
    facts: list[tuple[str, str]] = []
    rate = samples_per_second(record)
    whose = f", on rank 0 of {record.ranks}" if record.ranks > 1 else ""
    training = record.seconds - record.validation_seconds
    if rate is not None:
        facts.append((f"samples a second{whose}", format_number(rate)))
        if record.validation_seconds and training > 0:
            facts.append(
                (f"samples a second, without validation{whose}", format_number(rate * record.seconds / training))
            )
    if record.batches >= record.step > 0 and record.seconds > 0:
        facts.append((f"batches a second{whose}", format_number(record.batches / record.seconds)))
        facts.append(("share of the time in validation", format_percent(record.validation_seconds / record.seconds)))
    uses = record.parts_of(DeviceUse)
    for use in uses:
        if use.data_wait is not None:
            rank = f" of rank {use.rank}" * (len(uses) > 1)
            facts.append((f"share of the time{rank} waiting for data", format_percent(use.data_wait / 100)))
    verdicts = [f"{f'Rank {use.rank}: ' * (len(uses) > 1)}{said}" for use in uses for said in use.verdict]
    if facts and not uses:
        verdicts = ["With a DeviceMonitor, it is said here what training waited for."]
    return Facts(title="Throughput", facts=facts, sentences=verdicts) if facts or verdicts else None
