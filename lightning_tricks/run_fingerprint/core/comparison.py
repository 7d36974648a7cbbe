"""Where two recorded runs part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from lightning_tricks.run_fingerprint.core.record_file import (
    Column,
    FingerprintRecord,
    FingerprintRecordError,
    IncompleteResume,
    Row,
)

_STAGES = ("start", "data", "forward", "gradient", "update")
_STAGE_OF_COLUMN = {"loss": "forward", "weights": "update"}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first difference of two runs.

    Attributes:
        step: Optimizer steps that were done when its batch began.
        epoch: The batch's epoch.
        batch_idx: The batch's number in the epoch; -1 for the weights with which the runs began.
        rank: On which it was seen.
        kind: "start" (the weights before the first batch), "data", "forward", "gradient" or "update".
        layer: The first layer whose output differs, or parameter, or part of the batch, or "loss"; None without detail.
            Of gradients, which are made from the loss on, it is the one nearest to the loss.
        call: Which time at this batch, for what comes several times.
        num_differing: How many of those that the step made together differ.
        num_compared: How many those are.
        last_equal_layer: The layer right before it, whose output is equal, for "forward" by layer.
        missing_in: The run that has no such value, "A" or "B", or "".
        last_equal_step: The last step that was equal, where steps between it and this one were not recorded.
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
        verdict = (_VERDICTS if self.layer is None else _VERDICTS_BY_LAYER)[self.kind].format(self.layer)
        time = f" at its call {self.call} within the batch" if self.call > 1 else ""
        lines = [f"The runs part at step {self.step}, {place}{of_rank}: {self.kind}. {verdict}{time}{share}."]
        if self.missing_in:
            lines.append(f"{self.missing_in} has none there.")
        if self.last_equal_layer is not None:
            lines.append(f"The output right before it, of {self.last_equal_layer}, is equal.")
        if self.last_equal_step is None:
            lines.append(_CAUSES[self.kind])
        else:
            lines.append(f"It began after step {self.since}: every_n_train_steps=1 records the steps between as well.")
        if self.layer is None and self.kind != "data":
            lines.append('detail="layer" tells in which layer.')
        return "\n".join(lines)


_VERDICTS = {
    "start": "The weights differ",
    "data": "The batch differs",
    "forward": "The loss differs",
    "gradient": "The gradients differ",
    "update": "The weights differ after the update",
}
_VERDICTS_BY_LAYER = {
    "start": "{} differs",
    "data": "Part {} of the batch differs",
    "forward": "The output of {} differs",
    "gradient": "The gradient of {} differs",
    "update": "{} differs after the update",
}
_CAUSES = {
    "start": "Look at the seed, at what is created before it is set, and at the checkpoint that was loaded.",
    "data": "Look at the order of samples, at augmentation, and at the seeds of workers.",
    "forward": "Batch and weights were equal: look at dropout and other random numbers, at kernels that are not "
    "deterministic, and at what changes weights between steps.",
    "gradient": "Batch and forward pass were equal: look at kernels whose backward is not deterministic.",
    "update": "The gradients were equal: look at the optimizer's state, the learning rate, and what changes weights.",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out when two runs were compared.

    Attributes:
        divergence: Their first difference, or None.
        equal_batches: How many batches were compared and are equal, over all ranks.
        longer_run: The run that goes on where the other ends, "A", "B" or "".
        incomplete_resumes: The run, "A" or "B", and what it lacked when it was resumed, before the first difference.
    """

    divergence: Divergence | None
    equal_batches: int
    longer_run: str = ""
    incomplete_resumes: tuple[tuple[str, IncompleteResume], ...] = ()

    def __str__(self) -> str:
        equal = f"{self.equal_batches:,} {'batch is' if self.equal_batches == 1 else 'batches are'} equal"
        if self.divergence is not None:
            return "\n".join(
                [str(self.divergence), *map(_describe_resume, self.incomplete_resumes), f"{equal} before it."]
            )
        more = f" {self.longer_run} goes on after that." if self.longer_run else ""
        return "\n".join(
            [f"No difference: {equal}, bit for bit.{more}", *map(_describe_resume, self.incomplete_resumes)]
        )


def compare(run_a: Sequence[FingerprintRecord], run_b: Sequence[FingerprintRecord]) -> Comparison:
    """Find where two runs part, A and B, each given by the records of its ranks.

    Raises:
        FingerprintRecordError: If they were not recorded alike, or have no batch in common.
    """
    for name in ("world_size", "detail"):
        in_a, in_b = (getattr(records[0].header, name) for records in (run_a, run_b))
        if in_a != in_b:
            raise FingerprintRecordError(f"A has {name}={in_a!r} and B {in_b!r}: record both alike to compare them.")
    found = [_compare_rank(*records) for records in zip(run_a, run_b, strict=True)]
    divergences = [each.divergence for each in found if each.divergence is not None]
    first = min(divergences, key=lambda p: (p.step, p.epoch, p.batch_idx, _STAGES.index(p.kind), p.rank), default=None)
    last = None if first is None else first.step
    incomplete_resumes = tuple(
        (name, resume)
        for name, records in (("A", run_a), ("B", run_b))
        for resume in dict.fromkeys(one for record in records for one in record.incomplete_resumes)
        if last is None or resume.step <= last
    )
    return Comparison(
        divergence=first,
        equal_batches=sum(each.equal_batches for each in found),
        longer_run=found[0].longer_run,
        incomplete_resumes=incomplete_resumes,
    )


