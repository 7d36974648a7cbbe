"""Which keys are logged, by whom, and what is said where that is not clear."""

import csv
import re
import warnings

import pytest
import torch
import torchmetrics.classification as tm
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import FlopsReport, GradientClipping, MetricsMonitor, RunReport
from lightning_tricks._shared.report_parts import ClassValues
from lightning_tricks.metrics import MetricsError, multiclass_metrics, regression_metrics
from lightning_tricks.metrics.core.metric_table import find_name_conflict, per_class_names
from lightning_tricks.run_report import read_record
from tests.metrics.tables import trainer
from tests.small import EvaluatedNet, digits, fork

pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")
ACC = {"acc": tm.MulticlassAccuracy(4, average="micro")}


def loader(rows=16):
    generator = torch.Generator().manual_seed(rows)
    columns = torch.rand(rows, 4, generator=generator), torch.randint(4, (rows,), generator=generator)
    return DataLoader(TensorDataset(*columns), 4)


class Logs(LightningModule):
    """A module that logs keys in hooks: `where` is hook -> arguments of `log`."""

    def __init__(self, from_epoch=0, rank=None, **where):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.where, self.from_epoch, self.rank = where, from_epoch, rank

    def tell(self, hook):
        if hook in self.where and self.current_epoch >= self.from_epoch and self.rank in (None, self.global_rank):
            arguments = {"rank_zero_only": True} if self.rank is not None else {}
            self.log(value=5.0, **arguments, **self.where[hook])

    def training_step(self, batch, batch_idx):
        self.tell("training_step")
        return {"loss": (self.weight * 0).sum(), "preds": batch[0], "target": batch[1]}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.tell("validation_step")
        return {"preds": batch[0], "target": batch[1]}

    def test_step(self, batch, batch_idx):
        self.tell("test_step")
        return {"preds": batch[0], "target": batch[1]}

    def on_train_epoch_end(self):
        self.tell("on_train_epoch_end")

    def on_validation_epoch_end(self):
        self.tell("on_validation_epoch_end")

    def on_test_epoch_end(self):
        self.tell("on_test_epoch_end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


STEP_AND_EPOCH = {"on_step": True, "on_epoch": True}


def told(fitter, run):
    """What the monitor warns of while `run` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(fitter)
    return [str(warning.message) for warning in caught if "MetricsMonitor" in str(warning.message)]


def fits(module, *loaders):
    return lambda fitter: fitter.fit(module, *(loaders or (loader(), loader())))


@pytest.mark.parametrize("from_epoch", [0, 2])
@pytest.mark.parametrize("sanity", [0, 1])
@pytest.mark.parametrize(
    ("hook", "arguments", "who"),
    [
        ("training_step", STEP_AND_EPOCH, r"Logs\.training_step"),
        ("validation_step", {}, r"Logs\.validation_step"),
        ("on_train_epoch_end", {}, "on_train_epoch_end of Logs or of another callback"),
        ("on_validation_epoch_end", {}, "on_validation_epoch_end of Logs or of another callback"),
    ],
)
def test_a_key_that_the_module_logs_too_is_its_own_and_told_once(tmp_path, hook, arguments, who, sanity, from_epoch):
    key = "train/acc" if "train" in hook else "val/acc"
    monitor = MetricsMonitor(ACC, best={key: "max"})
    fitter = trainer(monitor, num_sanity_val_steps=sanity, max_epochs=4, logger=CSVLogger(tmp_path))
    (words,) = told(fitter, fits(Logs(from_epoch=from_epoch, **{hook: {"name": key, **arguments}})))
    assert re.match(f"MetricsMonitor and {who} both log '{key}'. Loggers and callbacks get the values of {who}", words)
    assert words.endswith("or give the monitor another prefix, such as prefix='monitor'.")
    assert fitter.callback_metrics[key] == 5
    shares = [row["value"] for row in monitor.history() if f"{row['stage']}/{row['metric']}" == key]
    assert shares == [monitor.results[key].item()] * 4 == [monitor.best[key][0]] * 4
    with next(tmp_path.rglob("metrics.csv")).open() as rows:
        seen = [row for row in csv.DictReader(rows) if row.get(key)]
    of_others = 0 if arguments else 4 - from_epoch  # which then bear a suffix
    assert [float(row[key]) for row in seen] == pytest.approx(shares[:from_epoch] + [5.0] * of_others)


def test_a_key_of_a_test_of_a_suffix_and_of_another_callback():
    class Also(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.log("val/acc", 1.0)

    for hook in ("test_step", "on_test_epoch_end"):
        module = Logs(**{hook: {"name": "test/acc"}})
        (words,) = told(trainer(MetricsMonitor(ACC)), lambda it, own=module: it.test(own, loader(), verbose=False))
        assert "both log 'test/acc'" in words
    for name in ("acc_step", "acc_epoch"):
        module = Logs(validation_step={"name": "val/acc", **STEP_AND_EPOCH})
        fitter = trainer(MetricsMonitor({name: ACC["acc"]}))
        (words,) = told(fitter, lambda it, own=module: it.validate(own, loader(), verbose=False))
        assert f"both log 'val/{name}'" in words
    for callbacks in ((Also(), MetricsMonitor(ACC)), (MetricsMonitor(ACC), Also())):
        fitter = trainer(*callbacks)
        (words,) = told(fitter, lambda it: it.validate(Logs(), loader(), verbose=False))
        assert "on_validation_epoch_end of Logs or of another callback both log 'val/acc'" in words
        assert fitter.callback_metrics["val/acc"] == 1


def test_several_keys_are_told_in_one_warning_and_other_keys_not_at_all():
    where = {
        "training_step": {"name": "train/accuracy", **STEP_AND_EPOCH},
        "validation_step": {"name": "val/acc", **STEP_AND_EPOCH},  # val/acc/dataloader_idx_0, beside val/0/acc
        "on_train_epoch_end": {"name": "acc"},
    }
    fitter = trainer(MetricsMonitor(ACC), max_epochs=3)
    assert told(fitter, fits(Logs(**where), loader(), [loader(), loader(8)])) == []
    assert {"val/0/acc", "val/1/acc", "train/acc", "acc", "val/acc/dataloader_idx_1"} <= fitter.callback_metrics.keys()
    monitors = MetricsMonitor(multiclass_metrics(4)), _Mine(multiclass_metrics(4), stages=["val"])
    (words,) = told(trainer(*monitors, max_epochs=2), fits(Logs()))
    assert re.match(r"_Mine and MetricsMonitor both log 'val/acc', 'val/b.*, '.*' and 3 more", words)


def test_a_loss_that_nobody_asked_for_gives_way_and_one_that_is_a_metric_is_told():
    for hook in ("training_step", "on_train_epoch_end"):
        module = Logs(**{hook: {"name": "train/loss", "on_step": False, "on_epoch": True}})
        fitter = trainer(MetricsMonitor(ACC), max_epochs=2, num_sanity_val_steps=1)
        assert told(fitter, fits(module)) == []
        assert fitter.callback_metrics["train/loss"] == 5
        (words,) = told(trainer(MetricsMonitor({"loss": ACC["acc"]}), max_epochs=2), fits(module))
        assert "both log 'train/loss'" in words


@pytest.mark.parametrize("name", ["trainLoss", "Loss/train"])
def test_a_loss_in_another_spelling_is_not_logged_twice_and_one_of_a_monitor_is(name, tmp_path):
    monitors = [MetricsMonitor(ACC, stages=["train"], prefix=prefix) for prefix in (None, "ema")]
    for module, more in (
        (Logs(training_step={"name": name, "on_step": False, "on_epoch": True}), {name}),
        (Logs(), {"train/loss", "ema/train/loss"}),
    ):
        fitter = trainer(*monitors, logger=CSVLogger(tmp_path, name="of"), log_every_n_steps=1)
        fitter.fit(module, loader(), loader())
        with max(tmp_path.rglob("metrics.csv"), key=lambda file: file.stat().st_mtime).open() as rows:
            keys = {*csv.DictReader(rows).fieldnames} - {"epoch", "step", "train/acc", "ema/train/acc"}
        assert keys == more
        assert "train/loss" in fitter.callback_metrics, "callbacks see it"


@pytest.mark.parametrize("hook", ["training_step", "validation_step", "on_validation_epoch_end", "on_train_epoch_end"])
def test_ranks_agree_on_what_is_logged(hook):
    key = "train/acc" if "train" in hook else "val/acc"

    def run(rank):
        for logs in (1, 0, None):
            module = Logs(rank=logs, **{hook: {"name": key}})
            fitter = trainer(MetricsMonitor(ACC), strategy="ddp", devices=2, max_epochs=2)
            if logs is not None and "epoch_end" in hook:  # after the monitor has logged it, on this rank alone
                with pytest.raises(MetricsError, match=f"{hook} logged '{key}' on 1 of 2 ranks, over the value"):
                    told(fitter, fits(module))
                continue
            words = told(fitter, fits(module))
            assert len(words) == (rank == 0), words

    fork(run, 2)


class _Mine(MetricsMonitor):
    pass


def two():
    names = ["a", "b", "c", "d"]
    return [
        MetricsMonitor(ACC, best={"val/acc": "max"}, log_plots=False),
        MetricsMonitor(
            multiclass_metrics(4), class_names=names, prefix="ema", best={"ema/val/f1": "max"}, log_plots=False,
            output_transform=lambda outputs, batch, stage: {**outputs, "preds": -outputs["preds"]},
        ),
    ]  # fmt: skip


def test_two_monitors_stand_side_by_side(tmp_path):
    monitors = two()
    logger = CSVLogger(tmp_path)
    keeper = ModelCheckpoint(tmp_path, "{epoch}", monitor="ema/val/f1", mode="max")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of few batches
        fitter = trainer(*monitors, keeper, max_epochs=3, logger=logger, enable_checkpointing=True)
        fitter.fit(Logs(), loader(), loader(12))
    values = {key: value.item() for key, value in fitter.callback_metrics.items()}
    assert {"train/acc", "val/acc", "train/loss", "ema/train/loss", "ema/val/f1", "ema/val/f1_d"} <= values.keys()
    scores, target = loader(12).dataset.tensors
    assert values["val/acc"] == pytest.approx((scores.argmax(1) == target).float().mean().item())
    assert values["ema/val/acc"] == pytest.approx((scores.argmin(1) == target).float().mean().item())
    assert [*monitors[0].best, *monitors[1].best] == ["val/acc", "ema/val/f1"]
    assert monitors[1].best["ema/val/f1"][0] == pytest.approx(values["ema/val/f1"])
    assert monitors[1].results["ema/val/f1"] == values["ema/val/f1"]
    assert {row["metric"] for row in monitors[0].history()} == {"acc", "loss"}
    assert find_name_conflict(values) is None

    states = torch.load(keeper.best_model_path, weights_only=True)["callbacks"]
    assert {monitor.state_key for monitor in monitors} <= states.keys()
    again = two()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, that there are checkpoints already
        trainer(*again, max_epochs=3).fit(Logs(), loader(), loader(12), ckpt_path=keeper.best_model_path)
    assert [monitor.history() for monitor in again] == [monitor.history() for monitor in monitors]


def test_a_metric_of_several_values_promises_no_key():
    class Own(tm.MulticlassAccuracy):
        pass

    for metric, sure in ((None, set()), ("none", set()), ("micro", {"val/acc"})):
        assert MetricsMonitor({"acc": tm.MulticlassAccuracy(4, average=metric)}).logged_keys("val") == sure
    assert MetricsMonitor({"acc": Own(4)}).logged_keys("val") == set()


class Answers(Logs):
    """Returns what it is told to: stage -> a function of the step's own outputs and the batch's number."""

    def __init__(self, **answers):
        super().__init__()
        self.answers = answers
        self.automatic_optimization = answers.pop("automatic", True)

    def training_step(self, batch, batch_idx):
        return self.answers.get("train", lambda outputs, _: outputs)(super().training_step(batch, batch_idx), batch_idx)

    def validation_step(self, batch, batch_idx):
        outputs = super().validation_step(batch, batch_idx)
        return self.answers.get("val", lambda outputs, _: outputs)(outputs, batch_idx)


@pytest.mark.parametrize(
    ("answer", "what", "has_loss"),
    [
        (lambda outputs, index: outputs["loss"] + index, "training_step returned only loss in batch 0 of train", True),
        (lambda outputs, index: {"loss": outputs["loss"] + index, "log": 1}, "returned only loss, log", True),
        (lambda outputs, _: None, "training_step returned nothing in batch 0 of train", False),
    ],
)
@pytest.mark.parametrize("automatic", [True, False])
def test_a_training_step_that_returns_nothing_to_measure_warns_once(answer, what, has_loss, automatic):
    fitter = trainer(MetricsMonitor(ACC), max_epochs=2)
    words = told(fitter, fits(Answers(train=answer, automatic=automatic), loader(10), loader()))
    assert len(words) == 1
    assert what in words[0]
    assert "but the metrics need preds, target. Return a dict with them" in words[0]
    assert "or leave 'train' out: stages=['val', 'test']" in words[0]
    assert {"val/acc", *["train/loss"] * has_loss} == fitter.callback_metrics.keys()
    if has_loss:
        assert fitter.callback_metrics["train/loss"].item() == pytest.approx((0 * 4 + 1 * 4 + 2 * 2) / 10)
    assert not told(trainer(MetricsMonitor(ACC, stages=["val"])), fits(Answers(train=answer, automatic=automatic)))


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("answer", [None, torch.tensor(1.0), {}, {"loss": torch.tensor(1.0), "logits": 1}, 3])
def test_a_validation_step_that_returns_nothing_to_measure_warns_once(answer, sanity):
    fitter = trainer(MetricsMonitor(ACC), max_epochs=2, num_sanity_val_steps=sanity)
    words = told(fitter, fits(Answers(val=lambda *_: answer)))
    assert len(words) == 1
    assert "validation_step returned" in words[0]
    assert "stages=['train', 'test']" in words[0]
    assert "train/acc" in fitter.callback_metrics
    assert ("val/loss" in fitter.callback_metrics) == (isinstance(answer, dict | torch.Tensor) and bool(answer))


def test_batches_without_anything_are_passed_over_and_counted():
    def answer(outputs, batch_idx):
        return None if batch_idx == 1 else outputs

    fitter = trainer(MetricsMonitor(ACC), max_epochs=2)
    words = told(fitter, fits(Answers(train=answer, val=answer)))
    assert [
        word
        for word in words
        if "1 of 4 batches of train returned nothing to measure, so the metrics do not include them" in word
    ]
    assert [word for word in words if "1 of 4 batches of val returned nothing to measure" in word]
    assert len(words) == 4  # each of them once, and for each stage what to do
    scores, target = (torch.cat([part[:4], part[8:]]) for part in loader().dataset.tensors)
    expected = (scores.argmax(1) == target).float().mean().item()
    assert fitter.callback_metrics["train/acc"].item() == pytest.approx(expected)
    assert fitter.callback_metrics["val/acc"].item() == pytest.approx(expected)


def test_a_batch_with_a_part_of_it_is_passed_over_unless_it_is_the_first():
    def answer(number):
        return lambda outputs, batch_idx: (
            {"preds": outputs["preds"], "loss": outputs["loss"]} if batch_idx == number else outputs
        )

    assert len(told(trainer(MetricsMonitor(ACC)), fits(Answers(train=answer(2))))) == 2
    with pytest.raises(MetricsError, match=r"first batch of train: 'acc' needs target, but got loss, preds"):
        told(trainer(MetricsMonitor(ACC)), fits(Answers(train=answer(0))))


def test_ranks_of_which_one_returns_nothing(tmp_path):
    class Half(Answers):
        def validation_step(self, batch, batch_idx):
            return None if self.global_rank == 1 and batch_idx == 1 else super().validation_step(batch, batch_idx)

        def on_fit_end(self):
            told = [str(warning.message) for warning in self.caught if "MetricsMonitor" in str(warning.message)]
            torch.save((told, self.trainer.callback_metrics["val/acc"].item()), tmp_path / f"{self.global_rank}.pt")

        def on_fit_start(self):
            self.catcher = warnings.catch_warnings(record=True)
            self.caught = self.catcher.__enter__()
            warnings.simplefilter("always")

    fitter = trainer(MetricsMonitor(ACC), strategy="ddp_fork", devices=2)
    fitter.fit(Half(), loader(), loader())
    (zero, one), (of_zero, of_one) = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)), strict=True)
    assert len(zero) == 1
    assert "1 of 4 batches of val returned nothing to measure" in zero[0]
    assert not one
    assert of_zero == of_one


def test_a_best_of_a_stage_that_returns_nothing_is_refused():
    with pytest.raises(MetricsError, match=r"only loss in batch 0 of train.*best has the key 'train/acc'"):
        told(trainer(MetricsMonitor(ACC, best={"train/acc": "max"})), fits(Answers(train=lambda o, _: o["loss"])))
    with pytest.raises(MetricsError, match="best has the key 'val/acc', but the fit logged only nothing"):
        told(trainer(MetricsMonitor(ACC, best={"val/acc": "max"})), fits(Answers(val=lambda *_: None)))


def test_a_best_of_the_fit_is_not_looked_for_in_other_loaders():
    fitter, module = trainer(MetricsMonitor(ACC, best={"val/acc": "max"})), Logs()
    fitter.fit(module, loader(), loader())
    fitter.validate(module, [loader(), loader(8)], verbose=False)
    assert {"val/0/acc", "val/1/acc"} <= fitter.callback_metrics.keys()


def test_output_transform_may_return_nothing_for_a_batch_and_sees_batches_of_which_a_step_returns_none():
    def output_transform(outputs, batch, stage):
        return None if len(batch[1]) < 4 else {"preds": batch[0], "target": batch[1]}

    fitter = trainer(MetricsMonitor(ACC, output_transform=output_transform))
    module = Answers(train=lambda *_: None)
    with pytest.warns(UserWarning, match="returned nothing") as caught:
        fitter.fit(module, loader(10), loader(10))
    assert len([word for word in caught if "output_transform() returned nothing in batch 2" in str(word.message)]) == 2
    scores, target = (part[:8] for part in loader(10).dataset.tensors)
    expected = (scores.argmax(1) == target).float().mean().item()
    assert fitter.callback_metrics["train/acc"].item() == pytest.approx(expected)
    assert fitter.callback_metrics["val/acc"].item() == pytest.approx(expected)


def test_optional_arguments_may_come_and_go():
    class Weighted(tm.MulticlassAccuracy):
        def update(self, preds, target, weight=None):
            super().update(preds if weight is None else preds[weight], target if weight is None else target[weight])

    class Sometimes(Answers):
        def validation_step(self, batch, batch_idx):
            outputs = super().validation_step(batch, batch_idx)
            return {**outputs, "weight": torch.tensor([True, False, True, False])} if batch_idx % 2 else outputs

    fitter = trainer(MetricsMonitor({"acc": Weighted(4, average="micro")}))
    (values,) = fitter.validate(Sometimes(), loader(), verbose=False)
    scores, target = loader().dataset.tensors
    counted = torch.tensor([True] * 4 + [True, False, True, False]).repeat(2)
    assert values["val/acc"] == pytest.approx((scores.argmax(1) == target)[counted].float().mean().item())


class Outputs(EvaluatedNet):
    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "values": outputs["preds"][:, :2].detach()}

    def validation_step(self, batch, batch_idx):
        outputs = self.evaluate(batch, batch_idx)
        return {**outputs, "values": outputs["preds"][:, :2]}


@pytest.mark.parametrize("log_classes", [False, True])
@pytest.mark.parametrize("names", [None, ["x", "y"]])
def test_loggers_get_single_outputs_where_that_is_asked_for(log_classes, names, tmp_path, lightning_log):
    monitor = MetricsMonitor(
        {"task": "regression", "num_outputs": 2}, class_names=names, log_classes=log_classes,
        output_transform=lambda outputs, batch, stage: {"preds": outputs["values"], "target": outputs["values"] * 2},
    )  # fmt: skip
    fitter = trainer(monitor, RunReport(tmp_path / "report"), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    fitter.fit(Outputs("adamw"), DataLoader(digits(), 20), DataLoader(digits(), 20))
    (file,) = tmp_path.rglob("metrics.csv")
    keys = file.read_text().splitlines()[0].split(",")
    second = "val/mae_y" if names else "val/mae_1"
    assert "val/mae" in keys
    assert (second in keys) == log_classes
    assert second in fitter.callback_metrics
    (said,) = [line for _, lines in lightning_log for line in lines.splitlines() if "MetricsMonitor" in line]
    assert "mae_" not in said
    (values,) = [part for part in read_record(tmp_path / "report").parts if isinstance(part, ClassValues)]
    assert values.classes == (names or ["0", "1"])
    assert sorted(values.metrics) == ["mae", "mse", "r2", "rmse"]


@pytest.mark.trap("metrics: MLflow's file store has no place for val/f1 beside val/f1/cat")
def test_no_key_of_the_collection_is_a_folder_of_another():
    names = [f"digit {number}" for number in range(10)]
    keys = set()
    for optimization in ("adamw", "manual"):
        clipping = GradientClipping(1.0, log_layers=True, on_nonfinite="skip")
        classes = MetricsMonitor(multiclass_metrics(10, top_k=2), class_names=names, log_plots=False)
        values = MetricsMonitor(
            regression_metrics(2), prefix="values", log_plots=False,
            output_transform=lambda outputs, batch, stage: {
                "preds": outputs["values"], "target": outputs["values"] * 2
            },
        )  # fmt: skip
        fitter = trainer(clipping, classes, values, FlopsReport(log_totals=True), log_every_n_steps=1)
        fitter.fit(Outputs(optimization), DataLoader(digits(), 20), DataLoader(digits(), 20))
        keys |= fitter.callback_metrics.keys()
    wanted = {"val/f1", "val/f1_digit 7", "values/val/mae", "values/val/mae_1", "grad_norm/pre_clip", "flops/forward"}
    assert wanted | {"grad_norm/0/pre_clip", "params/total", "grad_norm/net.0.weight"} <= keys
    assert find_name_conflict(keys) is None


NAMES = st.text("ab/_", min_size=1, max_size=5)


@settings(derandomize=True)
@given(st.lists(NAMES, max_size=6))
def test_a_clash_is_two_names_that_no_folder_can_hold(names):
    def exclude(one, other):
        return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")

    pairs = [(names[i], names[j]) for i in range(len(names)) for j in range(i)]
    clash = find_name_conflict(names)
    assert (clash is not None) == any(exclude(*pair) for pair in pairs)
    assert clash is None or exclude(*clash)


def test_names_of_classes_are_told_from_others():
    names = ["f1", "f1_a", "f1_b_a", "acc_a", "hits_b_a", "f1_b_a_a", "f1_b_a_b_a"]
    assert per_class_names(names, ["a", "b_a"]) == {
        "f1_a": ("f1", "a"), "f1_b_a": ("f1", "b_a"), "f1_b_a_a": ("f1_b_a", "a"), "f1_b_a_b_a": ("f1_b_a", "b_a"),
    }  # fmt: skip
    assert per_class_names(names, []) == {}
