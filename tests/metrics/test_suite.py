import copy
from itertools import pairwise

import pytest
import torch
import torchmetrics
import torchmetrics.classification as tm
import torchmetrics.regression as tmr
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MinMaxMetric

from lightning_tricks.metrics import (
    MeanLoss,
    MetricSuite,
    binary_metrics,
    calibration_metrics,
    multiclass_metrics,
    ood_metrics,
    regression_metrics,
)
from lightning_tricks.metrics.core.metric_groups import ScoreHistogram
from lightning_tricks.metrics.core.metric_table import Task, stack_numbers
from tests.small import HostReads, cases

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.rand(60, 4, generator=GENERATOR)
TARGET = torch.randint(4, (60,), generator=GENERATOR)


def fed(suite, size=7, **inputs):
    for start in range(0, len(next(iter(inputs.values()))), size):
        suite.update(**{name: value[start : start + size] for name, value in inputs.items()})
    return suite


def alone(metric, *inputs, **named):
    metric = copy.deepcopy(metric)
    metric.update(*inputs, **named)
    return metric.compute()


FOUR = {"num_classes": 4}
COUNTED = [
    *(tm.MulticlassAccuracy(average=average, **FOUR) for average in ("micro", "macro", "weighted", None)),
    tm.MulticlassF1Score(average="macro", ignore_index=0, **FOUR),
    tm.MulticlassFBetaScore(2.0, average="weighted", **FOUR),
    tm.MulticlassPrecision(average="micro", ignore_index=2, **FOUR),
    tm.MulticlassHammingDistance(**FOUR),
    tm.MulticlassNegativePredictiveValue(**FOUR),
    tm.MulticlassStatScores(average=None, **FOUR),
    tm.MulticlassCohenKappa(weights="quadratic", **FOUR),
    tm.MulticlassMatthewsCorrCoef(**FOUR),
    tm.MulticlassJaccardIndex(ignore_index=1, **FOUR),
    tm.MulticlassConfusionMatrix(normalize="true", **FOUR),
]


@pytest.mark.parametrize("metric", COUNTED, ids=lambda metric: type(metric).__name__)
def test_a_counted_metric_is_what_torchmetrics_says(metric):
    suite = fed(MetricSuite({"it": metric}), preds=SCORES, target=TARGET)
    assert suite.confusion_matrix() is not None
    value = alone(metric, SCORES, TARGET)
    ours = suite.compute_all()
    parts = [ours["it"]] if "it" in ours else [ours[f"it_{number}"] for number in range(len(value))]
    torch.testing.assert_close(torch.stack(parts).reshape(value.shape).float(), value.float(), atol=1e-6, rtol=1e-6)


def test_all_of_them_share_one_matrix_for_each_ignored_class():
    metrics = {str(number): metric for number, metric in enumerate(COUNTED)}
    suite = fed(MetricSuite(metrics), preds=SCORES, target=TARGET)
    assert len(suite.state_dict()["groups"]) == 4  # none, 0, 1 and 2 ignored
    for number, metric in metrics.items():
        if (value := alone(metric, SCORES, TARGET)).ndim == 0:
            assert suite.compute()[number].item() == pytest.approx(value.item(), abs=1e-6)


@pytest.mark.trap("metrics: compute_groups merge metrics whose states coincide after the first batch")
def test_metrics_with_equal_states_after_the_first_batch_stay_apart():
    metrics = {"ignoring": tm.MulticlassF1Score(3, ignore_index=0), "all": tm.MulticlassF1Score(3)}
    preds, target = torch.tensor([1, 2, 1, 0, 0, 2]), torch.tensor([1, 2, 2, 0, 1, 0])
    suite = MetricSuite(metrics)
    suite.update(preds=preds[:3], target=target[:3])  # no class 0 in here: the states are equal
    suite.reset()
    fed(suite, 3, preds=preds, target=target)
    for name, metric in metrics.items():
        assert suite.compute()[name].item() == pytest.approx(alone(metric, preds, target).item())
    assert suite.compute()["ignoring"] != suite.compute()["all"]

    thresholds = {str(t): tm.BinaryF1Score(threshold=t) for t in (0.3, 0.5, 0.7)}
    suite = MetricSuite(thresholds)
    suite.update(preds=torch.tensor([0.1, 0.9]), target=torch.tensor([0, 1]))
    suite.reset()
    preds, target = torch.rand(50, generator=GENERATOR), torch.randint(2, (50,), generator=GENERATOR)
    fed(suite, preds=preds, target=target)
    values = {name: value.item() for name, value in suite.compute().items()}
    assert values == pytest.approx({name: alone(metric, preds, target).item() for name, metric in thresholds.items()})
    assert len(set(values.values())) == 3


