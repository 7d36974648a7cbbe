"""`History`: the values of all epochs, which are read from the device only when they are used."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from rich.console import Group as RenderGroup
from rich.text import Text
from torch import Tensor

from lightning_tricks._shared.fitting_table import FittingTable, FoldedName
from lightning_tricks._shared.report_parts import ClassValues, ConfusionMatrix, Reliability, ReportPart
from lightning_tricks._shared.tensors import read_numbers
from lightning_tricks._shared.text import counted, format_number
from lightning_tricks.metrics.core.counts import reliability_curve
from lightning_tricks.metrics.core.metric_table import per_class_names

_MAX_CLASSES = 50  # rows of the table of single classes
_MOST_REPORTED = 200  # classes of a confusion matrix in a report
_MOST_SAID = 5  # loaders in a line of text, and values of each


@dataclass
class EpochRecord:
    """The values of one loader of a stage at the end of one epoch.

    Attributes:
        stage: "train", "val" or "test".
        loader: The index of the loader if the stage has several, else None.
        epoch: The epoch, counted from 0.
        step: The number of optimizer steps done.
        fit: Whether the epoch was part of a fit.
        names: The names of the values.
        values: The numbers; a tensor on the device until they are read.
        num_invalid: The number of predictions or targets that were invalid.
        loader_name: The name of the loader, if the stage has several in a dict.
    """

    stage: str
    loader: int | None
    epoch: int
    step: int
    fit: bool
    names: list[str]
    values: Tensor | list[float]
    num_invalid: Tensor | int = 0
    loader_name: str | None = None

    @property
    def prefix(self) -> str:
        """The first part of the logged keys: the stage, with several loaders also the name or index of the loader."""
        return self.stage if self.loader is None else f"{self.stage}/{self.loader_name or self.loader}"

    def numbers(self) -> dict[str, float]:
        """Return the numbers by name, which must have been read."""
        return dict(zip(self.names, cast(list[float], self.values), strict=True))

    def of_classes(self, class_names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the numbers of single classes, which must have been read: metric -> class -> number."""
        numbers = self.numbers()
        found: dict[str, dict[str, float]] = {}
        for name, (metric, part) in per_class_names(self.names, class_names).items():
            found.setdefault(metric, {})[part] = numbers[name]
        return found


@dataclass
class EvaluationData:
    """The data of the plots and report parts of one loader at the end of one epoch.

    Attributes:
        record: The values, which must have been read.
        kind: The kind of the task; empty if it is not a classification.
        confusion: The confusion matrix, (C, C) or (L, 2, 2), or None.
        scores: The histograms of scores, (K, 2, B), or None.
        reliability: Confidence, accuracy and share of the rows of each bin, or None to take them from the histograms.
    """

    record: EpochRecord
    kind: str
    confusion: Tensor | None
    scores: Tensor | None
    reliability: tuple[Tensor, Tensor, Tensor] | None = None


