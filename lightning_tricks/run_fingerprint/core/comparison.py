"""Compare two recorded runs, and find where they diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from lightning_tricks.run_fingerprint.core.divergence import Comparison, Divergence
from lightning_tricks.run_fingerprint.core.record import Column, FingerprintRecord, FingerprintRecordError, Row

_STAGES = ("start", "data", "forward", "gradient", "update")
_STAGE_OF_COLUMN = {"loss": "forward", "weights": "update"}


def compare(run_a: Sequence[FingerprintRecord], run_b: Sequence[FingerprintRecord]) -> Comparison:
    """Find the first step at which two runs diverge.

    Args:
        run_a: The records of all ranks of the run that is called A, as `read_ranks` returns them.
        run_b: Those of the run that is called B.

    Returns:
        The first divergence, if there is one, and how many batches are equal before it.

    Raises:
        FingerprintRecordError: If the runs were recorded with different settings, or have no batch in common.
    """
    for name in ("world_size", "detail"):
        of_a, of_b = (getattr(records[0].header, name) for records in (run_a, run_b))
        if of_a != of_b:
            raise FingerprintRecordError(
                f"A has {name}={of_a!r} and B has {name}={of_b!r}: record both with the same settings to compare them."
            )
    of_ranks = [_compare_rank(*records) for records in zip(run_a, run_b, strict=True)]
    divergences = [each.divergence for each in of_ranks if each.divergence is not None]
    first = min(divergences, key=lambda d: (d.step, d.epoch, d.batch_idx, _STAGES.index(d.kind), d.rank), default=None)
    incomplete_resumes = tuple(
        (name, resume)
        for name, records in (("A", run_a), ("B", run_b))
        for resume in dict.fromkeys(one for record in records for one in record.incomplete_resumes)
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
            divergence = divergence or _diff_rows(row_a, row_b, rank)
            if divergence is None:
                num_equal, last_equal = num_equal + (row_a.batch_idx >= 0), row_a
            elif last_equal is not None and intervals != {1} and row_a.step - last_equal.step > 1:
                divergence = replace(divergence, last_equal_step=last_equal.step)
            row_a, row_b = next(rows_a, None), next(rows_b, None)
        else:
            a_is_first = row_a.key < row_b.key
            if last_equal is not None and len(intervals) == 1:
                divergence = _missing_row(row_a if a_is_first else row_b, rank, "B" if a_is_first else "A")
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


def _missing_row(row: Row, rank: int, missing_in: str) -> Divergence:
    return Divergence(
        step=row.step, epoch=row.epoch, batch_idx=row.batch_idx, rank=rank, kind="data", missing_in=missing_in
    )


def _diff_initial_weights(passed: Sequence[Row | None], row: Row, rank: int) -> Divergence | None:
    """Compare the initial weights of the run that began later with those that the other run had by then."""
    weights_a, weights_b = ({} if each is None else _weights_in(each) for each in passed)
    if not weights_a or not weights_b:
        return None
    return _first_difference(weights_a, weights_b, replace(row, batch_idx=-1), rank)


def _diff_rows(row_a: Row, row_b: Row, rank: int) -> Divergence | None:
    if row_a.columns == row_b.columns and np.array_equal(row_a.values, row_b.values):
        return None
    return _first_difference(row_a.as_dict(), row_b.as_dict(), row_a, rank)


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
    return Divergence(
        step=row.step,
        epoch=row.epoch,
        batch_idx=row.batch_idx,
        rank=rank,
        kind="start" if row.batch_idx < 0 else _STAGE_OF_COLUMN.get(first.kind, first.kind),
        layer=first.name or ("loss" if first.kind == "loss" and by_layer else None),
        call=first.call,
        num_differing=len(differing),
        num_compared=len(neighbours),
        last_equal_layer=equal_before[-1].name if equal_before else None,
        missing_in="" if first in values_a and first in values_b else "B" if first in values_a else "A",
    )


def _weights_in(row: Row) -> dict[Column, int]:
    return {column: value for column, value in row.as_dict().items() if column.kind == "weights"}


def _step_range(record: FingerprintRecord) -> str:
    steps = [row.step for row in record if row.batch_idx >= 0]
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
