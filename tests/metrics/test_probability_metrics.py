"""`calibration_metrics` and `ood_metrics`: against slow definitions and scikit-learn, over ranks, resumed, reported."""

import re

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback

from lightning_tricks import MetricsMonitor, RunReport
from lightning_tricks._shared.report_parts import ClassValues, Reliability
from lightning_tricks.metrics import MetricsError, MetricSuite, calibration_metrics, multiclass_metrics, ood_metrics
from tests.metrics.tables import Table, loader_of, trainer
from tests.metrics.test_presets import measured
from tests.small import cases, fork

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
FEW = settings(max_examples=30, derandomize=True)
SEEDS = st.integers(0, 2**20)


def slow_error(confidence, right, bins=15):
    """The expected calibration error, one bin after the other."""
    error = 0.0
    for number in range(bins):
        upper = confidence <= 1 if number == bins - 1 else confidence < (number + 1) / bins
        inside = (confidence >= number / bins) & upper
        if inside.any():
            error += abs(right[inside].mean() - confidence[inside].mean()) * inside.mean()
    return error


def slow_values(probabilities, target):
    """All values by their definitions; rows without ties."""
    rows, classes = probabilities.shape
    confidence, right = probabilities.max(1), probabilities.argmax(1) == target
    order = np.argsort(confidence)
    parts = [order[[place * min(15, rows) // rows == part for place in range(rows)]] for part in range(min(15, rows))]
    wrong = ~right[order[::-1]]
    one_hot = np.eye(classes)[target]
    scale = 2 if classes == 2 else 1
    of_classes = {
        "classwise_ece": [slow_error(probabilities[:, c], one_hot[:, c]) for c in range(classes)],
        "brier": [((probabilities[:, c] - one_hot[:, c]) ** 2).mean() / scale for c in range(classes)],
        "nll": [
            -np.log(probabilities[target == c, c]).mean() if (target == c).any() else np.nan for c in range(classes)
        ],
    }
    return {
        "ece": slow_error(confidence, right),
        "adaptive_ece": sum(abs(right[p].mean() - confidence[p].mean()) * len(p) / rows for p in parts),
        "classwise_ece": np.mean(of_classes["classwise_ece"]),
        "brier": sum(of_classes["brier"]),
        "nll": -np.log(probabilities[np.arange(rows), target]).mean(),
        "aurc": np.mean([wrong[: k + 1].mean() for k in range(rows)]),
    } | {
        f"{name}_{c}": value for name, values in of_classes.items() for c, value in zip("abcdefg", values, strict=False)
    }


def drawn(seed, rows, classes):
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.full(classes, 0.6), rows).astype(np.float32) + np.float32(1e-6)
    probabilities /= probabilities.sum(1, keepdims=True)
    return probabilities, generator.integers(0, classes, rows)


@FEW
@given(SEEDS, st.integers(1, 80), st.integers(2, 6), st.sampled_from([None, -1]))
def test_calibration_metrics_are_those_of_their_definitions(seed, rows, classes, ignored):
    probabilities, target = drawn(seed, rows, classes)
    kept = np.random.default_rng(seed).random(rows) < (0.7 if ignored else 1.1)
    kept[0] = True
    given_target = np.where(kept, target, -1)
    suite = MetricSuite(calibration_metrics(classes, ignored), class_names=list("abcdef"[:classes]))
    for part in np.array_split(np.arange(rows), 3):
        if len(part):
            suite.update(preds=torch.from_numpy(probabilities[part]), target=torch.from_numpy(given_target[part]))
    ours = {name: value.item() for name, value in suite.compute().items()}
    assert ours == pytest.approx(slow_values(probabilities[kept].astype(float), target[kept]), abs=2e-6, nan_ok=True)


@FEW
@given(SEEDS, st.integers(1, 80), st.booleans())
def test_ood_metrics_are_scikit_learns(seed, rows, ties):
    generator = np.random.default_rng(seed)
    scores = (100 * generator.standard_normal(rows) - 50).astype(np.float32)
    scores = scores.round(-1) if ties else scores
    target = generator.integers(0, 2, rows)
    ours = measured(ood_metrics(), preds=scores, target=target)
    if len(set(target)) < 2:
        assert all(np.isnan(value) for value in ours.values())
        return
    false, true, _ = sk.roc_curve(target, scores, drop_intermediate=False)
    enough = 100 * (true * target.sum()).round().astype(int) >= 95 * target.sum()
    oracle = {
        "auroc": sk.roc_auc_score(target, scores),
        "aupr": sk.average_precision_score(target, scores),
        "fpr95": false[enough].min(),
    }
    assert ours == pytest.approx(oracle, abs=2e-6)


@pytest.mark.parametrize("rows", [20, 40, 60, 220, 300])
def test_95_percent_is_a_whole_number_of_rows_where_it_is_one(rows):
    positives = torch.arange(rows).float()
    below = torch.tensor([rows * 0.05 - 0.5])  # one negative below exactly 95 % of the positives
    values = MetricSuite(ood_metrics())
    values.update(preds=torch.cat([positives, below]), target=torch.tensor([1] * rows + [0]))
    assert values.compute()["fpr95"] == 0


def test_a_preset_alone_is_a_metric_collection():
    probabilities, target = drawn(0, 50, 4)
    for metrics, preds, labels in (
        (calibration_metrics(4), probabilities, target),
        (ood_metrics(), probabilities[:, 0], target > 1),
    ):
        inputs = torch.from_numpy(preds), torch.from_numpy(labels).long()
        expected = measured(metrics, preds=inputs[0], target=inputs[1])
        for rows in (slice(0, 20), slice(20, 50)):
            metrics.update(*(part[rows] for part in inputs))
        assert {name: value.item() for name, value in metrics.compute().items()} == pytest.approx(expected, abs=1e-6)


@cases(
    "metrics, preds, target, words",
    (calibration_metrics(3), torch.randn(8, 3), torch.zeros(8).long(), r"look like logits.*torch.softmax"),
    (calibration_metrics(3), torch.zeros(8).long(), torch.zeros(8).long(), "needs scores"),
    (calibration_metrics(2), torch.rand(8), torch.zeros(8).long(), r"torch.stack\(\[1 - preds, preds\], dim=1\)"),
    (calibration_metrics(3), torch.full((8, 3), 1 / 3), torch.full((8,), 3), "targets must be 0 to 2"),
    (ood_metrics(), torch.randn(8), torch.arange(8), "targets must be 0 to 1"),
    (ood_metrics(), torch.randn(8, 2), torch.zeros(8).long(), "same shape"),
    (ood_metrics(), torch.zeros(8).long(), torch.zeros(8).long(), "needs scores"),
    (ood_metrics(), torch.full((8,), torch.nan), torch.zeros(8).long(), "NaN"),
)
def test_what_would_be_misunderstood_is_refused_in_the_first_batch(metrics, preds, target, words):
    monitor = MetricsMonitor(metrics, stages=["val"])
    with pytest.raises(MetricsError, match=words):
        trainer(monitor).validate(Table(), loader_of(preds, target, batch_size=8))


def tables(rows=53):
    """For both presets: predictions with ties and targets."""
    probabilities, target = drawn(3, rows, 4)
    probabilities = torch.from_numpy(probabilities).double().mul(20).round().add(1)
    probabilities = (probabilities / probabilities.sum(1, keepdim=True)).float()
    scores = (10 * torch.randn(rows, generator=torch.Generator().manual_seed(0))).round()
    return {
        "calibration": (calibration_metrics(4), probabilities, torch.from_numpy(target)),
        "ood": (ood_metrics(), scores, torch.from_numpy(target % 2)),
        "both": (
            {"cls": multiclass_metrics(4), "cal": calibration_metrics(4)},
            probabilities,
            torch.from_numpy(target),
        ),
    }


@pytest.mark.parametrize("kind", ["calibration", "ood", "both"])
@pytest.mark.parametrize("rows", [53, 3, 1])
def test_two_ranks_measure_what_one_process_does(kind, rows, tmp_path):
    """Of 53, 3 and 1 rows in batches of 4: uneven, repeated by the sampler, and none of its own on the second rank."""
    metrics, preds, target = tables(53)[kind]
    loader = loader_of(preds[:rows], target[:rows])
    alone = trainer(MetricsMonitor(metrics, log_plots=False)).validate(Table(), loader, verbose=False)[0]

    def run(rank):
        ranks = trainer(MetricsMonitor(metrics, log_plots=False), devices=2, strategy="ddp")
        torch.save(ranks.validate(Table(), loader, verbose=False)[0], tmp_path / f"{rank}.pt")

    fork(run, 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found == pytest.approx(alone, abs=1e-6, nan_ok=True)


def reported(monitor, report, preds, target):
    """The parts that a report gets at the end of a fit."""

    class Asks(Callback):
        def on_fit_end(self, trainer, pl_module):
            parts.extend(monitor.report_parts(trainer))

    parts = []
    made = trainer(monitor, report, Asks())
    made.fit(Table(), loader_of(preds, target), loader_of(preds, target))
    return parts


def test_the_report_has_the_reliability_of_the_metric_and_the_values_of_classes(tmp_path):
    metrics, preds, target = tables()["calibration"]
    monitor = MetricsMonitor(metrics, class_names=list("abcd"))
    report = RunReport(tmp_path / "report")
    parts = reported(monitor, report, preds, target)
    (reliability,) = [part for part in parts if isinstance(part, Reliability)]
    assert reliability.calibration_error == pytest.approx(monitor.results["val/ece"].item(), abs=1e-6)
    assert sum(reliability.weight) == pytest.approx(1)
    (classes,) = [part for part in parts if isinstance(part, ClassValues)]
    assert list(classes.metrics) == ["brier", "classwise_ece", "nll"]
    (page,) = (tmp_path / "report").rglob("*.html")
    text = page.read_text(encoding="utf-8")
    assert re.search(r"Expected calibration error 0\.\d{3}", text)
    assert f"{monitor.results['val/ece'].item():.3f}" in text


def test_scores_of_any_range_make_no_probability_plots(tmp_path):
    metrics, preds, target = tables()["ood"]
    assert not reported(MetricsMonitor(metrics), RunReport(tmp_path / "report"), preds, target)
