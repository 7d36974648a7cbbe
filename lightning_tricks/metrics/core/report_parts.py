"""What a report shows of an epoch's metrics beside the logged values: confusion matrix, reliability, single classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from lightning_tricks._shared.report_parts import ClassValues, ConfusionMatrix, Reliability, ReportPart
from lightning_tricks.metrics.core.plots import PlotData
from lightning_tricks.metrics.core.score_curves import reliability_curve
from lightning_tricks.metrics.core.value_names import per_class_names

_MOST_CLASSES = 200


def make_parts(data: PlotData, class_names: Sequence[str], key: Callable[[str, str], str]) -> list[ReportPart]:
    """Return what there is data for.

    Args:
        data: The data of one loader at the end of an epoch; the values of its record must have been read.
        class_names: The names of the classes, or nothing.
        key: Prefix and name of a value -> the key under which it is logged.
    """
    record, parts = data.record, list[ReportPart]()
    stage = key(record.prefix, "")[:-1]  # with the monitor's prefix: a part replaces another one of its stage
    if data.confusion is not None and data.confusion.ndim == 2 and len(data.confusion) <= _MOST_CLASSES:
        names = list(class_names) or [str(number) for number in range(len(data.confusion))]
        counts = data.confusion.long().tolist()
        parts.append(ConfusionMatrix(stage=stage, epoch=record.epoch, classes=names, counts=counts))
    if data.scores is not None and data.kind in ("binary", "multiclass"):
        histogram = data.scores[-1] if data.kind == "multiclass" else data.scores.sum(0)
        confidence, share, weight = (values.tolist() for values in reliability_curve(histogram))
        label = "accuracy" if data.kind == "multiclass" else "share of positives"
        if confidence:
            parts.append(
                Reliability(
                    stage=stage,
                    epoch=record.epoch,
                    label=label,
                    confidence=confidence,
                    share=share,
                    weight=weight,
                )
            )
    values = dict(zip(record.names, cast(list[float], record.values), strict=True))
    of_classes = per_class_names(record.names, class_names)
    if of_classes:
        metrics = list(dict.fromkeys(metric for metric, _ in of_classes.values()))
        rows = [[values.get(f"{metric}_{name}") for metric in metrics] for name in class_names]
        keys = [key(record.prefix, name) for name in of_classes]
        parts.append(
            ClassValues(
                stage=stage,
                epoch=record.epoch,
                classes=list(class_names),
                metrics=metrics,
                values=rows,
                keys=keys,
            )
        )
    return parts
