"""The load of host and GPUs, the thread that measures it, and the table of it."""

import threading
from dataclasses import replace

import psutil
import pytest

from lightning_tricks._shared.text import render_text
from lightning_tricks.devices.core import utilization
from lightning_tricks.devices.core.device_summary import (
    DEFAULT_KEYS,
    QUANTITIES,
    DeviceSummary,
    Recorder,
    check_keys,
    device_report,
    quantity_of,
)
from lightning_tricks.devices.core.nvml import open_nvml
from lightning_tricks.devices.core.utilization import (
    GIB,
    BackgroundSampler,
    GpuUtilization,
    HostUtilization,
    find_cuda_handles,
)
from tests.devices.boards import MIG_ENABLED, UNIFIED_MEMORY
from tests.devices.fake_nvml import FakeGpu, FakeMigSlice, FakeNvml
from tests.small import cases


def test_the_host():
    load = HostUtilization()
    while load._cpu_times() == load._times:  # the clock of the kernel moves every 10 ms
        sum(range(10_000))
    values = load.measure()
    assert values.keys() == {"host/ram_used_gib", "host/process_ram_gib", "host/cpu_utilization"}
    assert 0 <= values["host/cpu_utilization"] <= 100
    memory = psutil.virtual_memory()
    assert 0 < values["host/process_ram_gib"] < values["host/ram_used_gib"] < memory.total / GIB


def test_utilization_is_that_since_the_last_measurement(monkeypatch):
    times = [{"user": 10.0, "system": 5.0, "idle": 85.0, "iowait": 0.0, "guest": 4.0}]
    monkeypatch.setattr(psutil, "cpu_times", lambda: type("T", (), {"_asdict": lambda self: times[-1]})())
    load = HostUtilization()
    assert "host/cpu_utilization" not in load.measure(), "no time has passed"
    times.append({"user": 13.0, "system": 6.0, "idle": 89.0, "iowait": 2.0, "guest": 7.0})
    assert load.measure()["host/cpu_utilization"] == pytest.approx(40.0)  # 4 of 10; guests' time is part of the user's
    times.append({"user": 13.0, "system": 6.0, "idle": 99.0, "iowait": 2.0, "guest": 7.0})
    assert load.measure()["host/cpu_utilization"] == 0.0
    times.append({**times[-1], "user": 12.9, "idle": 100.0})  # the kernel's counters are no exact clocks
    assert load.measure()["host/cpu_utilization"] == 0


def gpu_load(gpu, **arguments):
    nvml = FakeNvml([gpu])
    nvml.nvmlInit()
    return GpuUtilization(nvml, gpu, "gpu0", **arguments)


def test_a_gpu():
    gpu = FakeGpu(
        memory_used="12GiB",
        utilization=97,
        memory_utilization=40,
        temperature=61,
        power=412.5,
        fan=30,
        sm_clock=1755,
        throttle_reasons=0x4,
    )
    assert gpu_load(gpu).measure() == {
        "gpu0/utilization": 97.0,
        "gpu0/memory_utilization": 40.0,
        "gpu0/memory_used_gib": 12.0,
        "gpu0/temperature": 61.0,
        "gpu0/power_w": 412.5,
        "gpu0/sm_clock_mhz": 1755.0,
        "gpu0/fan": 30.0,
        "gpu0/throttled": 100.0,
    }


@pytest.mark.trap("devices: fields that are not supported are left out, never 0")
@cases(
    "fails, missing",
    (UNIFIED_MEMORY, {"memory_used_gib", "fan"}),
    (MIG_ENABLED, {"utilization", "memory_utilization", "fan"}),
    ({"nvmlDeviceGetPowerUsage": "UNKNOWN"}, {"power_w"}),
    ({"nvmlDeviceGetTemperature": "NO_PERMISSION"}, {"temperature"}),
)
def test_what_is_not_told_is_left_out(fails, missing):
    whole = gpu_load(FakeGpu()).measure().keys()
    assert whole - gpu_load(FakeGpu(fails=fails)).measure().keys() == {f"gpu0/{name}" for name in missing}


