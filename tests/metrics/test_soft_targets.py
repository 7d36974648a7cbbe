"""multiclass_metrics(soft_targets=True): targets that are probabilities, beside targets that are classes."""

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, one_hot

from lightning_tricks import MetricsMonitor
from lightning_tricks.metrics import MetricSuite, multiclass_metrics, preset
from tests.metrics.tables import Table, loader_of, trainer
from tests.metrics.test_presets import FEW, SEEDS, assert_same, measured

pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")


def table(rows, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(rows, classes, generator=generator) for _ in range(2)]
    return 3 * draws[0], (2 * draws[1]).softmax(1)


def oracle(logits, target):
    """In float64, one sample after the other."""
    sums = np.zeros(3)
    for scores, truth in zip(logits.double().numpy(), target.double().numpy(), strict=True):
        probabilities = np.exp(scores) / np.exp(scores).sum()
        sums += -(truth * np.log(probabilities)).sum(), ((probabilities - truth) ** 2).sum(), truth[scores.argmax()]
    return dict(zip(("cross_entropy", "brier", "expected_acc"), sums / len(logits), strict=True))


@FEW
@given(SEEDS, st.integers(1, 60), st.integers(2, 6), st.booleans())
def test_each_value_against_a_loop_and_scikit_learn(seed, rows, classes, from_logits):
    logits, target = table(rows, classes, seed)
    preds = logits if from_logits else logits.softmax(1)
    metrics = multiclass_metrics(classes, soft_targets=True, from_logits=from_logits)
    ours = measured(metrics, preds=preds, target=target)
    hard = measured(multiclass_metrics(classes), preds=preds, target=target.argmax(1))
    assert_same(ours, {**hard, **oracle(logits, target)})
    metrics.update(preds, target)  # as a MetricCollection
    assert_same({name: value.item() for name, value in metrics.compute().items()}, ours)
    assert_same({name: value.item() for name, value in metrics(preds, target).items()}, ours)


def test_pixels_and_curves():
    logits, target = (part.reshape(5, 3, 4, 4).transpose(1, 3) for part in table(60))
    ours = measured(multiclass_metrics(4, soft_targets=True), preds=logits, target=target)
    flat = [part.movedim(1, -1).reshape(-1, 4) for part in (logits, target)]
    assert_same(ours, measured(multiclass_metrics(4, soft_targets=True), preds=flat[0], target=flat[1]))
    metrics = multiclass_metrics(4, curves=True, soft_targets=True, from_logits=False, top_k=2)
    probabilities, soft = table(60)[0].softmax(1), table(60)[1]
    ours = measured(metrics, preds=probabilities, target=soft)
    labels = soft.argmax(1)
    assert ours["auroc"] == pytest.approx(sk.roc_auc_score(labels, probabilities.double(), multi_class="ovr"), abs=1e-6)
    assert ours["acc_top2"] == pytest.approx(sk.top_k_accuracy_score(labels, probabilities, k=2))


@pytest.mark.parametrize("ignored", [None, 0, -100])
def test_classes_and_probabilities_may_take_turns(ignored):
    logits, target = table(30)
    labels = target.argmax(1)
    hard = labels[:10].clone()
    if ignored is not None:
        hard[::3] = ignored
    suite = MetricSuite(multiclass_metrics(4, ignore_index=ignored, soft_targets=True))
    suite.update(preds=logits[:10], target=hard)
    suite.update(preds=logits[10:], target=target[10:])
    values = suite.compute()
    counted = hard != (-1 if ignored is None else ignored)
    truth = torch.cat([one_hot(labels[:10], 4)[counted].float(), target[10:]])
    for name, value in oracle(torch.cat([logits[:10][counted], logits[10:]]), truth).items():
        assert values[name].item() == pytest.approx(value, abs=1e-6), name


