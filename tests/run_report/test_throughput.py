"""Throughput: how many samples a run has seen, in how much time, over all its parts."""

import time

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_tricks import AutoResume, DeviceMonitor, RunReport
from lightning_tricks._shared.report_parts import DeviceUse
from lightning_tricks.run_report import RunRecord, read_record
from lightning_tricks.run_report.core.page import throughput
from lightning_tricks.run_report.core.run_writer import ThroughputMeter
from tests.contract.checks import Interrupts
from tests.contract.lab import QUIET, Net, digits, loader
from tests.run_report.test_callback import Logs, train


class Uneven(Logs):
    """Trains on batches of which the last one of an epoch is smaller."""

    def train_dataloader(self):
        return DataLoader(digits(), 7)

    def val_dataloader(self):
        return loader()


def fit(module, *callbacks, **options):
    seed_everything(0, verbose=False)
    Trainer(max_epochs=2, log_every_n_steps=1, callbacks=list(callbacks), **{**QUIET, **options}).fit(module)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"limit_train_batches": 2}])
def test_all_samples_are_counted_also_those_of_the_last_batch(tmp_path, options):
    fit(Uneven(), RunReport(tmp_path), **options)
    record = read_record(tmp_path)
    batches = options.get("limit_train_batches", -(-len(digits()) // 7))
    assert record.batches == 2 * batches
    assert record.samples == 2 * min(len(digits()), 7 * batches)
    assert record.samples_per_second == record.samples / record.seconds
    assert "samples a second" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.oldest
def test_samples_and_time_of_earlier_parts_count(tmp_path):
    class Waits(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            time.sleep(0.02)

    def callbacks():
        return [RunReport(tmp_path / "a"), AutoResume(tmp_path / "saves", every_n_train_steps=3)]

    with pytest.raises(SystemExit):
        train([*callbacks(), Waits(), Interrupts(13)])
    stopped = read_record(tmp_path / "a")
    assert (stopped.batches, stopped.samples) == (13, 52)
    assert stopped.seconds > 13 * 0.02
    train(callbacks())
    resumed = read_record(tmp_path / "a")
    assert (resumed.batches, resumed.samples, resumed.step) == (20, 80, 20)
    assert resumed.seconds > stopped.seconds
    assert resumed.validation_seconds > stopped.validation_seconds > 0


class Images(Dataset):
    """Images of three channels, whose batches are lists."""

    def __len__(self):
        return 16

    def __getitem__(self, place):
        return torch.full((3, 2, 2), float(place))


class TakesAll(Net):
    """Trains on what it is given, and looks at none of it."""

    def __init__(self, loaders):
        super().__init__()
        self.loaders = loaders

    def train_dataloader(self):
        return self.loaders

    def training_step(self, batch, batch_idx):
        return self.net(digits()[0][0][None]).sum()


@pytest.mark.parametrize(
    ("loaders", "samples"),
    [
        (lambda: DataLoader(Images(), 4), 32),
        (lambda: DataLoader(Images(), 8, collate_fn=list), None),  # 8 images of 3 channels are not 3 samples
        (lambda: DataLoader(Images(), 2, collate_fn=list), None),
        (lambda: {"a": DataLoader(Images(), 4), "b": DataLoader(Images(), 4)}, None),
        (lambda: DataLoader(Images(), 4, collate_fn=lambda images: {"n": len(images)}), None),
    ],
)
def test_what_shapes_do_not_tell_is_not_said(tmp_path, loaders, samples):
    fit(TakesAll(loaders()), RunReport(tmp_path))
    record = read_record(tmp_path)
    assert (record.samples, record.batches > 0) == (samples, True)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ("samples a second" in page) == (samples is not None)
    assert "batches a second" in page


def test_object_that_cannot_be_looked_into_does_not_end_the_training(tmp_path):
    class Odd(dict):
        def values(self):
            raise ZeroDivisionError

    meter = ThroughputMeter(record := RunRecord(), None)
    meter.add(Odd(), 0)
    assert (record.samples, record.batches) == (None, 1)


def test_what_limited_a_run_is_what_the_device_monitor_found(tmp_path):
    fit(Uneven(), RunReport(tmp_path / "a"), DeviceMonitor())
    record = read_record(tmp_path / "a")
    (use,) = record.parts_of(DeviceUse)
    found = throughput(record)
    assert list(found.sentences) == list(use.verdict) != []
    assert dict(found.facts)["share of the time waiting for data"]
    without = throughput(RunRecord(batches=10, step=10, samples=20, seconds=5.0, validation_seconds=1.0))
    assert dict(without.facts) == {
        "samples a second": "4",
        "samples a second, without validation": "5",
        "batches a second": "2",
        "share of the time in validation": "20 %",
    }
    assert without.sentences == ["With a DeviceMonitor, it is said here what training waited for."]


@pytest.mark.oldest
def test_rank_zero_says_that_its_samples_are_its_own(tmp_path):
    train([RunReport(tmp_path)], strategy="ddp_fork", devices=2, use_distributed_sampler=True)
    record = read_record(tmp_path)
    assert (record.ranks, record.batches, record.samples) == (2, 10, 40)
    assert "samples a second, on rank 0 of 2" in (tmp_path / "report.html").read_text(encoding="utf-8")
