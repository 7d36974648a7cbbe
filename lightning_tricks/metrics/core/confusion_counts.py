"""Counts of a confusion matrix, without a read from the device: the cell of each prediction, their sums; torch only."""

from __future__ import annotations

import torch
from torch import Tensor

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
