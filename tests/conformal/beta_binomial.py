"""The exact distribution of the coverage of one calibration, computed without the package."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, exp, lgamma

import numpy as np


def rank(n: int, alpha: str) -> int:
    """The rank of the score that is the quantile, in exact numbers."""
    return ceil((n + 1) * (1 - Fraction(alpha)))


def probabilities(n: int, m: int, alpha: str) -> np.ndarray:
    """P(j of m new rows are covered) for j = 0..m: the coverage is Beta(k, n + 1 - k), with k the rank."""
    a, b = rank(n, alpha), n + 1 - rank(n, alpha)

    def log_beta(p, q):
        return lgamma(p) + lgamma(q) - lgamma(p + q)

    def log_choose(j):
        return lgamma(m + 1) - lgamma(j + 1) - lgamma(m - j + 1)

    return np.array([exp(log_choose(j) + log_beta(j + a, m - j + b) - log_beta(a, b)) for j in range(m + 1)])


def misfit(covered: np.ndarray, n: int, m: int, alpha: str) -> tuple[float, float]:
    """How far counts of covered rows are from their distribution: the mean in standard errors, and the largest
    difference of the distribution functions times the root of the number of counts (Kolmogorov-Smirnov)."""
    weights, j = probabilities(n, m, alpha), np.arange(m + 1)
    assert abs(weights.sum() - 1) < 1e-8
    mean = (weights * j).sum()
    error = np.sqrt((weights * (j - mean) ** 2).sum() / len(covered))
    seen = np.searchsorted(np.sort(covered), j, side="right") / len(covered)
    return (covered.mean() - mean) / error, np.abs(seen - weights.cumsum()).max() * len(covered) ** 0.5
