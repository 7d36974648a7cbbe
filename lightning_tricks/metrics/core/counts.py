"""Counts of confusion matrices and of scores without a read from the device, curves of them and areas; torch only."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import to_double

_EXTRA_CELLS = 2  # cells behind those of the matrix: invalid elements, and ignored ones


def multiclass_cells(num_classes: int, preds: Tensor, target: Tensor, ignore_index: int | None = None) -> Tensor:
    """Return the cell of a confusion matrix that each prediction falls into, without a read from the device.

    Args:
        num_classes: C, the number of classes.
        preds: Scores of shape (N, C, ...), of which the largest wins, or classes of shape (N, ...).
        target: Classes of shape (N, ...).
        ignore_index: A class of `target` whose rows do not count.

    Returns:
        Whole numbers, one for each element of `target`: `target * C + prediction`; C * C if the element is invalid
        (NaN scores, classes out of range), C * C + 1 if the row is ignored.
    """
    target = target.long()
    known = (target >= 0) & (target < num_classes)
    if preds.is_floating_point():
        largest, preds = preds.max(dim=1)
        known &= largest == largest  # NaN is not
    else:
        known &= (preds >= 0) & (preds < num_classes)
    return _assign_cells(target * num_classes + preds, known, target, ignore_index, num_classes**2)


def binary_cells(
    preds: Tensor, target: Tensor, threshold: float = 0.5, ignore_index: int | None = None, labels: int = 1
) -> Tensor:
    """Return the cell of the 2 x 2 matrix of its label that each prediction falls into, without a read from the device.

    Args:
        preds: Probabilities or 0/1, of shape (N, ...) or, for several labels, (N, L, ...).
        target: 0/1, of the same shape.
        threshold: What a probability has to exceed to count as 1.
        ignore_index: A value of `target` whose elements do not count.
        labels: L, the number of labels.

    Returns:
        Whole numbers of the same shape: `4 * label + 2 * target + prediction`; 4 * L if the element is invalid (NaN,
        no probability, no 0/1), 4 * L + 1 if it is ignored.
    """
    target = target.long()
    known = (preds >= 0) & (preds <= 1) & (target >= 0) & (target <= 1)  # false for NaN
    positive = (preds > threshold if preds.is_floating_point() else preds).long()
    shape = (1, labels) + (1,) * (preds.ndim - 2) if labels > 1 else ()
    label = torch.arange(labels, device=preds.device).reshape(shape)
    return _assign_cells(4 * label + 2 * target + positive, known, target, ignore_index, 4 * labels)


def _assign_cells(cells: Tensor, known: Tensor, target: Tensor, ignore_index: int | None, size: int) -> Tensor:
    cells = torch.where(known, cells, size)
    return cells if ignore_index is None else torch.where(target == ignore_index, size + 1, cells)


def zero_counts(size: int, device: torch.device | str | None = None) -> Tensor:
    """Return zeros for `size` cells and the two extra cells: invalid, and ignored."""
    return torch.zeros(size + _EXTRA_CELLS, dtype=torch.int64, device=device)


def count_cells_(counts: Tensor, cells: Tensor) -> Tensor:
    """Add to `counts`, in place, how often each cell occurs in `cells`."""
    cells = cells.flatten()
    return counts.scatter_add_(0, cells, torch.ones_like(cells))


def cells_to_matrix(counts: Tensor, *shape: int) -> Tensor:
    """Return the counts of the cells as a matrix, such as (C, C): rows are targets, columns predictions."""
    return counts[:-_EXTRA_CELLS].reshape(shape)


def count_invalid(counts: Tensor) -> Tensor:
    """Return the number of invalid elements."""
    return counts[-_EXTRA_CELLS]


def stat_scores(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return true positives, false positives, true negatives and false negatives.

    Args:
        matrix: Counts of shape (C, C), for each class against the rest, or (L, 2, 2), for each label.

    Returns:
        Four tensors of shape (C,) or (L,).
    """
    if matrix.ndim == 3:
        return matrix[:, 1, 1], matrix[:, 0, 1], matrix[:, 0, 0], matrix[:, 1, 0]
    tp = matrix.diagonal()
    fp, fn = matrix.sum(0) - tp, matrix.sum(1) - tp
    return tp, fp, matrix.sum() - tp - fp - fn, fn


def not_ignored(target: Tensor, ignore_index: int | None) -> Tensor:
    """Return which targets are not ignored, in their shape."""
    return torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index


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
