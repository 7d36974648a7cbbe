"""Metrics of probabilities (calibration, likelihood, risk) and of scores that tell what is out of distribution.

Their states are those of torchmetrics' curves, so that all of them share one copy of the rows, also with AUROC.
"""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics.classification as tm
from torch import Tensor

from lightning_tricks._shared import calibration_scores as scores
from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.counts import average_precision, roc_auc


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

    def positives_and_negatives(self) -> tuple[Tensor, Tensor]:
        """Return the scores of what is out of distribution, and of what is not."""
        preds, target = torch.cat(list(self.preds)), torch.cat(list(self.target))
        return preds[target == 1], preds[target == 0]


class OODAUROC(_OfOODScores):
    """Area under the ROC curve; NaN if one of the two does not occur."""

    def compute(self) -> Any:
        """Return the area, a number."""
        return roc_auc(*self.positives_and_negatives())


class OODAveragePrecision(_OfOODScores):
    """Average precision of what is out of distribution (AUPR); NaN if one of the two does not occur."""

    def compute(self) -> Any:
        """Return the area, a number."""
        return average_precision(*self.positives_and_negatives())


class FalsePositiveRate95(_OfOODScores):
    """False positive rate at the highest threshold that finds 95 % of what is out of distribution; NaN if none is."""

    def compute(self) -> Any:
        """Return the rate, a number."""
        positives, negatives = self.positives_and_negatives()
        if not len(positives) or not len(negatives):
            return torch.full((), torch.nan, device=positives.device)
        needed = -(-95 * len(positives) // 100)
        return to_double(negatives >= positives.sort(descending=True).values[needed - 1]).mean()
