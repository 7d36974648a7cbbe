import io
import math
import warnings

import pytest
import torch
import torchmetrics.classification as tm
import torchmetrics.regression as tmr
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, Metric
from torchmetrics.aggregation import RunningMean
from torchmetrics.image import PeakSignalNoiseRatio
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.text import EditDistance
from torchmetrics.wrappers import MetricTracker

from lightning_tricks import MetricsMonitor, Tricks, TricksMixin
from lightning_tricks._shared.console import make_console
from lightning_tricks.metrics import MetricsError, binary_metrics, multiclass_metrics
from lightning_tricks.metrics.core.history import EpochRecord, History
from tests.metrics.tables import OneLoader, Table, Trained, loader_of, numbers, table, trainer, truth
from tests.small import EvaluatedNet, Net, cases, digits, fork, without_warnings

# Lightning's advice to validate on one process, which is what exact evaluation makes needless
pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")

SIX = {"task": "multiclass", "num_classes": 10}


@pytest.mark.trap("metrics: one metric shared by train and val, and over two val loaders")
@pytest.mark.trap("metrics: self.log(f1(p, y)) is the mean of batches, logging compute() each step another mean")
def test_each_stage_and_loader_is_measured_on_its_own():
    data = [table(count, seed=seed)[:2] for seed, count in enumerate((20, 13, 9))]
    f1 = tm.MulticlassF1Score(4)
    fitter = trainer(MetricsMonitor({"f1": f1}))
    fitter.fit(Table(), loader_of(*data[0]), [loader_of(*data[1]), loader_of(*data[2])])
    expected = {
        key: truth(tm.MulticlassF1Score(4), *columns)
        for key, columns in zip(("train/f1", "val/0/f1", "val/1/f1"), data, strict=True)
    }
    assert numbers(fitter.callback_metrics) == pytest.approx({**expected, "train/loss": 1.0})
    assert f1.update_count == 0


@pytest.mark.trap("metrics: sanity checking counts, and update without reset continues counting")
def test_sanity_checking_and_the_last_epoch_do_not_count():
    class Count(tmr.MeanSquaredError):
        def compute(self):
            return self.total.float()

    seen = []

    class Look(Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(trainer.callback_metrics.get("val/rows"))

    scores, target, _ = table(12)
    monitor = MetricsMonitor({"rows": Count()}, stages=["val"])
    fitter = trainer(monitor, Look(), max_epochs=3, num_sanity_val_steps=2)
    loader = loader_of(scores[:, 0], target.float())
    fitter.fit(OneLoader(), loader, loader)
    assert seen == [None, 12, 12, 12]
    assert [row["epoch"] for row in monitor.history()] == [0, 1, 2]


class Learning(EvaluatedNet):
    """A net whose validation gets better, and that follows a plateau of what the monitor logs."""

    monitored = "val/acc"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        out_of_reach = {"threshold": 2.0, "threshold_mode": "abs"}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, **out_of_reach)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitored}}


@pytest.mark.parametrize("monitored", ["val/acc", "train/acc"])
@pytest.mark.parametrize("first", [True, False])
def test_checkpoints_stopping_and_plateaus_see_the_values_in_any_order(tmp_path, monitored, first):
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}-{val/acc:.2f}", monitor=monitored, mode="max", save_top_k=-1)
    stopping = EarlyStopping(monitored, mode="max", patience=1, min_delta=2.0)
    monitor = MetricsMonitor(SIX, class_names=[f"digit {number}" for number in range(10)])
    others = [checkpoints, stopping]
    module = Learning()
    module.monitored = monitored
    loader = DataLoader(digits(), 4)
    fitter = trainer(*([monitor, *others] if first else [*others, monitor]), max_epochs=9, enable_checkpointing=True)
    fitter.fit(module, loader, loader)
    assert fitter.current_epoch == 2  # stopped
    assert checkpoints.best_model_score is not None
    assert fitter.optimizers[0].param_groups[0]["lr"] < 0.1  # the plateau has stepped
    assert len([key for key in fitter.callback_metrics if key.startswith("val/f1_digit ")]) == 10


