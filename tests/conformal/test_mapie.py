"""The same sets, intervals and coverage as MAPIE's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import ResidualNormalisedScore
from mapie.metrics.classification import classification_coverage_score
from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from torch import nn

from lightning_tricks.conformal import ConformalClassifier, ConformalRegressor
from lightning_tricks.conformal.functional import conformal_quantile, ranked_scores

pytestmark = pytest.mark.filterwarnings("ignore")  # MAPIE's own
RNG = np.random.default_rng(0)
CALIBRATION, TEST = RNG.dirichlet(np.ones(6), 700), RNG.dirichlet(np.ones(6), 1000)
LABELS = np.array([RNG.choice(6, p=p) for p in CALIBRATION])
X = RNG.normal(size=(500, 1))
Y = X[:, 0] + RNG.normal(size=500) * (0.2 + np.abs(X[:, 0]))
X_TEST = RNG.normal(size=(300, 1))


class Given(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose probabilities are its inputs."""

    classes_ = np.arange(6)

    def fit(self, x, y):
        return self

    def predict(self, x):
        return x.argmax(1)

    def predict_proba(self, x):
        return x


class Line(RegressorMixin, BaseEstimator):
    """A fitted regressor: `weight * x + shift * scale(x)`."""

    fitted_ = True

    def __init__(self, weight=1.0, shift=0.0):
        self.weight, self.shift = weight, shift

    def fit(self, x, y):
        return self

    def predict(self, x):
        return self.weight * x[:, 0] + self.shift * (0.2 + np.abs(x[:, 0]))


class Outputs(nn.Module):
    def __init__(self, score):
        super().__init__()
        self.score = score

    def forward(self, x):
        mean, scale = x[:, 0], 0.2 + x[:, 0].abs()
        return {"absolute": mean, "normalised": (mean, scale), "quantile": (mean - scale, mean + scale)}[self.score]


def _sets(score, **arguments):
    theirs = SplitConformalClassifier(Given(), 0.9, score, prefit=True, random_state=7)
    return theirs.conformalize(CALIBRATION, LABELS).predict_set(TEST, **arguments)[1][:, :, 0]


def test_lac():
    data = [(torch.tensor(CALIBRATION), torch.tensor(LABELS))]
    ours = ConformalClassifier(nn.Identity(), data, outputs="probabilities").predict(TEST)
    assert np.array_equal(ours.numpy(), _sets("lac"))


def test_sets_and_coverage_of_each_class():
    data, labels = [(torch.tensor(CALIBRATION), torch.tensor(LABELS))], np.arange(1000) % 6
    ours = ConformalClassifier(nn.Identity(), data, outputs="probabilities", groups="class-conditional")
    found = ours.coverage([(torch.tensor(TEST), torch.tensor(labels))])
    sets = ours.predict(TEST).numpy()
    for label in range(6):
        of_class = label == LABELS
        theirs = SplitConformalClassifier(Given(), 0.9, "lac", prefit=True)
        theirs.conformalize(CALIBRATION[of_class], LABELS[of_class])
        assert np.array_equal(sets[:, label], theirs.predict_set(TEST)[1][:, label, 0])
        rows = labels == label
        (expected,) = classification_coverage_score(labels[rows], sets[rows][:, :, None])
        assert found[label] == pytest.approx(expected)


def test_randomized_aps_with_the_same_random_numbers():
    # theirs subtract `u` times the probability from the sum that includes it
    u = [1 - np.random.RandomState(7).uniform(size=len(rows)) for rows in (CALIBRATION, TEST)]
    order, scores = ranked_scores(torch.tensor(CALIBRATION), "aps", torch.tensor(u[0]))
    place = (order == torch.tensor(LABELS).unsqueeze(1)).int().argmax(1, keepdim=True)
    limit = conformal_quantile(scores.gather(1, place)[:, 0], 0.1)
    order, scores = ranked_scores(torch.tensor(TEST), "aps", torch.tensor(u[1]))
    ours = torch.zeros(TEST.shape, dtype=torch.bool).scatter_(1, order, scores <= limit)
    assert np.array_equal(ours.numpy(), _sets("aps", conformity_score_params={"include_last_label": "randomized"}))


def test_deterministic_aps_has_no_class_that_their_sets_with_the_last_label_lack():
    data = [(torch.tensor(CALIBRATION), torch.tensor(LABELS))]
    ours = ConformalClassifier(nn.Identity(), data, score="aps", outputs="probabilities").predict(TEST).numpy()
    theirs = _sets("aps", conformity_score_params={"include_last_label": True})
    assert (theirs >= ours).all()
    assert theirs.sum() > 1.1 * ours.sum()


@pytest.mark.parametrize("score", ["absolute", "normalised", "quantile"])
def test_intervals(score):
    made = {
        "absolute": lambda: SplitConformalRegressor(Line(), 0.9, prefit=True),
        "normalised": lambda: SplitConformalRegressor(
            Line(), 0.9, ResidualNormalisedScore(Line(0, 1), prefit=True), prefit=True
        ),
        "quantile": lambda: ConformalizedQuantileRegressor([Line(1, -1), Line(1, 1), Line()], 0.9, prefit=True),
    }[score]()
    options = {"symmetric_correction": True} if score == "quantile" else {}
    theirs = made.conformalize(X, Y).predict_interval(X_TEST, **options)[1][:, :, 0]
    ours = ConformalRegressor(Outputs(score), [(torch.tensor(X), torch.tensor(Y))], score=score).predict(X_TEST)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-12)
