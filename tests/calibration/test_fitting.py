"""How calibrations are fitted, against scikit-learn, a grid, torch's LBFGS and known temperatures."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import brier_score_loss, log_loss
from torch.nn import functional
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_tricks._shared import calibration as scores
from lightning_tricks.calibration import Calibration, calibration_scores
from lightning_tricks.calibration.functional import fit_calibration, fit_temperature, fit_vector, isotonic_steps
from tests.metrics.test_probability_metrics import slow_values

FEW = settings(max_examples=40, derandomize=True)
SEEDS = st.integers(0, 2**20)


def drawn(rows=3000, classes=5, seed=0, scale=2.0):
    """Logits, and labels of their very probabilities, as probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return logits, functional.one_hot(labels, classes).double()


def applied(method, logits, target, to=None):
    calibration = Calibration()
    calibration.set_values(**fit_calibration(method, logits, target))
    return calibration(logits if to is None else to)


def nll(logits, target):
    return -(target * logits.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e6])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0, 50.0])
def test_a_known_temperature_comes_back_within_its_standard_error(temperature, unit):
    distances = []
    for seed in range(20):
        logits, target = drawn(seed=seed)
        found = fit_temperature(logits * temperature * unit, target).item() / unit
        # the Fisher information of 1 / T is the variance of the logits under the model, of each row
        share = logits.softmax(1)
        variance = (share * logits**2).sum(1) - (share * logits).sum(1) ** 2
        error = temperature / variance.sum().sqrt().item()
        distances.append((found - temperature) / error)
    assert np.abs(distances).max() < 3.5  # of 20 normal ones
    assert np.abs(np.mean(distances)) < 3 / np.sqrt(20)


@FEW
@given(SEEDS, st.integers(10, 60), st.integers(2, 6), st.booleans())
def test_no_temperature_of_a_grid_is_better(seed, rows, classes, soft):
    logits, target = drawn(rows, classes, seed, scale=1.0)
    if soft:
        target = 0.8 * target + 0.2 / classes
    try:
        found = fit_temperature(logits, target)
    except ValueError:  # the best one is 0 or infinite
        lowest, highest = (nll(logits / t, target) for t in (1e-3, 1e3))
        middle = min(nll(logits / t, target) for t in np.geomspace(0.05, 50, 50))
        assert min(lowest, highest) <= middle + 1e-12
        return
    best = nll(logits / found, target)
    assert found > 0
    assert all(best <= nll(logits / t, target) + 1e-13 for t in [*np.geomspace(1e-3, 1e3, 300), found * 1.001])


def test_a_temperature_keeps_the_order_of_the_classes():
    logits, target = drawn(classes=20)
    probabilities = applied("temperature", 7 * logits, target)
    assert torch.equal(probabilities.argsort(1), logits.argsort(1))


