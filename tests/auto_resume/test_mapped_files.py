"""Files that are mapped into memory and that training writes to: a resume does not take them back, and says so."""

import mmap
import os
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_tricks.auto_resume import AutoResume
from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from tests.auto_resume.test_callback import fit
from tests.small import Net

pytestmark = pytest.mark.oldest

SHAPE = (40, 64)


def opened(path, how):
    """Return what a data set holds of a file of numbers."""
    if how == "bytes":
        return mmap.mmap(os.open(path, os.O_RDWR), 0)
    mode = "r+" if how in ("array", "list", "tensor", "untouched") else how
    mapped = np.memmap(path, dtype=np.float32, mode=mode, shape=SHAPE)
    kinds = {"array": np.asarray, "list": lambda one: [one], "tensor": torch.from_numpy}
    return kinds.get(how, lambda one: one)(mapped)


class Mapped(Dataset):
    """Writes to the file whenever it is asked for a sample, from an epoch on."""

    def __init__(self, path, how, first):
        self.x, self.epoch = opened(path, how), 0
        self.first = 99 if how in ("r", "untouched") else first

    def __len__(self):
        return SHAPE[0]

    def numbers(self):
        if isinstance(self.x, mmap.mmap):
            return np.frombuffer(self.x, np.float32).reshape(SHAPE)
        return self.x[0] if isinstance(self.x, list) else self.x

    def __getitem__(self, index):
        numbers = self.numbers()
        if self.epoch >= self.first:
            numbers[index] *= 0.5
        return torch.as_tensor(np.array(numbers[index])), index % 10


class Ends(Callback):
    """Tells the data set the epoch, and ends the run in the second or third one."""

    def __init__(self, data, epoch):
        self.data, self.last = data, epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.data.epoch = trainer.current_epoch
        if (trainer.current_epoch, batch_idx) == (self.last, 5):
            raise RuntimeError("gone")


def warned_in_two_starts(tmp_path, how, first, often):
    path = tmp_path / "x"
    np.random.default_rng(0).random(SHAPE, dtype=np.float32).tofile(path)
    said = []
    for epoch in (1, 9):
        data = Mapped(path, how, first)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                fit(Ends(data, epoch), AutoResume(tmp_path / "runs", **often), data=DataLoader(data, batch_size=4))
            except RuntimeError:
                assert epoch == 1
        said.append([str(one.message) for one in caught if "AutoResume" in str(one.message)])
    return said


@pytest.mark.parametrize("often", [{}, {"every_n_train_steps": 3}], ids=["epochs", "steps"])
@pytest.mark.parametrize("first", [0, 1], ids=["from the first", "after the save"])
@pytest.mark.parametrize("how", ["r+", "c", "list", "bytes", "array", "tensor"])
def test_a_file_that_training_writes_to_is_named(tmp_path, how, first, often):
    before, after = warned_in_two_starts(tmp_path, how, first, often)
    if first == 0 and how not in ("array", "tensor"):  # these are saved
        assert "dataset.x" in before[0]
        assert "or the contents of their files" in before[0]
    if how != "c" or first == 0 or often:  # it is gone with the process
        assert any("dataset.x" in sentence for sentence in after)


@pytest.mark.parametrize("how", ["r", "c", "untouched"])
def test_a_file_that_training_only_reads_is_not_named(tmp_path, how):
    assert warned_in_two_starts(tmp_path, how, 99, {"every_n_train_steps": 3}) == [[], []]


class Holds(Net):
    """Keeps scores of samples in a file."""

    def __init__(self, path):
        super().__init__(dropout=0.2)
        self.scores = np.memmap(path, dtype=np.float32, mode="r+", shape=SHAPE)

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.scores[batch_idx] += float(outputs["loss"].detach())
        return {**outputs, "loss": outputs["loss"] * (1 + float(self.scores[batch_idx].mean()))}


def test_a_file_of_the_module_is_named(tmp_path):
    np.zeros(SHAPE, np.float32).tofile(tmp_path / "x")
    with pytest.warns(
        UserWarning, match=r"cannot be saved: module.scores \(numpy.memmap\).*or the contents of a memory-mapped file"
    ):
        fit(AutoResume(tmp_path / "runs"), module=lambda: Holds(tmp_path / "x"))


@pytest.mark.parametrize("same_process", [True, False])
def test_of_a_large_file_few_entries_are_read(tmp_path, same_process):
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", 1 << 33)  # 8 GiB of which the disk holds nothing
    mapped = np.memmap(tmp_path / "x", dtype=np.float32, mode="r+")

    def digest(value):
        found = ValueDigest(same_process=same_process)
        found.feed(value)
        return int(found)

    before = digest(mapped)
    assert digest(mapped) == before
    mapped[: 1 << 10] = 1.0
    mapped.flush()
    assert digest(mapped) != before
