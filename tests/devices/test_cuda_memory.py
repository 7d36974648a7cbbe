"""`CudaMemory` in real fits: reports of memory that really ran out, and what is logged with the figures of a GPU."""

import os
import pickle
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, Dataset

from lightning_tricks.devices import CudaMemory, MemoryReport
from tests.devices.runs import SavesInTheMiddle, rows
from tests.small import QUIET, EvaluatedNet, Net, cases, digits, fit, loader

GIB = 2**30


class Hungry(EvaluatedNet):
    """Asks for 4 PiB in one step."""

    def __init__(self, where="training_step", batch_idx=3, rank=0, **arguments):
        super().__init__(**arguments)
        self.where, self.at, self.rank = where, batch_idx, rank

    def eat(self, where, batch_idx=3):
        if (where, batch_idx, self.global_rank) == (self.where, self.at, self.rank):
            torch.empty(1 << 50)

    def training_step(self, batch, batch_idx):
        self.eat("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def evaluate(self, batch, batch_idx):
        self.eat("evaluate", batch_idx)
        return super().evaluate(batch, batch_idx)

    validation_step = test_step = evaluate

    def predict_step(self, batch, batch_idx):
        self.eat("predict_step", batch_idx)
        return super().predict_step(batch, batch_idx)

    def on_after_backward(self):
        self.eat("backward")

    def on_train_epoch_end(self):
        self.eat("epoch_end")


def run(module, callback, function="fit", error=RuntimeError, **arguments):
    """Run until memory is exhausted; return the error."""
    trainer = Trainer(callbacks=[callback], **{"max_epochs": 1, **QUIET, **arguments})
    data = (loader(), loader()) if function == "fit" else (loader(),)
    with pytest.raises(error) as caught:
        getattr(trainer, function)(module, *data)
    return caught.value


def notes(error):
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.fixture
def told(lightning_log):
    """The advice: in the notes of the error, or in the log before Python 3.11."""
    return lambda error: notes(error) or "\n".join(message for _, message in lightning_log)


def test_memory_that_really_runs_out_in_training(tmp_path, told):
    callback = CudaMemory(dirpath=tmp_path / "made" / "here")
    error = run(Hungry(hidden=512), callback)
    text = (tmp_path / "made" / "here" / "out_of_memory-rank0.txt").read_text()
    for line in (
        "stage train, epoch 0, batch 3",
        "rank 0 of 1, precision 32-true",
        "4096 TiB were requested",
        "batch: list of 2",
        "  [0]: float32 4x64 on cpu, 1 KiB",
        "  [1]: int64 4 on cpu, 32 B",
    ):
        assert line in text.splitlines()
    for words in ("exp_avg of net.0.weight", "512x64", "4503599627370496 bytes", "more than the device has"):
        assert words in text
    assert [path.name for path in (tmp_path / "made" / "here").iterdir()] == ["out_of_memory-rank0.txt"]
    advice = told(error)
    assert "cpu ran out of memory on rank 0, stage train, epoch 0, batch 3." in advice
    assert "more than the device has" in advice
    assert str(tmp_path / "made" / "here" / "out_of_memory-rank0.txt") in advice
    assert isinstance(callback.report, MemoryReport)
    assert "exp_avg of net.0.weight" in {one.name for one in callback.report.largest}


@cases(
    "function, where, words",
    ("fit", "backward", "stage train, epoch 0, batch 0"),
    ("fit", "epoch_end", "stage train, epoch 0, outside of a step"),
    ("fit", "evaluate", "stage validate, epoch 0, batch 3"),
    ("validate", "evaluate", "stage validate, epoch 0, batch 3"),
    ("test", "evaluate", "stage test, epoch 0, batch 3"),
    ("predict", "predict_step", "stage predict, epoch 0, batch 3"),
)
def test_each_stage_is_named_once(tmp_path, told, function, where, words):
    error = run(Hungry(where), CudaMemory(dirpath=str(tmp_path)), function)
    assert told(error).count("ran out of memory on rank 0") == 1
    text = (tmp_path / "out_of_memory-rank0.txt").read_text()
    assert words in text.splitlines()
    assert ("4x64" in text) == ("outside" not in words)


def test_the_folder_is_the_loggers(tmp_path):
    logger = CSVLogger(tmp_path, name="runs", version=7)
    run(Hungry(), CudaMemory(), logger=logger, log_every_n_steps=1)
    assert (tmp_path / "runs" / "version_7" / "out_of_memory-rank0.txt").exists()


def test_the_folder_is_the_trainers_without_a_logger_and_stays_when_the_directory_changes(tmp_path, monkeypatch):
    class Moves(Hungry):
        def on_train_start(self):
            (tmp_path / "elsewhere").mkdir()
            os.chdir(tmp_path / "elsewhere")

    run(Moves(), CudaMemory(), default_root_dir="runs")
    assert (tmp_path / "runs" / "out_of_memory-rank0.txt").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_that_is_not_on_a_disk_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "log_dir", "s3://bucket/logs")
    run(Hungry(), CudaMemory(), default_root_dir="runs")
    assert (tmp_path / "runs" / "out_of_memory-rank0.txt").exists()
    monkeypatch.setattr(Trainer, "default_root_dir", "gs://bucket")
    run(Hungry(), CudaMemory())
    assert (tmp_path / "out_of_memory-rank0.txt").exists()
    run(Hungry(), CudaMemory(dirpath="here"))
    assert (tmp_path / "here" / "out_of_memory-rank0.txt").exists()