@pytest.mark.parametrize("classes", [2, 3, 8])
def test_vector_scaling_is_the_minimum_that_lbfgs_finds(classes):
    logits, target = drawn(classes=classes)
    given = 3 * logits + torch.arange(classes)
    scale, bias = fit_vector(given, target)
    weights = torch.ones(2, classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = nll(given * weights[0] + weights[1], target)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert nll(given * scale + bias, target) <= closure().item() + 1e-12
    centred = [part - part.mean() for part in (bias, weights[1].detach())]
    torch.testing.assert_close(scale, weights[0].detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*centred, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fit_vector(1e5 * given, target)[0] * 1e5, scale)  # whatever the unit of the logits


@settings(max_examples=200, derandomize=True)
@given(SEEDS, st.integers(1, 80), st.sampled_from(["free", "ties", "near 1", "near 0"]), st.booleans())
def test_isotonic_regression_is_scikit_learns(seed, rows, kind, soft):
    generator = np.random.default_rng(seed)
    x = generator.random(rows)
    x = {"free": x, "ties": x.round(1), "near 1": 1 - x * 1e-15, "near 0": 10.0 ** -generator.integers(1, 300, rows)}[
        kind
    ]
    y = generator.random(rows) if soft else (generator.random(rows) < x).astype(float)
    oracle = IsotonicRegression(out_of_bounds="clip").fit(x, y)
    thresholds, values = isotonic_steps(x, y)
    assert thresholds == oracle.X_thresholds_.tolist()
    np.testing.assert_allclose(values, oracle.y_thresholds_, atol=1e-12)
    asked = np.concatenate([x, generator.random(50), [0.0, 1.0]])
    np.testing.assert_allclose(np.interp(asked, thresholds, values), oracle.predict(asked), atol=1e-12)


@FEW
@given(SEEDS, st.integers(2, 6), st.sampled_from([None, 1]), st.sampled_from([0.5, 40.0]))
def test_isotonic_calibration_is_scikit_learns_of_each_class_with_the_sum_1(seed, classes, digits, sharpness):
    logits, target = drawn(200, classes, seed)
    logits = sharpness * (logits if digits is None else logits.round(decimals=digits))
    target[:classes] = torch.eye(classes, dtype=torch.float64)  # each class occurs
    asked = torch.cat([logits[:50], 3 * drawn(50, classes, seed + 1)[0], torch.full((1, classes), -700.0).double()])
    probabilities, held_out = asked.softmax(1).numpy(), logits.softmax(1).numpy()
    oracle = np.stack(
        [
            IsotonicRegression(out_of_bounds="clip")
            .fit(held_out[:, c], target[:, c].numpy())
            .predict(probabilities[:, c])
            for c in range(classes)
        ],
        axis=1,
    )
    total = oracle.sum(1, keepdims=True)
    oracle = np.divide(oracle, total, out=np.full_like(oracle, 1 / classes), where=total != 0)
    found = applied("isotonic", logits, target, asked)
    np.testing.assert_allclose(found.numpy(), oracle, atol=1e-9)
    np.testing.assert_allclose(found.sum(1).numpy(), 1, atol=1e-12)


def test_all_regressions_at_0_give_equal_probabilities():
    calibration = Calibration()
    thresholds = torch.tensor([[0.9, 1.0]] * 3)
    calibration.set_values(thresholds=thresholds, values=torch.tensor([[0.0, 1.0]] * 3))
    assert calibration(torch.zeros(1, 3)).tolist() == [pytest.approx([1 / 3] * 3)]
    assert calibration(torch.full((1, 3), torch.nan)).isnan().all()
    with pytest.raises(TypeError, match="set_values takes no 'tresholds'"):
        calibration.set_values(tresholds=thresholds, values=thresholds)


def with_labels(rows, classes, labels, sure=4.0):
    logits = sure * functional.one_hot(torch.arange(rows) % classes, classes).double()
    logits += 0.1 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits, functional.one_hot(labels, classes).double()


ROWS = torch.arange(60)
REFUSED = {
    "all right": ("temperature", *with_labels(60, 3, ROWS % 3), "all 60 held-out rows are predicted correctly"),
    "told apart": ("vector", *with_labels(60, 3, ROWS % 3), "separates the held-out rows without error"),
    "one class told apart": (
        "vector",
        *with_labels(60, 3, torch.where(ROWS % 3 > 0, ROWS // 2 % 2 + 1, 0)),
        "separates the held-out rows",
    ),
    "worse than chance": ("temperature", *with_labels(60, 3, (ROWS + 1) % 3), "say nothing about"),
    "constant logits": ("temperature", torch.zeros(60, 3).double(), drawn(60, 3)[1], "say nothing|predicted correctly"),
    "a class is absent": ("vector", *with_labels(60, 3, ROWS % 2), "is of class 2"),
    "a class is absent, isotonic": ("isotonic", *with_labels(60, 3, ROWS % 2), "is of class 2"),
    "few rows": ("temperature", *drawn(9, 3), "needs 10 held-out rows or more for 3 classes, got 9"),
    "few rows for vector": ("vector", *drawn(39, 20), "needs 40 held-out rows"),
    "probability 0": ("temperature", torch.tensor([[0.0, -torch.inf]] * 60).double(), drawn(60, 2)[1], "probability 0"),
    "infinite": ("vector", torch.tensor([[0.0, -torch.inf]] * 60).double(), drawn(60, 2)[1], "finite logits"),
}


@pytest.mark.parametrize(("method", "logits", "target", "words"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_best_calibration_is_refused(method, logits, target, words):
    with pytest.raises(ValueError, match=words):
        fit_calibration(method, logits, target)


def test_an_absent_class_and_classes_without_probability_do_not_matter_to_a_temperature():
    logits, target = drawn(classes=3)
    wider = functional.pad(logits, (0, 1), value=-torch.inf), functional.pad(target, (0, 1))
    torch.testing.assert_close(fit_temperature(*wider), fit_temperature(logits, target))
    probabilities = applied("temperature", *wider)
    assert not probabilities[:, 3].any()
    assert probabilities.isfinite().all()


@FEW
@given(SEEDS, st.integers(1, 120), st.integers(2, 7))
def test_scores_are_those_of_their_definitions(seed, rows, classes):
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.full(classes, 0.5), rows) + 1e-9
    probabilities /= probabilities.sum(1, keepdims=True)
    labels = generator.integers(0, classes, rows)
    found = calibration_scores(torch.from_numpy(probabilities), torch.from_numpy(labels))
    slow = slow_values(probabilities, labels)
    confidence, right = torch.from_numpy(probabilities.max(1)), torch.from_numpy(probabilities.argmax(1) == labels)
    oracle = {"nll": log_loss(labels, probabilities, labels=range(classes))}
    oracle |= {name: slow[name] for name in ("ece", "adaptive_ece", "brier")}
    assert found == pytest.approx(oracle, abs=1e-9)
    assert scores.risk_coverage_area(confidence, right).item() == pytest.approx(slow["aurc"])
    of_torchmetrics = multiclass_calibration_error(torch.from_numpy(probabilities), torch.from_numpy(labels), classes)
    if probabilities.max() < 1:  # it has a bin of its own for 1
        assert found["ece"] == pytest.approx(of_torchmetrics.item(), abs=1e-6)
    if classes == 2:
        assert found["brier"] == pytest.approx(brier_score_loss(labels, probabilities[:, 1]))
        for form in (probabilities[:, 1], probabilities[:, 1:]):
            assert calibration_scores(torch.from_numpy(form), torch.from_numpy(labels)) == pytest.approx(found)


@pytest.mark.trap("metrics: torchmetrics' calibration error has a 16th bin, of confidences of 1")
def test_a_confidence_of_1_is_in_the_last_bin():
    probabilities, labels = torch.tensor([[1.0, 0.0], [0.05, 0.95]]), torch.tensor([1, 1])
    assert calibration_scores(probabilities, labels)["ece"] == pytest.approx(abs(0.5 - 0.975))
    assert multiclass_calibration_error(probabilities, labels, 2).item() == pytest.approx(0.5 * 1 + 0.5 * 0.05)


@FEW
@given(SEEDS)
def test_no_score_depends_on_the_order_of_tied_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(50, generator=generator).double().round(decimals=1)
    correct = (torch.rand(50, generator=generator) < 0.5).double()
    order = torch.randperm(50, generator=generator)
    for score in (scores.calibration_error, scores.adaptive_calibration_error, scores.risk_coverage_area):
        torch.testing.assert_close(score(confidence[order], correct[order]), score(confidence, correct))


def test_the_area_of_tied_rows_is_its_mean_over_their_orders():
    confidence, correct = torch.tensor([0.9, 0.9, 0.9, 0.5]).double(), torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    generator, areas = np.random.default_rng(0), []
    for _ in range(4000):
        order = np.append(generator.permutation(3), 3)
        wrong = 1 - correct.numpy()[order]
        areas.append(np.mean(wrong.cumsum() / np.arange(1, 5)))
    assert scores.risk_coverage_area(confidence, correct).item() == pytest.approx(np.mean(areas), abs=0.01)
