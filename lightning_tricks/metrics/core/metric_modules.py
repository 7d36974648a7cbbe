"""Metrics of torchmetrics with other values in edge cases, as scikit-learn has them, or without host reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torchmetrics.classification as tm
import torchmetrics.regression as tmr
from torch import Tensor

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.counts import average_precision, not_ignored, roc_auc


class BalancedAccuracy(tm.MulticlassRecall):
    """Mean recall of the classes that occur in the targets, as scikit-learn's `balanced_accuracy_score`.

    Macro averages of torchmetrics count a class that is predicted but does not occur as 0.
    """

    def compute(self) -> Tensor:
        """Return the mean over the classes with targets; NaN where there are none."""
        tp, fn = cast(Tensor, self.tp), cast(Tensor, self.fn)
        support = tp + fn
        recall = torch.where(support > 0, tp / support.clamp(min=1), torch.nan)
        return recall.nanmean()


class TopKAccuracy(tm.MulticlassAccuracy):
    """Share of samples whose class is among the `top_k` highest scores, without host reads.

    With `average="micro"`, it need not know the number of classes.
    """

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count scores of shape (N, C, ...), or classes of shape (N, ...), and targets of shape (N, ...)."""
        counted = not_ignored(target, self.ignore_index)
        first = preds.topk(self.top_k, dim=1).indices if preds.ndim > target.ndim else preds.unsqueeze(1)
        found = (first == target.unsqueeze(1)).any(1) & counted
        cast(Tensor, self.tp)[0] += found.sum()
        cast(Tensor, self.fn)[0] += counted.sum() - found.sum()


class _ExactMatthews:
    """Matthews correlation in float64 and without host reads; 0 if it is undefined, as in scikit-learn.

    torchmetrics computes it in float32 and reads from the device several times.
    """

    def compute(self) -> Any:
        """Return the coefficient, a number."""
        matrix = to_double(cast(Any, self).confmat)
        target, predicted, total = matrix.sum(1), matrix.sum(0), matrix.sum()
        covariance = matrix.trace() * total - target @ predicted
        variance = (total**2 - predicted @ predicted).sqrt() * (total**2 - target @ target).sqrt()
        return torch.where(variance > 0, covariance / variance, 0.0).float()


class BinaryMatthewsCorrCoef(_ExactMatthews, tm.BinaryMatthewsCorrCoef):
    """Matthews correlation coefficient of a classification into 0 and 1."""


class MulticlassMatthewsCorrCoef(_ExactMatthews, tm.MulticlassMatthewsCorrCoef):
    """Matthews correlation coefficient of a classification into several classes."""


class _AreaUnderCurve:
    """An exact area for each class or label; NaN if there are no positives or no negatives.

    torchmetrics returns 0 there. The states are those of torchmetrics' metric with `thresholds=None`.
    """

    area: Callable[[Tensor, Tensor], Tensor]

    def compute(self) -> Any:
        """Return the area, averaged as `average` says."""
        metric = cast(Any, self)
        preds, target = torch.cat(list(metric.preds)), torch.cat(list(metric.target))
        if hasattr(metric, "num_classes"):
            target = (target[:, None] == torch.arange(metric.num_classes, device=target.device)).long()
        preds, target = (part[:, None] if part.ndim == 1 else part for part in (preds, target))
        columns = zip(preds.T, target.T, strict=True)
        values = torch.stack([type(self).area(p[t == 1], p[t == 0]) for p, t in columns])
        average = getattr(metric, "average", None)
        if average == "macro":
            return values.nanmean()
        if average == "weighted":
            weights = (target == 1).sum(0) * ~values.isnan()
            return (values.nan_to_num() * weights).sum() / weights.sum()
        return values.squeeze()


class BinaryAUROC(_AreaUnderCurve, tm.BinaryAUROC):
    """Exact area under the ROC curve; NaN where one of the classes does not occur."""

    area = staticmethod(roc_auc)


class BinaryAveragePrecision(_AreaUnderCurve, tm.BinaryAveragePrecision):
    """Average precision; NaN where one of the classes does not occur."""

    area = staticmethod(average_precision)


class MulticlassAUROC(_AreaUnderCurve, tm.MulticlassAUROC):
    """Exact area under the ROC curve, one class against the rest, over the classes for which it is defined."""

    area = staticmethod(roc_auc)


class MulticlassAveragePrecision(_AreaUnderCurve, tm.MulticlassAveragePrecision):
    """Average precision, one class against the rest, over the classes for which it is defined."""

    area = staticmethod(average_precision)


class MultilabelAUROC(_AreaUnderCurve, tm.MultilabelAUROC):
    """Exact area under the ROC curve of each label, over the labels for which it is defined."""

    area = staticmethod(roc_auc)


class MultilabelAveragePrecision(_AreaUnderCurve, tm.MultilabelAveragePrecision):
    """Average precision of each label (mAP), over the labels for which it is defined."""

    area = staticmethod(average_precision)


class R2Score(tmr.R2Score):
    """Coefficient of determination; NaN for fewer than two samples, for which torchmetrics raises."""

    def compute(self) -> Tensor:
        """Return 1 - residual / total sum of squares."""
        if self.total < 2:
            return torch.full_like(self.residual, torch.nan)
        return super().compute()