class Breaks(Net):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError("other"), RuntimeError("shapes cannot be multiplied")])
def test_another_error_is_left_alone(tmp_path, error):
    callback = CudaMemory(dirpath=tmp_path)
    with pytest.raises(type(error)):
        fit(Breaks(error), callback)
    assert not notes(error)
    assert not list(tmp_path.iterdir())
    assert callback.report is None


def test_a_folder_that_cannot_be_written_does_not_replace_the_error(tmp_path, told):
    (tmp_path / "file").write_text("")
    error = run(Hungry(), CudaMemory(dirpath=tmp_path / "file" / "folder"))
    assert "can't allocate memory" in str(error)
    assert re.search("The report could not be written to .*file.folder: NotADirectoryError", told(error))
    assert "more than the device has" in told(error)


def test_a_failure_in_the_report_does_not_replace_the_error(tmp_path, monkeypatch, lightning_log):
    def fails(*args, **kwargs):
        raise LookupError("no figures")

    monkeypatch.setattr("lightning_tricks.devices.cuda_memory.memory_report", fails)
    callback = CudaMemory(dirpath=tmp_path)
    error = run(Hungry(), callback)
    assert "can't allocate memory" in str(error)
    assert any(
        "could not report the use of the memory that ran out: LookupError('no figures')" in line
        for _, line in lightning_log
    )
    assert callback._step is None


class Batches(Dataset):
    """Batches that can be told apart, and that say when they are gone."""

    def __init__(self):
        self.references = []

    def __len__(self):
        return 3

    def __getitem__(self, index):
        batch = torch.full((4, 64), float(index))
        self.references.append(weakref.ref(batch))
        return batch, torch.zeros(4, dtype=torch.long)


