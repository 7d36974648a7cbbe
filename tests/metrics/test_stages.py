"""Metrics run in each stage alone, in inference mode and out of it: presets, torchmetrics' own, and anybody's."""

import inspect

import pytest
import torch
import torchmetrics
import torchmetrics.classification as tm
import torchmetrics.regression as tmr
import torchmetrics.retrieval as tmir
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MinMaxMetric, MultioutputWrapper, Running

from lightning_tricks import MetricsMonitor
from lightning_tricks.metrics import (
    MetricSuite,
    binary_metrics,
    multiclass_metrics,
    multilabel_metrics,
    regression_metrics,
    retrieval_metrics,
    segmentation_metrics,
)
from lightning_tricks.metrics.core.metric_table import can_concat_batches
from tests.metrics.tables import Table
from tests.small import QUIET

pytestmark = pytest.mark.oldest

ROWS = 24
GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.arange(ROWS) % 5


def rand(*shape):
    return torch.rand(ROWS, *shape, generator=GENERATOR)


def whole(classes, *shape):
    return torch.randint(classes, (ROWS, *shape), generator=GENERATOR)


DATA = {
    "binary": {"preds": rand(), "target": torch.arange(ROWS) % 2},
    "multiclass": {"preds": rand(4).softmax(1), "target": torch.arange(ROWS) % 4},
    "multilabel": {"preds": rand(4), "target": whole(2, 4)},
    "regression": {"preds": rand() + 0.1, "target": rand() + 0.1},
    "outputs": {"preds": rand(2), "target": rand(2)},
    "retrieval": {"preds": rand(), "target": torch.arange(ROWS) % 2, "indexes": QUERY},
    "pixels": {"preds": rand(4, 3, 3), "target": whole(4, 3, 3)},
    "groups": {"preds": rand(), "target": torch.arange(ROWS) % 2, "groups": torch.arange(ROWS) % 3 % 2},
}
PRESETS = {
    "binary": (lambda: binary_metrics(0.3, ignore_index=-1), "binary"),
    "multiclass": (lambda: multiclass_metrics(4), "multiclass"),
    "multiclass, all": (lambda: multiclass_metrics(4, ignore_index=1, top_k=2, curves=True), "multiclass"),
    "multilabel": (lambda: multilabel_metrics(4), "multilabel"),
    "multilabel, all": (lambda: multilabel_metrics(4, threshold=0.3, ignore_index=-1), "multilabel"),
    "regression": (lambda: regression_metrics(), "regression"),
    "regression, outputs": (lambda: regression_metrics(2), "outputs"),
    "retrieval": (lambda: retrieval_metrics(top_k=2, ignore_index=-1), "retrieval"),
    "segmentation": (lambda: segmentation_metrics(4, ignore_index=3), "pixels"),
}


def run(monitor, data, *functions, batch_size=6, **arguments):
    """Call functions of one Trainer one after the other; return the values of each stage, as it saw them last."""
    trainer = Trainer(callbacks=[monitor], **{**QUIET, "max_epochs": 1, "num_sanity_val_steps": 2, **arguments})
    module, loader = Table(list(data)), DataLoader(TensorDataset(*data.values()), batch_size)
    seen = {}
    for function in functions:
        loaders = [loader] * (2 if function == "fit" else 1)
        getattr(trainer, function)(module, *loaders, **({"verbose": False} if function in ("validate", "test") else {}))
        for key, value in trainer.callback_metrics.items():
            stage, _, name = key.partition("/")
            seen.setdefault(stage, {})[name] = value.item()
    return seen


@pytest.mark.filterwarnings("ignore")  # torchmetrics', of classes that do not occur
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_in_each_stage_alone(preset, inference_mode):
    make, kind = PRESETS[preset]
    suite = MetricSuite(make())
    for start in range(0, ROWS, 6):
        suite.update(**{name: column[start : start + 6] for name, column in DATA[kind].items()})
    expected = {name: value.item() for name, value in suite.compute().items()}
    for function, stage in (("validate", "val"), ("test", "test"), ("fit", "train"), ("fit", "val"), ("predict", "")):
        monitor = MetricsMonitor(make(), log_plots=False, stages=[stage] if stage else ["train", "val", "test"])
        seen = run(monitor, DATA[kind], function, inference_mode=inference_mode)
        if stage:
            assert {name: seen[stage][name] for name in expected} == pytest.approx(expected, nan_ok=True), stage


