"""Where two recorded runs part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from lightning_tricks.run_fingerprint.core.record_file import Column, Record, RecordError, Resume, Row

_KINDS = ("start", "data", "forward", "gradient", "update")
_KIND_OF = {"loss": "forward", "weights": "update"}


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first difference of two runs.

    Attributes:
        step: Optimizer steps that were done when its batch began.
        epoch: The batch's epoch.
        batch: The batch's number in the epoch; -1 for the weights with which the runs began.
        rank: On which it was seen.
        kind: "start" (the weights before the first batch), "data", "forward", "gradient" or "update".
        layer: The first layer whose output differs, or parameter, or part of the batch, or "loss"; None without detail.
            Of gradients, which are made from the loss on, it is the one nearest to the loss.
        call: Which time at this batch, for what comes several times.
        differing: How many of those that the step made together differ.
        compared: How many those are.
        equal_before: The layer right before it, whose output is equal, for "forward" by layer.
        lacking: The run that has no such value, "A" or "B", or "".
        since: The last step that was equal, where steps between it and this one were not recorded.
    """

    step: int
    epoch: int
    batch: int
    rank: int
    kind: str
    layer: str | None = None
    call: int = 1
    differing: int = 1
    compared: int = 1
    equal_before: str | None = None
    lacking: str = ""
    since: int | None = None

    def __str__(self) -> str:
        place = "before the first batch" if self.batch < 0 else f"in epoch {self.epoch}, batch {self.batch}"
        of_rank = f" on rank {self.rank}" if self.rank else ""
        share = f" ({self.differing} of {self.compared} differ)" if self.compared > 1 else ""
        verdict = (_VERDICTS if self.layer is None else _VERDICTS_BY_LAYER)[self.kind].format(self.layer)
        time = f" at its call {self.call} within the batch" if self.call > 1 else ""
        lines = [f"The runs part at step {self.step}, {place}{of_rank}: {self.kind}. {verdict}{time}{share}."]
        if self.lacking:
            lines.append(f"{self.lacking} has none there.")
        if self.equal_before is not None:
            lines.append(f"The output right before it, of {self.equal_before}, is equal.")
        if self.since is None:
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
        parting: Their first difference, or None.
        batches: How many batches were compared and are equal, over all ranks.
        longer: The run that goes on where the other ends, "A", "B" or "".
        resumes: The run, "A" or "B", and what it lacked when it was resumed, before the first difference.
    """

    parting: Parting | None
    batches: int
    longer: str = ""
    resumes: tuple[tuple[str, Resume], ...] = ()

    def __str__(self) -> str:
        equal = f"{self.batches:,} {'batch is' if self.batches == 1 else 'batches are'} equal"
        if self.parting is not None:
            return "\n".join([str(self.parting), *map(_sentence, self.resumes), f"{equal} before it."])
        more = f" {self.longer} goes on after that." if self.longer else ""
        return "\n".join([f"No difference: {equal}, bit for bit.{more}", *map(_sentence, self.resumes)])


def compare(left: Sequence[Record], right: Sequence[Record]) -> Comparison:
    """Find where two runs part, A and B, each given by the records of its ranks.

    Raises:
        RecordError: If they were not recorded alike, or have no batch in common.
    """
    for name in ("world_size", "detail"):
        ours, theirs = (getattr(records[0].origin, name) for records in (left, right))
        if ours != theirs:
            raise RecordError(f"A has {name}={ours!r} and B {theirs!r}: record both alike to compare them.")
    found = [_compare_ranks(*records) for records in zip(left, right, strict=True)]
    partings = [each.parting for each in found if each.parting is not None]
    first = min(partings, key=lambda p: (p.step, p.epoch, p.batch, _KINDS.index(p.kind), p.rank), default=None)
    last = None if first is None else first.step
    resumes = tuple(
        (name, resume)
        for name, records in (("A", left), ("B", right))
        for resume in dict.fromkeys(one for record in records for one in record.resumes)
        if last is None or resume.step <= last
    )
    return Comparison(
        parting=first, batches=sum(each.batches for each in found), longer=found[0].longer, resumes=resumes
    )


def _sentence(lacking: tuple[str, Resume]) -> str:
    run, resume = lacking
    return f"{run} was resumed at step {resume.step}, where this was not restored: {', '.join(resume.not_restored)}."


def _compare_ranks(left: Record, right: Record) -> Comparison:
    rhythms = {left.origin.every_n_train_steps, right.origin.every_n_train_steps}
    rank, equal, before, parting = left.origin.rank, 0, None, None
    rows = iter(left), iter(right)
    ours, theirs = (next(each, None) for each in rows)
    passed: list[Row | None] = [None, None]  # the last row of each that the other has not
    while ours is not None and theirs is not None and parting is None:
        if ours.key == theirs.key:
            parting = _part_at_start(passed, theirs, rank) if before is None and rhythms == {1} else None
            parting = parting or _part(ours, theirs, rank)
            if parting is None:
                equal, before = equal + (ours.batch >= 0), ours
            elif before is not None and rhythms != {1} and ours.step - before.step > 1:
                parting = replace(parting, since=before.step)
            ours, theirs = (next(each, None) for each in rows)
        else:
            earlier, lacking = (ours, "B") if ours.key < theirs.key else (theirs, "A")
            if before is not None and len(rhythms) == 1:
                parting = Parting(
                    step=earlier.step, epoch=earlier.epoch, batch=earlier.batch, rank=rank, kind="data", lacking=lacking
                )
            if lacking == "B":
                passed[0], ours = ours, next(rows[0], None)
            else:
                passed[1], theirs = theirs, next(rows[1], None)
    if parting is None and not equal:
        raise RecordError(f"The runs have no batch in common: A has {_span(left)}, B {_span(right)}.")
    longer = "" if parting else "A" if ours is not None else "B" if theirs is not None else ""
    return Comparison(parting=parting, batches=equal, longer=longer)


def _part_at_start(passed: Sequence[Row | None], row: Row, rank: int) -> Parting | None:
    """Compare the weights with which one run began with those that the other had by then."""
    ours, theirs = ({} if each is None else _weights(each) for each in passed)
    return _first_difference(ours, theirs, replace(row, batch=-1), rank) if ours and theirs else None


def _part(ours: Row, theirs: Row, rank: int) -> Parting | None:
    if ours.columns == theirs.columns and np.array_equal(ours.values, theirs.values):
        return None
    return _first_difference(ours.as_dict(), theirs.as_dict(), ours, rank)


def _first_difference(ours: dict[Column, int], theirs: dict[Column, int], at: Row, rank: int) -> Parting | None:
    columns = list(dict.fromkeys([*ours, *theirs]))  # in the order in which a step makes them
    first = next((column for column in columns if ours.get(column) != theirs.get(column)), None)
    if first is None:
        return None
    runs = (list(run) for _, run in groupby(columns, key=lambda column: column.kind))
    alike = next(run for run in runs if first in run)
    differing = [column for column in alike if ours.get(column) != theirs.get(column)]
    if first.kind == "gradient":
        first = differing[-1]
    before = alike[: alike.index(first)] if first.kind == "forward" else []
    by_layer = any(column.name for column in columns)
    return Parting(
        step=at.step,
        epoch=at.epoch,
        batch=at.batch,
        rank=rank,
        kind="start" if at.batch < 0 else _KIND_OF.get(first.kind, first.kind),
        layer=first.name or ("loss" if first.kind == "loss" and by_layer else None),
        call=first.call,
        differing=len(differing),
        compared=len(alike),
        equal_before=before[-1].name if before else None,
        lacking="" if first in ours and first in theirs else "B" if first in ours else "A",
    )


def _weights(row: Row) -> dict[Column, int]:
    return {column: value for column, value in row.as_dict().items() if column.kind == "weights"}


def _span(record: Record) -> str:
    steps = [row.step for row in record if row.batch >= 0]
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
