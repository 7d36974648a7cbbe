"""One flat list of metrics from what a user gives as metrics, with copies for single classes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_tricks.metrics.core.metric_modules import BalancedAccuracy
from lightning_tricks.metrics.core.metric_properties import state_sharing_key, task_of
from lightning_tricks.metrics.core.presets import preset

_AVERAGES = ("micro", "macro", "weighted")


@dataclass(frozen=True)
class MetricEntry:
    """A metric and its key.

    Attributes:
        key: The key.
        metric: The metric.
        element_names: The names of the elements of its value; if empty, their indices are used.
        is_per_class: Whether it is a copy that computes for single classes what the metric of the same key averages.
    """

    key: str
    metric: Metric
    element_names: tuple[str, ...] = ()
    is_per_class: bool = False


def metric_entries(metrics: Any, class_names: Sequence[str] | None = None) -> list[MetricEntry]:
    """Return metrics one by one, with their keys.

    Args:
        metrics: A Metric, a MetricCollection (whose prefix and postfix are ignored), a dict of both, or the plain
            values of a preset, `{"task": "multiclass", "num_classes": 10}`.
        class_names: Names of the classes, labels or outputs; with them, averages over classes come for each class too.

    Raises:
        TypeError: If it is none of these.
        ValueError: If there is no metric, or there are more or fewer classes than names.
    """
    names = _checked_names(class_names)
    entries = []
    for key, metric in _flat(metrics):
        labels: list[str] = []
        if isinstance(metric, ClasswiseWrapper):  # the labels are kept, the metric is unwrapped
            labels = list(metric.labels or ())
            metric = metric.metric
        task = task_of(metric)
        of_classes = task is not None and task.kind in ("multiclass", "multilabel")
        if names and of_classes and task is not None and task.classes not in (None, len(names)):
            raise ValueError(f"class_names has {len(names)} names, but the metric {key!r} has {task.classes} classes.")
        entries.append(MetricEntry(key, metric, tuple(labels) or names))
        if names and of_classes and (single := _without_averaging(metric)) is not None:
            entries.append(MetricEntry(key, single, names, is_per_class=True))
    if not entries:
        raise ValueError(f"metrics must hold at least one metric, got {metrics!r}.")
    return entries


def _flat(metrics: Any) -> Iterator[tuple[str, Metric]]:
    if isinstance(metrics, Metric):
        yield type(metrics.metric if isinstance(metrics, ClasswiseWrapper) else metrics).__name__, metrics
    elif isinstance(metrics, MetricCollection):
        yield from ((str(key), metric) for key, metric in metrics.items(keep_base=True, copy_state=False))
    elif isinstance(metrics, Mapping) and isinstance(metrics.get("task"), str):
        yield from _flat(preset(**metrics))
    elif isinstance(metrics, Mapping):
        for key, part in metrics.items():
            if isinstance(part, Metric):
                yield str(key), part
            else:
                yield from ((f"{key}/{inner}", metric) for inner, metric in _flat(part))
    else:
        raise TypeError(
            "metrics must be a Metric, a MetricCollection, a dict of them, or the values of a preset such as "
            f"{{'task': 'multiclass', 'num_classes': 10}}, got {metrics!r} ({type(metrics).__name__})."
        )


def _without_averaging(metric: Metric) -> Metric | None:
    """Return a copy without averaging, if the metric averages over classes and the copy shares its state; or None."""
    is_average = getattr(metric, "average", None) in _AVERAGES
    if (
        not is_average or state_sharing_key(metric) is None or isinstance(metric, BalancedAccuracy)
    ):  # its values for single classes are those of `recall`
        return None
    single: Any = copy.deepcopy(metric)
    single.average = "none"
    return single  # type: ignore[no-any-return]


def _checked_names(class_names: Sequence[str] | None) -> tuple[str, ...]:
    if class_names is None:
        return ()
    if isinstance(class_names, str) or not all(isinstance(name, str) for name in class_names):
        raise TypeError(f"class_names must be a list of names, got {class_names!r}.")
    if len(set(class_names)) < len(class_names):
        twice = sorted({name for name in class_names if list(class_names).count(name) > 1})
        raise ValueError(
            f"class_names must not repeat a name, as both would share a key, got {', '.join(twice)} twice."
        )
    return tuple(class_names)