def test_curves_over_one_grid_of_thresholds_share_their_counts():
    """The first of them counts for all, and each has the value that it would have alone."""
    curves = {"area": tm.MulticlassAUROC, "precision": tm.MulticlassAveragePrecision}
    metrics = {name: kind(4, thresholds=21) for name, kind in curves.items()}
    suite, soft = MetricSuite({**metrics, "finer": tm.MulticlassAUROC(4, thresholds=41)}), SCORES.softmax(1)
    fed(suite, preds=soft, target=TARGET)
    assert len(suite.state_dict()["groups"]) == 2
    for name, metric in metrics.items():
        assert suite.compute()[name].item() == pytest.approx(alone(metric, soft, TARGET).item())


@pytest.mark.trap("metrics: clone(prefix='') keeps the old prefix")
def test_a_collections_prefix_does_not_count():
    collection = MetricCollection({"acc": tm.MulticlassAccuracy(4)}, prefix="val_", postfix="_x")
    assert list(fed(MetricSuite(collection), preds=SCORES, target=TARGET).compute()) == ["acc"]


@pytest.mark.trap("metrics: ClasswiseWrapper in a collection drops your key")
def test_a_classwise_wrapper_keeps_its_key_and_its_labels():
    labels = ["a", "b", "c", "d"]
    f1 = tm.MulticlassF1Score(4, average=None)
    suite = MetricSuite({"f1": ClasswiseWrapper(f1, labels=labels), "plain": ClasswiseWrapper(f1)})
    values = fed(suite, preds=SCORES, target=TARGET).compute()
    expected = alone(f1, SCORES, TARGET)
    assert list(values) == [f"f1_{label}" for label in labels] + [f"plain_{number}" for number in range(4)]
    assert torch.stack(list(values.values())[:4]).tolist() == pytest.approx(expected.tolist())


@pytest.mark.trap("metrics: logging a confusion-matrix tensor is an error")
def test_a_matrix_is_kept_and_is_no_number():
    suite = fed(MetricSuite({"matrix": tm.MulticlassConfusionMatrix(4)}), preds=SCORES, target=TARGET)
    assert suite.compute() == {}
    assert suite.compute_all()["matrix"].tolist() == alone(tm.MulticlassConfusionMatrix(4), SCORES, TARGET).tolist()


@pytest.mark.trap("metrics: one metric shared by train and val")
def test_the_metrics_given_stay_as_they_are():
    metric = tm.MulticlassF1Score(4)
    one, two = MetricSuite(metric), MetricSuite(metric)
    fed(one, preds=SCORES[:30], target=TARGET[:30])
    fed(two, preds=SCORES[30:], target=TARGET[30:])
    assert one.compute()["MulticlassF1Score"].item() == pytest.approx(alone(metric, SCORES[:30], TARGET[:30]).item())
    assert two.compute()["MulticlassF1Score"].item() == pytest.approx(alone(metric, SCORES[30:], TARGET[30:]).item())
    assert metric.update_count == 0
    assert metric.validate_args


def test_class_names_bring_each_class():
    names = ["ant", "bee", "cat", "dog"]
    values = fed(MetricSuite(multiclass_metrics(4), names), preds=SCORES, target=TARGET).compute()
    for key, kind in (("f1", tm.MulticlassF1Score), ("acc", tm.MulticlassAccuracy), ("recall", tm.MulticlassRecall)):
        expected = alone(kind(4, average=None), SCORES, TARGET).tolist()
        assert [values[f"{key}_{name}"].item() for name in names] == pytest.approx(expected)
    assert "kappa_ant" not in values
    assert "balanced_acc_ant" not in values