class History:
    """The values of a run, which are read from the device all at once, and only when they are used."""

    def __init__(self) -> None:
        self._records: list[EpochRecord] = []
        self._read = 0

    def add(self, record: EpochRecord) -> None:
        """Add a record, whose values are a tensor, without reading it."""
        self._records.append(record)

    def records(self) -> list[EpochRecord]:
        """Return the records, their values as numbers."""
        new = self._records[self._read :]
        self._read = len(self._records)
        tensors = [[cast(Tensor, record.values), torch.as_tensor(record.num_invalid)] for record in new]
        numbers = iter(read_numbers([tensor for pair in tensors for tensor in pair]))
        for record in new:
            record.values, (num_invalid,) = next(numbers), next(numbers)
            record.num_invalid = int(num_invalid)
            if record.num_invalid:
                warnings.warn(
                    f"{record.num_invalid} predictions or targets of {record.prefix} in epoch {record.epoch} were "
                    "NaN, not probabilities, or out of range, so its metrics are NaN.",
                    stacklevel=2,
                )
        return self._records

    def best(self, modes: Mapping[str, str]) -> dict[str, tuple[float, int]]:
        """Return the best value of each key in a fit, and the step at which it first occurred; NaN is never best."""
        best: dict[str, tuple[float, int]] = {}
        for record in self.records():
            for name, value in record.numbers().items():
                key = f"{record.prefix}/{name}"
                if record.fit and key in modes and not math.isnan(value):
                    sign = 1 if modes[key] == "max" else -1
                    if key not in best or sign * value > sign * best[key][0]:
                        best[key] = value, record.step
        return best

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each value: stage, loader, epoch, step, metric and value."""
        places = ("stage", "loader", "epoch", "step")
        return [
            {**{place: getattr(record, place) for place in places}, "metric": name, "value": value}
            for record in self.records()
            for name, value in record.numbers().items()
        ]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the records as plain values."""
        states = [dict(vars(record)) for record in self.records()]
        for state in states:
            state["misfits"] = state.pop("num_invalid")  # its name in checkpoints
        return states

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replace the records by those of a `state_dict()`."""
        states = [dict(record) for record in state]
        for record in states:
            record["num_invalid"] = record.pop("misfits", 0)
        self._records = [EpochRecord(**record) for record in states]
        self._read = len(self._records)

    def line(self, best: Mapping[str, tuple[float, int]], left_out: Callable[[Iterable[str]], Collection[str]]) -> str:
        """Return the best values, or else the last ones of the validation (of the training, where there is none).

        Args:
            best: The best values: key -> value and step.
            left_out: A function of the names of values that returns those that are not said.
        """
        if best:
            return ", ".join(f"best {key} {format_number(value)} at step {step}" for key, (value, step) in best.items())
        last = self.last_values()
        evaluated = [prefix for prefix in last if not prefix.startswith("train")]
        said = []
        for prefix in sorted(evaluated or last)[:_MOST_SAID]:
            unsaid = left_out(last[prefix])
            few = [f"{name} {format_number(value)}" for name, value in last[prefix].items() if name not in unsaid]
            said.append(f"{prefix} {', '.join(few[:_MOST_SAID])}")
        more = len(evaluated) - len(said)
        others = [counted(more, "more loader")] if more > 0 else []
        return "; ".join([*said, *others])

    def last_values(self) -> dict[str, dict[str, float]]:
        """Return the last values of each loader: its prefix -> name -> value."""
        return {record.prefix: record.numbers() for record in self.records()}

    def table(self, best: Mapping[str, tuple[float, int]], class_names: Sequence[str] = ()) -> RenderGroup:
        """Return the last values as tables: metrics by stage, and, where there are classes, metrics by class.

        Args:
            best: The best values: key -> value and step.
            class_names: The classes of the second table, which shows the last stage or loader.
        """
        overall: dict[str, dict[str, float]] = {}
        by_class: dict[str, dict[str, dict[str, float]]] = {}
        for record in self.records():
            parts = per_class_names(record.names, class_names)
            for name, value in record.numbers().items():
                if name not in parts:
                    overall.setdefault(name, {})[record.prefix] = value
            if parts:
                by_class[record.prefix] = record.of_classes(class_names)
        prefixes = sorted({record.prefix for record in self._records})
        stages = sorted(prefixes, key=lambda prefix: ("train", "val", "test").index(prefix.partition("/")[0]))
        table = _make_table("Metrics", ["metric", *stages], drop=["best", *stages[:-1]])
        if best:
            table.add_column("best")
        for name, values in overall.items():
            found = [(stage, *best[key]) for stage in stages if (key := f"{stage}/{name}") in best]
            of_best = [", ".join(f"{stage} {format_number(value)} at step {step}" for stage, value, step in found)]
            numbers = (format_number(values.get(stage)) for stage in stages)
            table.add_row(FoldedName(name), *numbers, *(of_best if best else []))
        with_classes = [stage for stage in stages if stage in by_class]
        return RenderGroup(table, *(_class_table(stage, by_class[stage]) for stage in with_classes[-1:]))


def _make_table(title: str, columns: Sequence[str], drop: Sequence[str]) -> FittingTable:
    table = FittingTable(*columns, drop=drop, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _class_table(stage: str, values: Mapping[str, Mapping[str, float]]) -> FittingTable:
    table = _make_table(f"Classes, {stage}", ["class", *values], drop=list(values)[:0:-1])
    classes = list(next(iter(values.values())))
    for name in classes[:_MAX_CLASSES]:
        table.add_row(Text(name), *(format_number(of_metric[name]) for of_metric in values.values()))
    if len(classes) > _MAX_CLASSES:
        table.notes = f"{len(classes) - _MAX_CLASSES} more classes"
    return table


def make_parts(data: EvaluationData, class_names: Sequence[str], key: Callable[[str, str], str]) -> list[ReportPart]:
    """Return the parts for which there is data.

    Args:
        data: The data of one loader at the end of an epoch; the values of its record must have been read.
        class_names: The names of the classes, or nothing.
        key: Prefix and name of a value -> the key under which it is logged.
    """
    record, parts = data.record, list[ReportPart]()
    stage = key(record.prefix, "")[:-1]  # with the monitor's prefix: a part replaces another one of its stage
    if data.confusion is not None and data.confusion.ndim == 2 and len(data.confusion) <= _MOST_REPORTED:
        names = list(class_names) or [str(number) for number in range(len(data.confusion))]
        counts = data.confusion.long().tolist()
        parts.append(ConfusionMatrix(stage=stage, epoch=record.epoch, classes=names, counts=counts))
    if data.scores is not None and data.kind in ("binary", "multiclass"):
        histogram = data.scores[-1] if data.kind == "multiclass" else data.scores.sum(0)
        bins = data.reliability or reliability_curve(histogram)
        confidence, share, weight = (values.tolist() for values in bins)
        label = "accuracy" if data.kind == "multiclass" else "share of positives"
        if confidence:
            of_bins = {"confidence": confidence, "share": share, "weight": weight}
            parts.append(Reliability(stage=stage, epoch=record.epoch, label=label, **of_bins))
    if by_class := record.of_classes(class_names):
        parts.append(
            ClassValues(
                stage=stage,
                epoch=record.epoch,
                classes=list(class_names),
                metrics=list(by_class),
                values=[[of_metric[name] for of_metric in by_class.values()] for name in class_names],
                keys=[key(record.prefix, f"{metric}_{name}") for metric in by_class for name in class_names],
            )
        )
    return parts
