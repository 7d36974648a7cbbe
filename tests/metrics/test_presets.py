"""Every metric of every preset, against scikit-learn over random data, through the suite in batches of random sizes."""

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks.metrics import (
    MetricSuite,
    binary_metrics,
    calibration_metrics,
    multiclass_metrics,
    multilabel_metrics,
    ood_metrics,
    preset,
    regression_metrics,
    retrieval_metrics,
    segmentation_metrics,
)
from tests.small import cases, without_warnings

FEW = settings(max_examples=25, derandomize=True)
SEEDS = st.integers(0, 2**20)


def measured(metrics, **inputs):
    """The values of a suite that gets the data in batches of one to seven rows."""
    suite = MetricSuite(metrics)
    generator = np.random.default_rng(0)
    start, rows = 0, len(next(iter(inputs.values())))
    while start < rows:
        stop = start + int(generator.integers(1, 8))
        suite.update(**{name: torch.as_tensor(value[start:stop]) for name, value in inputs.items()})
        start = stop
    return {name: value.item() for name, value in suite.compute().items()}


def assert_same(ours, oracle):
    assert ours.keys() == oracle.keys()
    for name, value in oracle.items():
        assert ours[name] == pytest.approx(value, abs=2e-6, nan_ok=True), name


def quietly(function, *args, **kwargs):
    """scikit-learn's value, without its warnings of undefined ones."""
    with without_warnings():
        return function(*args, **kwargs)


def curve_values(target, scores):
    if len(set(target.tolist())) < 2:
        return float("nan"), float("nan")
    return sk.roc_auc_score(target, scores), sk.average_precision_score(target, scores)


@FEW
@given(SEEDS, st.integers(1, 60), st.sampled_from([None, -1, 1]), st.sampled_from([0.5, 0.3]))
def test_binary_is_scikit_learns(seed, rows, ignored, threshold):
    generator = np.random.default_rng(seed)
    scores = generator.random(rows).round(2).astype(np.float32)  # with ties
    target = generator.integers(0, 2, rows)
    if ignored == -1:
        target[generator.random(rows) < 0.2] = -1
    ours = measured(binary_metrics(threshold, ignored), preds=scores, target=target)
    counted = target != ignored
    y, p = target[counted], scores[counted]
    decided = (p > threshold).astype(int)
    if not len(y):
        assert ours["acc"] == 0
        return
    auroc, ap = curve_values(y, p)
    oracle = {
        "acc": sk.accuracy_score(y, decided),
        "precision": sk.precision_score(y, decided, zero_division=0),
        "recall": sk.recall_score(y, decided, zero_division=0),
        "f1": sk.f1_score(y, decided, zero_division=0),
        "specificity": sk.recall_score(y, decided, pos_label=0, zero_division=0),
        "kappa": quietly(sk.cohen_kappa_score, y, decided, labels=[0, 1]),
        "mcc": quietly(sk.matthews_corrcoef, y, decided),
        "auroc": auroc,
        "ap": ap,
    }
    assert_same(ours, oracle)


@FEW
@given(SEEDS, st.integers(1, 60), st.sampled_from([None, -1, 0, 3]), st.integers(2, 6), st.booleans())
def test_multiclass_is_scikit_learns_also_where_classes_are_absent(seed, rows, ignored, present, as_classes):
    classes = 6
    generator = np.random.default_rng(seed)
    scores = generator.random((rows, classes)) + 1e-3
    scores = (scores / scores.sum(1, keepdims=True)).astype(np.float32)
    target = generator.integers(0, present, rows)
    if ignored == -1:
        target[generator.random(rows) < 0.2] = -1
    curves = not as_classes
    metrics = multiclass_metrics(classes, ignored, top_k=2 if curves else None, curves=curves)
    preds = scores.argmax(1) if as_classes else scores
    ours = measured(metrics, preds=preds, target=target)
    counted = target != ignored
    y, p = target[counted], scores[counted]
    if not len(y):
        return
    decided = p.argmax(1)
    averaged = {"average": "macro", "zero_division": 0}
    matrices = quietly(sk.multilabel_confusion_matrix, y, decided, labels=list(range(classes)))
    seen = [m for m in matrices if m[1].sum() + m[0, 1]]  # torchmetrics leaves out classes that do not occur at all
    oracle = {
        "acc": sk.accuracy_score(y, decided),
        "balanced_acc": quietly(sk.balanced_accuracy_score, y, decided),
        "precision": sk.precision_score(y, decided, **averaged),
        "recall": sk.recall_score(y, decided, **averaged),
        "f1": sk.f1_score(y, decided, **averaged),
        "specificity": np.mean([m[0, 0] / m[0].sum() if m[0].sum() else 0.0 for m in seen]),
        "kappa": quietly(sk.cohen_kappa_score, y, decided, labels=list(range(classes))),
        "mcc": quietly(sk.matthews_corrcoef, y, decided),
    }
    if curves:
        oracle["acc_top2"] = sk.top_k_accuracy_score(y, p, k=2, labels=list(range(classes)))
        each = [curve_values((y == number).astype(int), p[:, number]) for number in range(classes)]
        oracle["auroc"], oracle["ap"] = quietly(np.nanmean, each, axis=0)
    assert_same(ours, oracle)


