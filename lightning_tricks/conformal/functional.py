"""Scores, their quantiles, and the sets and intervals that follow from them.

A score says how badly a label fits a prediction. A set or interval holds the labels whose score is at most a quantile
of the scores of the true labels on calibration data.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_number
from lightning_tricks._shared.text import list_names

LAMBDAS = (0.001, 0.01, 0.1, 0.2, 0.5)  # those that the authors of RAPS choose from
ROUNDING = 1e-6  # the share by which probabilities of single precision may differ between batches of other sizes


def check_alpha(alpha: object) -> float:
    """Return `alpha`, the share of errors that is allowed, or raise an error if it is not in (0, 1)."""
    number = check_number("alpha", alpha)
    if not 0 < number < 1:
        raise ValueError(f"alpha must be a number > 0 and < 1, the share of rows that may be missed, got {alpha!r}.")
    return number


def needed_rows(alpha: float) -> int:
    """Return the least number of calibration rows for which there is a finite quantile: ceil(1 / alpha) - 1."""
    return math.ceil(1 / _exact(alpha)) - 1


def conformal_quantile(scores: Tensor, alpha: float) -> Tensor:
    """Return the ceil((n + 1)(1 - alpha))-th smallest of n scores, which a new one exceeds with probability <= alpha.

    Args:
        scores: Scores of the true labels on calibration data, (n,).
        alpha: The share of errors that is allowed, in (0, 1), as the decimal number that is written.

    Returns:
        One of the scores, a scalar tensor on their device.

    Raises:
        ValueError: If there are fewer than ceil(1 / alpha) - 1 scores, or one is NaN.

    Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005.

    Examples:
        >>> conformal_quantile(torch.arange(1.0, 20.0), alpha=0.1)
        tensor(18.)
    """
    alpha, n = check_alpha(alpha), len(scores)
    if n < needed_rows(alpha):
        raise ValueError(f"alpha={alpha:g} needs at least {needed_rows(alpha)} calibration rows, got {n}.")
    if scores.isnan().any():
        raise ValueError(f"{int(scores.isnan().sum())} of {n} scores are NaN.")
    return scores.kthvalue(math.ceil((n + 1) * (1 - _exact(alpha)))).values


def group_quantiles(scores: Tensor, ids: Tensor, groups: Tensor, alpha: float) -> Tensor:
    """Return the quantile of each group, (G,).

    Args:
        scores: (n,).
        ids: The group of each row, (n,).
        groups: The groups, (G,).
        alpha: The share of errors that is allowed.

    Raises:
        ValueError: If a group has too few rows.
    """
    parts, needed = [scores[ids == group] for group in groups], needed_rows(alpha)
    few = [f"group {g} has {len(own)}" for g, own in zip(groups.tolist(), parts, strict=True) if len(own) < needed]
    if few and len(groups) > 1:
        raise ValueError(f"alpha={alpha:g} needs at least {needed} calibration rows of each group: {list_names(few)}.")
    return torch.stack([conformal_quantile(own, alpha) for own in parts])


def quantiles_of(ids: Tensor, groups: Tensor, quantiles: Tensor) -> Tensor:
    """Return the quantile of the group of each row, (N,); infinity for a group without calibration rows."""
    place = torch.searchsorted(groups, ids).clamp(max=len(groups) - 1)
    return torch.where(groups[place] == ids, quantiles[place], torch.inf)


def ranked_scores(probabilities: Tensor, score: str, u: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the classes of each row from the most to the least probable, and their scores in this order.

    Args:
        probabilities: (N, C).
        score: "lac" for one minus the probability; else the sum of the probabilities of all classes that are more
            probable, so that the sets {score <= t} are the smallest ones with a probability above t.
        u: The share of its own probability that is added to the sum of each class, in [0, 1), (N,); None for 0.

    Returns:
        Class indices and scores, (N, C) both; the scores ascend.
    """
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if score == "lac":
        return order, 1 - ranked
    others = 1.0 if u is None else (1 - u).unsqueeze(-1)
    return order, ranked.cumsum(-1) - others * ranked


def rank_penalty(ranks: Tensor, penalty: Tensor) -> Tensor:
    """Return `weight * max(0, rank - k_reg)` for ranks from 1 and a penalty (weight, k_reg)."""
    return penalty[0] * (ranks - penalty[1]).clamp(min=0)


def choose_penalty(scores: Tensor, ranks: Tensor, alpha: float, weight: float | None, k_reg: int | None) -> Tensor:
    """Choose what is not given of the penalty of RAPS: (weight, k_reg), a tensor of single precision.

    `k_reg` is the quantile of the ranks of the true classes, and the weight is the one of `LAMBDAS` whose sets are
    smallest, as in the authors' code.

    Args:
        scores: Ranked scores without penalty of rows that do not calibrate, (n, C).
        ranks: Rank of the true class of each, from 1, (n,).
        alpha: The share of errors that is allowed.
        weight: The weight, if it is given.
        k_reg: The number of classes without penalty, if it is given.
    """
    free = int(conformal_quantile(ranks, alpha)) if k_reg is None else k_reg
    weights = LAMBDAS if weight is None else (weight,)
    penalties = [torch.tensor([each, free], dtype=torch.float32, device=scores.device) for each in weights]
    if weight is not None:
        return penalties[0]
    places, own, sizes = torch.arange(1, scores.shape[1] + 1, device=scores.device), ranks.unsqueeze(1) - 1, []
    for penalty in penalties:
        penalized = scores + rank_penalty(places, penalty)
        sizes.append(int((penalized <= conformal_quantile(penalized.gather(1, own).squeeze(1), alpha)).sum()))
    return penalties[sizes.index(min(sizes))]


def interval_scores(lower: Tensor, upper: Tensor, width: Tensor, target: Tensor) -> Tensor:
    """Return how many widths a target lies outside of [lower, upper]; below 0 inside. All are (N,)."""
    return torch.maximum(lower - target, target - upper) / width


def widened(lower: Tensor, upper: Tensor, width: Tensor, quantile: Tensor) -> Tensor:
    """Return the intervals (N, 2) of all targets with a score up to the quantile; their middle if there are none.

    They are wider by some rounding errors, for discrete data, where many targets have the very score of the quantile.
    """
    middle, more = (lower + upper) / 2, quantile * width
    rounding = 8 * max(torch.finfo(part.dtype).eps for part in (lower, quantile))
    slack = rounding * (torch.maximum(lower.abs(), upper.abs()) + more.abs())
    return torch.stack([torch.minimum(lower - more, middle) - slack, torch.maximum(upper + more, middle) + slack], 1)


def _exact(alpha: float) -> Fraction:
    """Return alpha as it is written: 10 * (1 - 0.7) is above 3 in floating point."""
    return Fraction(repr(float(alpha)))