class _Loss(OneLoader):
    """Logs a loss of its own under the monitor's key, in the way that `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how, self.rows = how, torch.zeros(())  # which each step overwrites

    def validation_step(self, batch, batch_idx):
        if self.how == "step":
            self.log("val/loss", 7.0)
        return {**super().validation_step(batch, batch_idx), "loss": self.rows.fill_(len(batch[1]))}

    def on_validation_epoch_end(self):
        if self.how == "epoch":
            self.log("val/loss", 7.0)


@pytest.mark.parametrize(("how", "expected"), [("step", 7.0), ("epoch", 7.0), ("", (3 * 16 + 1) / 13)])
def test_the_loss_is_the_modules_or_the_mean_over_samples(how, expected):
    fitter = trainer(MetricsMonitor({"acc": tm.MulticlassAccuracy(4)}), max_epochs=2)
    loader = loader_of(*table(13)[:2])
    fitter.fit(_Loss(how), loader, loader)
    assert fitter.callback_metrics["val/loss"].item() == pytest.approx(expected)
    assert fitter.callback_metrics["train/loss"].item() == 1.0


def test_validation_within_a_training_epoch_leaves_the_training_alone():
    scores, target, _ = table(40)
    monitor = MetricsMonitor({"f1": tm.MulticlassF1Score(4)})
    fitter = trainer(monitor, val_check_interval=3)
    fitter.fit(OneLoader(), loader_of(scores, target), loader_of(scores[:9], target[:9]))
    assert fitter.callback_metrics["train/f1"].item() == pytest.approx(truth(tm.MulticlassF1Score(4), scores, target))
    values = [row["value"] for row in monitor.history() if (row["stage"], row["metric"]) == ("val", "f1")]
    assert values == pytest.approx([truth(tm.MulticlassF1Score(4), scores[:9], target[:9])] * 3)


class _Keeper(Callback):
    """Writes what each rank sees at the end of a stage."""

    def __init__(self, folder):
        self.folder = folder

    def on_validation_end(self, trainer, pl_module):
        torch.save(numbers(trainer.callback_metrics), self.folder / f"{trainer.global_rank}.pt")

    on_test_end = on_validation_end


def two_ranks(folder, metrics, **options):
    """A Trainer of two ranks, which write what they see into a folder."""
    return trainer(MetricsMonitor(metrics), _Keeper(folder), strategy="ddp_fork", devices=2, **options)


def of_ranks(folder):
    values = [torch.load(file) for file in sorted(folder.glob("*.pt"))]
    assert len({repr(rank) for rank in values}) == 1  # NaN included
    return len(values), values[0]


class _Logs(OneLoader):
    """Everything by name, a loss for each sample, and a value that the module itself logs and synchronises."""

    def __init__(self):
        super().__init__(("preds", "target", "indexes"))

    def validation_step(self, batch, batch_idx):
        self.log("own", batch[0].mean(), on_step=True, on_epoch=True, sync_dist=True)
        outputs = super().validation_step(batch, batch_idx)
        return {**outputs, "loss": (outputs["preds"] - outputs["target"]).abs()}


def rank_metrics():
    return {**dict(binary_metrics().items()), "map": RetrievalMAP()}


@pytest.mark.trap("metrics: DistributedSampler pads, so that synchronised values are wrong (#4732 #7929 #5060)")
@pytest.mark.trap("metrics: torchmetrics' sync aborts on uneven retrieval updates and on a rank without samples")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("count", [1, 7, 103])
def test_evaluation_on_several_ranks_is_that_of_one_process(tmp_path, monkeypatch, world, count):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    scores, target, query = table(count)
    columns = scores[:, 0], target % 2, query
    one = trainer(MetricsMonitor(rank_metrics()))
    (expected,) = one.validate(_Logs(), loader_of(*columns), verbose=False)
    expected = {key: value for key, value in expected.items() if not key.startswith("own")}
    parallel = trainer(MetricsMonitor(rank_metrics()), _Keeper(tmp_path), strategy="ddp_fork", devices=world)
    parallel.validate(_Logs(), loader_of(*columns), verbose=False)
    ranks, values = of_ranks(tmp_path)
    assert ranks == world
    assert {key: values[key] for key in expected} == pytest.approx(expected, abs=1e-7, nan_ok=True)
    assert {"own_epoch", "val/auroc", "val/f1", "val/map", "val/loss"} <= values.keys()


@pytest.mark.parametrize("function", ["fit", "test"])
def test_fitting_and_testing_on_several_ranks_are_exact_too(tmp_path, function):
    scores, target, _ = table(11)
    loaders = [loader_of(scores, target)] * (2 if function == "fit" else 1)
    getattr(two_ranks(tmp_path, {"f1": tm.MulticlassF1Score(4)}), function)(OneLoader(), *loaders)
    _, values = of_ranks(tmp_path)
    stage = {"fit": "val", "test": "test"}[function]
    assert values[f"{stage}/f1"] == pytest.approx(truth(tm.MulticlassF1Score(4), scores, target))


def test_two_loaders_of_which_one_rank_sees_one_only(tmp_path):
    first, second = table(1), table(9, seed=1)
    fitter = two_ranks(tmp_path, {"auroc": tm.MulticlassAUROC(4, average="weighted")})
    with without_warnings():  # torchmetrics', of classes that do not occur
        fitter.validate(Table(), [loader_of(*first[:2]), loader_of(*second[:2])], verbose=False)
        expected = truth(tm.MulticlassAUROC(4, average="weighted"), *second[:2])
    values = of_ranks(tmp_path)[1]
    assert values["val/1/auroc"] == pytest.approx(expected)
    assert "val/0/auroc" in values


def warnings_of_ranks(folder, module, loader, **arguments):
    class Hear(Callback):
        def on_validation_start(self, trainer, pl_module):
            self.catcher = warnings.catch_warnings(record=True)
            self.heard = self.catcher.__enter__()
            warnings.simplefilter("always")

        def on_validation_end(self, trainer, pl_module):
            self.catcher.__exit__(None, None, None)
            words = [str(warning.message) for warning in self.heard if "MetricsMonitor" in str(warning.message)]
            torch.save(words, folder / f"{trainer.global_rank}.pt")

    monitor = MetricsMonitor({"f1": tm.MulticlassF1Score(4)})
    trainer(Hear(), monitor, strategy="ddp_fork", devices=2, **arguments).validate(module, loader, verbose=False)
    return [torch.load(file) for file in sorted(folder.glob("*.pt"))]


def test_an_unknown_division_among_ranks_warns_once(tmp_path):
    loader = loader_of(*table(8)[:2])
    zero, one = warnings_of_ranks(tmp_path, OneLoader(), loader, use_distributed_sampler=False)
    assert len(zero) == 1
    assert not one
    assert "val over 2 ranks may not be what one process would measure" in zero[0]
    assert "no DistributedSampler" in zero[0]


class Words(Metric):
    """How many words there are in lists of sentences."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("words", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, preds):
        self.words += sum(len(sentence.split()) for sentence in preds)

    def compute(self):
        return self.words