def test_no_batch_is_kept_after_its_step():
    """The Trainer itself lets go of a batch when it fetches the next one."""
    alive = []

    def watch(data):
        class Watches(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                alive.append(sum(reference() is not None for reference in data.references))

        return Watches()

    for callbacks in ([], [CudaMemory()]):
        data = Batches()
        fit(Net(), watch(data), *callbacks, data=DataLoader(data, batch_size=None))
        assert not any(reference() for reference in data.references[:-1])
    assert alive[:3] == alive[3:]


def test_on_a_cpu_it_says_once_what_it_leaves_out(lightning_log, tmp_path):
    callback = CudaMemory(limit=0.5, record_history=True, empty_cache_every_n_epochs=1)
    fit(Net(), callback, logger=CSVLogger(tmp_path, version=0), max_epochs=3, log_every_n_steps=1)
    said = [line for _, text in lightning_log for line in text.splitlines() if "CudaMemory" in line]
    assert len(said) == 1
    assert "logs, limits and records nothing on cpu" in said[0]
    assert not (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").exists()
    assert callback.report.device == "cpu"
    assert callback.report.growth_per_epoch is None


def test_a_second_fit_and_a_pickle_in_the_middle(tmp_path):
    callback = CudaMemory(dirpath=tmp_path)
    run(Hungry(), callback)
    first = (tmp_path / "out_of_memory-rank0.txt").read_text()

    class Pickles(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.copy = pickle.loads(pickle.dumps(callback))

    pickles = Pickles()
    fit(Net(), callback, pickles)
    assert pickles.copy.dirpath == tmp_path
    assert pickles.copy._step is None
    run(Hungry(batch_idx=5), callback)
    second = (tmp_path / "out_of_memory-rank0.txt").read_text()
    assert "batch 3" in first
    assert "batch 5" in second


def test_a_tuner_that_tries_batch_sizes_is_not_reported(tmp_path):
    class Tuned(EvaluatedNet):
        batch_size = 2

        def train_dataloader(self):
            return DataLoader(digits(), batch_size=self.batch_size)

        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().training_step(batch, batch_idx)

        def val_dataloader(self):
            return loader()

    module, callback = Tuned(), CudaMemory(dirpath=tmp_path / "reports")
    options = {**QUIET, "max_epochs": 1, "default_root_dir": tmp_path, "num_sanity_val_steps": 0}
    trainer = Trainer(callbacks=[callback], **options)
    assert Tuner(trainer).scale_batch_size(module, steps_per_trial=2) == 8
    assert not (tmp_path / "reports").exists()
    module.batch_size = 16
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(module)
    assert (tmp_path / "reports" / "out_of_memory-rank0.txt").exists()


def test_a_worker_of_the_loader_that_runs_out(tmp_path, told):
    class Refused(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return np.zeros(1 << 50)

    data = DataLoader(Refused(), num_workers=1)
    with pytest.raises(RuntimeError) as caught:
        fit(Net(), CudaMemory(dirpath=tmp_path), data=data)
    assert "more than the device has" in told(caught.value)
    assert "8192 TiB were requested" in (tmp_path / "out_of_memory-rank0.txt").read_text()


def test_a_module_that_cannot_be_looked_into_ends_no_fit(tmp_path):
    class Old(Net):
        def named_parameters(self, prefix="", recurse=True):
            return super().named_parameters(prefix, recurse)

    callback = CudaMemory(dirpath=tmp_path)
    with pytest.warns(UserWarning, match="could not report on the memory at the end of the fit: TypeError"):
        fit(Old(), callback)
    assert callback.report is None


def test_bad_arguments_are_named():
    for arguments, words in (
        ({"empty_cache_every_n_epochs": 0}, "empty_cache_every_n_epochs must be a whole number >= 1, got 0"),
        ({"limit": 1.5}, "limit must be a number > 0 and <= 1"),
        ({"dirpath": "s3://bucket/folder"}, "dirpath must be the path of a folder on a local or mounted disk, got 's3"),
        ({"record_history": True, "snapshot_on_oom": False}, "record_history=True needs snapshot_on_oom=True"),
    ):
        with pytest.raises(ValueError, match=words):
            CudaMemory(**arguments)
    with pytest.raises(TypeError, match="dirpath must be the path of a folder"):
        CudaMemory(dirpath=3)


class FakeGpu:
    """torch's CUDA functions with figures of our own, for a Trainer whose device only claims to be a GPU."""

    def __init__(self, monkeypatch):
        self.calls, self.size, self.peak, self.in_hook = [], GIB, GIB, False
        self.device = torch.device("cuda:1")
        patches = {
            "memory_allocated": self._of(lambda: self.size),
            "memory_reserved": self._of(lambda: 2 * self.size),
            "max_memory_allocated": self._of(lambda: self.peak),
            "max_memory_reserved": self._of(lambda: 2 * self.peak),
            "mem_get_info": self._of(lambda: (GIB, 80 * GIB)),
            "reset_peak_memory_stats": self._of(self._reset),
            "empty_cache": self._empty,
            "set_per_process_memory_fraction": lambda *given: self.calls.append(("limit", *given)),
            "synchronize": lambda *given: self.calls.append("synchronize"),
        }
        for name, function in patches.items():
            monkeypatch.setattr(torch.cuda, name, function)
        memory = torch.cuda.memory
        monkeypatch.setattr(memory, "_record_memory_history", lambda **given: self.calls.append(("record", given)))
        monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))

    def _of(self, function):
        def checked(device):
            assert device == self.device, "another device was asked"
            return function()

        return checked

    def _empty(self):
        if self.in_hook:  # the Trainer empties it at its end
            self.calls.append("empty_cache")

    def _reset(self):
        self.peak = self.size

    def use(self, gib):
        self.peak = max(self.peak, self.size + round(gib * GIB))


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


class Pretends(CudaMemory):
    """Sees the device of the fake GPU, in all hooks that ask for a device."""

    def __init__(self, gpu, **arguments):
        super().__init__(**arguments)
        self.gpu = gpu

    def __getattribute__(self, name):
        hook = super().__getattribute__(name)
        if name not in ("setup", "on_train_epoch_end", "on_fit_end", "_on_error"):
            return hook

        def with_device(trainer, *args, **kwargs):
            strategy = type(trainer.strategy)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.gpu, "in_hook", True)
                patch.setattr(strategy, "root_device", self.gpu.device)
                patch.setattr(torch.cuda, "is_available", lambda: True)
                patch.setattr(torch.cuda, "device_count", lambda: 2)
                return hook(trainer, *args, **kwargs)

        return with_device


class Uses(EvaluatedNet):
    """Needs some GiB in its steps."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def training_step(self, batch, batch_idx):
        self.gpu.use(3 + self.current_epoch)
        return super().training_step(batch, batch_idx)

    def evaluate(self, batch, batch_idx):
        self.gpu.use(50 if self.trainer.sanity_checking else 7)
        return super().evaluate(batch, batch_idx)

    validation_step = test_step = evaluate


def logged(folder):
    found = [
        {name.removeprefix("cuda_memory/"): value for name, value in row.items() if name.startswith(("cuda_", "step"))}
        for row in rows(CSVLogger(folder, version=0))
    ]
    return [row for row in found if row.keys() != {"step"}]


def fit_on(gpu, tmp_path, module=None, callback=None, epochs=2, **arguments):
    callback = callback or Pretends(gpu)
    options = {"logger": CSVLogger(tmp_path, version=0), "max_epochs": epochs, "log_every_n_steps": 1, **arguments}
    fit(module or Uses(gpu), callback, **options)
    return callback


def test_peaks_of_training_and_validation_apart(gpu, tmp_path):
    callback = fit_on(gpu, tmp_path, num_sanity_val_steps=2, val_check_interval=0.5)
    sizes = {"allocated_gib": 1.0, "reserved_gib": 2.0, "val_peak_gib": 8.0}
    assert logged(tmp_path) == [
        {**sizes, "train_peak_gib": 4.0, "step": 9},
        {**sizes, "train_peak_gib": 5.0, "step": 19},
    ]
    report = callback.report
    assert (report.device, report.allocated, report.peak_allocated) == ("cuda:1", GIB, 51 * GIB)
    assert report.growth_per_epoch == 0
    assert "synchronize" not in gpu.calls


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_the_peak_of_an_epoch_that_resumes_in_the_middle(gpu, tmp_path):
    options = {**QUIET, "max_epochs": 1, "limit_val_batches": 0}
    fit(Uses(gpu), SavesInTheMiddle(tmp_path / "middle.ckpt"), **options)
    logger = CSVLogger(tmp_path, version=0)
    trainer = Trainer(callbacks=[Pretends(gpu)], **{**options, "logger": logger, "log_every_n_steps": 1})
    trainer.fit(Uses(gpu), loader(), loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert [row["train_peak_gib"] for row in logged(tmp_path)] == [4.0]


@pytest.mark.parametrize(("function", "key"), [("validate", "val_peak_gib"), ("test", "test_peak_gib")])
def test_the_peak_of_a_stage_alone(gpu, tmp_path, function, key):
    options = {**QUIET, "logger": CSVLogger(tmp_path, version=0)}
    trainer = Trainer(callbacks=[Pretends(gpu)], **options)
    getattr(trainer, function)(Uses(gpu), loader(), verbose=False)
    assert logged(tmp_path) == [{key: 8.0, "step": 0}]


def test_the_limit_is_that_of_the_ranks_own_device_and_the_cache_is_emptied_every_second_epoch(gpu, tmp_path):
    fit_on(gpu, tmp_path, callback=Pretends(gpu, limit=0.25, empty_cache_every_n_epochs=2), epochs=5)
    assert gpu.calls == [("limit", 0.25, gpu.device), "empty_cache", "empty_cache"]


class Keeps(Uses):
    """Keeps some memory in each epoch."""

    def __init__(self, gpu, sizes):
        super().__init__(gpu)
        self.sizes = iter(sizes)

    def on_train_epoch_start(self):
        self.gpu.size += round(next(self.sizes) * GIB)


def test_growth_is_warned_of_once(gpu, tmp_path):
    words = r"grew in each of the last 4 epochs, from 2 GiB to 4 GiB\. .*detach"
    with pytest.warns(UserWarning, match=words) as caught:
        callback = fit_on(gpu, tmp_path, Keeps(gpu, [1] + 7 * [0.5]), epochs=8)
    assert len([one for one in caught if "grew" in str(one.message)]) == 1
    assert callback.report.growth_per_epoch == GIB // 2


class Exhausted(Uses):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of"
            )
        return super().training_step(batch, batch_idx)


def test_a_gpu_that_is_full(gpu, tmp_path, told):
    callback = Pretends(gpu, record_history=True, limit=0.5, dirpath=tmp_path / "oom")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_on(gpu, tmp_path, Exhausted(gpu), callback)
    assert len(list((tmp_path / "oom").iterdir())) == 2
    assert (tmp_path / "oom" / "out_of_memory-rank0.pickle").read_bytes() == b"snapshot"
    text = (tmp_path / "oom" / "out_of_memory-rank0.txt").read_text()
    for words in ("Memory of cuda:1", "2 GiB were requested", "allocated: 1 GiB (peak 4 GiB)", "hold 77 GiB"):
        assert words in text
    assert "raise limit=0.5" in told(caught.value)
    records = [given for name, given in (call for call in gpu.calls if isinstance(call, tuple) and call[0] == "record")]
    assert [given.get("enabled", "all") for given in records] == ["all", None]


def test_a_shortage_of_the_host_is_no_shortage_of_the_gpu(gpu, tmp_path):
    class OnHost(Uses):
        def training_step(self, batch, batch_idx):
            return torch.empty(1 << 50)

    callback = Pretends(gpu, record_history=True, dirpath=tmp_path / "oom")
    with pytest.raises(RuntimeError, match="can't allocate"):
        fit_on(gpu, tmp_path, OnHost(gpu), callback)
    assert [path.name for path in (tmp_path / "oom").iterdir()] == ["out_of_memory-rank0.txt"]
    assert callback.report.device == "cpu"


class RealGpuNet(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.kept = torch.empty(1 << 45, device=self.device)
        return super().training_step(batch, batch_idx)


@pytest.mark.gpu("only the real allocator has a history")
def test_a_real_gpu_runs_out(tmp_path):
    callback = CudaMemory(dirpath=tmp_path, record_history=True)
    with pytest.raises(torch.OutOfMemoryError):
        fit(RealGpuNet(hidden=512), callback, accelerator="gpu", devices=1)
    text = (tmp_path / "out_of_memory-rank0.txt").read_text()
    for words in ("stage train, epoch 0, batch 3", "float32 4x64 on cuda:0", "exp_avg of net.0.weight"):
        assert words in text
    snapshot = pickle.loads((tmp_path / "out_of_memory-rank0.pickle").read_bytes())
    assert any(snapshot["device_traces"])


class RealLeak(Net):
    def __init__(self):
        super().__init__(hidden=512)
        self.losses = []

    def training_step(self, batch, batch_idx):
        out = super().training_step(batch, batch_idx)
        self.losses.append(torch.zeros(2**16, device=self.device) + out["loss"])
        return out


@pytest.mark.gpu
def test_a_real_gpu_is_watched(tmp_path):
    callback = CudaMemory(empty_cache_every_n_epochs=2, limit=0.9)
    options = {"accelerator": "gpu", "devices": 1, "logger": CSVLogger(tmp_path, version=0), "log_every_n_steps": 1}
    with pytest.warns(UserWarning, match="grew in each of the last 4 epochs"):
        fit(RealLeak(), callback, max_epochs=6, **options)
    assert len(logged(tmp_path)) == 6
    for row in logged(tmp_path):
        assert row["train_peak_gib"] >= row["allocated_gib"] > 0
        assert row["reserved_gib"] >= row["allocated_gib"]
    assert callback.report.growth_per_epoch >= 10 * 4 * 2**16
    assert any(one.name.startswith("losses[") for one in callback.report.largest)


@pytest.mark.gpu
def test_no_step_waits_for_a_real_gpu():
    class Strict(Callback):
        def on_train_batch_start(self, *args):
            torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *args):
            torch.cuda.set_sync_debug_mode("default")

    try:
        fit(Net("sgd"), Strict(), CudaMemory(), accelerator="gpu", devices=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
