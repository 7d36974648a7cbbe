"""DeviceMonitor in real Trainers."""

import io
import json
import sys
import threading
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_tricks.devices import monitored_run
from lightning_tricks.devices.core import bottleneck, utilization
from lightning_tricks.devices.core.device_summary import DEFAULT_KEYS
from lightning_tricks.devices.device_monitor import DeviceMonitor
from tests.devices.fake_nvml import FakeGpu, FakeNvml
from tests.devices.runs import SavesInTheMiddle, rows
from tests.small import QUIET, EvaluatedNet, Net, cases, digits, loader, recorded_warnings
from tests.small import fit as train

HOST = ["host/cpu_utilization", "host/ram_used_gib", "host/data_wait"]
LOGGED = {"host/cpu_utilization", "host/data_wait"}


def threads():
    return [thread.name for thread in threading.enumerate() if "lightning_tricks" in thread.name]


def fit(*callbacks, module=None, **options):
    return train(module, *callbacks, **{"max_epochs": 2, "log_every_n_steps": 1, **options})


@pytest.mark.trap("devices: a few readable keys (PL#20807)")
def test_keys_and_steps(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(DeviceMonitor(4), logger=logger)
    found = [row for row in rows(logger) if "host/data_wait" in row]
    assert [row["step"] for row in found] == [3, 7, 11, 15, 19]
    assert {key for row in found for key in row} | LOGGED == LOGGED | {"step"}
    assert all(0 <= row["host/data_wait"] <= 100 for row in found)


def test_accumulation_logs_after_the_optimizer_steps(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(DeviceMonitor(2), logger=logger, accumulate_grad_batches=4)  # 4, 8 and 10 of 10 batches
    assert [row["step"] for row in rows(logger) if "host/data_wait" in row] == [1, 3, 5]


def test_several_optimizer_steps_in_a_batch_pass_over_no_log(tmp_path):
    class Critic(Net):
        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            self.optimizers()[0].step()
            return outputs

    logger = CSVLogger(tmp_path)
    fit(DeviceMonitor(4), module=Critic("manual"), logger=logger, max_epochs=1)  # steps 3, 6, ..., 30
    assert [row["step"] for row in rows(logger)] == [1, 2, 3, 5, 6, 7, 9]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_fit_that_resumes_in_the_middle_of_an_epoch(tmp_path):
    fit(SavesInTheMiddle(tmp_path / "middle.ckpt"), max_epochs=1)
    logger, monitor = CSVLogger(tmp_path), DeviceMonitor(1)
    runner = Trainer(callbacks=[monitor], **{**QUIET, "max_epochs": 1, "logger": logger, "log_every_n_steps": 1})
    runner.fit(Net(), loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert [row["step"] for row in rows(logger) if "host/data_wait" in row] == [6, 7, 8, 9]
    assert monitor.summary[0].stage == "train"


def test_nothing_measured_logs_nothing(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(DeviceMonitor(1, log_keys=["gpu/fan"]), logger=logger)
    assert not (Path(logger.log_dir) / "metrics.csv").exists()


@pytest.mark.trap("devices: in validation as well")
def test_validation_has_keys_of_its_own(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(DeviceMonitor(100, log_keys=HOST, stages=["val"]), module=EvaluatedNet(), logger=logger, num_sanity_val_steps=2)
    found = [row for row in rows(logger) if "host/val_data_wait" in row]
    assert [row["step"] for row in found] == [9, 19], "not in sanity checking"
    assert {key for key in found[0] if key.startswith("host")} >= {"host/val_data_wait", "host/val_ram_used_gib"}
    assert not any("host/data_wait" in row for row in rows(logger)), "no training step was to be logged"


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_every_function_alone(function, tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    stage = {"validate": "val"}.get(function, function)
    monitor = DeviceMonitor(stages=[stage], verbose=True)
    runner = Trainer(callbacks=[monitor], **{**QUIET, "logger": logger, "log_every_n_steps": 1})
    getattr(runner, function)(EvaluatedNet(), loader())
    logger.save()
    assert monitor.summary[0].stage == stage
    assert any(f"host/{stage}_data_wait" in row for row in rows(logger))
    assert "Devices in" not in capsys.readouterr().out, "the table is one of a fit"
    assert not threads()


def test_the_table_comes_once_and_says_what_the_run_waited_for(capsys, lightning_log):
    monitor = DeviceMonitor(verbose=True)
    fit(monitor, module=EvaluatedNet())
    printed = capsys.readouterr().out
    assert printed.count("Devices in training") == 1
    assert "Waited for data" in printed
    assert [line.count("Waited for data") for _, line in lightning_log if "at the end" in line] == [1]
    (summary,) = monitor.summary
    assert list(summary.means) == HOST
    assert (summary.rank, summary.node, summary.stage) == (0, 0, "train")


class Slow(torch.utils.data.Dataset):
    """Data whose samples take a time to load, on the clock of the test."""

    def __init__(self, clock, seconds):
        self.data, self.clock, self.seconds = digits(), clock, seconds

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.clock[0] += self.seconds
        return self.data[index]


class Works(Callback):
    """Lets a step take a time, on the clock of the test."""

    def __init__(self, clock, seconds):
        def on_before_backward(*args):
            clock[0] += seconds

        self.on_before_backward = on_before_backward


@pytest.mark.trap("devices: is the loader the bottleneck (PL#1216 #2701 #4833)")
@cases(
    "loading, working, words, remedy",
    (3.0, 4.0, "Waited for data 74 % of the time: the loader is the bottleneck; {}.", "try num_workers=3, now 0"),
    (0.01, 4.0, "Waited for data 1 % of the time: the loader keeps up.", ""),
)
def test_the_verdict_is_measured(loading, working, words, remedy, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(monitored_run, "DataWait", partial(bottleneck.DataWait, clock=lambda: clock[0]))
    monkeypatch.setattr(monitored_run, "available_cores", lambda: 8)
    monitor = DeviceMonitor()
    data = DataLoader(Slow(clock, loading), batch_size=4)
    fit(monitor, Works(clock, working), data=data)
    (use,) = monitor.report_parts(None)
    assert (use.verdict, use.remedy, use.keeps_up) == ([words.format(remedy)], remedy, not remedy)
    share = 100 * 19 * 4 * loading / (19 * 4 * loading + 20 * working)  # but for the first batch
    assert monitor.summary[0].means["host/data_wait"] == pytest.approx(share)


@pytest.fixture
def on_gpus(monkeypatch):
    """A Trainer on the CPU that the monitor takes for one on two GPUs; CUDA is what this machine lacks."""
    gpus = [
        FakeGpu(uuid="GPU-a", memory_used="3GiB", utilization=20, temperature=50, power=100, name="Fake A"),
        FakeGpu(uuid="GPU-b", memory_used="5GiB", utilization=99, temperature=60, power=200, name="Fake B"),
    ]
    monkeypatch.setattr(monitored_run, "cuda_device_of", lambda trainer: torch.device("cuda", 0))
    monkeypatch.setattr(Trainer, "device_ids", property(lambda self: [0, 1]))
    monkeypatch.setattr(utilization, "cuda_uuid", "ab".__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 << 30)
    monkeypatch.setattr(monitored_run, "IdleClock", NeverIdle)
    with FakeNvml(gpus) as nvml:
        yield nvml


class NeverIdle:
    def __init__(self, device):
        assert device == torch.device("cuda", 0)

    def start(self):
        pass

    def stop(self, counts):
        pass

    def take(self):
        return 0.0


@pytest.mark.trap("devices: DeviceStatsMonitor has no utilization, temperature or power")
def test_gpus(on_gpus, tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    monitor = DeviceMonitor(10, log_keys=list(DEFAULT_KEYS), verbose=True)
    fit(monitor, logger=logger)
    row = next(row for row in rows(logger) if "gpu0/utilization" in row)
    names = ("utilization", "memory_used_gib", "temperature", "power_w")
    expected = {f"gpu0/{name}": value for name, value in zip(names, (20, 3, 50, 100), strict=True)}
    expected |= {f"gpu1/{name}": value for name, value in zip(names, (99, 5, 60, 200), strict=True)}
    assert {key: value for key, value in row.items() if key.startswith("gpu")} == expected | {"gpu0/peak_memory_gib": 2}
    assert monitor.summary[0].products == {"gpu0": "Fake A", "gpu1": "Fake B"}
    assert monitor.summary[0].verdict[1].startswith("gpu0 worked 20 % of the time although data was available")
    assert "gpu1 Fake B" in capsys.readouterr().out
    assert on_gpus.calls.count("nvmlInit") == on_gpus.calls.count("nvmlShutdown"), "NVML is shut down"


def test_energy_of_a_run(on_gpus):
    class Burns(Callback):
        def on_train_batch_end(self, *args):
            on_gpus.gpus[0].energy += 1.8e5

    monitor = DeviceMonitor(1, interval=3600)
    fit(Samples(monitor), monitor, Burns(), Samples(monitor))
    assert monitor.summary[0].energy == {"gpu0": pytest.approx(20 * 0.05), "gpu1": 0.0}


class Samples(Callback):
    """Measures after each batch, as the thread would."""

    def __init__(self, monitor):
        self.monitor = monitor

    def on_train_batch_end(self, *args):
        self.monitor._run.sample()


def test_heat_is_told_once(on_gpus):
    class Heats(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            on_gpus.gpus[0].temperature += 10

    monitor = DeviceMonitor(interval=3600)
    with pytest.warns(UserWarning, match="DeviceMonitor") as warned:
        fit(Heats(), Samples(monitor), monitor)
    (heat,) = [str(warning.message) for warning in warned if "DeviceMonitor" in str(warning.message)]
    assert heat.startswith("DeviceMonitor: gpu0 is at 90 °C, and warn_temperature=85.")


def test_a_gpu_that_is_lost_is_told_once(on_gpus):
    class Loses(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                on_gpus.gpus[0].fails = {"nvmlDeviceGetUtilizationRates": "GPU_IS_LOST"}

    monitor = DeviceMonitor(interval=3600)
    with pytest.warns(UserWarning, match="DeviceMonitor") as warned:
        fit(Loses(), Samples(monitor), monitor)
    (lost,) = [str(warning.message) for warning in warned if "DeviceMonitor" in str(warning.message)]
    assert lost == "DeviceMonitor: gpu0 no longer responds (GPU is lost)."
    assert "gpu1/utilization" in monitor.summary[0].means


@pytest.mark.parametrize("error", ["GPU_IS_LOST", "NOT_SUPPORTED"])
@pytest.mark.parametrize("function", ["nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMaxMigDeviceCount"])
def test_what_one_gpu_does_not_tell_takes_nothing_from_the_other(on_gpus, function, error):
    on_gpus.gpus[1].fails = {function: error}
    monitor = DeviceMonitor()
    unknown = function == "nvmlDeviceGetUUID" or (error, "Mig" in function) == ("GPU_IS_LOST", True)
    with recorded_warnings() as warned:
        fit(monitor)
    said = [str(warning.message) for warning in warned if "DeviceMonitor" in str(warning.message)]
    assert said == ["DeviceMonitor does not measure gpu1: NVML reports nothing about it."] * unknown
    assert monitor.summary[0].means["gpu0/utilization"] == 20


class Waits(Callback):
    """Ends no epoch before something has happened."""

    def __init__(self, event):
        self.on_train_epoch_end = lambda *args: self._check(event)

    def _check(self, event):
        assert event.wait(60)


def test_a_driver_that_hangs_holds_nothing_up(on_gpus, monkeypatch, lightning_log):
    hangs, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(utilization, "PATIENCE", 1e-3)
    plain = monitored_run.GpuUtilization.measure

    def measure(self):
        if threading.current_thread() is not threading.main_thread():
            hangs.set()
            answers.wait()
        return plain(self)

    monkeypatch.setattr(monitored_run.GpuUtilization, "measure", measure)
    monitor = DeviceMonitor(interval=1e-4)
    fit(monitor, Waits(hangs))
    (thread,) = [thread for thread in threading.enumerate() if "lightning_tricks" in thread.name]
    answers.set()
    thread.join()
    assert monitor.summary[0].verdict[-1] == "The measurements ended early: the driver does not answer."
    assert any("the driver does not answer" in line for _, line in lightning_log)
    assert on_gpus.calls.count("nvmlInit") == on_gpus.calls.count("nvmlShutdown")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_what_the_system_refuses_is_told_once_and_ends_nothing(monkeypatch, error, capsys):
    def refuses(self):
        raise OSError(24, "Too many open files")

    class Breaks(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 5:
                monkeypatch.setattr(utilization.HostUtilization, "measure", refuses)
                if error is not None:
                    raise error

    monitor = DeviceMonitor()
    words = r"could not measure everything, and leaves out the rest: OSError\(24"
    if error is None:
        with pytest.warns(UserWarning, match=words):
            fit(monitor, Breaks(), Samples(monitor))
    else:
        with pytest.raises(BaseException) as raised:  # noqa: PT011
            fit(monitor, Breaks())
        assert isinstance(raised.value, KeyboardInterrupt | SystemExit)
    assert "host/data_wait" in monitor.summary[0].means
    assert not threads()


def test_an_output_that_takes_no_table_ends_no_run(on_gpus, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    output.close()
    monkeypatch.setattr(sys, "stdout", output)
    monitor = DeviceMonitor(verbose=True)
    with pytest.warns(UserWarning, match="DeviceMonitor could not print its table: "):
        fit(monitor)
    assert monitor.summary[0].products == {"gpu0": "Fake A", "gpu1": "Fake B"}


def test_each_rank_tells_about_its_own_gpu(on_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(monitored_run, "cuda_device_of", lambda trainer: torch.device("cuda", trainer.local_rank))
    monkeypatch.setattr(NeverIdle, "__init__", lambda self, device: None)
    logger = CSVLogger(tmp_path, version=0)

    class Writes(Callback):
        def on_fit_end(self, trainer, pl_module):
            if trainer.is_global_zero:
                told = [[summary.rank, [*summary.products], summary.verdict[1:]] for summary in monitor.summary]
                (tmp_path / "told.json").write_text(json.dumps(told))

    monitor = DeviceMonitor(1)
    fit(monitor, Writes(), logger=logger, strategy="ddp_fork", devices=2, max_epochs=4)
    first, second = json.loads((tmp_path / "told.json").read_text())
    assert first[:2] == [0, ["gpu0"]]
    assert second == [1, ["gpu1"], []]
    assert len(first[2]) == 1
    assert "gpu0 worked 20 %" in first[2][0]
    assert {"gpu0/utilization", "gpu1/utilization"} <= rows(logger)[0].keys(), "rank zero logs all"


def test_without_nvml_the_host_is_measured(on_gpus):
    on_gpus.init_error = "LIB_RM_VERSION_MISMATCH"
    monitor = DeviceMonitor()
    with pytest.warns(UserWarning, match="DeviceMonitor measures no GPU: NVML does not start .* was updated while"):
        fit(monitor)
    assert monitor.summary[0].means.keys() >= {*HOST, "gpu0/peak_memory_gib"}


@pytest.mark.parametrize("name", ["psutil", "pynvml"])
def test_a_missing_package_is_named_before_training(name, on_gpus):
    with (
        patch.dict(sys.modules, {name: None}),
        pytest.raises(ModuleNotFoundError, match=r"from the extra 'devices': pip install .*\"psutil"),
    ):
        fit(DeviceMonitor())
    assert not threads()


def test_without_a_gpu_no_nvml_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = DeviceMonitor()
    fit(monitor)
    assert list(monitor.summary[0].means) == HOST


class Raises(Callback):
    def __init__(self, error, hook="on_train_batch_start"):
        def raise_(trainer, pl_module, *args):
            if trainer.global_step == 15 or "batch" not in hook:
                raise error

        setattr(self, hook, raise_)


@cases(
    "hook, error",
    ("on_train_batch_start", KeyboardInterrupt()),
    ("on_fit_start", ZeroDivisionError("!")),
    ("on_train_epoch_end", ZeroDivisionError("!")),
    ("on_fit_end", KeyboardInterrupt()),
)
def test_no_thread_is_left_after_an_exception(error, hook, capsys):
    running = []

    class Sees(Callback):
        def on_train_start(self, trainer, pl_module):
            running.extend(threads())

    monitor = DeviceMonitor(interval=1e-3)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        fit(monitor, Sees(), Raises(error, hook))
    assert isinstance(raised.value, type(error) | SystemExit)
    assert running or hook == "on_fit_start"
    assert not threads()
    assert monitor._run is None
    fit(monitor)
    assert monitor.summary[0].means


def test_an_interrupted_run_shows_its_table(capsys):
    monitor = DeviceMonitor(verbose=True)
    with pytest.raises(BaseException):  # noqa: B017, PT011
        fit(monitor, Raises(KeyboardInterrupt()))
    assert "Devices in training" in capsys.readouterr().out
    monitor = DeviceMonitor(verbose=True)
    with pytest.raises(ZeroDivisionError):
        fit(monitor, Raises(ZeroDivisionError()))
    assert "Devices in training" not in capsys.readouterr().out


def test_a_thread_that_fails_does_not_stop_the_run(monkeypatch):
    raised = threading.Event()

    def sample(self):
        if threading.current_thread() is not threading.main_thread():
            raised.set()
            raise OSError("no such device")

    monkeypatch.setattr(monitored_run.MonitoredRun, "sample", sample)
    monitor = DeviceMonitor(interval=1e-4)
    fit(monitor, Waits(raised))
    assert monitor.summary[0].verdict[-1] == "The measurements ended early: OSError('no such device')."


def test_a_fit_without_epochs(capsys):
    monitor = DeviceMonitor()
    fit(monitor, max_epochs=0)
    assert monitor.summary is None
    assert "Devices" not in capsys.readouterr().out


def test_bad_arguments():
    with pytest.raises(ValueError, match="every_n_train_steps must be a whole number >= 1, got 0"):
        DeviceMonitor(0)
    with pytest.raises(ValueError, match=r"keys must be one of .*Did you mean 'host/data_wait'\?"):
        DeviceMonitor(log_keys=["host/data_wat"])
    with pytest.raises(ValueError, match="warn_temperature must be a number > 0, got -1"):
        DeviceMonitor(warn_temperature=-1)
    with pytest.raises(ValueError, match="interval must be a number > 0 and <= 3600, got 0"):
        DeviceMonitor(interval=0)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    names = ("utilization", "peak_memory_gib", "memory_used_gib", "data_wait")
    monitor = DeviceMonitor(5, interval=0.05, log_keys=[f"gpu/{name}" for name in names])
    fit(monitor, logger=logger, accelerator="cuda", devices=1, max_epochs=20)
    assert any("gpu0/utilization" in row for row in rows(logger))
    (summary,) = monitor.summary
    assert 0 <= summary.means["gpu0/data_wait"] <= 100
    assert summary.means["gpu0/peak_memory_gib"] > 0
    assert 0 < summary.means["gpu0/memory_used_gib"] < torch.cuda.get_device_properties(0).total_memory / 2**30
    assert summary.energy["gpu0"] >= 0
    assert summary.products["gpu0"] == torch.cuda.get_device_name(0)