def test_lists_are_rows_too(tmp_path):
    class Speaks(OneLoader):
        def validation_step(self, batch, batch_idx):
            return {"preds": ["a b c"] * len(batch[1]), "loss": torch.tensor(float(batch_idx))}

    fitter = two_ranks(tmp_path, {"words": Words()})
    fitter.validate(Speaks(), loader_of(*table(9)[:2]), verbose=False)
    values = of_ranks(tmp_path)[1]
    assert values["val/words"] == 27
    assert values["val/loss"] == pytest.approx(1 / 9)  # the last sample is alone in its batch


class _OfRows(OneLoader):
    """Returns what a function makes of the numbers of the rows."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def validation_step(self, batch, batch_idx):
        return self.make(batch[0])


class _KeepsResults(_Keeper):
    def on_validation_end(self, trainer, pl_module):
        (monitor,) = (callback for callback in trainer.callbacks if isinstance(callback, MetricsMonitor))
        torch.save(monitor.results["val/m"], self.folder / f"{trainer.world_size}-{trainer.global_rank}.pt")


def results_of(folder, metric, make, world, **arguments):
    ranks = {"strategy": "ddp_fork", "devices": world} if world > 1 else {}
    monitor = MetricsMonitor({"m": metric})
    trainer(monitor, _KeepsResults(folder), **ranks, **arguments).validate(
        _OfRows(make), loader_of(torch.arange(9.0)), verbose=False
    )
    return [torch.load(file) for file in sorted(folder.glob(f"{world}-*.pt"))]


def _images(rows):
    return torch.linspace(0, 1, 256).view(16, 16) * rows.view(-1, 1, 1, 1) / 9


def _pair(make):
    return lambda rows: {"preds": make(rows), "target": make(rows.flip(0) * 0 + 2)}


@cases(
    "metric, make",
    (PeakSignalNoiseRatio(data_range=(0, 1)), _pair(_images)),
    (RetrievalMAP(), lambda rows: {"preds": rows * 0, "target": rows.long() % 3 == 1, "indexes": rows.long() // 5}),
)
def test_values_that_depend_on_ties_and_on_whole_numbers_are_those_of_one_process(tmp_path, metric, make):
    (expected,) = results_of(tmp_path, metric, make, 1)
    for values in results_of(tmp_path, metric, make, 2):
        assert torch.equal(values, expected)


@cases(
    "metric, make, shape",
    (CatMetric(), lambda rows: {"value": rows}, (9,)),
    (tm.BinaryAccuracy(multidim_average="samplewise"), _pair(lambda rows: rows[:, None].long() & 1), (9,)),
    (EditDistance(reduction="none"), _pair(lambda rows: ["a" * int(row) for row in rows]), (9,)),
    (RunningMean(3), lambda rows: {"value": rows}, ()),
)
def test_values_that_depend_on_the_order_are_refused_on_several_ranks(tmp_path, metric, make, shape):
    assert results_of(tmp_path, metric, make, 1)[0].shape == shape
    with pytest.raises(ProcessRaisedException, match=r"MetricsError: .*'m' in val depends on the order .* one device"):
        results_of(tmp_path, metric, make, 2)


def test_reloaded_loaders_are_divided_anew(tmp_path):
    class Grows(OneLoader):
        def train_dataloader(self):
            return loader_of(*table(8)[:2])

        def val_dataloader(self):
            return loader_of(*table(7 + 2 * self.current_epoch)[:2])

    options = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 1}
    two_ranks(tmp_path, {"f1": tm.MulticlassF1Score(4)}, **options).fit(Grows())
    assert of_ranks(tmp_path)[1]["val/f1"] == pytest.approx(truth(tm.MulticlassF1Score(4), *table(9)[:2]))


class Resumable(DataLoader):
    """A loader that resumes in the middle of an epoch, as Lightning lets loaders with a state do."""

    position = 0

    def __iter__(self):
        start = self.position
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Breaks(Trained):
    """Saves after a batch, with all that it needs to resume, and breaks off."""

    def __init__(self, at=None, path=None):
        super().__init__()
        self.at, self.path = at, path

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == self.at:
            self.trainer.save_checkpoint(self.path)
            raise ZeroDivisionError


@pytest.mark.trap("metrics: metric state is lost on a mid-epoch resume")
@pytest.mark.parametrize("world", [1, 2])
def test_a_resume_within_an_epoch_reports_the_same_training_metrics(tmp_path, world):
    scores, target, _ = table(48)
    data = TensorDataset(scores, target)
    ranks = {"strategy": "ddp_fork", "devices": world} if world > 1 else {}
    path = tmp_path / "middle.ckpt"

    def monitor():
        rows = tm.MulticlassStatScores(4, average="micro")
        metrics = {"f1": tm.MulticlassF1Score(4), "auroc": tm.MulticlassAUROC(4), "rows": rows}
        return MetricsMonitor(metrics, stages=["train"])

    class Keep(Callback):
        def on_fit_end(self, trainer, pl_module):
            torch.save(numbers(trainer.callback_metrics), tmp_path / f"{trainer.global_rank}.pt")

    with pytest.raises(ProcessRaisedException if world > 1 else ZeroDivisionError):
        trainer(monitor(), **ranks).fit(Breaks(at=3, path=path), Resumable(data, 4))
    partial = next(iter(torch.load(path, weights_only=True)["callbacks"].values()))["partial"]
    assert len(partial["ranks"]) == world
    trainer(monitor(), Keep(), **ranks).fit(Breaks(), Resumable(data, 4), ckpt_path=path)
    values = torch.load(tmp_path / "0.pt")
    assert values["train/f1"] == pytest.approx(truth(tm.MulticlassF1Score(4), scores, target))
    assert values["train/auroc"] == pytest.approx(truth(tm.MulticlassAUROC(4), scores, target))

    if world == 2:  # and on another number of ranks, all of it is there
        trainer(monitor(), Keep()).fit(Breaks(), Resumable(data, 8), ckpt_path=path)
        assert torch.load(tmp_path / "0.pt")["train/rows_4"] == values["train/rows_4"] == 48


def test_a_checkpoint_of_a_validation_does_not_leak_into_the_next_epoch(tmp_path):
    scores, target, _ = table(20)
    loader = loader_of(scores, target)
    keeper = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    trainer(MetricsMonitor({"f1": tm.MulticlassF1Score(4)}), keeper, max_epochs=2, enable_checkpointing=True).fit(
        OneLoader(), loader, loader
    )
    again = MetricsMonitor({"f1": tm.MulticlassF1Score(4)})
    keeper = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    fitter = trainer(again, keeper, max_epochs=3, enable_checkpointing=True)
    with without_warnings():  # Lightning's, that there are checkpoints already
        fitter.fit(OneLoader(), loader, loader, ckpt_path=tmp_path / "epoch=0.ckpt")
    expected = truth(tm.MulticlassF1Score(4), scores, target)
    trained = [row["value"] for row in again.history() if (row["stage"], row["metric"]) == ("train", "f1")]
    assert trained == pytest.approx([expected] * len(trained))
    assert len(trained) >= 2


def test_saving_in_an_exception_of_one_rank_waits_for_no_other(tmp_path):
    class OneBreaks(Trained):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2 and self.trainer.is_global_zero:
                self.trainer.strategy.barrier = lambda *_: None  # where saving itself waits for the others
                raise ZeroDivisionError

    def run(rank):
        callbacks = MetricsMonitor(multiclass_metrics(4)), OnExceptionCheckpoint(tmp_path)
        fitter = trainer(*callbacks, strategy="ddp", devices=2, enable_checkpointing=True)
        warnings.simplefilter("ignore")  # Lightning's, of a checkpoint callback without a checkpoint
        with pytest.raises(ZeroDivisionError if rank == 0 else RuntimeError):  # the other one's connection is closed
            fitter.fit(OneBreaks(), loader_of(*table(40)[:2]))

    fork(run, 2)
    (file,) = tmp_path.glob("*.ckpt")
    (state,) = (s for s in torch.load(file, weights_only=True)["callbacks"].values() if "history" in s)
    assert len(state["partial"]["ranks"]) == 1


def test_best_history_and_plot(tmp_path):
    loader = DataLoader(digits(), 4)
    monitor = MetricsMonitor(SIX, best={"val/f1": "max", "train/loss": "min"}, class_names=list("0123456789"))
    fitter = trainer(monitor, max_epochs=3)
    fitter.fit(Learning(), loader, loader)
    rows = monitor.history()
    assert rows[0].keys() == {"stage", "loader", "epoch", "step", "metric", "value"}
    for key, mode in (("val/f1", max), ("train/loss", min)):
        stage, _, metric = key.partition("/")
        mine = [row for row in rows if (row["stage"], row["metric"]) == (stage, metric)]
        best = mode(mine, key=lambda row: row["value"])
        assert monitor.best[key] == (best["value"], best["step"])
        assert [row["step"] for row in mine] == [10, 20, 30]
    figure = monitor.plot(["f1", "loss"])
    assert [axes.get_title() for axes in figure.axes] == ["f1", "loss"]
    assert "f1_3" not in {axes.get_title() for axes in monitor.plot().axes}
    with pytest.raises(ValueError, match=r"no values of 'f2'.*Did you mean 'f"):
        monitor.plot(["f2"])

    before = monitor.best
    fitter.validate(OneLoader(), loader_of(torch.eye(10), torch.arange(10)), verbose=False)
    assert monitor.best == before  # of the fit
    assert monitor.results["val/f1"] > before["val/f1"][0]
    assert len(monitor.history()) > len(rows)


@cases(
    "arguments, words",
    ({"best": {"val/f2": "max"}}, r"'val/f2', but a fit logs only val/acc, .*/loss\. Did you mean 'val/f1'\?"),
    ({"best": {"test/f1": "max"}}, "'test/f1', but a fit logs only train/acc, .*val/acc"),
    ({"best": {"f1": "max"}}, "'f1', but a fit logs only train/acc"),
    ({"best": {"train/f1": "max"}, "stages": ["val"]}, "'train/f1', but a fit logs only val/acc"),
    ({"best": {"train/f1": "max"}, "stages": ["test"]}, "'train/f1', but a fit logs only nothing"),
    ({"best": {"val/f1": "max"}, "prefix": "ema"}, "a fit logs only ema/train/acc, .* mean 'ema/val/f1'"),
)
def test_a_key_of_best_that_no_fit_logs_is_refused_at_once(arguments, words):
    with pytest.raises(ValueError, match=words):
        MetricsMonitor(SIX, **arguments)


def test_keys_of_best_that_there_may_be_are_not_refused():
    for key in ("val/f1", "val/0/f1", "train/loss", "val/1/loss", "val/f1_b"):
        MetricsMonitor({"task": "multiclass", "num_classes": 2}, class_names=["a", "b"], best={key: "max"})
    own = {"own": Parts(), "kept": tm.MulticlassConfusionMatrix(4)}
    for key in ("val/own", "val/own/longest", "val/own_3"):
        MetricsMonitor(own, best={key: "max"})


class Parts(tmr.MeanSquaredError):
    """A metric of somebody's own, of which nobody knows what it computes."""

    def update(self, preds, target):
        super().update(preds.max(1).values, target)

    def compute(self):
        return {"longest": super().compute(), "shortest": super().compute()}