@FEW
@given(SEEDS, st.integers(1, 40), st.sampled_from([None, -1]))
def test_multilabel_is_scikit_learns(seed, rows, ignored):
    generator = np.random.default_rng(seed)
    scores = generator.random((rows, 4)).round(2).astype(np.float32)
    target = (generator.random((rows, 4)) < [0.0, 0.2, 0.5, 0.9]).astype(int)  # one label does not occur
    if ignored == -1:
        target[generator.random((rows, 4)) < 0.2] = -1
    ours = measured(multilabel_metrics(4, ignore_index=ignored), preds=scores, target=target)
    counted = target != -1
    decided = (scores > 0.5).astype(int)
    labels = [(target[counted[:, n], n], decided[counted[:, n], n], scores[counted[:, n], n]) for n in range(4)]
    scored = [curve_values(y, p) for y, _, p in labels]

    def macro(function):
        return np.mean([quietly(function, y, d, zero_division=0) if len(y) else 0.0 for y, d, _ in labels])

    auroc, ap = quietly(np.nanmean, scored, axis=0)
    oracle = {
        "acc": (decided == target)[counted].mean() if counted.any() else 0.0,
        "precision": macro(sk.precision_score),
        "recall": macro(sk.recall_score),
        "f1": macro(sk.f1_score),
        "exact_match": ours["exact_match"] if ignored else sk.accuracy_score(target, decided),
        "auroc": auroc,
        "ap": ap,
    }
    assert_same(ours, oracle)


@FEW
@given(SEEDS, st.integers(1, 60), st.integers(1, 3))
def test_regression_is_scikit_learns(seed, rows, outputs):
    generator = np.random.default_rng(seed)
    shape = (rows,) if outputs == 1 else (rows, outputs)
    target = generator.normal(100, 1, shape).astype(np.float32)
    preds = target + generator.normal(0, 1, shape).astype(np.float32)
    ours = measured(regression_metrics(outputs), preds=preds, target=target)
    y, p = target.astype(np.float64), preds.astype(np.float64)
    functions = {
        "mae": sk.mean_absolute_error,
        "mse": sk.mean_squared_error,
        "rmse": sk.root_mean_squared_error,
        "r2": lambda y, p, **how: quietly(sk.r2_score, y, p, **how),
    }
    oracle = {name: function(y, p) for name, function in functions.items()}
    for name, function in functions.items() if outputs > 1 else ():
        each = np.broadcast_to(function(y, p, multioutput="raw_values"), outputs)
        oracle |= {f"{name}_{number}": value for number, value in enumerate(each)}
    if rows < 2:
        oracle |= {name: float("nan") for name in oracle if name.startswith("r2")}
    assert_same(ours, oracle)


@FEW
@given(SEEDS, st.integers(1, 60), st.sampled_from([None, -1]))
def test_retrieval_is_scikit_learns(seed, rows, ignored):
    generator = np.random.default_rng(seed)
    scores = generator.permutation(rows).astype(np.float32) - rows / 2  # without ties, whose order is nobody's
    target = generator.integers(0, 2, rows)
    query = generator.integers(0, 6, rows)
    if ignored == -1:
        target[generator.random(rows) < 0.2] = -1
    ours = measured(retrieval_metrics(ignore_index=ignored), preds=scores, target=target, indexes=query)
    each = {name: [] for name in ("map", "ndcg", "mrr", "precision", "recall", "hit_rate")}
    for number in set(query[target != -1].tolist()):
        mine = (query == number) & (target != -1)
        y, p = target[mine], scores[mine]
        found = y[np.argsort(-p)]
        some = bool(y.sum())
        each["map"].append(sk.average_precision_score(y, p) if some else 0.0)
        each["ndcg"].append(sk.ndcg_score([y], [p]) if len(y) > 1 else float(some))
        each["mrr"].append(1 / (1 + found.argmax()) if some else 0.0)
        each["precision"].append(y.mean())
        each["recall"].append(float(some))
        each["hit_rate"].append(float(some))
    if each["map"]:
        assert_same(ours, {name: np.mean(values) for name, values in each.items()})


