"""The metrics in the argument `metrics` one by one, their properties, and their values by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torchmetrics.classification as tm
from torch import Tensor
from torchmetrics import CatMetric, Metric, MetricCollection
from torchmetrics.retrieval.base import RetrievalMetric
from torchmetrics.wrappers import ClasswiseWrapper, Running

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.own_metrics import BalancedAccuracy, SoftTargetScore
from lightning_tricks.metrics.core.presets import Preset, preset

Kind = Literal["binary", "multiclass", "multilabel", "ood", "retrieval", "regression"]

_STAT_SCORES = (tm.BinaryStatScores, tm.MulticlassStatScores, tm.MultilabelStatScores)
_MATRICES = (tm.BinaryConfusionMatrix, tm.MulticlassConfusionMatrix, tm.MultilabelConfusionMatrix)
_CURVES = (tm.BinaryPrecisionRecallCurve, tm.MulticlassPrecisionRecallCurve, tm.MultilabelPrecisionRecallCurve)
_CALIBRATIONS = (tm.BinaryCalibrationError, tm.MulticlassCalibrationError)
_CLASSIFICATION = ("torchmetrics.classification.", "lightning_tricks.metrics.")
_MANY_CLASSES = 4096  # of which a confusion matrix takes 128 MiB
_CONCATENABLE = (*_CLASSIFICATION, "torchmetrics.regression.", "torchmetrics.retrieval.")
_AVERAGES = ("micro", "macro", "weighted")


@dataclass(frozen=True)
class MetricEntry:
    """A metric and its key.

    Attributes:
        key: The key.
        metric: The metric.
        element_names: The names of the elements of its value; if empty, their indices are used.
        is_per_class: Whether it is a copy that computes the values of single classes, which the metric of the same key
            averages.
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
        classes: Any = task.classes if of_classes and task is not None else None
        classes = metric.num_classes if names_of_values(metric) else classes
        if names and classes not in (None, len(names)):
            raise ValueError(f"class_names has {len(names)} names, but the metric {key!r} has {classes} classes.")
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


def seldom_plotted_keys(metrics: Any) -> set[str]:
    """Return the keys of the metrics that are in a preset, and not among its main ones."""
    if isinstance(metrics, Mapping) and isinstance(metrics.get("task"), str):
        metrics = preset(**metrics)
    if isinstance(metrics, Preset):
        return {name for key, metric in _flat(metrics) for name in (key, *names_of_values(metric))} - {*metrics.main}
    inner = metrics.items() if isinstance(metrics, Mapping) else ()
    return {f"{key}/{name}" for key, part in inner for name in seldom_plotted_keys(part)}


def names_of_values(metric: Metric) -> tuple[str, ...]:
    """Return the names of the values of a metric that names them by itself, such as that of detected objects."""
    return getattr(metric, "names_of_values", ())


def output_numbers(metrics: Any) -> list[str]:
    """Return the numbers of the outputs, if all metrics are those of a regression, with several; or nothing."""
    found = [metric for _, metric in _flat(metrics)]
    is_regression = all((task := task_of(metric)) is not None and task.kind == "regression" for metric in found)
    count = max((getattr(metric, "num_outputs", 1) for metric in found), default=1) if is_regression else 1
    return [*map(str, range(count))] if count > 1 else []


def _without_averaging(metric: Metric) -> Metric | None:
    """Return a copy without averaging, if the metric averages over classes and the copy shares its state; or None."""
    is_average = getattr(metric, "average", None) in _AVERAGES
    # the values of BalancedAccuracy for single classes are those of `recall`
    if not is_average or state_sharing_key(metric) is None or isinstance(metric, BalancedAccuracy):
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
        said = f"got {', '.join(twice)} twice"
        raise ValueError(f"class_names must not repeat a name, as both would share a key, {said}.")
    return tuple(class_names)


def is_number(value: Any) -> bool:
    """Whether a value is a tensor without dimensions."""
    return isinstance(value, Tensor) and value.ndim == 0


def stack_numbers(values: Iterable[Tensor]) -> Tensor:
    """Return numbers as one tensor in double precision, on the device of the first; metrics may compute on the CPU."""
    numbers = list(map(to_double, values))
    return torch.stack([number.to(numbers[0]) for number in numbers]) if numbers else torch.empty(0)