def test_mixup_and_label_smoothing_are_what_torch_computes():
    logits, _ = table(32)
    labels = torch.arange(32) % 4
    mixed = 0.7 * one_hot(labels, 4) + 0.3 * one_hot(labels.flip(0), 4)
    smooth = 0.9 * one_hot(labels, 4) + 0.1 / 4
    for target, expected in (
        (mixed, cross_entropy(logits, mixed)),
        (smooth, cross_entropy(logits, labels, label_smoothing=0.1)),
    ):
        values = measured(multiclass_metrics(4, soft_targets=True), preds=logits, target=target)
        assert values["cross_entropy"] == pytest.approx(expected.item(), abs=1e-6)
        assert values["acc"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())  # the likelier class


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_certainty(dtype):
    logits, target = table(50)
    suite = MetricSuite(multiclass_metrics(4, soft_targets=True))
    suite.update(preds=logits.to(dtype), target=target.to(dtype))
    expected = oracle(logits.to(dtype), target.to(dtype))
    assert suite.compute()["brier"].item() == pytest.approx(expected["brier"], abs=1e-5)
    values = MetricSuite(multiclass_metrics(2, soft_targets=True))
    certain = torch.tensor([[300.0, -300.0]] * 2, dtype=dtype)
    values.update(preds=certain, target=torch.tensor([[1.0, 0.0]] * 2, dtype=dtype))
    assert values.compute()["cross_entropy"].item() == 0  # 0 log 0 is 0


def test_what_would_be_misunderstood_is_refused_with_the_remedy():
    logits, target = table(8)

    def suite(**options):
        return MetricSuite(multiclass_metrics(4, soft_targets=True, **options))

    for options, preds, truth, words in (
        ({}, logits.softmax(1), target, "look like probabilities: give the preset from_logits=False"),
        ({"from_logits": False}, logits, target, "look like logits: give the preset from_logits=True"),
        ({}, logits, 2 * target, "sums from 2 to 2: divide them"),
        ({}, logits, logits, "must be probabilities that sum up to 1"),
        ({}, logits.argmax(1), target.argmax(1), "needs scores of shape"),
        ({}, logits, target[:, :3], r"need the shape of the scores, \(8, 4\), got \(8, 3\)"),
    ):
        with pytest.raises(ValueError, match=words):
            suite(**options).update(preds=preds, target=truth)
    with pytest.raises(ValueError, match=r"acc.* need target, but got preds"):
        suite().update(preds=logits)
    with pytest.raises(ValueError, match="soft_targets=True needs num_classes"):
        multiclass_metrics(soft_targets=True)
    with pytest.raises(ValueError, match="give from_logits=False"):
        multiclass_metrics(4, curves=True, soft_targets=True)
    with pytest.raises(ValueError, match="or give multiclass_metrics soft_targets=True"):
        MetricSuite(multiclass_metrics(4)).update(preds=logits, target=target)


def test_later_targets_that_are_no_probabilities_make_all_values_nan():
    logits, target = table(8)
    suite = MetricSuite(multiclass_metrics(4, ignore_index=-1, soft_targets=True))
    suite.update(preds=logits, target=target)
    bad = target.clone()
    bad[2], bad[5, 1] = 0.0, float("nan")
    suite.update(preds=logits, target=bad)
    assert suite.num_invalid() == 2
    assert all(value.isnan() for value in suite.compute().values())


class _Mixes(Table):
    """Trains with soft targets, and validates with classes."""

    def training_step(self, batch, batch_idx):
        return {**super().training_step(batch, batch_idx), "loss": cross_entropy(*batch) + 0 * self.weight.sum()}

    def validation_step(self, batch, batch_idx):
        return {"preds": batch[0], "target": batch[1].argmax(1)}


def test_a_fit_with_soft_training_and_hard_validation():
    metrics = preset(task="multiclass", num_classes=4, soft_targets=True)
    fitter = trainer(MetricsMonitor(metrics, best={"train/cross_entropy": "min"}))
    fitter.fit(_Mixes(), loader_of(*table(26)), loader_of(*table(26)))
    values, (logits, target) = fitter.callback_metrics, table(26)
    assert values["train/cross_entropy"] == pytest.approx(values["train/loss"].item(), abs=1e-6)
    hard = oracle(logits, one_hot(target.argmax(1), 4))
    assert values["val/cross_entropy"].item() == pytest.approx(hard["cross_entropy"], abs=1e-6)
    assert values["val/acc"] == values["val/expected_acc"]