@FEW
@given(SEEDS, st.integers(1, 4), st.sampled_from([None, 255, 0]), st.booleans())
def test_segmentation_is_scikit_learns(seed, images, ignored, as_classes):
    classes = 4
    generator = np.random.default_rng(seed)
    scores = generator.random((images, classes, 5, 3)).astype(np.float32)
    target = generator.integers(0, 3, (images, 5, 3))  # class 3 does not occur
    if ignored == 255:
        target[generator.random(target.shape) < 0.2] = 255
    preds = scores.argmax(1) if as_classes else scores
    ours = measured(segmentation_metrics(classes, ignored), preds=preds, target=target)
    counted = target != ignored
    y, p = target[counted], scores.argmax(1)[counted]
    labels = [number for number in range(classes) if number != ignored]
    weighed = quietly(sk.jaccard_score, y, p, average="weighted", zero_division=0)
    seen = sorted({*y.tolist(), *p.tolist()} & set(labels))
    miou = quietly(sk.jaccard_score, y, p, labels=seen, average="macro", zero_division=0)
    oracle = {
        "pixel_acc": sk.accuracy_score(y, p),
        "mean_acc": quietly(sk.balanced_accuracy_score, y, p),
        "dice": quietly(sk.f1_score, y, p, labels=seen, average="macro", zero_division=0),
        "miou": miou,
        "fw_iou": weighed,
    }
    assert_same(ours, oracle)


def test_a_preset_of_plain_values_is_the_same():
    made = [
        binary_metrics(0.4, -1),
        multiclass_metrics(3, ignore_index=0, top_k=2, curves=True),
        multilabel_metrics(3, 0.4),
        regression_metrics(2),
        retrieval_metrics(top_k=3),
        segmentation_metrics(3, 255),
        calibration_metrics(4, ignore_index=-1),
        ood_metrics(),
    ]
    for metrics in made:
        again = preset(**metrics.spec)
        assert again.spec == metrics.spec
        assert list(again) == list(metrics)


@cases(
    "arguments, words",
    ({"task": "multiklass"}, "Did you mean 'multiclass'"),
    ({"task": "multiclass", "curves": True}, "curves=True needs num_classes"),
    ({"task": "multilabel"}, "num_labels"),
    ({"task": "calibration", "num_classes": 1}, "num_classes must be a whole number >= 2, got 1"),
    ({"task": "multiclass", "num_classes": 1}, "num_classes must be a whole number >= 2, got 1"),
    ({"task": "segmentation", "num_classes": 1}, "num_classes must be a whole number >= 2, got 1"),
    ({"task": "multiclass", "num_classes": 3, "top_k": 4}, "top_k must be at most num_classes"),
    ({"task": "regression", "num_classes": 3}, "num_outputs"),
    ({"task": "regression", "num_outputs": 0}, "num_outputs must be a whole number >= 1, got 0"),
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        preset(**arguments)


@pytest.mark.parametrize("ignored", [None, 1])
@pytest.mark.parametrize("shape", [(40,), (40, 3)])
@pytest.mark.parametrize("top_k", [None, 2])
def test_accuracy_without_the_number_of_classes_is_that_with_it(shape, ignored, top_k):
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(5, shape, generator=generator)
    scores = torch.rand((shape[0], 5, *shape[1:]), generator=generator)
    given = [scores] if top_k else [scores, scores.argmax(1)]
    for preds in given:
        without, known = (
            MetricSuite(multiclass_metrics(None, ignored, top_k)),
            MetricSuite(multiclass_metrics(5, ignored, top_k)),
        )
        for rows in (slice(15), slice(15, None)):
            for suite in (without, known):
                suite.update(preds=preds[rows], target=target[rows])
        expected = known.compute()
        assert without.compute() == {name: expected[name] for name in ("acc", *(["acc_top2"] if top_k else []))}
    assert preset("multiclass").spec == preset(**preset("multiclass").spec).spec