@pytest.mark.trap("devices: the total energy counter gives the energy of a run from two reads")
def test_energy_is_the_difference_of_the_counter():
    gpu = FakeGpu(energy=5e9, power=100.0)
    load = gpu_load(gpu)
    load.measure()
    assert load.energy == 0.0
    gpu.energy += 3600.0
    load.measure()
    assert load.energy == 3600.0


def test_energy_without_a_counter_is_the_integral_of_power():
    gpu = FakeGpu(fails={"nvmlDeviceGetTotalEnergyConsumption": "NOT_SUPPORTED"}, power=100.0)
    now = [0.0]
    load = gpu_load(gpu, clock=lambda: now[0])
    load.measure()
    assert load.energy is None
    now[0], gpu.power = 10.0, 200.0
    load.measure()
    now[0], gpu.power = 12.0, 50.0
    load.measure()
    assert load.energy == pytest.approx(10 * 150 + 2 * 125)
    gpu.fails |= {"nvmlDeviceGetPowerUsage": "NOT_SUPPORTED"}
    load = gpu_load(gpu)
    assert (load.measure(), load.measure())[1].keys() >= {"gpu0/utilization"}
    assert load.energy is None


@pytest.mark.trap("devices: the reasons for throttling say why a GPU is slow")
def test_only_what_slows_down_is_throttling():
    gpu = FakeGpu(throttle_reasons=0x1 | 0x2 | 0x10)  # idle, the clocks that the user has set, synchronized boards
    load = gpu_load(gpu)
    assert load.measure()["gpu0/throttled"] == 0.0
    gpu.throttle_reasons = 0x4 | 0x40
    load.measure()
    gpu.throttle_reasons = 0x4
    load.measure()
    assert (load.reasons, load.n_measurements) == ({"power cap": 2, "hardware thermal slowdown": 1}, 3)


def test_a_gpu_that_is_lost_is_measured_no_more():
    gpu = FakeGpu()
    load = gpu_load(gpu)
    assert load.measure()
    gpu.fails = {"nvmlDeviceGetTemperature": "GPU_IS_LOST"}
    assert load.measure() == {}
    assert load.problem == "GPU is lost"
    gpu.fails = {}
    assert load.measure() == {}


def test_cuda_devices_are_found_by_uuid(monkeypatch):
    slices = [FakeMigSlice("MIG-c5f9"), FakeMigSlice("MIG-d6a0")]
    gpus = [
        FakeGpu(uuid="GPU-AA", bus_id="00000000:90:00.0"),
        FakeGpu(fails={"nvmlDeviceGetHandleByIndex": "GPU_IS_LOST"}),
        FakeGpu(uuid="GPU-bb", bus_id="00000000:10:00.0", mig_mode=True, mig_slices=slices, fails=MIG_ENABLED),
    ]
    uuids = {0: "aa", 1: "d6a0", 2: "ee"}  # of a GPU, of a part of one, and one that NVML does not know
    monkeypatch.setattr("lightning_tricks.devices.core.utilization.cuda_uuid", uuids.__getitem__)
    with open_nvml(FakeNvml(gpus)) as nvml:
        assert find_cuda_handles(nvml, [0, 1, 2]) == {0: gpus[0], 1: slices[1]}


def test_names_of_quantities():
    assert check_keys("default") == DEFAULT_KEYS
    assert check_keys(["gpu/fan"]) == ("gpu/fan",)
    assert quantity_of("gpu12/power_w") is QUANTITIES["gpu/power_w"]
    assert quantity_of("host/data_wait").unit == "%"
    with pytest.raises(ValueError, match=r"keys must be one of .*, got 'gpu/powr_w'\. Did you mean 'gpu/power_w'\?"):
        check_keys(["gpu/powr_w"])
    for wrong in ("gpu/fan", 3, None):
        with pytest.raises(TypeError, match=r"keys must be 'default' or a list of gpu/utilization, .*, got"):
            check_keys(wrong)