@cases(
    "best, words",
    ("val/f1", "val has 2 loader.*: use val/0/f1, val/1/f1"),
    ("val/2/f1", "val has 2 loader.*: use val/0/f1, val/1/f1"),
    ("train/0/f1", "train has 1 loader.*: use train/f1"),
)
def test_a_key_of_best_that_this_fit_does_not_log_is_refused_in_the_first_batch(best, words):
    monitor = MetricsMonitor({"f1": tm.MulticlassF1Score(4)}, best={best: "max"})
    fitter = trainer(monitor, num_sanity_val_steps=1)
    loader = loader_of(*table(8)[:2])
    with pytest.raises(MetricsError, match=words):
        fitter.fit(Table(), loader, [loader, loader])
    assert fitter.global_step == best.startswith("train")


@cases(
    "key, arguments",
    ("val/f1", {"limit_val_batches": 0}),
    ("val/loss", {"limit_val_batches": 0}),
    ("val/f1", {"check_val_every_n_epoch": 2}),
)
def test_a_key_of_best_in_a_fit_that_does_not_validate_is_a_warning(key, arguments):
    monitor = MetricsMonitor({"f1": tm.MulticlassF1Score(4)}, best={key: "max"})
    loader = loader_of(*table(8)[:2])
    with pytest.warns(UserWarning, match=f"'{key}', but this fit does not validate"):
        trainer(monitor, **arguments).fit(OneLoader(), loader, loader)
    assert monitor.best == {}