def named_values(entry: MetricEntry, metric: Any, value: Any) -> list[tuple[str, Any]]:
    """Return the values of a metric by name.

    Args:
        entry: The key of the metric and the names of the elements of its value.
        metric: The metric.
        value: What its `compute` returned.

    Returns:
        Pairs of name and value: one for a number, one for each element of a vector (and one for their mean where they
        are outputs of a regression) and of a dict; and whatever else there is, such as a matrix or a value for each
        sample, as it is.
    """
    key = entry.key
    if isinstance(value, Mapping):
        if names_of_values(metric):
            named = [(name.removesuffix("_per_class"), inner) for name, inner in value.items()]
            entries = ((replace(entry, key=name), one) for name, one in named if one.ndim == 0 or entry.element_names)
        else:
            entries = ((MetricEntry(f"{key}/{name}", metric), inner) for name, inner in value.items())
        return [pair for inner_entry, inner in entries for pair in named_values(inner_entry, metric, inner)]
    if isinstance(value, int | float):
        value = torch.tensor(float(value))
    if isinstance(value, tuple | list) and value and all(is_number(element) for element in value):
        value = stack_numbers(value)
    if not isinstance(value, Tensor):
        return [] if value is None else [(key, value)]
    if value.numel() > 1 and (value.ndim > 1 or has_value_per_sample(metric)):
        return [(key, value)]
    value = value if value.is_floating_point() else value.float()
    if value.numel() == 1:
        return [(key, value.reshape(()))]
    fits = len(entry.element_names) == len(value)
    names = entry.element_names if fits else [str(number) for number in range(len(value))]
    elements = [(f"{key}_{name}", element) for name, element in zip(names, value, strict=True)]
    outputs = getattr(metric, "num_outputs", 1) == len(value) or getattr(metric, "multioutput", "") == "raw_values"
    return [(key, value.mean()), *elements] if outputs else elements