def test_the_recorder_keeps_stages_apart_and_gives_each_value_once():
    recorder = Recorder()
    recorder.add("train", {"a": 1.0, "b": 5.0})
    recorder.add("val", {"a": 100.0})
    recorder.add("train", {"a": 4.0})
    recent = recorder.take_recent("train")
    assert {key: (value.mean, value.maximum, value.count) for key, value in recent.items()} == {
        "a": (2.5, 4.0, 2),
        "b": (5.0, 5.0, 1),
    }
    assert recorder.take_recent("train") == {}
    recorder.add("train", {"a": 8.5})
    assert recorder.take_recent("train")["a"].mean == 8.5
    assert recorder.whole("train")["a"].mean == 4.5
    assert recorder.whole("val")["a"].maximum == 100.0
    assert recorder.whole("test") == {}


def test_the_thread_measures_until_it_is_stopped():
    enough = threading.Event()
    calls = []

    def sample():
        calls.append(threading.current_thread())
        if len(calls) == 5:
            enough.set()

    sampler = BackgroundSampler(sample, 1e-4)
    before = threading.active_count()
    sampler.start()
    assert enough.wait(60)
    sampler.stop()
    sampler.stop()  # and nothing happens
    assert threading.active_count() == before
    count = len(calls)
    assert count >= 5
    assert set(calls) == {calls[0]} != {threading.main_thread()}
    assert calls[0].daemon, "it would keep a process that ends from ending"
    assert sampler.error is None


def test_a_measurement_that_hangs_is_waited_for_once_and_nothing_is_released(monkeypatch):
    monkeypatch.setattr(utilization, "PATIENCE", 1e-3)
    hangs, answers, released = threading.Event(), threading.Event(), threading.Event()

    def sample():
        hangs.set()
        answers.wait()

    sampler = BackgroundSampler(sample, 1e-4, finish=released.set)
    sampler.start()
    assert hangs.wait(60)
    assert not sampler.stop()
    monkeypatch.setattr(utilization, "PATIENCE", 3600)
    assert not sampler.stop()
    assert not released.is_set(), "a driver that hangs may hang in nvmlShutdown, too"
    answers.set()
    assert released.wait(60)


def test_a_thread_that_cannot_start_releases_everything(monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    released = []
    with pytest.raises(RuntimeError, match="can't start"):
        BackgroundSampler(list, 1.0, finish=lambda: released.append(1)).start()
    assert released == [1]


def test_the_last_measurement_is_that_of_the_end():
    measured, released = [], []
    sampler = BackgroundSampler(lambda: measured.append(len(released)), 3600, finish=lambda: released.append(1))
    sampler.start()
    assert sampler.stop()
    assert (measured, released) == ([0], [1])


RANK = DeviceSummary(
    rank=0,
    node=0,
    stage="train",
    products={"gpu0": "NVIDIA H100 80GB HBM3"},
    means={"gpu0/utilization": 61.4, "gpu0/memory_used_gib": 31.25, "host/data_wait": 12.0},
    maxima={"gpu0/utilization": 99.0, "gpu0/memory_used_gib": 40.0, "host/data_wait": 30.0},
    energy={"gpu0": 1.234},
    verdict=["Waited for data 3 % of the time: the loader keeps up.", "gpu0 ran below its clock rate."],
)


def test_the_table_of_several_ranks():
    # rank zero measures the other GPU of its machine as well: its energy counts once
    first = replace(RANK, energy={"gpu0": 1.0, "gpu1": 2.0})
    text = render_text(
        device_report([first, replace(RANK, rank=1, energy={"gpu1": 2.0}), replace(RANK, rank=2, node=1)])
    )
    assert "Energy of 3 GPUs: 4.23 kWh." in text
    assert "Rank 1: Waited for data 3 % of the time: the loader keeps up." in text
    assert "│ 2    │ gpu0 NVIDIA H100 80GB HBM3 │ utilization" in text