def _describe_resume(resumed: tuple[str, IncompleteResume]) -> str:
    run, resume = resumed
    return f"{run} was resumed at step {resume.step}, where this was not restored: {', '.join(resume.not_restored)}."


def _compare_rank(record_a: FingerprintRecord, record_b: FingerprintRecord) -> Comparison:
    rhythms = {record_a.header.every_n_train_steps, record_b.header.every_n_train_steps}
    rank, equal, before, divergence = record_a.header.rank, 0, None, None
    rows = iter(record_a), iter(record_b)
    row_a, row_b = (next(each, None) for each in rows)
    passed: list[Row | None] = [None, None]  # the last row of each that the other has not
    while row_a is not None and row_b is not None and divergence is None:
        if row_a.key == row_b.key:
            divergence = _diff_initial_weights(passed, row_b, rank) if before is None and rhythms == {1} else None
            divergence = divergence or _diff_rows(row_a, row_b, rank)
            if divergence is None:
                equal, before = equal + (row_a.batch_idx >= 0), row_a
            elif before is not None and rhythms != {1} and row_a.step - before.step > 1:
                divergence = replace(divergence, last_equal_step=before.step)
            row_a, row_b = (next(each, None) for each in rows)
        else:
            earlier, missing_in = (row_a, "B") if row_a.key < row_b.key else (row_b, "A")
            if before is not None and len(rhythms) == 1:
                divergence = Divergence(
                    step=earlier.step,
                    epoch=earlier.epoch,
                    batch_idx=earlier.batch_idx,
                    rank=rank,
                    kind="data",
                    missing_in=missing_in,
                )
            if missing_in == "B":
                passed[0], row_a = row_a, next(rows[0], None)
            else:
                passed[1], row_b = row_b, next(rows[1], None)
    if divergence is None and not equal:
        raise FingerprintRecordError(
            f"The runs have no batch in common: A has {_step_range(record_a)}, B {_step_range(record_b)}."
        )
    longer = "" if divergence else "A" if row_a is not None else "B" if row_b is not None else ""
    return Comparison(divergence=divergence, equal_batches=equal, longer_run=longer)


def _diff_initial_weights(passed: Sequence[Row | None], row: Row, rank: int) -> Divergence | None:
    """Compare the weights with which one run began with those that the other had by then."""
    row_a, row_b = ({} if each is None else _weight_columns(each) for each in passed)
    return _first_difference(row_a, row_b, replace(row, batch_idx=-1), rank) if row_a and row_b else None


def _diff_rows(row_a: Row, row_b: Row, rank: int) -> Divergence | None:
    if row_a.columns == row_b.columns and np.array_equal(row_a.values, row_b.values):
        return None
    return _first_difference(row_a.as_dict(), row_b.as_dict(), row_a, rank)


def _first_difference(row_a: dict[Column, int], row_b: dict[Column, int], at: Row, rank: int) -> Divergence | None:
    columns = list(dict.fromkeys([*row_a, *row_b]))  # in the order in which a step makes them
    first = next((column for column in columns if row_a.get(column) != row_b.get(column)), None)
    if first is None:
        return None
    runs = (list(run) for _, run in groupby(columns, key=lambda column: column.kind))
    alike = next(run for run in runs if first in run)
    differing = [column for column in alike if row_a.get(column) != row_b.get(column)]
    if first.kind == "gradient":
        first = differing[-1]
    before = alike[: alike.index(first)] if first.kind == "forward" else []
    by_layer = any(column.name for column in columns)
    return Divergence(
        step=at.step,
        epoch=at.epoch,
        batch_idx=at.batch_idx,
        rank=rank,
        kind="start" if at.batch_idx < 0 else _STAGE_OF_COLUMN.get(first.kind, first.kind),
        layer=first.name or ("loss" if first.kind == "loss" and by_layer else None),
        call=first.call,
        num_differing=len(differing),
        num_compared=len(alike),
        last_equal_layer=before[-1].name if before else None,
        missing_in="" if first in row_a and first in row_b else "B" if first in row_a else "A",
    )


def _weight_columns(row: Row) -> dict[Column, int]:
    return {column: value for column, value in row.as_dict().items() if column.kind == "weights"}


def _step_range(record: FingerprintRecord) -> str:
    steps = [row.step for row in record if row.batch_idx >= 0]
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