def test_a_key_of_best_that_only_data_can_refuse():
    loader = loader_of(*table(8)[:2])
    with pytest.raises(MetricsError, match="'val/own', but the fit logged only val/own/longest, val/own/shortest"):
        trainer(MetricsMonitor({"own": Parts()}, best={"val/own": "min"})).fit(OneLoader(), loader, loader)
    monitor = MetricsMonitor({"f1": tm.MulticlassF1Score(4)}, best={"val/loss": "min"})
    with pytest.raises(MetricsError, match="'val/loss', but the fit logged only val/f1"):
        trainer(monitor).fit(OneLoader(), loader, loader)  # whose validation returns none
    monitor = MetricsMonitor({"f1": tm.MulticlassF1Score(4)}, best={"val/f1_macro": "max"})
    with pytest.raises(MetricsError, match=r"'val/f1_macro', but the fit logged only val/f1\. Did you mean"):
        trainer(monitor).fit(OneLoader(), loader, loader)


def test_the_summary_shows_stages_classes_and_the_best(capsys):
    loader = DataLoader(digits(), 4)
    names = [f"digit {number}" for number in range(10)]
    monitor = MetricsMonitor(SIX, best={"val/f1": "max"}, class_names=names, verbose=True)
    trainer(monitor).fit(Learning(), loader, loader)
    printed = capsys.readouterr().out
    assert "at step 10" in printed
    assert "digit 7" in printed
    header = next(line for line in printed.splitlines() if "metric" in line and "best" in line)
    assert header.index("train") < header.index("val")


