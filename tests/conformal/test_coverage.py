"""The promise: the coverage of 1,000 calibrations has exactly the distribution that the theory gives it."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, exp, lgamma

import numpy as np
import pytest
import torch
from torch import nn

from lightning_tricks.conformal import ConformalClassifier, ConformalRegressor
from tests.small import cases

SPLITS, N, M = 1000, 57, 80
LIMITS = (4.0, 1.95)  # standard errors; the 99.9 % point of the Kolmogorov distribution


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


class Band(nn.Module):
    def forward(self, x):
        return x[:, 0], x[:, 1]


def _rows(generator, n, classes=6):
    logits = torch.randn(n, classes, generator=generator) * 2
    return logits, torch.multinomial((0.7 * logits).softmax(1), 1, generator=generator)[:, 0]  # overconfident


def _covered(conformal, make, splits=SPLITS):
    """How many of M new rows each of the calibrations covers."""
    counts = []
    for _ in range(splits):
        x, y = make(N)
        conformal.calibrate([(x[:30], y[:30]), (x[30:], y[30:])])
        x, y = make(M)
        made = conformal.predict(x)
        if made.dtype == torch.bool:
            counts.append(int(made[torch.arange(M), y].sum()))
        else:
            counts.append(int(((made[:, 0] <= y) & (y <= made[:, 1])).sum()))
    return np.array(counts)


@pytest.mark.sampled(3)
@cases(
    "score, randomized, groups",
    ("lac", False, None),
    ("aps", True, None),
    ("aps", False, None),
    ("raps", True, None),
    ("lac", False, "function"),
    ("raps", False, None),
)
def test_sets_cover_as_often_as_they_should(score, randomized, groups):
    generator = torch.Generator().manual_seed(0)
    options = {"lambda_reg": 0.05, "k_reg": 2} if score == "raps" else {}
    if groups:
        options["groups"] = lambda x: torch.full((len(x),), 4)
    if randomized:
        options["generator"] = torch.Generator().manual_seed(1)
    conformal = ConformalClassifier(nn.Identity(), None, 0.1, score, **options)
    mean, distance = misfit(_covered(conformal, lambda n: _rows(generator, n)), N, M, "0.1")
    if score == "lac" or randomized:
        assert abs(mean) < LIMITS[0]
        assert distance < LIMITS[1]
    else:
        assert mean > -LIMITS[0], "where many scores are equal, 0, sets cover more"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("score", ["absolute", "normalised", "quantile"])
def test_intervals_cover_as_often_as_they_should(score):
    generator = torch.Generator().manual_seed(2)

    def make(n):
        x = torch.randn(n, 2, generator=generator)
        x[:, 1] = x[:, 0] + x[:, 1].abs() if score == "quantile" else 0.1 + x[:, 1].abs()
        return x, x[:, 0] + torch.randn(n, generator=generator) * (1 + x[:, 0].abs())

    module = Band() if score != "absolute" else nn.Flatten(0)
    conformal = ConformalRegressor(module, None, 0.2, score)
    draw = make if score != "absolute" else lambda n: (make(n)[1], make(n)[1])
    mean, distance = misfit(_covered(conformal, draw), N, M, "0.2")
    assert abs(mean) < LIMITS[0]
    assert distance < LIMITS[1]


def test_rows_that_choose_the_penalty_do_not_calibrate():
    """With a fifth of the rows in both places, sets would cover too little where there are few rows."""
    generator = torch.Generator().manual_seed(4)
    conformal = ConformalClassifier(nn.Identity(), None, 0.1, "raps")
    x, y = _rows(generator, 100)
    conformal.calibrate([(x, y)])
    draws = torch.rand(100, generator=torch.Generator().manual_seed(0)) < 0.2
    rest = ConformalClassifier(
        nn.Identity(), None, 0.1, "raps", lambda_reg=float(conformal.penalty[0]), k_reg=int(conformal.penalty[1])
    )
    rest.calibrate([(x[~draws], y[~draws])])
    assert torch.equal(conformal.quantiles, rest.quantiles)
    rest.calibrate([(x, y)])
    assert not torch.equal(conformal.quantiles, rest.quantiles)
