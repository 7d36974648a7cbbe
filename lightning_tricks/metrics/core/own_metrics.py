"""Metrics that torchmetrics lacks or computes in another way: edge cases, regions, probabilities, soft targets.

Most have the state of a metric of torchmetrics, so that several of them share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch
import torchmetrics.classification as tm
import torchmetrics.regression as tmr
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks._shared import calibration as scores
from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.counts import average_precision, not_ignored, roc_auc

_Value = Literal["cross_entropy", "brier", "expected_acc"]
SOFT_TARGET_VALUES: tuple[_Value, ...] = ("cross_entropy", "brier", "expected_acc")
SOFT_TARGET = "soft_target"  # the argument of metrics that compare with the probabilities, not with the likeliest class
_NO_CLASS = -(2**31)  # the class of targets that are no probabilities; a confusion matrix counts it as invalid


class BalancedAccuracy(tm.MulticlassRecall):
    """Mean recall of the classes that occur in the targets, as scikit-learn's `balanced_accuracy_score`.

    torchmetrics' macro averages count a class that is predicted but does not occur as 0.
    """

    def compute(self) -> Tensor:
        """Return the mean over the classes with targets; NaN if there are none."""
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


class RegionOverlap(tm.MulticlassConfusionMatrix):
    """Intersection over union, Dice coefficient, or recall of each class, over all pixels of the data set.

    A class that occurs neither in the targets nor in the predictions, and the one that is ignored, have no value.

    Args:
        num_classes: C, the number of classes.
        measure: Which of them.
        average: `"macro"` for the mean over the classes that have a value; `"frequency"` for one that is weighted with
            their pixels; `"none"` for a value of each class, NaN where there is none.
        ignore_index: A class of the target whose pixels do not count.
    """

    def __init__(
        self,
        num_classes: int,
        measure: Literal["iou", "dice", "recall"],
        average: Literal["macro", "frequency", "none"] = "macro",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(num_classes=num_classes, ignore_index=ignore_index)
        self.measure, self.average = measure, average

    def compute(self) -> Tensor:
        """Return the mean, or a tensor of shape (C,)."""
        matrix = to_double(self.confmat)
        both, predicted, target = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
        whole = {"iou": predicted + target - both, "dice": (predicted + target) / 2, "recall": target}[self.measure]
        ignored = -1 if self.ignore_index is None else self.ignore_index
        is_ignored = torch.arange(len(both), device=both.device) == ignored
        values = torch.where((whole > 0) & ~is_ignored, both / whole, torch.nan).float()
        if self.average == "frequency":
            return (values.nan_to_num() * target).sum().float() / target.sum().float()
        return values if self.average == "none" else values.nanmean()


class _OfProbabilities(tm.MulticlassPrecisionRecallCurve):
    """Base of the metrics of probabilities.

    Args:
        num_classes: C, the number of classes.
        ignore_index: A class of `target` whose rows do not count.
        average: "none" for the values of single classes, of which "macro" and "weighted" make one.
    """

    higher_is_better = False

    def __init__(self, num_classes: int, ignore_index: int | None = None, average: str | None = None) -> None:
        super().__init__(num_classes, ignore_index=ignore_index)
        self.average: Any = average

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return probabilities and one-hot targets, (N, C) each."""
        target = torch.cat(list(self.target))
        classes = torch.arange(self.num_classes, device=target.device)
        return to_double(torch.cat(list(self.preds))), to_double(target[:, None] == classes)

    def top_rows(self) -> tuple[Tensor, Tensor]:
        """Return the highest probability of each row, and whether its class is the right one, (N,) each."""
        preds, target = self.rows()
        confidence, chosen = preds.max(1)
        return confidence, target.gather(1, chosen[:, None]).squeeze(1)


