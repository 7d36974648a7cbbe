"""How far probabilities can be trusted: calibration errors, Brier score, log-likelihood, risk and coverage; torch only.

No value depends on the order of the rows: rows of equal confidence count with the mean of what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 15


def reliability_bins(confidence: Tensor, correct: Tensor, bins: int = BINS) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean confidence, share of correct rows and share of the rows, of equally wide bins that have rows.

    A bin includes its lower end, the last one 1 as well.

    Args:
        confidence: Probabilities, (N,).
        correct: What they are probabilities of, (N,): 0, 1, or a share.
        bins: The number of bins of [0, 1].
    """
    inner = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)[1:-1]
    return _means(torch.bucketize(confidence.detach().contiguous(), inner, right=True), confidence, correct, bins)


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """Return the expected calibration error (ECE): the mean distance of confidence and accuracy over equally wide bins.

    Source: Guo et al., arXiv 1706.04599.

    Examples:
        >>> calibration_error(torch.tensor([0.75, 0.75]), torch.tensor([1.0, 0.0]))
        tensor(0.2500)
    """
    return _error(*reliability_bins(confidence, correct, bins))


def adaptive_calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """Return the calibration error over bins of equally many rows (but for one row), in the order of their confidence.

    Source: Nixon et al., arXiv 1904.01685; Mukhoti et al., arXiv 2002.09437.
    """
    confidence, correct = _by_confidence(confidence, correct)
    bins = max(1, min(bins, len(confidence)))
    places = torch.arange(len(confidence), device=confidence.device) * bins // max(1, len(confidence))
    return _error(*_means(places, confidence, correct, bins))


def risk_coverage_area(confidence: Tensor, correct: Tensor) -> Tensor:
    """Return the area under the risk-coverage curve (AURC): the mean error rate of the k most confident rows, over k.

    Source: Geifman and El-Yaniv, arXiv 1805.08206.

    Examples:
        >>> risk_coverage_area(torch.tensor([0.9, 0.6]), torch.tensor([1.0, 0.0]))
        tensor(0.2500)
    """
    wrong = 1 - _by_confidence(confidence, correct)[1].flip(0)
    return (wrong.cumsum(0) / torch.arange(1, len(wrong) + 1, device=wrong.device)).mean()


def brier_scores(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of the probability of each class, (C,), halved if there are two classes.

    Their sum is the Brier score, by scikit-learn's `brier_score_loss`.
    """
    scores = (probabilities - target).square().mean(0)
    return scores / 2 if len(scores) == 2 else scores


def negative_log_likelihoods(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the negative log-likelihood of each row, (N,): infinite where what is so was given the probability 0."""
    return -torch.xlogy(target, probabilities).sum(1)


def classification_scores(probabilities: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return `nll`, `ece`, `adaptive_ece` and `brier` of probabilities and targets, both (N, C)."""
    confidence, chosen = probabilities.max(1)
    correct = target.gather(1, chosen[:, None]).squeeze(1)
    return {
        "nll": negative_log_likelihoods(probabilities, target).mean(),
        "ece": calibration_error(confidence, correct),
        "adaptive_ece": adaptive_calibration_error(confidence, correct),
        "brier": brier_scores(probabilities, target).sum(),
    }


def _by_confidence(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in ascending order of the confidence; of rows with equal confidence, the mean of all."""
    levels, of_row, counts = confidence.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(levels).index_add_(0, of_row, correct.to(levels))
    return levels.repeat_interleave(counts), (sums / counts).repeat_interleave(counts)


def _means(places: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    columns = torch.stack([torch.ones_like(confidence), confidence, correct.to(confidence)], 1)
    count, total, right = columns.new_zeros(bins, 3).index_add_(0, places, columns).T
    some = count > 0
    return total[some] / count[some], right[some] / count[some], count[some] / count.sum()


def _error(confidence: Tensor, accuracy: Tensor, weight: Tensor) -> Tensor:
    return ((confidence - accuracy).abs() * weight).sum() if len(weight) else confidence.new_tensor(torch.nan)


def are_probabilities(rows: Tensor) -> Tensor:
    """Return whether each row (N, C), perhaps once rounded to bfloat16, holds the probabilities of C classes, (N,)."""
    sums = (rows.float() if rows.itemsize < 4 else rows).sum(1)
    return (rows >= 0).all(1) & ((sums - 1).abs() < 1e-2)


def are_between_0_and_1(rows: Tensor) -> Tensor:
    """Return whether all numbers of each row (N, ...) are from 0 to 1, but for rounding to bfloat16, (N,)."""
    return ((rows[:, None].flatten(1) - 0.5).abs() <= 0.51).all(1)