def find_name_conflict(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two names that are equal, or of which the first is a folder of the second; or None.

    Loggers that keep a file for each name, such as MLflow's, cannot have `val/acc` beside `val/acc/cat`.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name, name
        seen.add(name)
    for name in seen:
        parts = name.split("/")
        for length in range(1, len(parts)):
            if (folder := "/".join(parts[:length])) in seen:
                return folder, name
    return None


def refuse_name_conflict(names: Iterable[str]) -> None:
    """Raise a ValueError for two names that exclude each other."""
    one, other = find_name_conflict(names) or ("", "")
    if one and one == other:
        raise ValueError(f"metrics has two values with the name {one!r}: rename one of them.")
    if one:
        raise ValueError(
            f"metrics has the values {one!r} and {other!r}, which loggers with a file per value cannot both keep: "
            "rename one of them."
        )


def per_class_names(names: Iterable[str], class_names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the names that belong to a single class: name -> metric and class.

    Args:
        names: The names of values, such as `f1` and `f1_cat`.
        class_names: The names of the classes; a metric has a value for each of them, or for none.
    """
    there = set(names)
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        if not class_names or not name.endswith(f"_{class_names[0]}"):
            continue
        metric = name.removesuffix(f"_{class_names[0]}")
        of_classes = {f"{metric}_{part}": (metric, part) for part in class_names}
        if of_classes.keys() <= there:
            found |= of_classes
    return found


@dataclass(frozen=True)
class Task:
    """What kind of predictions a metric compares.

    Attributes:
        kind: The kind of the task.
        classes: The number of classes or labels; None if the metric does not say.
        ignore_index: A target that does not count.
        needs_scores: Whether predictions have to be scores, not classes.
        needs_probabilities: Whether floating-point predictions have to be probabilities.
    """

    kind: Kind
    classes: int | None = None
    ignore_index: int | None = None
    needs_scores: bool = False
    needs_probabilities: bool = False


def task_of(metric: Metric) -> Task | None:
    """Return the task of a metric of torchmetrics, or None for one that is not known."""
    home = _update_module(metric)
    ignored = getattr(metric, "ignore_index", None)
    if getattr(metric, "takes_any_score", False):
        return Task("ood", needs_scores=True)
    if isinstance(metric, RetrievalMetric):
        return Task("retrieval", ignore_index=ignored)
    if home.startswith("torchmetrics.regression."):
        return Task("regression")
    if not home.startswith(_CLASSIFICATION):
        return None
    curve = isinstance(metric, (*_CURVES, *_CALIBRATIONS))
    scored = curve or getattr(metric, "top_k", 1) != 1
    for parent in type(metric).__mro__:
        for kind, prefix in (("binary", "Binary"), ("multiclass", "Multiclass"), ("multilabel", "Multilabel")):
            if parent.__module__.startswith("torchmetrics.classification.") and parent.__name__.startswith(prefix):
                classes = getattr(metric, "num_labels" if kind == "multilabel" else "num_classes", None)
                decided = kind != "multiclass" and hasattr(metric, "threshold")
                return Task(kind, classes, ignored, scored, curve or decided)  # type: ignore[arg-type]
    return None


def state_sharing_key(metric: Metric) -> tuple[Hashable, ...] | None:
    """Return a key that is equal for metrics which compute the same statistic from the same data, or None.

    It depends on the type and the arguments of the metrics, never on the values of their states: metrics whose states
    are equal by chance after the first batch (`ignore_index=0` and none, three thresholds) do not share.

    Returns:
        A tuple that starts with the name of the statistic: "confusion matrix", "retrieval", "curve", "binned curve" or
        "soft targets".
    """
    ignored = getattr(metric, "ignore_index", None)
    if _inherits_update(metric, (RetrievalMetric,)):
        return "retrieval", ignored
    if _inherits_update(metric, _CURVES):
        thresholds = getattr(metric, "thresholds", None)
        classes = getattr(metric, "num_classes", None), getattr(metric, "num_labels", None)
        is_micro = getattr(metric, "average", None) == "micro"  # scores of all classes make one curve
        is_exact = thresholds is None and not is_micro
        grid = None if thresholds is None else tuple(thresholds.tolist())
        return "curve" if is_exact else "binned curve", _update_of(metric), classes, grid, ignored, is_micro
    if isinstance(metric, SoftTargetScore):
        return "soft targets", ignored, metric.from_logits
    per_sample = getattr(metric, "multidim_average", "global") != "global"
    if per_sample or not _inherits_update(metric, (*_STAT_SCORES, *_MATRICES)):
        return None
    task = task_of(metric)
    if task is None or getattr(metric, "top_k", 1) != 1 or (task.kind != "binary" and task.classes is None):
        return None
    needs_no_matrix = getattr(metric, "average", None) == "micro" and isinstance(metric, tm.MulticlassStatScores)
    if needs_no_matrix and cast(int, task.classes) > _MANY_CLASSES:
        return None
    return "confusion matrix", task.kind, task.classes, ignored, getattr(metric, "threshold", None)


def stores_confusion_matrix(metric: Metric) -> bool:
    """Whether the state of a metric is the confusion matrix itself, not counts that are derived from it."""
    return isinstance(metric, _MATRICES)


def can_concat_batches(metric: Metric) -> bool:
    """Whether an update with concatenated batches gives the same result as one update for each batch."""
    return _update_module(metric).startswith(_CONCATENABLE)


def metrics_in(metric: Metric) -> list[Metric]:
    """Return a metric and those that it wraps."""
    return [part for part in metric.modules() if isinstance(part, Metric)]


def depends_on_order(metric: Metric) -> bool:
    """Whether a value depends on the order of the samples: a value for each of them, or one of a running window."""
    return has_value_per_sample(metric) or any(isinstance(part, Running) for part in metrics_in(metric))


def has_value_per_sample(metric: Metric) -> bool:
    """Whether a metric has a value for each sample, in their order."""
    return any(
        isinstance(part, CatMetric)
        or getattr(part, "multidim_average", "") == "samplewise"
        or getattr(part, "reduction", "") in ("none", None)
        or getattr(part, "return_sentence_level_score", False)
        for part in metrics_in(metric)
    )


def update_arguments(metric: Metric) -> tuple[set[str], set[str]]:
    """Return the names of the required and of all arguments of `update`; for a wrapper those of the wrapped metrics."""
    parameters = inspect.signature(metric.update).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required, accepted = {p.name for p in named if p.default is p.empty}, {p.name for p in named}
    if len(named) < len(parameters):
        for child in metrics_in(metric)[1:]:
            of_child = update_arguments(child)
            required, accepted = required | of_child[0], accepted | of_child[1]
    return required, accepted


def _update_of(metric: Metric) -> Any:
    return type(metric).update


def _update_module(metric: Metric) -> str:
    return f"{getattr(_update_of(metric), '__module__', '')}."


def _inherits_update(metric: Metric, parents: tuple[type, ...]) -> bool:
    return any(isinstance(metric, parent) and _update_of(metric) is parent.update for parent in parents)  # type: ignore[attr-defined]
