"""Compare two recorded runs, and find where they diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from lightning_tricks.run_fingerprint.core.record import (
    Column,
    FingerprintRecord,
    FingerprintRecordError,
    IncompleteResume,
    Row,
)

# The stages of a step in their order: the verdict, the verdict by layer or part, and advice on the cause
_STAGES = {
    "start": (
        "The weights differ",
        "{} differs",
        "Look at the seed, at what is created before it is set, and at the checkpoint that was loaded.",
    ),
    "dataset": ("The data differ", "The {} data differ", "Look at the seed with which they are split."),
    "data": (
        "The batch differs",
        "Part {} of the batch differs",
        "Look at the order of samples, at augmentation, and at the seeds of workers.",
    ),
    "forward": (
        "The loss differs",
        "The output of {} differs",
        "Batch and weights were equal: look at dropout and other random numbers, at kernels that are not "
        "deterministic, and at what changes weights between steps.",
    ),
    "rate": ("The learning rates differ", "{} differs", "Look at the scheduler, and at what else sets learning rates."),
    "gradient": (
        "The gradients differ",
        "The gradient of {} differs",
        "Batch and forward pass were equal: look at kernels whose backward is not deterministic.",
    ),
    "update": (
        "The weights differ after the update",
        "{} differs after the update",
        "The gradients were equal: look at the optimizer's state, the learning rate, and what changes weights.",
    ),
}
_WEIGHTS = ("replicated", "weights")
_STAGE_OF_COLUMN = {"loss": "forward", "replicated": "update", "weights": "update"}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first difference of two runs.

    Attributes:
        step: The number of optimizer steps before the batch.
        epoch: The batch's epoch.
        batch_idx: The batch's index in the epoch; -1 for the initial weights of the runs.
        rank: The rank that recorded the difference.
        kind: "dataset", "start" (the weights before the first batch), "data", "forward", "rate", "gradient" or
            "update".
        layer: The first layer with a different output, or the first different parameter or part of the batch, or
            "loss"; None if the runs were recorded with `detail="step"`. For gradients, the one nearest to the loss, as
            they are computed backward from it.
        call: 1 if the layer differs at its first call within the batch, 2 at its second, ...
        num_differing: The number of differing values among those computed together with it.
        num_compared: The number of values computed together with it.
        last_equal_layer: For "forward" by layer: the layer before it, which has an equal output, or None.
        missing_in: The run without the value, "A" or "B", or "".
        last_equal_step: The last equal step, if the steps between it and this one were not recorded, or None.
    """

    step: int
    epoch: int
    batch_idx: int
    rank: int
    kind: str
    layer: str | None = None
    call: int = 1
    num_differing: int = 1
    num_compared: int = 1
    last_equal_layer: str | None = None
    missing_in: str = ""
    last_equal_step: int | None = None

    def __str__(self) -> str:
        place = "before the first batch" if self.batch_idx < 0 else f"in epoch {self.epoch}, batch {self.batch_idx}"
        of_rank = f" on rank {self.rank}" if self.rank else ""
        share = f" ({self.num_differing} of {self.num_compared} differ)" if self.num_compared > 1 else ""
        of_step, of_layer, cause = _STAGES[self.kind]
        verdict = of_step if self.layer is None else of_layer.format(self.layer)
        time = f" at call {self.call} within the batch" if self.call > 1 else ""
        lines = [f"The runs diverge at step {self.step}, {place}{of_rank}: {self.kind}. {verdict}{time}{share}."]
        if self.missing_in:
            lines.append(f"Run {self.missing_in} has no such value.")
        if self.last_equal_layer is not None:
            lines.append(f"The output of the layer that ran before it, {self.last_equal_layer}, is equal.")
        if self.last_equal_step is None:
            lines.append(cause)
        else:
            lines.append(
                f"They diverged after step {self.last_equal_step}: every_n_train_steps=1 records the steps in between."
            )
        if self.layer is None and self.kind not in ("data", "rate"):
            lines.append('Record with detail="layer" to find the layer.')
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison of two runs.

    Attributes:
        divergence: The first difference, or None.
        equal_batches: How many batches are equal before it, over all ranks.
        longer_run: The run with more steps, "A" or "B", or "".
        incomplete_resumes: The resumes before the first difference that did not restore everything, each with the
            name of its run, "A" or "B".
    """

    divergence: Divergence | None
    equal_batches: int
    longer_run: str = ""
    incomplete_resumes: tuple[tuple[str, IncompleteResume], ...] = ()

    def __str__(self) -> str:
        equal = f"{self.equal_batches:,} {'batch is' if self.equal_batches == 1 else 'batches are'} equal"
        resumes = [
            f"Run {run} was resumed at step {resume.step} without restoring: {', '.join(resume.not_restored)}."
            for run, resume in self.incomplete_resumes
        ]
        if self.divergence is not None:
            return "\n".join([str(self.divergence), *resumes, f"{equal} before it."])
        more = f" Run {self.longer_run} has more steps." if self.longer_run else ""
        return "\n".join([f"No difference: {equal}, bit for bit.{more}", *resumes])


def compare(run_a: Sequence[FingerprintRecord], run_b: Sequence[FingerprintRecord]) -> Comparison:
    """Find the first step at which two runs diverge.

    Args:
        run_a: The records of all ranks of run A, as `read_ranks` returns them.
        run_b: The records of all ranks of run B.

    Returns:
        The first divergence, if any, and the number of equal batches before it.

    Raises:
        FingerprintRecordError: If the runs were recorded with different settings, or have no batch in common.
    """
    a, b = run_a[0], run_b[0]
    pairs = [(name, getattr(a.header, name), getattr(b.header, name)) for name in ("version", "world_size", "detail")]
    for name, of_a, of_b in [*pairs, ("compare_ranks", a.compare_ranks, b.compare_ranks)]:
        if of_a != of_b:
            raise FingerprintRecordError(
                f"A has {name}={of_a!r} and B has {name}={of_b!r}: record both with the same settings, and the same "
                "version of lightning_tricks, to compare them."
            )
    of_ranks = [_compare_rank(*records) for records in zip(run_a, run_b, strict=True)]
    divergences = [each.divergence for each in of_ranks if each.divergence is not None]
    first = min(
        divergences, key=lambda d: (d.step, d.epoch, d.batch_idx, list(_STAGES).index(d.kind), d.rank), default=None
    )
    incomplete_resumes = tuple(
        (name, resume)
        for name, records in (("A", run_a), ("B", run_b))
        for resume in dict.fromkeys(resume for record in records for resume in record.incomplete_resumes)
        if first is None or resume.step <= first.step
    )
    return Comparison(
        divergence=first,
        equal_batches=sum(each.equal_batches for each in of_ranks),
        longer_run=of_ranks[0].longer_run,
        incomplete_resumes=incomplete_resumes,
    )


def _compare_rank(record_a: FingerprintRecord, record_b: FingerprintRecord) -> Comparison:
    """Compare what one rank recorded in two runs."""
    # Rows are ordered by step, epoch and batch, so the two records are walked side by side, as when they are merged.
    # A row that only one run has is passed over where one run began later or recorded fewer steps, and is a
    # difference otherwise.
    intervals = {record_a.header.every_n_train_steps, record_b.header.every_n_train_steps}
    rank, num_equal, last_equal, divergence = record_a.header.rank, 0, None, None
    rows_a, rows_b = iter(record_a), iter(record_b)
    row_a, row_b = next(rows_a, None), next(rows_b, None)
    passed: list[Row | None] = [None, None]  # the last row of each run that the other one lacks
    while row_a is not None and row_b is not None and divergence is None:
        if row_a.key == row_b.key:
            if last_equal is None and intervals == {1}:
                divergence = _diff_initial_weights(passed, row_b, rank)
            are_equal = row_a.columns == row_b.columns and np.array_equal(row_a.values, row_b.values)
            if divergence is None and not are_equal:
                divergence = _first_difference(row_a.as_dict(), row_b.as_dict(), row_a, rank)
            if divergence is None:
                num_equal, last_equal = num_equal + (row_a.batch_idx >= 0), row_a
            elif last_equal is not None and intervals != {1} and row_a.step - last_equal.step > 1:
                divergence = replace(divergence, last_equal_step=last_equal.step)
            row_a, row_b = next(rows_a, None), next(rows_b, None)
        else:
            a_is_first = row_a.key < row_b.key
            if last_equal is not None and len(intervals) == 1:
                row, missing_in = (row_a, "B") if a_is_first else (row_b, "A")
                divergence = _diverges_at(row, rank, "data", missing_in=missing_in)
            if a_is_first:
                passed[0], row_a = row_a, next(rows_a, None)
            else:
                passed[1], row_b = row_b, next(rows_b, None)
    if divergence is None and not num_equal:
        raise FingerprintRecordError(
            f"The runs have no batch in common: A has {_step_range(record_a)}, B has {_step_range(record_b)}."
        )
    longer_run = "" if divergence else "A" if row_a is not None else "B" if row_b is not None else ""
    return Comparison(divergence=divergence, equal_batches=num_equal, longer_run=longer_run)


def _diverges_at(row: Row, rank: int, kind: str, **known: Any) -> Divergence:
    return Divergence(step=row.step, epoch=row.epoch, batch_idx=row.batch_idx, rank=rank, kind=kind, **known)


def _diff_initial_weights(passed: Sequence[Row | None], row: Row, rank: int) -> Divergence | None:
    """Compare the initial weights of the run that began later with those that the other run had by then."""
    weights_a, weights_b = (
        {column: value for column, value in each.as_dict().items() if column.kind in _WEIGHTS} if each else {}
        for each in passed
    )
    if not weights_a or not weights_b:
        return None
    return _first_difference(weights_a, weights_b, replace(row, batch_idx=-1), rank)


def _first_difference(
    values_a: Mapping[Column, int], values_b: Mapping[Column, int], row: Row, rank: int
) -> Divergence | None:
    columns = list(dict.fromkeys([*values_a, *values_b]))  # in the order of a step
    first = next((column for column in columns if values_a.get(column) != values_b.get(column)), None)
    if first is None:
        return None
    # a step may have several forward passes: only the neighbours of the same kind belong to the same one
    runs_of_kind = (list(run) for _, run in groupby(columns, key=lambda column: column.kind))
    neighbours = next(run for run in runs_of_kind if first in run)
    differing = [column for column in neighbours if values_a.get(column) != values_b.get(column)]
    if first.kind == "gradient":  # gradients are computed from the loss on, against the order of the columns
        first = differing[-1]
    equal_before = neighbours[: neighbours.index(first)] if first.kind == "forward" else []
    by_layer = any(column.name for column in columns)
    return _diverges_at(
        row,
        rank,
        "start" if row.batch_idx < 0 and first.kind in _WEIGHTS else _STAGE_OF_COLUMN.get(first.kind, first.kind),
        layer=first.name or ("loss" if first.kind == "loss" and by_layer else None),
        call=first.call,
        num_differing=len(differing),
        num_compared=len(neighbours),
        last_equal_layer=equal_before[-1].name if equal_before else None,
        missing_in="" if first in values_a and first in values_b else "B" if first in values_a else "A",
    )


def _step_range(record: FingerprintRecord) -> str:
    steps = [row.step for row in record if row.batch_idx >= 0]
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