@pytest.mark.parametrize("inference_mode", [True, False])
def test_one_monitor_in_one_stage_after_the_other(inference_mode):
    functions = ("validate", "validate", "fit", "validate", "test", "fit", "test")
    metrics = {"own": Writes(), "hinge": tm.MulticlassHingeLoss(4), "auroc": tm.MulticlassAUROC(4, thresholds=5)}
    monitor = MetricsMonitor(metrics, log_plots=False)
    seen = run(monitor, DATA["multiclass"], *functions, inference_mode=inference_mode)
    seen["train"].pop("loss")
    assert seen["train"] == pytest.approx(seen["val"])
    assert seen["val"] == pytest.approx(seen["test"])
    assert seen["val"]["own"] == pytest.approx(ROWS + DATA["multiclass"]["preds"].sum().item())


class Writes(Metric):
    """Somebody's metric that writes into its states, tensors and lists, and into what it is given."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("rows", torch.zeros(1), dist_reduce_fx="sum")
        self.add_state("kept", [], dist_reduce_fx="cat")

    def update(self, preds, target):
        self.rows[0] += len(target)
        self.kept.append(preds)
        self.kept[-1].mul_(2)
        target.zero_()

    def compute(self):
        total = sum(part.sum() for part in self.kept)
        self.rows.add_(total / 2)
        return self.rows


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_metric_that_writes_into_its_arguments_writes_into_no_steps(step):
    class Looks(Table):
        def training_step(self, batch, batch_idx):
            self.returned = super().training_step(batch, batch_idx)
            return self.returned

        def validation_step(self, batch, batch_idx):
            self.returned = super().validation_step(batch, batch_idx)
            return self.returned

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.kept = {name: self.returned[name].clone() for name in ("preds", "target")}

        on_validation_batch_end = on_train_batch_end

    data, module = DATA["multiclass"], Looks(["preds", "target"])
    loader = DataLoader(TensorDataset(*data.values()), batch_size=ROWS)
    loaders = [loader, loader] if step == "training_step" else [loader]
    trainer = Trainer(callbacks=[MetricsMonitor({"own": Writes()}, log_plots=False)], max_epochs=1, **QUIET)
    if step == "training_step":
        trainer.fit(module, *loaders)
    else:
        trainer.validate(module, *loaders, verbose=False)
    assert all(torch.equal(module.kept[name], data[name]) for name in data)


def test_a_suite_made_in_one_mode_is_used_in_another():
    preds, target = DATA["multiclass"].values()
    metrics = {"own": Writes(), "hinge": tm.MulticlassHingeLoss(4), "top": tm.MulticlassAccuracy(4, top_k=2)}
    values = []
    for modes in ((True, False, True), (False, True, False), (False, False, False), (True, True, True)):
        with torch.inference_mode(modes[0]):
            suite = MetricSuite({**metrics, "made": tm.MulticlassHingeLoss(4)})
            suite.update(preds=preds[:6] + 0, target=target[:6] + 0)
        with torch.inference_mode(modes[1]):
            suite.update(preds=preds[6:] + 0, target=target[6:] + 0)
            state = suite.state_dict()
        with torch.inference_mode(modes[2]):
            merged = MetricSuite({**metrics, "made": tm.MulticlassHingeLoss(4)})
            merged.load([state], "cpu")
        merged.update(preds=preds, target=target)
        suite.update(preds=preds, target=target)
        values += [{name: value.item() for name, value in part.compute().items()} for part in (suite, merged)]
        suite.reset()
        suite.update(preds=preds, target=target)
    assert all(value == pytest.approx(values[0]) for value in values)


def test_a_loaded_state_is_not_written_to():
    preds, target = DATA["multiclass"].values()
    first, second = MetricSuite({"own": Writes()}), MetricSuite({"own": Writes()})
    first.update(preds=preds, target=target)
    state = first.state_dict()
    before = MetricSuite({"own": Writes()})
    before.load([state])
    second.load([state])
    second.update(preds=preds, target=target)
    second.compute()
    assert before.compute()["own"] == first.compute()["own"]


def _classes(module, **given):
    for name, kind in vars(module).items():
        if inspect.isclass(kind) and issubclass(kind, Metric) and not inspect.isabstract(kind):
            parameters = inspect.signature(kind).parameters
            yield name, kind, {argument: value for argument, value in given.items() if argument in parameters}


def _classification():
    least = {"min_recall": 0.5, "min_precision": 0.5, "min_sensitivity": 0.5, "min_specificity": 0.5, "beta": 2.0}
    for name, kind, arguments in _classes(tm, **least):
        for start, task, sizes in (
            ("Binary", "binary", {}),
            ("Multiclass", "multiclass", {"num_classes": 4}),
            ("Multilabel", "multilabel", {"num_labels": 4}),
        ):
            of_groups = {"num_groups": 2} if name in ("BinaryFairness", "BinaryGroupStatRates") else {}
            if name.startswith(start):
                options = {"thresholds": 5} if "thresholds" in inspect.signature(kind).parameters else {}
                yield name, kind(**sizes, **of_groups, **arguments, **options), "groups" if of_groups else task


def _others():
    two = ("CosineSimilarity",)
    for name, kind, arguments in _classes(tmr, threshold=0.5):
        wants = set(inspect.signature(kind.update).parameters)
        if {"preds", "target"} <= wants and name not in ("ContinuousRankedProbabilityScore",):
            yield name, kind(**arguments), "outputs" if name in two else "regression"
    for name, kind, arguments in _classes(tmir):
        yield name, kind(**arguments), "retrieval"
    f1 = tm.MulticlassF1Score(4)
    wrapped = [
        BootStrapper(f1, num_bootstraps=2), MinMaxMetric(f1), ClasswiseWrapper(tm.MulticlassF1Score(4, average=None)),
        Running(torchmetrics.MeanSquaredError()), f1 + tm.MulticlassAccuracy(4), torchmetrics.MeanMetric(),
    ]  # fmt: skip
    for metric in wrapped[:3]:
        yield type(metric).__name__, metric, "multiclass"
    yield "Running", wrapped[3], "regression"
    yield "Composition", wrapped[4], "multiclass"
    yield "MultioutputWrapper", MultioutputWrapper(tmr.R2Score(), 2), "outputs"
    yield "Collection", MetricCollection({"f1": f1, "acc": tm.MulticlassAccuracy(4, top_k=2)}), "multiclass"


@pytest.mark.filterwarnings("ignore")
def test_every_metric_of_torchmetrics_in_validation_alone_whatever_the_cuts():
    kinds = {}
    for name, metric, kind in (*_classification(), *_others()):
        kinds.setdefault(kind, {})[name] = metric
    assert sum(map(len, kinds.values())) > 100
    for kind, metrics in kinds.items():
        seen = []
        for batch_size, inference_mode in ((1, True), (7, False), (ROWS, True)):
            monitor = MetricsMonitor(metrics, log_plots=False, stages=["val"])
            options = {"batch_size": batch_size, "inference_mode": inference_mode}
            seen.append(run(monitor, DATA[kind], "validate", **options)["val"])
            named = [name for name in metrics if any(key.startswith(f"val/{name}") for key in monitor.results)]
            assert named == list(metrics)
            assert seen[-1].keys() <= {key.removeprefix("val/") for key in monitor.results}
        whole = {name for name, metric in metrics.items() if isinstance(metric, Metric) and can_concat_batches(metric)}
        cut = [{key: value for key, value in values.items() if key.split("_")[0] in whole} for values in seen]
        assert len(cut[0]) >= len(whole) / 2 or kind == "groups"
        assert cut[0] == pytest.approx(cut[2], rel=1e-4, abs=2e-5, nan_ok=True)
        assert cut[1] == pytest.approx(cut[2], rel=1e-4, abs=2e-5, nan_ok=True)


def test_what_is_no_number_is_kept_and_not_logged():
    metrics = {"roc": tm.BinaryROC(), "matrix": tm.BinaryConfusionMatrix(), "at": tm.BinaryRecallAtFixedPrecision(0.5)}
    monitor = MetricsMonitor(metrics, log_plots=False)
    assert run(monitor, DATA["binary"], "validate")["val"].keys() == {"at_0", "at_1"}  # the recall and the threshold
    assert len(monitor.results["val/roc"]) == 3
    assert monitor.results["val/matrix"].sum() == ROWS
    alone = MetricsMonitor({"roc": tm.BinaryROC()}, log_plots=False)
    assert run(alone, DATA["binary"], "validate") == {}
    assert run(alone, DATA["binary"], "fit").keys() == {"train"}
    assert "val/roc" in alone.results


@pytest.mark.parametrize("function", ["fit", "validate", "test"])
@pytest.mark.parametrize("combined", [False, True])
def test_loaders_in_a_dict_keep_their_names(function, combined):
    data = {"preds": torch.eye(3)[torch.arange(12) % 3], "target": torch.arange(12) % 3}
    module, loader = Table(list(data)), DataLoader(TensorDataset(*data.values()), batch_size=6)
    given = {"easy": loader, "hard": loader}
    loaders = CombinedLoader(given, "sequential") if combined else given
    monitor = MetricsMonitor({"task": "multiclass", "num_classes": 3}, log_plots=False, best={"val/hard/acc": "max"})
    trainer = Trainer(max_epochs=1, callbacks=[monitor], **QUIET)
    if function == "fit":
        trainer.fit(module, loader, loaders)
        assert monitor.best["val/hard/acc"] == (1.0, 2)
    else:
        getattr(trainer, function)(module, loaders, verbose=False)
    records = monitor.state_dict()["history"]
    assert [record["loader_name"] for record in records if record["stage"] != "train"] == ["easy", "hard"]
    assert {key.rsplit("/", 1)[0] for key in monitor.results if not key.startswith("train")} == {
        f"{function if function == 'test' else 'val'}/{name}" for name in given
    }
