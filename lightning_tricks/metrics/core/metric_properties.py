"""Properties of a metric of torchmetrics: its task and classes, its arguments, with which metrics it shares a state."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torchmetrics.classification as tm
from torchmetrics import CatMetric, Metric
from torchmetrics.retrieval.base import RetrievalMetric
from torchmetrics.wrappers import Running

from lightning_tricks.metrics.core.soft_targets import SoftTargetScore

Kind = Literal["binary", "multiclass", "multilabel", "ood", "retrieval", "regression"]

_STAT_SCORES = (tm.BinaryStatScores, tm.MulticlassStatScores, tm.MultilabelStatScores)
_MATRICES = (tm.BinaryConfusionMatrix, tm.MulticlassConfusionMatrix, tm.MultilabelConfusionMatrix)
_CURVES = (tm.BinaryPrecisionRecallCurve, tm.MulticlassPrecisionRecallCurve, tm.MultilabelPrecisionRecallCurve)
_CALIBRATIONS = (tm.BinaryCalibrationError, tm.MulticlassCalibrationError)
_CLASSIFICATION = ("torchmetrics.classification.", "lightning_tricks.metrics.")
_MANY_CLASSES = 4096  # of which a confusion matrix takes 128 MiB
_CONCATENABLE = (*_CLASSIFICATION, "torchmetrics.regression.", "torchmetrics.retrieval.")


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
        for child in metric.modules():
            if isinstance(child, Metric) and child is not metric:
                of_child = update_arguments(child)
                required, accepted = required | of_child[0], accepted | of_child[1]
    return required, accepted


def _update_of(metric: Metric) -> Any:
    return type(metric).update


def _update_module(metric: Metric) -> str:
    return f"{getattr(_update_of(metric), '__module__', '')}."


def _inherits_update(metric: Metric, parents: tuple[type, ...]) -> bool:
    return any(isinstance(metric, parent) and _update_of(metric) is parent.update for parent in parents)  # type: ignore[attr-defined]