class CalibrationError(_OfProbabilities):
    """Expected calibration error of the predicted class over 15 bins.

    torchmetrics has a 16th bin for confidences of exactly 1, and decides batch by batch what are logits.
    """

    def compute(self) -> Any:
        """Return the error, a number."""
        return scores.calibration_error(*self.top_rows())

    def reliability(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean confidence, accuracy and share of the rows, of the bins that have rows."""
        return scores.reliability_bins(*self.top_rows())


class AdaptiveCalibrationError(_OfProbabilities):
    """Calibration error of the predicted class over 15 bins of equally many rows."""

    def compute(self) -> Any:
        """Return the error, a number."""
        return scores.adaptive_calibration_error(*self.top_rows())


class ClasswiseCalibrationError(_OfProbabilities):
    """Expected calibration error of the probability of each class, over 15 bins, or its mean over the classes."""

    def compute(self) -> Any:
        """Return the error of each class, (C,), or their mean."""
        preds, target = self.rows()
        errors = torch.stack([scores.calibration_error(p, y) for p, y in zip(preds.T, target.T, strict=True)])
        return errors if self.average == "none" else errors.mean()


class BrierScore(_OfProbabilities):
    """Mean squared error of the probabilities: of each class, or their sum; with two classes half of it."""

    def compute(self) -> Any:
        """Return the score of each class, (C,), or their sum."""
        of_classes = scores.brier_scores(*self.rows())
        return of_classes if self.average == "none" else of_classes.sum()


class NegativeLogLikelihood(_OfProbabilities):
    """Mean negative log-likelihood of all rows, or of the rows of each class (NaN where there are none)."""

    def compute(self) -> Any:
        """Return the mean of each class, (C,), or of all rows."""
        preds, target = self.rows()
        of_rows = scores.negative_log_likelihoods(preds, target)
        if self.average != "none":
            return of_rows.mean()
        return torch.where(target > 0, of_rows[:, None], 0).sum(0) / target.sum(0)


class RiskCoverageArea(_OfProbabilities):
    """Area under the risk-coverage curve: the mean error rate of the most confident rows, over how many they are."""

    def compute(self) -> Any:
        """Return the area, a number."""
        return scores.risk_coverage_area(*self.top_rows())


class _OfOODScores(tm.BinaryPrecisionRecallCurve):
    """Base of the metrics of scores of any range, of which high ones mean "out of distribution", the target 1."""

    takes_any_score = True
    value: Callable[[Tensor, Tensor], Tensor]

    def compute(self) -> Any:
        """Return the value of the scores of what is out of distribution, and of what is not; a number."""
        preds, target = torch.cat(list(self.preds)), torch.cat(list(self.target))
        return type(self).value(preds[target == 1], preds[target == 0])


class OODAUROC(_OfOODScores):
    """Area under the ROC curve; NaN if one of the two does not occur."""

    value = staticmethod(roc_auc)


class OODAveragePrecision(_OfOODScores):
    """Average precision of what is out of distribution (AUPR); NaN if one of the two does not occur."""

    value = staticmethod(average_precision)


class FalsePositiveRate95(_OfOODScores):
    """False positive rate at the highest threshold that finds 95 % of what is out of distribution; NaN if none is."""

    @staticmethod
    def value(positives: Tensor, negatives: Tensor) -> Tensor:
        """Return the rate, a number."""
        if not len(positives) or not len(negatives):
            return torch.full((), torch.nan, device=positives.device)
        needed = -(-95 * len(positives) // 100)
        return to_double(negatives >= positives.sort(descending=True).values[needed - 1]).mean()


def is_soft(inputs: Mapping[str, Any]) -> bool:
    """Whether the target holds floats of the shape of the scores, (N, C, ...)."""
    preds, target = inputs.get("preds"), inputs.get("target")
    both = isinstance(preds, Tensor) and isinstance(target, Tensor)
    return both and target.is_floating_point() and target.ndim == preds.ndim > 1  # type: ignore[union-attr]


def split_soft_target(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs with the target as `soft_target`, and its likeliest class, the first of several, as `target`.

    A target that holds classes is both as it is.
    """
    if "target" not in inputs or SOFT_TARGET in inputs:
        return dict(inputs)
    target = inputs["target"]
    if not is_soft(inputs):
        return {**inputs, SOFT_TARGET: target}
    classes = target.argmax(1)
    return {**inputs, SOFT_TARGET: target, "target": torch.where(scores.are_probabilities(target), classes, _NO_CLASS)}


class SoftTargetScore(Metric):
    """A mean over the samples of what compares probabilities with soft targets; 64-bit sums without host reads.

    Args:
        value: What to compute: `"cross_entropy"`, -sum t log p; `"brier"`, sum (p - t)^2; or `"expected_acc"`, the
            target's probability of the predicted class.
        from_logits: Whether scores are logits, not probabilities.
        ignore_index: A class whose rows do not count, where targets are classes.
    """

    full_state_update = False

    def __init__(self, value: _Value, from_logits: bool = True, ignore_index: int | None = None) -> None:
        super().__init__()
        self.value, self.from_logits, self.ignore_index = value, from_logits, ignore_index
        self.sums: Tensor
        self.add_state("sums", torch.zeros(len(SOFT_TARGET_VALUES) + 1), dist_reduce_fx="sum")

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise an error for a first batch whose scores or targets are not what the metric takes them for.

        Raises:
            ValueError: If the predictions are no scores, or are probabilities in place of logits or the reverse; if
                soft targets have another shape than they, or do not sum up to 1.
        """
        preds, target = inputs["preds"], inputs[SOFT_TARGET]
        if not isinstance(preds, Tensor) or not isinstance(target, Tensor):
            return  # which other metrics refuse
        if not preds.is_floating_point() or preds.ndim < 2:
            raise ValueError("soft_targets=True needs scores of shape (N, C, ...): return them, without argmax.")
        if preds.isfinite().all() and self.from_logits == bool(scores.are_probabilities(preds).all()):
            found, wanted = ("probabilities", "False") if self.from_logits else ("logits", "True")
            raise ValueError(f"the predictions look like {found}: give the preset from_logits={wanted}.")
        if not is_soft({"preds": preds, "target": target}):
            return
        if preds.shape != target.shape:
            shapes = f"{tuple(preds.shape)}, got {tuple(target.shape)}"
            raise ValueError(f"soft targets need the shape of the scores, {shapes}.")
        if not scores.are_probabilities(target).all():
            sums = target.float().sum(1)
            raise ValueError(
                "soft targets must be probabilities that sum up to 1 over the classes, got sums from "
                f"{sums.min().item():.3g} to {sums.max().item():.3g}: divide them by target.sum(1, keepdim=True), or "
                "take softmax of a teacher's logits."
            )

    def update(self, preds: Tensor, soft_target: Tensor) -> None:
        """Add scores of shape (N, C, ...), and probabilities of the same shape or classes of shape (N, ...)."""
        given = preds.float()
        log = given.log_softmax(1) if self.from_logits else given.log()
        probabilities = log.exp() if self.from_logits else given
        if is_soft({"preds": preds, "target": soft_target}):
            target, counted = soft_target.float(), torch.ones_like(log[:, 0], dtype=torch.bool)
        else:
            classes, counted = soft_target.long(), not_ignored(soft_target, self.ignore_index)
            place = classes.clamp(0, preds.shape[1] - 1).unsqueeze(1)
            target = torch.zeros_like(log).scatter_(1, place, 1.0)
        terms = [
            -torch.where(target > 0, target * log, 0.0).sum(1),
            (probabilities - target).square().sum(1),
            target.gather(1, given.max(1, keepdim=True).indices).squeeze(1),
            counted.float(),
        ]
        values = to_double(torch.where(counted, torch.stack(terms), 0.0))
        self.sums = self.sums + values.flatten(1).sum(1)

    def compute(self) -> Tensor:
        """Return the mean; NaN without samples."""
        return (self.sums[SOFT_TARGET_VALUES.index(self.value)] / self.sums[-1]).float()
