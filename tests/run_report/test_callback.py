"""RunReport: the record and the page of real fits."""

import csv
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Subset

from lightning_tricks import (
    AutoResume,
    GradientClipping,
    ImageLogger,
    MetricsMonitor,
    RunFingerprint,
    RunReport,
    SeedEverything,
)
from lightning_tricks._shared.report_parts import ClippedSteps, ConfusionMatrix, Pictures, Reliability
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.run_report import read_record
from tests.contract.checks import Interrupts
from tests.contract.processes import run_and_exit
from tests.small import QUIET, EvaluatedNet, Net, cases, digits, loader


class Logs(Net):
    """Logs losses in steps and epochs, in training and validation, and at the end of an epoch."""

    def __init__(self, fails_at=None, **arguments):
        super().__init__(**arguments)
        self.save_hyperparameters({"width": 16, "api_key": "hush", "<b>": "<script>alert(1)</script>"})
        self.fails_at, self.failure = fails_at, ZeroDivisionError("<i>never</i>")

    def training_step(self, batch, batch_idx):
        if self.fails_at == self.global_step:
            raise self.failure
        outputs = super().training_step(batch, batch_idx)
        self.log("train/loss", outputs["loss"].detach(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("<img src=x>", 1.0)
        return outputs

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_train_epoch_end(self):
        self.log("epoch_end", float(self.current_epoch), sync_dist=True)


def train(callbacks, module=None, seed=0, **options):
    pl.seed_everything(seed, verbose=False)
    arguments = {"max_epochs": 2, "log_every_n_steps": 1, **QUIET, "callbacks": callbacks, **options}
    trainer = Trainer(**arguments)
    trainer.fit(module or Logs(), loader(), loader())
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The record of a whole run without a logger."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train([RunReport(folder)])
    return read_record(folder)


@cases(
    "options",
    {},
    {"accumulate_grad_batches": 4},
    {"val_check_interval": 3, "check_val_every_n_epoch": None},
    {"log_every_n_steps": 3, "num_sanity_val_steps": 2},
    {"reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 0},
)
def test_record_holds_what_a_csv_logger_writes(tmp_path, options, undisturbed):
    logger = CSVLogger(tmp_path / "csv")
    train([RunReport(tmp_path / "a")], logger=logger, **options)
    record = read_record(tmp_path / "a")
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 3
    for key in rows[0].keys() - {"step", "epoch"}:
        written = [(int(row["step"]), int(row["epoch"]), float(row[key])) for row in rows if row[key]]
        assert [(point.step, point.epoch, point.value) for point in record.curve(key)] == written
    if not options:
        assert record.rows == undisturbed.rows, "with a logger and without one"


def test_what_auto_resume_could_not_restore_is_in_the_page(tmp_path):
    class Opens(Logs):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.opened = object()  # neither a plain value nor a tensor

    def callbacks():
        return [RunReport(tmp_path / "a"), AutoResume(tmp_path / "saves", every_n_train_steps=3)]

    with pytest.raises(SystemExit), pytest.warns(UserWarning, match="opened"):
        train([*callbacks(), Interrupts(13)], Opens())
    with pytest.warns(UserWarning, match="opened"):
        train(callbacks(), Opens())
    (resume,) = read_record(tmp_path / "a").resumes
    assert resume.not_restored
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "resumed once, at step 13, and not exactly" in page


def test_learning_rate_is_that_of_the_step(tmp_path):
    class Decays(Logs):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    train([RunReport(tmp_path)], Decays())
    rates = [point.value for point in read_record(tmp_path).curve("learning_rate")]
    assert rates == [0.01 * 0.5**step for step in range(20)]


def test_error_leaves_a_page_that_names_it(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train([RunReport(tmp_path)], Logs(fails_at=13))
    record = read_record(tmp_path)
    assert (record.status, record.message) == ("failed", "ZeroDivisionError: <i>never</i>")
    assert len(record.curve("train/loss_step")) == 13
    assert "&lt;i&gt;never" in (tmp_path / "report.html").read_text(encoding="utf-8")


def rows_of(record):
    return [(row.kind, row.step, row.epoch, row.values) for row in record.rows]


@pytest.mark.oldest
def test_stopped_run_that_auto_resume_continues_has_the_undisturbed_record(undisturbed, tmp_path):
    def fit(*more):
        report, saves = RunReport(tmp_path / "a"), AutoResume(tmp_path / "saves", every_n_train_steps=3)
        train([report, saves, *more])

    with pytest.raises(SystemExit):
        fit(Interrupts(13))
    stopped = read_record(tmp_path / "a")
    assert (stopped.status, len(stopped.curve("train/loss_step"))) == ("stopped", 13)
    fit()
    resumed = read_record(tmp_path / "a")
    assert rows_of(resumed) == rows_of(undisturbed)
    assert [(one.step, one.epoch, one.not_restored) for one in resumed.resumes] == [(13, 1, [])]
    assert resumed.started == stopped.started
    assert [(one.batches, one.samples, one.step) for one in (stopped, resumed)] == [(13, 52, 13), (20, 80, 20)]
    assert resumed.seconds > stopped.seconds > 0
    assert resumed.validation_seconds > stopped.validation_seconds > 0
    assert resumed.status == "finished"


class _Kills(pl.Callback):
    """Kills its process at a step, as a scheduler does that gives no notice."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 17:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork and no SIGKILL")
def test_killed_run_leaves_a_page_and_its_record_is_continued(undisturbed, tmp_path):
    def callbacks():
        return [RunReport(tmp_path / "a"), AutoResume(tmp_path / "saves", every_n_train_steps=3)]

    child = multiprocessing.get_context("fork").Process(
        target=run_and_exit, args=(lambda: train([*callbacks(), _Kills()]),)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    killed = read_record(tmp_path / "a")
    assert killed.status == "running"
    assert len(killed.curve("train/loss_step")) == 15  # those before the last save
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "was running when this page was written" in page
    train(callbacks())
    resumed = read_record(tmp_path / "a")
    assert rows_of(resumed) == rows_of(undisturbed)
    assert [one.step for one in resumed.resumes] == [15]


@pytest.mark.oldest
def test_rows_after_the_restored_step_are_dropped(undisturbed, tmp_path):
    trainer = train([RunReport(tmp_path / "a")], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    for _ in range(2):  # the second time the run had finished
        pl.seed_everything(0, verbose=False)
        again = Trainer(max_epochs=2, log_every_n_steps=1, callbacks=[RunReport(tmp_path / "a")], **QUIET)
        again.fit(Logs(), loader(), loader(), ckpt_path=tmp_path / "one.ckpt")
        assert rows_of(read_record(tmp_path / "a")) == rows_of(undisturbed)
    assert len(read_record(tmp_path / "a").resumes) == 2
    assert rows_of(read_record(tmp_path / "a" / "earlier-1")) == rows_of(undisturbed)


def test_resume_into_the_folder_of_another_run_continues_its_own_record(undisturbed, tmp_path, caplog):
    train([RunReport(tmp_path / "a")], max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    train([RunReport(tmp_path / "a")], seed=1)
    other = (tmp_path / "a" / "values.jsonl").read_text()
    pl.seed_everything(0, verbose=False)
    again = Trainer(max_epochs=2, log_every_n_steps=1, callbacks=[RunReport(tmp_path / "a")], **QUIET)
    with caplog.at_level("INFO"):
        again.fit(Logs(), loader(), loader(), ckpt_path=tmp_path / "one.ckpt")
    assert rows_of(read_record(tmp_path / "a")) == rows_of(undisturbed)
    assert (tmp_path / "a" / "earlier-2" / "values.jsonl").read_text() == other
    assert f"moved to {tmp_path / 'a' / 'earlier-2'}" in caplog.text
    assert f"the record of this run was found in {tmp_path / 'a' / 'earlier-1'}" in caplog.text


def test_fit_within_a_fit_has_a_report_of_its_own(undisturbed, tmp_path):
    class Fits(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            with isolated_rng():
                train([RunReport(tmp_path / "a")], seed=trainer.current_epoch + 1, max_epochs=1)

    train([RunReport(tmp_path / "a"), Fits()])
    assert rows_of(read_record(tmp_path / "a")) == rows_of(undisturbed)
    inner = [tmp_path / "a" / "at-once-1", tmp_path / "a" / "at-once-1" / "earlier-1"]
    assert [len(read_record(folder).curve("train/loss_step")) for folder in inner] == [10, 10]


@pytest.mark.oldest
def test_rank_zero_writes_what_is_logged(tmp_path):
    logger = CSVLogger(tmp_path / "csv")
    train([RunReport(tmp_path / "a")], logger=logger, strategy="ddp_fork", devices=2, use_distributed_sampler=True)
    with next((tmp_path / "csv").rglob("metrics.csv")).open(newline="") as file:
        written = [float(row["train/loss_step"]) for row in csv.DictReader(file) if row["train/loss_step"]]
    record = read_record(tmp_path / "a")
    assert [point.value for point in record.curve("train/loss_step")] == written
    assert len(written) == 10
    assert ("strategy", "DDPStrategy, 2 ranks") in record.trainer
    assert (record.ranks, record.batches, record.samples) == (2, 10, 40)
    assert "samples a second, on rank 0 of 2" in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")


def test_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(MisconfigurationException, match="Choose another dirpath"):
        train([RunReport(tmp_path / "a")])


def test_fast_dev_run_writes_nothing(tmp_path):
    train([RunReport(tmp_path / "a")], fast_dev_run=True)
    assert not (tmp_path / "a").exists()


def test_full_disk_stops_the_report_and_not_the_training(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("lightning_tricks.run_report.core.run_writer.on_disk.append_rows", fails)
    with pytest.warns(UserWarning, match="RunReport stops writing .*No space left") as warned:
        trainer = train([RunReport(tmp_path)])
    assert trainer.global_step == 20
    assert sum("RunReport stops writing" in str(one.message) for one in warned) == 1


def test_callback_that_fails_to_tell_what_it_knows_does_not_end_the_training(tmp_path):
    class Fails(SeedEverything):
        def report_parts(self, trainer):
            raise KeyError("gone")

    with pytest.warns(UserWarning, match="RunReport stops writing .*KeyError: 'gone'"):
        trainer = train([RunReport(tmp_path), Fails(0)])
    assert trainer.global_step == 20


def test_text_that_utf8_lacks_is_replaced(tmp_path):
    module = Logs()
    module.save_hyperparameters({"file": "a\udc80", "many": list(range(100_000))})
    train([RunReport(tmp_path)], module, max_epochs=1)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a?" in page
    assert len(page) < 100_000
    assert dict(read_record(tmp_path).arguments)["file"] == "a\udc80"


def test_page_has_what_callbacks_know_and_a_test_after_the_fit(tmp_path):
    callbacks = [
        RunReport(tmp_path),  # first: it asks the others when all are done
        GradientClipping(0.1),
        MetricsMonitor({"task": "multiclass", "num_classes": 10}, class_names=list("abcdefghij")),
        RunFingerprint(tmp_path / "fingerprint.jsonl"),
        ImageLogger(3, shape=[1, 8, 8]),
    ]
    module = EvaluatedNet()
    trainer = train(callbacks, module)
    before = read_record(tmp_path)
    (clipped,), (matrix,), (pictures,) = map(before.parts_of, (ClippedSteps, ConfusionMatrix, Pictures))
    assert (clipped.steps, clipped.clipped, clipped.max_norm) == (20, 20, 0.1)
    assert (matrix.stage, matrix.epoch, matrix.classes[0]) == ("val", 1, "a")
    right = sum(matrix.counts[place][place] for place in range(10)) / 40
    (reliability,) = before.parts_of(Reliability)
    assert sum(w * s for w, s in zip(reliability.weight, reliability.share, strict=True)) == pytest.approx(right)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == len(pictures.pictures) == min(3, round(40 * (1 - right))) > 0
    assert "fingerprint diff" in page
    for seed in range(2):  # the second test replaces the parts of the first
        rows = DataLoader(Subset(digits(), range(8 * (seed + 1))), 4)
        trainer.test(module, rows, verbose=False)
    record = read_record(tmp_path)
    assert [point.step for point in record.curve("test/acc")] == [20, 20]
    assert record.rows[: len(before.rows)] == before.rows
    assert (record.status, record.seconds, record.step) == ("finished", before.seconds, 20)
    assert record.parts_of(ClippedSteps) == [clipped]
    assert {part.stage: sum(map(sum, part.counts)) for part in record.parts_of(ConfusionMatrix)} == {
        "val": 40,
        "test": 16,
    }
    assert [part.title for part in record.parts_of(Pictures)] == [
        f"Most confident mistakes ({x})" for x in ("val", "test")
    ]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>test/acc</td>" in page
    assert "Classes (test)" in page


def test_test_that_fails_leaves_the_report_of_the_fit(tmp_path):
    class Fails(EvaluatedNet):
        def test_step(self, batch, batch_idx):
            raise ZeroDivisionError

    module = Fails()
    trainer = train([RunReport(tmp_path)], module)
    files = {name: (tmp_path / name).read_bytes() for name in ("run.json", "values.jsonl", "report.html")}
    with pytest.raises(ZeroDivisionError):
        trainer.test(module, loader(), verbose=False)
    assert files == {name: (tmp_path / name).read_bytes() for name in files}


def test_test_writes_nothing_into_the_report_of_another_fit(tmp_path):
    module = EvaluatedNet()
    trainer = train([RunReport(tmp_path)], module)
    train([RunReport(tmp_path)], EvaluatedNet(), max_epochs=1)
    rows = (tmp_path / "values.jsonl").read_bytes()
    trainer.test(module, loader(), verbose=False)
    assert (tmp_path / "values.jsonl").read_bytes() == rows
    Trainer(callbacks=[RunReport(tmp_path / "alone")], **QUIET).test(module, loader(), verbose=False)
    assert not (tmp_path / "alone").exists()
