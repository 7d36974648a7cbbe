"""The names that the values of metrics will have, determined before there is data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.metrics.core.metric_properties import Task, task_of
from lightning_tricks.metrics.core.metric_table import MetricEntry, metric_entries
from lightning_tricks.metrics.core.suite import MetricSuite
from lightning_tricks.metrics.core.value_names import find_name_conflict, name_conflict_message

_MAX_CLASSES = 512  # above which no confusion matrix is made for this


@dataclass(frozen=True)
class ExpectedNames:
    """The names of the values of some metrics.

    Attributes:
        known: The names that are certain.
        undetermined: The keys of metrics whose values only data can show: a number of that name, or several whose
            names start with it.
    """

    known: tuple[str, ...]
    undetermined: tuple[str, ...]

    def may_contain(self, name: str) -> bool:
        """Whether a value of that name is certain or possible."""
        return name in self.known or any(
            name == root or name.startswith((f"{root}_", f"{root}/")) for root in self.undetermined
        )


def expected_names(metrics: Any, class_names: Sequence[str] | None = None) -> ExpectedNames:
    """Return the names of the values of metrics, which are computed for four made-up samples.

    Args:
        metrics: As for `MetricSuite`.
        class_names: As for `MetricSuite`.

    Raises:
        TypeError: As `MetricSuite` does.
        ValueError: As `MetricSuite` does, and if two names are equal, or one is a folder of the other.
    """
    known: list[str] = []
    undetermined: list[str] = []
    for entry in metric_entries(metrics, class_names):
        if not entry.is_per_class:  # its values come with the metric of the same key
            found = _names_for_samples(entry)
            known += found or []
            undetermined += [entry.key] if found is None else []
    conflict = find_name_conflict(known)
    if conflict is not None:
        raise ValueError(name_conflict_message(*conflict))
    return ExpectedNames(tuple(known), tuple(undetermined))


def _names_for_samples(entry: MetricEntry) -> list[str] | None:
    """Return the names of the numbers that a metric computes for some samples, or None if they cannot be computed."""
    module = f"{type(entry.metric).__module__}."
    if not module.startswith(("torchmetrics.", "lightning_tricks.")):
        return None  # a custom metric may have side effects
    task = task_of(entry.metric)
    inputs = None if task is None else _make_samples(task, entry.metric)
    if inputs is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            suite = MetricSuite({entry.key: entry.metric}, entry.element_names or None)
            suite.update(**inputs)
            return list(suite.compute())
        except Exception:  # the samples may be invalid for the metric
            return None


def _make_samples(task: Task, metric: Any) -> dict[str, Tensor] | None:
    rows = torch.arange(4)
    classes = task.classes or 4  # where a metric does not say, any number will do
    if classes > _MAX_CLASSES or getattr(metric, "multioutput", "") == "raw_values":
        return None
    if task.kind == "binary":
        return {"preds": torch.tensor([0.1, 0.8, 0.6, 0.3]), "target": rows % 2}
    if task.kind == "multiclass":
        return {"preds": torch.eye(classes)[rows % classes], "target": rows % classes}
    if task.kind == "multilabel":
        target = (rows[:, None] + torch.arange(classes)) % 2
        return {"preds": 0.2 + 0.5 * target, "target": target}
    if task.kind == "retrieval":
        return {"preds": torch.tensor([0.1, 0.8, 0.6, 0.3]), "target": rows % 2, "indexes": rows // 2}
    outputs = getattr(metric, "num_outputs", 1)
    values = torch.tensor([0.5, 1.0, 2.0, 4.0])
    values = values[:, None].repeat(1, outputs) if outputs > 1 else values
    return {"preds": values, "target": values.flip(0)}
