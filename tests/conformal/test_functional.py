"""The core: against slow twins in numpy, and properties of the quantile."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.conformal.functional import (
    LAMBDAS,
    check_alpha,
    choose_penalty,
    conformal_quantile,
    group_quantiles,
    interval_scores,
    needed_rows,
    quantiles_of,
    rank_penalty,
    ranked_scores,
    widened,
)

ALPHAS = st.integers(1, 99).map(lambda percent: percent / 100)


@given(n=st.integers(1, 300), alpha=ALPHAS)
def test_the_quantile_has_the_exact_rank_and_exists_where_there_are_enough_rows(n, alpha):
    exact = Fraction(str(alpha))
    rank = ceil((n + 1) * (1 - exact))
    assert (n >= needed_rows(alpha)) == (rank <= n)
    scores = torch.randperm(n, generator=torch.Generator().manual_seed(n)) + 1.0
    if rank <= n:
        assert conformal_quantile(scores, alpha) == rank
    else:
        with pytest.raises(ValueError, match=f"needs at least {ceil(1 / exact) - 1} calibration rows, got {n}"):
            conformal_quantile(scores, alpha)


def test_alpha_is_the_number_that_is_written():
    assert 10 * (1 - 0.7) > 3, "in floating point"
    assert conformal_quantile(torch.arange(1.0, 10.0), 0.7) == 3
    assert needed_rows(0.05) == 19


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 1.5, float("nan"), float("inf")])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha must be a number"):
        check_alpha(alpha)


@pytest.mark.parametrize("alpha", ["0.1", None, True])
def test_alpha_of_another_type_is_refused(alpha):
    with pytest.raises(TypeError, match="alpha must be a number"):
        check_alpha(alpha)


def test_scores_that_are_nan_are_refused():
    with pytest.raises(ValueError, match="1 of 20 scores are NaN"):
        conformal_quantile(torch.cat([torch.zeros(19), torch.tensor([torch.nan])]), 0.1)


def test_each_group_has_its_quantile_and_an_unknown_one_has_none():
    ids = torch.tensor([3, 7]).repeat(20)
    scores = torch.arange(40.0)
    quantiles = group_quantiles(scores, ids, torch.tensor([3, 7]), 0.2)
    own = [sorted(scores[ids == group].tolist()) for group in (3, 7)]
    assert quantiles.tolist() == [part[ceil(21 * 0.8) - 1] for part in own]
    found = quantiles_of(torch.tensor([7, 0, 3, 5, 9]), torch.tensor([3, 7]), quantiles)
    assert found.tolist() == [quantiles[1], torch.inf, quantiles[0], torch.inf, torch.inf]


def test_a_group_with_too_few_rows_is_named():
    with pytest.raises(ValueError, match=r"at least 9 calibration rows of each group: group 7 has 4, group 8 has 0\."):
        group_quantiles(torch.zeros(24), torch.tensor([3] * 20 + [7] * 4), torch.tensor([3, 7, 8]), 0.1)


def _slow_scores(probabilities, score, u):
    made = np.empty_like(probabilities)
    for row, p in enumerate(probabilities):
        for c in range(len(p)):
            more_probable = sum(p[d] for d in range(len(p)) if p[d] > p[c] or (p[d] == p[c] and d < c))
            made[row, c] = 1 - p[c] if score == "lac" else more_probable + u[row] * p[c]
    return made


@pytest.mark.parametrize("score", ["lac", "aps"])
@pytest.mark.parametrize("randomized", [False, True])
def test_scores_equal_their_definition(score, randomized):
    rng = np.random.default_rng(0)
    probabilities = np.round(rng.dirichlet(np.ones(5), 50), 1)  # many are equal, and some are 0
    u = rng.uniform(size=50) if randomized else np.zeros(50)
    order, ranked = ranked_scores(torch.tensor(probabilities), score, torch.tensor(u) if randomized else None)
    made = torch.empty_like(ranked).scatter_(1, order, ranked).numpy()
    np.testing.assert_allclose(made, _slow_scores(probabilities, score, u), atol=1e-12)
    assert (ranked.diff(dim=1) >= -1e-12).all()


def test_the_penalty_is_that_of_the_paper():
    penalty = rank_penalty(torch.arange(1, 6), torch.tensor([0.1, 2.0]))
    np.testing.assert_allclose(penalty.numpy(), [0, 0, 0.1, 0.2, 0.3], atol=1e-7)


@pytest.mark.parametrize("given", [(None, None), (None, 2), (0.1, None)])
def test_the_penalty_that_is_chosen_has_the_smallest_sets(given):
    rng = np.random.default_rng(1)
    probabilities = rng.dirichlet(np.full(20, 0.3), 200)
    labels = np.array([rng.choice(20, p=0.5 * p + 0.5 / 20) for p in probabilities])
    order, ranked = ranked_scores(torch.tensor(probabilities), "aps")
    ranks = (order == torch.tensor(labels).unsqueeze(1)).int().argmax(1) + 1
    found = choose_penalty(ranked, ranks, 0.1, *given)

    scores, places, rank = ranked.numpy(), ranks.numpy(), ceil(201 * Fraction("0.9")) - 1
    k_reg = np.sort(places)[rank] if given[1] is None else given[1]
    sizes = {}
    for weight in LAMBDAS if given[0] is None else (given[0],):
        made = scores + np.float32(weight) * np.maximum(0, np.arange(1, 21) - k_reg)
        sizes[weight] = (made <= np.sort(made[np.arange(200), places - 1])[rank]).sum()
    assert found.tolist() == pytest.approx([min(sizes, key=sizes.get), k_reg])
    assert len(set(sizes.values())) > 1 or given[0], "there is something to choose"


@given(
    lower=st.floats(-5, 5), upper=st.floats(-5, 5), width=st.floats(0.1, 3), limit=st.floats(-4, 4), y=st.floats(-9, 9)
)
def test_an_interval_holds_the_values_whose_score_is_at_most_the_quantile(lower, upper, width, limit, y):
    lower, upper, width, limit, y = (torch.tensor([v], dtype=torch.float64) for v in (lower, upper, width, limit, y))
    score = interval_scores(lower, upper, width, y)
    (low, high) = widened(lower, upper, width, limit)[0]
    assert low <= high, "no interval is upside down"
    if abs(score - limit) > 1e-9 and lower - limit * width < upper + limit * width:
        assert bool(low <= y <= high) == bool(score <= limit)