def test_wrappers_and_compositions_take_what_their_metrics_take():
    f1 = tm.MulticlassF1Score(4)
    metrics = {
        "twice": tm.MulticlassF1Score(4) + tm.MulticlassAccuracy(4),
        "range": MinMaxMetric(tm.MulticlassF1Score(4)),
        "boot": BootStrapper(tm.MulticlassF1Score(4), num_bootstraps=3),
        "inner": MetricCollection({"f1": f1}),
    }
    values = fed(MetricSuite(metrics), preds=SCORES, target=TARGET).compute()
    one = alone(f1, SCORES, TARGET).item()
    both = one + alone(tm.MulticlassAccuracy(4), SCORES, TARGET).item()
    assert values["twice"].item() == pytest.approx(both)
    assert values["range/raw"].item() == pytest.approx(one)
    assert 0 < values["boot/mean"] < 1
    assert values["inner/f1"].item() == pytest.approx(one)


class Longest(Metric):
    """A metric of somebody's own: the longest row of `lengths`, and how many rows there were."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("longest", torch.tensor(0.0), dist_reduce_fx="max")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, lengths, scale=1.0):
        self.longest = torch.maximum(self.longest, lengths.max() * scale)
        self.rows += len(lengths)

    def compute(self):
        return {"longest": self.longest, "rows": self.rows}


def test_a_metric_of_ones_own_gets_its_arguments_by_name():
    suite = MetricSuite({"own": Longest(), "acc": tm.MulticlassAccuracy(4)})
    suite.update(preds=SCORES, target=TARGET, lengths=torch.arange(60.0), scale=2.0, unused=object())
    suite.update(preds=SCORES, target=TARGET, lengths=torch.arange(10.0), scale=1.0)
    values = suite.compute()
    assert values["own/longest"] == 118
    assert values["own/rows"] == 70
    with pytest.raises(ValueError, match=r"'own' needs lengths, but got preds, target\. Return a dict"):
        MetricSuite({"own": Longest()}).update(preds=SCORES, target=TARGET)


def test_merged_states_are_those_of_all_data():
    metrics = {"own": Longest(), "r2": tmr.R2Score(), "pearson": tmr.PearsonCorrCoef()}
    inputs = {"preds": SCORES[:, 0], "target": SCORES[:, 1], "lengths": SCORES[:, 2]}
    whole = fed(MetricSuite(metrics), **inputs)
    for cuts in ((0, 60, 60, 60), (0, 13, 13, 60), (0, 20, 40, 60)):
        states = []
        for start, stop in pairwise(cuts):
            part = MetricSuite(metrics)
            if stop > start:
                fed(part, **{name: value[start:stop] for name, value in inputs.items()})
            states.append(part.state_dict())
        merged = MetricSuite(metrics)
        merged.load(states, "cpu")
        expected = {name: value.item() for name, value in whole.compute().items()}
        assert {name: value.item() for name, value in merged.compute().items()} == pytest.approx(expected, rel=1e-6)


def test_a_state_continues_where_it_was():
    for metrics in (multiclass_metrics(4, curves=True), {"own": tm.MulticlassCalibrationError(4)}):
        soft = SCORES.softmax(1)
        first = fed(MetricSuite(metrics), preds=soft[:25], target=TARGET[:25])
        second = MetricSuite(metrics)
        second.load([first.state_dict()], "cpu")
        fed(second, preds=soft[25:], target=TARGET[25:])
        whole = fed(MetricSuite(metrics), preds=soft, target=TARGET)
        assert second.compute() == whole.compute()
    with pytest.raises(ValueError, match="other metrics"):
        MetricSuite({"one": Longest(), "two": tmr.R2Score(), "three": tmr.R2Score()}).load([first.state_dict()])


def test_a_save_changes_no_bit():
    """Which batches are added up at once decides the last bits of a sum: neither saves nor a resume may change it."""

    def run(*, saves, resumes=()):
        suite, loss = MetricSuite(regression_metrics()), MeanLoss()
        for step, (preds, target) in enumerate(zip(numbers[0].split(4), numbers[1].split(4), strict=True)):
            suite.update(preds=preds, target=target)
            loss.update((preds - target).square(), samples=len(preds))
            states = (suite.state_dict(), loss.state_dict()) if saves else ()
            if step in resumes:
                suite, loss = MetricSuite(regression_metrics()), MeanLoss()
                suite.load([states[0]], "cpu")
                loss.load([states[1]], "cpu")
        return {**suite.compute(), "loss": loss.compute()}

    numbers = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2))  # the buffer is emptied once
    assert run(saves=True) == run(saves=True, resumes=(3, 500, 1200)) == run(saves=False)


def test_nothing_is_read_after_the_first_batch_and_what_a_step_returned_may_be_overwritten():
    options = {"top_k": 2, "curves": True, "soft_targets": True, "from_logits": False}
    for made, soft, target in (
        (multiclass_metrics(4, **options), SCORES.softmax(-1), TARGET),
        (calibration_metrics(4), SCORES.softmax(-1), TARGET),
        (ood_metrics(), SCORES[:, 0], TARGET % 2),
    ):
        suite = MetricSuite(made, curves=True)
        suite.update(preds=soft, target=target)
        values = {name: value.item() for name, value in suite.compute().items()}
        with HostReads() as reads:
            for _ in range(200):
                given = soft.clone()
                suite.update(preds=given, target=target)
                given.zero_()
            again = suite.compute()
        assert reads.count == 0
        assert {name: again[name].item() for name in values} == pytest.approx(values, rel=0.02)


def test_no_graph_is_kept():
    weight = torch.ones(4, requires_grad=True)
    suite = MetricSuite({"f1": tm.MulticlassF1Score(4), "own": Longest()})
    suite.update(preds=SCORES * weight, target=TARGET, lengths=weight * 2)
    assert not any(tensor.requires_grad for batch in suite._buffer._pending for tensor in batch.values())
    assert not suite.compute()["own/longest"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sums_are_exact_whatever_the_predictions_type(dtype):
    generator = torch.Generator().manual_seed(0)
    preds, target = torch.rand(5000, generator=generator).to(dtype), torch.rand(5000, generator=generator).to(dtype)
    suite = fed(MetricSuite({"mse": tmr.MeanSquaredError()}), 32, preds=preds, target=target)
    expected = (preds.double() - target.double()).square().mean().item()
    assert suite.compute()["mse"].item() == pytest.approx(expected, rel=1e-12)


def test_batches_of_other_shapes_types_and_modes_come_together():
    suite = MetricSuite(tm.MulticlassAccuracy(4, average="micro"))
    right = 0
    for number, (rows, height) in enumerate([(3, 2), (3, 2), (5, 2), (2, 6), (1, 1)]):
        with torch.inference_mode(number % 2 == 0):
            scores = torch.rand(rows, 4, height, generator=GENERATOR).to([torch.float32, torch.float64][number % 2])
            target = torch.randint(4, (rows, height), generator=GENERATOR)
            suite.update(preds=scores, target=target)
            right += (scores.argmax(1) == target).sum().item()
    suite.update(preds=torch.tensor([[0]]), target=torch.tensor([[0]]))
    assert suite.compute()["MulticlassAccuracy"].item() == pytest.approx((right + 1) / (6 + 6 + 10 + 12 + 1 + 1))


def test_large_batches_are_counted_at_once():
    suite = MetricSuite(tm.MulticlassAccuracy(4, average="micro"))
    scores, target = torch.rand(4, 4, 300, 300), torch.randint(4, (4, 300, 300))
    suite.update(preds=scores, target=target)
    assert not suite._buffer._pending
    assert suite.compute()["MulticlassAccuracy"].item() == pytest.approx(
        (scores.argmax(1) == target).float().mean().item()
    )


def test_later_invalid_values_make_the_values_nan_and_are_counted():
    suite = MetricSuite(multiclass_metrics(4))
    suite.update(preds=SCORES, target=TARGET)
    assert suite.num_invalid() == 0
    broken = SCORES.clone()
    broken[3, 2] = float("nan")
    suite.update(preds=broken, target=TARGET)
    suite.update(preds=SCORES, target=TARGET + 1)
    assert suite.num_invalid() == 1 + (TARGET == 3).sum()
    assert all(value.isnan() for value in suite.compute().values())
    suite.reset()
    suite.update(preds=SCORES, target=TARGET)
    assert not any(value.isnan() for value in suite.compute().values())


@pytest.mark.trap("metrics: torchmetrics takes scores for logits batch by batch")
def test_later_logits_are_not_taken_for_probabilities():
    suite = MetricSuite(binary_metrics())
    suite.update(preds=torch.tensor([0.2, 0.7]), target=torch.tensor([0, 1]))
    suite.update(preds=torch.tensor([-3.0, 0.7]), target=torch.tensor([0, 1]))
    assert all(value.isnan() for value in suite.compute().values())


@pytest.mark.trap("metrics: RetrievalMAP and RetrievalMRR drop relevant documents whose score is not above 0")
def test_rankings_by_negative_scores():
    metrics = {"map": torchmetrics.retrieval.RetrievalMAP(), "mrr": torchmetrics.retrieval.RetrievalMRR()}
    suite = MetricSuite(metrics)
    scores, target = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0, 1, 0])
    suite.update(preds=scores, target=target, indexes=torch.zeros(3, dtype=torch.long))
    assert {name: value.item() for name, value in suite.compute().items()} == {"map": 0.5, "mrr": 0.5}


def test_an_own_update_shares_no_state():
    class Mine(tm.MulticlassF1Score):
        def update(self, preds, target):
            super().update(preds, (target + 1) % 4)

    suite = fed(MetricSuite({"mine": Mine(4), "f1": tm.MulticlassF1Score(4)}), preds=SCORES, target=TARGET)
    assert len(suite.state_dict()["groups"]) == 2
    assert suite.confusion_matrix() is not None
    key = "mine", False
    assert not any(group.members[key].validate_args for group in suite._groups if key in group.members)
    shifted = alone(tm.MulticlassF1Score(4), SCORES, (TARGET + 1) % 4)
    assert suite.compute()["mine"].item() == pytest.approx(shifted.item())


BAD = {
    "no batch dimension": (tm.MulticlassF1Score(4), SCORES[0], TARGET[0], "'it': the predictions have no batch dim"),
    "scalar": (tm.BinaryF1Score(), torch.tensor(0.5), torch.tensor(1), "have no batch dimension"),
    "scores as classes": (tm.MulticlassF1Score(4), SCORES[:, 0], TARGET, r"scores of the shape \(N, C, \.\.\.\)"),
    "other length": (tm.MulticlassF1Score(4), SCORES[:5], TARGET, r"preds: float32 \(5, 4\), target: int64 \(60,\)"),
    "target negative": (tm.MulticlassF1Score(4, ignore_index=9), SCORES, TARGET - 1, "0 to 3 or ignore_index=9, got"),
    "logits, multiclass": (tm.MulticlassAUROC(4), SCORES * 4 - 2, TARGET, r"torch\.softmax\(logits, dim=1\)"),
    "logits above 1 alone": (tm.BinaryF1Score(), SCORES[:, 0] * 1.5, TARGET % 2, r"from 0.* to 1\..*sigmoid"),
    "logits, multilabel": (tm.MultilabelF1Score(4), SCORES * 4, (SCORES > 0.5).long(), r"torch\.sigmoid"),
    "labels": (tm.MultilabelF1Score(3), SCORES, (SCORES > 0.5).long(), r"3 labels: .* need the shape \(N, 3\)"),
    "no labels": (tm.MultilabelF1Score(3), SCORES[:, 0], TARGET % 2, r"predictions need the shape \(N, 3\)"),
    "classes for scores": (tm.MulticlassAUROC(4), TARGET, TARGET, "needs scores, but the predictions are classes"),
    "classes, top k": (tm.MulticlassAccuracy(4, top_k=2), TARGET, TARGET, "the metric needs scores"),
    "classes out of range": (tm.MulticlassF1Score(4), TARGET + 1, TARGET, "predictions must be 0 to 3, got 4"),
    "NaN": (tm.MulticlassF1Score(4), torch.full((60, 4), torch.nan), TARGET, "240 of 240 predictions are NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_first_batch_is_refused_in_words(name):
    metric, preds, target, words = BAD[name]
    suite = MetricSuite({"it": metric})
    with pytest.raises(ValueError, match=words):
        suite.update(preds=preds, target=target)
    assert suite.updates == 0


def test_what_is_good_is_not_refused():
    MetricSuite(tm.MulticlassF1Score(4)).update(preds=SCORES * 9 - 4, target=TARGET)  # logits will do
    MetricSuite(tm.MulticlassF1Score(4)).update(preds=SCORES.argmax(1), target=TARGET)
    MetricSuite(tm.MulticlassF1Score(4, ignore_index=-100)).update(preds=SCORES, target=torch.full((60,), -100))
    MetricSuite(tm.BinaryF1Score()).update(preds=SCORES[:, 0], target=(TARGET % 2).float())  # as the loss needs it
    MetricSuite(tmr.MeanSquaredError()).update(preds=SCORES, target=SCORES)
    MetricSuite(tm.BinaryF1Score()).update(preds=TARGET % 2, target=TARGET % 2)
    for metric in (tm.BinaryF1Score(), tm.BinaryAUROC()):  # as sure as can be
        MetricSuite(metric).update(preds=(TARGET % 2).float(), target=TARGET % 2)
    MetricSuite(tm.MulticlassAUROC(4)).update(preds=torch.eye(4)[TARGET], target=TARGET)
    suite = MetricSuite(tm.BinaryAUROC())
    suite.update(preds=SCORES[:, 0], target=(TARGET % 2).float())
    assert 0 < suite.compute()["BinaryAUROC"] < 1


def test_the_task_is_that_of_the_first_classification():
    metrics = {
        "own": Longest(),
        "error": tmr.MeanSquaredError(),
        "f1": tm.BinaryF1Score(),
        "no": tm.MulticlassF1Score(3),
    }
    assert MetricSuite(metrics).task.kind == "binary"
    assert MetricSuite({"error": tmr.MeanSquaredError()}).task is None


def test_curves_of_logits_are_those_of_their_probabilities():
    probabilities = SCORES.softmax(1)
    counts = []
    for preds in (probabilities, probabilities.log()):
        scores = ScoreHistogram(Task("multiclass", classes=4))
        scores.update({"preds": preds, "target": TARGET})
        counts.append(scores.state())
    assert torch.equal(*counts)
    highest = (probabilities.amax(1) * ScoreHistogram.bins).long()
    assert torch.equal(counts[0][4].sum(0), torch.bincount(highest, minlength=ScoreHistogram.bins))


@cases(
    "metrics, names, error, words",
    ([tm.BinaryF1Score()], None, TypeError, "metrics must be a Metric"),
    ("multiclass", None, TypeError, "metrics must be"),
    ({}, None, ValueError, "must hold at least one metric"),
    (tm.MulticlassF1Score(4), ["a", "b"], ValueError, "2 names, but the metric 'MulticlassF1Score' has 4 classes"),
    (tm.MulticlassF1Score(2), ["a", "a"], ValueError, "not repeat a name, .* got a twice\\."),
    (tm.MulticlassF1Score(2), "ab", TypeError, "list of names"),
)
def test_wrong_metrics_are_refused(metrics, names, error, words):
    with pytest.raises(error, match=words):
        MetricSuite(metrics, names)


@pytest.mark.parametrize("kind", [tmr.PearsonCorrCoef, tmr.ConcordanceCorrCoef])
def test_the_merged_states_of_several_ranks_are_updated_further(kind):
    """Their statistics are kept in a stack, one row for each rank, which `update` takes for one statistic."""
    numbers = torch.rand(2, 40, generator=torch.Generator().manual_seed(1))
    parts = numbers[:, :30].split(10, dim=1)
    ranks = [fed(MetricSuite({"r": kind()}), preds=part[0], target=part[1]) for part in parts]
    resumed = MetricSuite({"r": kind()})
    resumed.load([rank.state_dict() for rank in ranks])
    again = MetricSuite({"r": kind()})
    for start in (30, 35):  # what was resumed is saved and resumed once more
        fed(resumed, preds=numbers[0, start : start + 5], target=numbers[1, start : start + 5])
        again.load([resumed.state_dict()])
        resumed.load([again.state_dict()])
    whole = kind()
    whole.update(*numbers)
    assert resumed.compute()["r"].item() == pytest.approx(whole.compute().item(), abs=1e-6)
    assert again.compute()["r"].item() == pytest.approx(whole.compute().item(), abs=1e-6)


def test_a_running_mean_keeps_its_window_after_a_resume():
    values = torch.arange(8.0) ** 2
    whole, begun, resumed = (MetricSuite({"m": torchmetrics.RunningMean(window=3)}) for _ in range(3))
    for value in values:
        whole.update(value=value)
    for value in values[:4]:
        begun.update(value=value)
    resumed.load([begun.state_dict()])
    assert resumed.compute()["m"] == begun.compute()["m"]
    resumed.load([begun.state_dict()])
    for value in values[4:]:
        resumed.update(value=value)
    assert resumed.compute()["m"] == whole.compute()["m"]
    assert whole.compute()["m"].item() == pytest.approx(values[-3:].mean().item())


@pytest.mark.parametrize("rows", [10, 100])
def test_the_area_of_a_ranking_has_no_ties_that_the_scores_have_not(rows):
    scores = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    target = (scores + torch.randn(rows, generator=torch.Generator().manual_seed(1)) > 0).long()
    suite = MetricSuite({"area": torchmetrics.retrieval.RetrievalAUROC()})
    suite.update(preds=scores, target=target, indexes=torch.zeros(rows, dtype=torch.long))
    expected = tm.BinaryAUROC()
    expected.update(scores.sigmoid(), target)
    assert suite.compute()["area"].item() == pytest.approx(expected.compute().item(), abs=1e-6)


def test_accuracy_over_a_vocabulary_keeps_no_confusion_matrix():
    target = torch.arange(50) * 100
    suite = MetricSuite({"acc": tm.MulticlassAccuracy(50_000, average="micro")}, curves=True)
    suite.update(preds=torch.nn.functional.one_hot(target, 50_000).float().roll(1, 0), target=target.roll(2))
    assert suite.confusion_matrix() is None
    assert suite.score_histogram().shape == (21, 2, 300)
    assert suite.compute()["acc"] == 0
    suite.update(preds=target, target=target)
    assert suite.compute()["acc"] == 0.5


def test_scores_that_are_nan_and_empty_batches_are_in_no_histogram():
    for preset, scores in ((binary_metrics(), torch.rand(6)), (multiclass_metrics(4), SCORES[:6].softmax(1))):
        suite = MetricSuite(preset, curves=True)
        suite.update(preds=scores[:0], target=TARGET[:0])
        assert suite.score_histogram() is None
        suite.update(preds=scores, target=TARGET[:6] % 2)
        suite.update(preds=torch.full_like(scores, torch.nan), target=TARGET[:6] % 2)
        assert (suite.score_histogram().sum((1, 2)) == 6).all()


def test_numbers_are_stacked_on_one_device():
    stacked = stack_numbers([torch.tensor(1.0, device="meta"), torch.tensor(2, dtype=torch.int32)])
    assert (stacked.device.type, stacked.dtype, stacked.shape) == ("meta", torch.float64, (2,))
