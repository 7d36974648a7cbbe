"""Throughput: how many samples a run has seen, in how much time, over all its parts."""

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_tricks import DeviceMonitor, RunReport
from lightning_tricks._shared.report_parts import DeviceUse
from lightning_tricks.run_report import RunRecord, read_record
from lightning_tricks.run_report.core.page import throughput
from lightning_tricks.run_report.core.run_writer import ThroughputMeter
from tests.run_report.test_callback import Logs
from tests.small import QUIET, Net, cases, digits, loader


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


@cases(
    "loaders, samples",
    (lambda: DataLoader(Images(), 4), 32),
    (lambda: DataLoader(Images(), 8, collate_fn=list), None),  # 8 images of 3 channels are not 3 samples
    (lambda: DataLoader(Images(), 2, collate_fn=list), None),
    (lambda: {"a": DataLoader(Images(), 4), "b": DataLoader(Images(), 4)}, None),
    (lambda: DataLoader(Images(), 4, collate_fn=lambda images: {"n": len(images)}), None),
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
    assert without.sentences == ["Add DeviceMonitor to see what training waits for."]
