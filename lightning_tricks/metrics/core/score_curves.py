"""Areas under curves of scores, and curves of histograms of scores; torch only."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import to_double


def roc_auc(positives: Tensor, negatives: Tensor) -> Tensor:
    """Return the area under the ROC curve: the share of pairs of a positive and a negative in the right order.

    Ties count half.

    Args:
        positives: Scores of shape (P,).
        negatives: Scores of shape (N,).

    Returns:
        A number in float64 (float32 on MPS); NaN if there are no positives or no negatives.
    """
    negatives = negatives.sort().values
    below = torch.searchsorted(negatives, positives) + torch.searchsorted(negatives, positives, right=True)
    return to_double(below).mean() / (2 * len(negatives)) if len(negatives) else to_double(below).sum() * torch.nan


def average_precision(positives: Tensor, negatives: Tensor) -> Tensor:
    """Return the average precision: the mean over the positives of the precision at the threshold of their score.

    Args:
        positives: Scores of shape (P,).
        negatives: Scores of shape (N,).

    Returns:
        A number in float64 (float32 on MPS); NaN if there are no positives or no negatives.
    """
    positives, negatives = positives.sort().values, negatives.sort().values
    true = to_double(len(positives) - torch.searchsorted(positives, positives))
    false = to_double(len(negatives) - torch.searchsorted(negatives, positives))
    return (true / (true + false)).mean() if len(negatives) else true.sum() * torch.nan


def count_scores_(histogram: Tensor, scores: Tensor, positive: Tensor, counted: Tensor) -> Tensor:
    """Add scores to a histogram of positives and negatives, in place; those that are NaN are left out.

    Args:
        histogram: Counts of shape (K, 2, B): curve, negative or positive, bin of [0, 1].
        scores: Scores in [0, 1], of shape (N, K).
        positive: 0 or 1, of shape (N, K).
        counted: Which of them count, of shape (N,) or (N, K).
    """
    curves, _, bins = histogram.shape
    cell = (scores.nan_to_num(0.0).clamp(0, 1) * bins).long().clamp_(max=bins - 1)
    cell = cell + bins * (positive.long() + 2 * torch.arange(curves, device=scores.device))
    weight = counted.reshape(len(scores), -1) & ~scores.isnan()
    histogram.view(-1).scatter_add_(0, cell.flatten(), weight.long().flatten())
    return histogram


def roc_curve(histogram: Tensor) -> tuple[Tensor, Tensor]:
    """Return false and true positive rates of a histogram (2, B), from the highest threshold to the lowest."""
    negative, positive = _cumulative_counts(histogram)
    return negative / negative[-1].clamp(min=1), positive / positive[-1].clamp(min=1)


def pr_curve(histogram: Tensor) -> tuple[Tensor, Tensor]:
    """Return recall and precision of a histogram (2, B), from the highest threshold to the lowest."""
    negative, positive = (counts[1:] for counts in _cumulative_counts(histogram))
    some = (negative + positive) > 0
    return (positive / positive[-1].clamp(min=1))[some], (positive / (negative + positive))[some]


def reliability_curve(histogram: Tensor, bins: int = 15) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean confidence, share of positives and share of the samples, for the bins that contain samples.

    Args:
        histogram: Counts of shape (2, B).
        bins: How many groups of neighbouring bins to make.
    """
    width = histogram.shape[-1] // bins
    centres = ((torch.arange(histogram.shape[-1], dtype=torch.float64) + 0.5) / histogram.shape[-1])[: bins * width]
    counts = histogram[:, : bins * width].double()
    total = counts.sum(0).reshape(bins, width).sum(1)
    some = total > 0
    confidence = (counts.sum(0) * centres).reshape(bins, width).sum(1)[some] / total[some]
    positives = counts[1].reshape(bins, width).sum(1)[some] / total[some]
    return confidence, positives, total[some] / total.sum().clamp(min=1)


def _cumulative_counts(histogram: Tensor) -> tuple[Tensor, Tensor]:
    cumulated = histogram.double().flip(-1).cumsum(-1)
    negative, positive = torch.cat([torch.zeros(2, 1, dtype=torch.float64), cumulated], dim=1)
    return negative, positive
