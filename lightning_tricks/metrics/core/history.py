"""`History`: the values of all epochs, which are read from the device only when they are used."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from rich.console import Group as RenderGroup
from rich.table import Table
from torch import Tensor

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.value_names import per_class_names

_MAX_CLASSES = 50  # rows of the table of single classes


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
        """The first part of the logged keys: the stage, with several loaders also the index of the loader."""
        return self.stage if self.loader is None else f"{self.stage}/{self.loader}"

    @property
    def title(self) -> str:
        """What tables and plots call the loader: its prefix, and its name if it has one."""
        return self.prefix if self.loader_name is None else f"{self.prefix} ({self.loader_name})"

    def items(self) -> Iterator[tuple[str, float]]:
        """Return the logged keys and the numbers, which must have been read."""
        return zip((f"{self.prefix}/{name}" for name in self.names), cast(list[float], self.values), strict=True)


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
        tensors = [
            to_double(part.reshape(-1))
            for record in new
            for part in (cast(Tensor, record.values), torch.as_tensor(record.num_invalid))
        ]
        if tensors:
            device = tensors[0].device
            numbers = iter(torch.cat([tensor.to(device, tensors[0].dtype) for tensor in tensors]).tolist())
            for record in new:
                record.values = [next(numbers) for _ in record.names]
                record.num_invalid = int(next(numbers))
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
            for key, value in record.items():
                if record.fit and key in modes and not math.isnan(value):
                    sign = 1 if modes[key] == "max" else -1
                    if key not in best or sign * value > sign * best[key][0]:
                        best[key] = value, record.step
        return best

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each value: stage, loader, epoch, step, metric and value."""
        return [
            {
                "stage": record.stage,
                "loader": record.loader,
                "epoch": record.epoch,
                "step": record.step,
                "metric": name,
                "value": value,
            }
            for record in self.records()
            for name, value in zip(record.names, cast(list[float], record.values), strict=True)
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
            for name, value in zip(record.names, cast(list[float], record.values), strict=True):
                metric, part = parts.get(name, ("", ""))
                if metric:
                    by_class.setdefault(record.prefix, {}).setdefault(part, {})[metric] = value
                else:
                    overall.setdefault(name, {})[record.prefix] = value
        stages = sorted({record.prefix for record in self._records}, key=_by_stage)
        titles = {record.prefix: record.title for record in self._records}
        table = Table("metric", *map(titles.__getitem__, stages), title="Metrics")
        if best:
            table.add_column("best")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, values in overall.items():
            cells = [_format(values.get(stage)) for stage in stages]
            found = [(stage, *best[key]) for stage in stages if (key := f"{stage}/{name}") in best]
            table.add_row(name, *cells, *([", ".join(map(_format_best, found))] if best else []))
        tables = [table]
        with_classes = [stage for stage in stages if stage in by_class]
        tables += [_class_table(titles[stage], by_class[stage]) for stage in with_classes[-1:]]
        return RenderGroup(*tables)


def _by_stage(prefix: str) -> tuple[int, str]:
    return ("train", "val", "test").index(prefix.partition("/")[0]), prefix


def _class_table(stage: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    metrics = list(dict.fromkeys(metric for values in rows.values() for metric in values))
    table = Table("class", *metrics, title=f"Classes, {stage}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in list(rows.items())[:_MAX_CLASSES]:
        table.add_row(name, *(_format(values.get(metric)) for metric in metrics))
    if len(rows) > _MAX_CLASSES:
        table.caption = f"{len(rows) - _MAX_CLASSES} more classes"
    return table


def _format_best(best: tuple[str, float, int]) -> str:
    stage, value, step = best
    return f"{stage} {_format(value)} at step {step}"


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