def test_the_table_of_classes_says_how_many_more_there_are():
    names, history = [f"class {number}" for number in range(53)], History()
    history.add(EpochRecord("val", None, 0, 0, True, [f"f1_{name}" for name in names], torch.full((53,), 0.5)))
    *_, table = history.table({}, names).renderables
    assert (table.row_count, table.notes) == (50, "3 more classes")


def test_the_table_shows_all_numbers_where_the_output_is_not_unicode(monkeypatch):
    history, output = History(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    values = {"psnr": math.inf, "gain": -math.inf, "loss": math.nan, "rows": 12345.6}
    history.add(EpochRecord("val", None, 0, 5, True, list(values), torch.tensor(list(values.values()))))
    monkeypatch.setattr("sys.stdout", output)
    make_console().print(history.table({}))
    output.seek(0)
    printed = dict(line.strip("| \n").replace(" ", "").split("|") for line in output if line.startswith("| "))
    assert printed == {"metric": "val", "psnr": "inf", "gain": "-inf", "loss": "NaN", "rows": "12,346"}
    assert history.line({}, lambda names: set()).startswith("val psnr inf, gain -inf, loss NaN")


class _Returns(Net):
    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def validation_step(self, batch, batch_idx):
        return self.outputs


@cases(
    "outputs, words",
    ({"preds": torch.zeros(2, 10), "logits": 1}, r"need target, but got logits, preds\. Return a dict"),
    ({"preds": torch.zeros(10), "target": torch.tensor(1)}, "first batch of val: .* no batch dimension"),
    ({"preds": torch.full((2, 10), math.nan), "target": torch.tensor([1, 2])}, "20 of 20 predictions are NaN"),
    ({"preds": torch.zeros(2, 10), "target": torch.tensor([1, 10])}, "targets must be 0 to 9, got 10"),
)
@pytest.mark.parametrize("error", [MisconfigurationException, ValueError])
def test_a_bad_first_batch_stops_sanity_checking(outputs, words, error):
    loader = DataLoader(digits(), 4)
    fitter = trainer(MetricsMonitor(SIX, stages=["val"]), num_sanity_val_steps=1)
    with pytest.raises(error, match=words):
        fitter.fit(_Returns(outputs), loader, loader)
    assert fitter.global_step == 0


def test_later_invalid_values_make_nan_and_are_counted_in_words():
    class Breaks(OneLoader):
        def validation_step(self, batch, batch_idx):
            outputs = super().validation_step(batch, batch_idx)
            return {**outputs, "preds": outputs["preds"] * (math.nan if batch_idx == 1 else 1)}

    fitter = trainer(MetricsMonitor({"f1": tm.MulticlassF1Score(4)}), max_epochs=1)
    with pytest.warns(UserWarning, match=r"4 predictions or targets of val in epoch 0 were NaN.*so its metrics are"):
        fitter.fit(Breaks(), loader_of(*table(8)[:2]), loader_of(*table(8)[:2]))
    assert math.isnan(fitter.callback_metrics["val/f1"])
    assert not math.isnan(fitter.callback_metrics["train/f1"])


def test_a_loader_without_batches_is_refused():
    empty, some = loader_of(*table(0)[:2]), loader_of(*table(8)[:2])
    with without_warnings():  # Lightning's, that the loader is empty
        with pytest.raises(MetricsError, match="loader 1 of val has no batches"):
            trainer(MetricsMonitor(multiclass_metrics(4))).fit(Table(), some, [some, empty])
        for loaders, index in ((empty, 0), ({"some": some, "empty": empty}, 1)):
            with pytest.raises(MetricsError, match=f"loader {index} of train has no batches"):
                trainer(MetricsMonitor(multiclass_metrics(4))).fit(OneLoader(), loaders)
        with pytest.raises(MetricsError, match="loader 0 of test has no batches"):
            trainer(MetricsMonitor(multiclass_metrics(4))).test(OneLoader(), empty, verbose=False)
        with pytest.raises(MetricsError, match="loader 0 of val has no batches"):
            trainer(MetricsMonitor(multiclass_metrics(4))).fit(OneLoader(), some, empty)
        trainer(MetricsMonitor(multiclass_metrics(4)), limit_val_batches=0).fit(OneLoader(), some, some)


@pytest.mark.trap("metrics: MetricTracker copies the metric each epoch and has an empty state_dict")
@pytest.mark.filterwarnings("ignore:The default value for `maximize`:FutureWarning")  # torchmetrics before 1.7
def test_the_history_is_in_the_checkpoint_and_a_tracker_is_refused(tmp_path):
    with pytest.raises(TypeError, match="metrics must be a Metric"):
        MetricsMonitor(MetricTracker(tm.MulticlassF1Score(4)))
    loader = loader_of(*table(12)[:2])
    monitor = MetricsMonitor({"f1": tm.MulticlassF1Score(4)}, best={"val/f1": "max"})
    fitter = trainer(monitor, max_epochs=2)
    fitter.fit(OneLoader(), loader, loader)
    fitter.save_checkpoint(tmp_path / "it.ckpt")
    again = MetricsMonitor({"f1": tm.MulticlassF1Score(4)}, best={"val/f1": "max"})
    trainer(again, max_epochs=2).fit(OneLoader(), loader, loader, ckpt_path=tmp_path / "it.ckpt")
    assert again.history() == monitor.history()
    assert again.best == monitor.best
    assert monitor.best["val/f1"][1] == 3  # the first of two equal ones


@cases(
    "arguments, error, words",
    ({"metrics": 3}, TypeError, "metrics must be a Metric"),
    ({"metrics": SIX, "stages": ["valid"]}, ValueError, "stages must be one of train, val, test, got 'valid'"),
    ({"metrics": SIX, "stages": "val"}, TypeError, "stages must be a list"),
    ({"metrics": SIX, "best": {"val/f1": "highest"}}, ValueError, r"best\['val/f1'\] must be one of min, max"),
    ({"metrics": SIX, "prefix": 3}, TypeError, "prefix must be a string such as 'ema'"),
    ({"metrics": SIX, "prefix": "ema/"}, ValueError, "logs 'ema/val/acc', got 'ema/'"),
    ({"metrics": SIX, "prefix": ""}, ValueError, "prefix must be a name"),
    ({"metrics": SIX, "prefix": "val"}, ValueError, "got 'val', which would log 'val/val/acc'"),
    (
        {"metrics": {"f1": tm.MulticlassF1Score(2), "f1_b": tm.BinaryF1Score()}, "class_names": ["a", "b"]},
        ValueError,
        "two values with the name 'f1_b'",
    ),
    (
        {"metrics": {"f1": tm.BinaryF1Score(), "f1/x": tm.BinaryF1Score()}},
        ValueError,
        "the values 'f1' and 'f1/x', which loggers with a file per value cannot both keep",
    ),
    ({"metrics": SIX, "log_plots": 0.5}, TypeError, "log_plots must be a whole number"),
    ({"metrics": SIX, "class_names": ["a"]}, ValueError, "1 names, but the metric"),
    ({"metrics": SIX, "output_transform": "preds"}, TypeError, "output_transform must be a function"),
)
def test_wrong_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        MetricsMonitor(**arguments)


def test_from_inside_the_module(tmp_path):
    class Inside(TricksMixin, Learning):
        def __init__(self, tricks=None):
            super().__init__(tricks=tricks)
            self.save_hyperparameters()

    loader = DataLoader(digits(), 4)
    preset = multiclass_metrics(10, top_k=2)
    for given in ({"metrics": preset.spec}, {"metrics": preset}, preset):
        fitter = trainer()
        fitter.fit(Inside(Tricks(metrics_monitor=given)), loader, loader)
        assert "val/acc_top2" in fitter.callback_metrics
        fitter.save_checkpoint(tmp_path / "it.ckpt")
        hparams = torch.load(tmp_path / "it.ckpt", weights_only=True)["hyper_parameters"]
        assert hparams["tricks"]["metrics_monitor"] == {"metrics": preset.spec}
        assert Inside.load_from_checkpoint(tmp_path / "it.ckpt").tricks.metrics_monitor == {"metrics": preset.spec}
    with pytest.raises(TypeError, match="contains a MulticlassF1Score, which cannot be saved as plain values"):
        Inside(Tricks(metrics_monitor={"metrics": tm.MulticlassF1Score(10)}))


def test_rows_that_cannot_be_told_apart_are_named(tmp_path):
    class Flat(OneLoader):
        def validation_step(self, batch, batch_idx):
            return {"preds": batch[0].repeat(2, 1), "target": batch[1].repeat(2)}

    # of three samples, the second one of rank 1 is a repeated one
    heard = warnings_of_ranks(tmp_path, Flat(), loader_of(*table(3)[:2]))
    assert not heard[0]
    assert "1 of the 2 samples of the last batch of val are repeated, and" in heard[1][0]
    assert "preds (4, 4), target (4,)), so they count twice" in heard[1][0]
