"""Which GPUs are selected, what is refused and in which words, and what becomes of CUDA's variables."""

import os
import shutil
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_tricks.devices import NoGpuAvailableError, select_gpus
from tests.devices.boards import LOST, MIG_ENABLED, UNIFIED_MEMORY
from tests.devices.fake_nvml import FakeGpu, FakeMigSlice, FakeNvml, FakeProcess
from tests.small import cases


def selected(gpus, n=1, **arguments):
    return select_gpus(n, nvml=FakeNvml(gpus), **arguments).devices


def split_gpu(*slices, **fields):
    return FakeGpu(mig_mode=True, mig_slices=slices, fails=MIG_ENABLED, **fields)


def refused(gpus, n=1, **arguments):
    with pytest.raises(NoGpuAvailableError) as error:
        select_gpus(n, nvml=FakeNvml(gpus), **arguments)
    return str(error.value)


# The choice


@pytest.mark.trap("devices: pick the emptiest, not the first")
@cases("prefer, expected", ("free_memory", [1, 2]), ("idle", [2, 3]), ("cool", [0, 3]), ids=lambda value: str(value))
def test_the_preferred_ones_are_selected_and_listed_in_ascending_order(prefer, expected):
    gpus = [
        FakeGpu(memory_used="30GiB", utilization=4, temperature=30),
        FakeGpu(memory_used="1GiB", utilization=5, temperature=60),
        FakeGpu(memory_used="2GiB", utilization=0, temperature=50),
        FakeGpu(memory_used="20GiB", utilization=0, temperature=40, processes=[FakeProcess(1 << 22)]),
    ]
    assert selected(gpus, 2, prefer=prefer) == expected


def test_display_gpus_are_the_last_of_equals_and_then_the_index_decides():
    assert selected([FakeGpu(display_active=True), FakeGpu(), FakeGpu()]) == [1]
    assert selected([FakeGpu(display_active=True), FakeGpu(memory_used="1GiB")]) == [0]


LOADS = st.builds(
    dict,
    memory_used=st.sampled_from(["0", "72GiB", "72.1GiB"]),
    utilization=st.sampled_from([0, 10, 11]),
    temperature=st.sampled_from([30, 70]),
    compute_mode=st.sampled_from([0, 0, 2]),
    display_active=st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LOADS, max_size=5), st.integers(1, 3))
def test_selected_are_the_first_of_those_within_all_limits(loads, n):
    within = [
        (0 if load["memory_used"] == "0" else 1, load["display_active"], number)
        for number, load in enumerate(loads)
        if load["memory_used"] != "72.1GiB"
        and load["utilization"] <= 10
        and load["temperature"] <= 60
        and load["compute_mode"] != 2
    ]
    gpus = [FakeGpu(**load) for load in loads]
    if len(within) < n:
        lines = refused(gpus, n, max_temperature=60, lock=False).splitlines()
        assert sum(line.startswith("  GPU") for line in lines) == len(loads)
    else:
        best = sorted(number for *_, number in sorted(within)[:n])
        assert selected(gpus, n, max_temperature=60, lock=False) == best


@pytest.mark.trap("devices: Fields that are not supported are left out, never 0")
def test_what_a_gpu_does_not_tell_limits_nothing_and_comes_last():
    told, untold = FakeGpu(memory_used="70GiB", utilization=9), FakeGpu(fails=UNIFIED_MEMORY)
    assert selected([untold, told]) == [1]
    assert selected([untold, told], 2) == [0, 1]
    assert selected([untold, FakeGpu(utilization=50)]) == [0]
    untold = FakeGpu(fails={"nvmlDeviceGetTemperature": "NOT_SUPPORTED"})
    assert selected([untold, FakeGpu(memory_used="9GiB")], max_temperature=60) == [1]
    assert selected([untold, FakeGpu(temperature=70)], prefer="cool") == [1]


@pytest.mark.trap("devices: `find_usable_cuda_devices` accepts a 99 % full one")
def test_each_refused_gpu_has_a_line_with_the_reason():
    user = psutil.Process().username()
    gpus = [
        FakeGpu(memory_used="79GiB", processes=[FakeProcess(os.getpid(), "70GiB")]),
        FakeGpu(utilization=97),
        FakeGpu(temperature=90),
        FakeGpu(compute_mode=2),
        FakeGpu(compute_mode=3, processes=[FakeProcess(1 << 22, "1GiB")]),
        FakeGpu(fails=LOST),
        split_gpu(),
    ]
    message = refused(gpus, max_temperature=80, timeout=0)
    lines = message.splitlines()
    name = "(NVIDIA H100 80GB HBM3)"
    assert lines[0] == "0 of 7 GPUs qualify, and n=1."
    assert lines[1].startswith(f"  GPU 0 {name}: 1 GiB free, less than min_free_memory=8 GiB, process {os.getpid()} of")
    assert lines[1].endswith("with 70 GiB uses it")
    assert user in lines[1]
    assert lines[2:8] == [
        f"  GPU 1 {name}: 97 % busy, more than max_utilization=10",
        f"  GPU 2 {name}: 90 °C, more than max_temperature=80",
        f"  GPU 3 {name}: is in compute mode Prohibited, which its administrator has set",
        f"  GPU 4 {name}: is in compute mode Exclusive_Process, and process 4194304 with 1 GiB uses it",
        "  GPU 5: does not answer: GPU is lost",
        f"  GPU 6 {name}: is in MIG mode, and has no slices",
    ]
    assert "timeout=" in lines[8]
    assert "fallback='cpu'" in lines[8]


def test_a_gpu_for_one_process_is_selected_if_it_only_draws():
    assert selected([FakeGpu(compute_mode=3, processes=[FakeProcess(1 << 22, "1GiB", "G")])]) == [0]


def test_limits_can_be_switched_off():
    busy = FakeGpu(memory_used="80GiB", utilization=100, temperature=99)
    assert selected([busy], min_free_memory=0, max_utilization=None) == [0]


# The arguments


@cases(
    "arguments, error, says",
    ({"n": 0}, ValueError, "n must be a whole number >= 1, got 0"),
    ({"n": "all"}, TypeError, "n must be a whole number >= 1, got 'all'"),
    ({"min_free_memory": "8 gigs"}, ValueError, "min_free_memory must be .* got '8 gigs'"),
    ({"max_utilization": 101}, ValueError, "max_utilization must be .* <= 100"),
    ({"max_utilization": -1}, ValueError, "max_utilization must be .* >= 0"),
    ({"max_temperature": float("nan")}, ValueError, "max_temperature must be"),
    ({"prefer": "memory"}, ValueError, "prefer must be one of free_memory, idle, cool, got 'memory'"),
    ({"timeout": -1}, ValueError, "timeout must be a finite number >= 0"),
    ({"timeout": float("inf")}, ValueError, "timeout must be a finite number >= 0"),
    ({"fallback": "gpu"}, ValueError, "fallback must be None or 'cpu', got 'gpu'"),
)
def test_a_wrong_argument_is_named_before_anything_is_read(arguments, error, says):
    nvml = FakeNvml([FakeGpu()])
    with pytest.raises(error, match=says):
        select_gpus(**arguments, nvml=nvml)
    assert nvml.calls == []


# The CPU


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_no_visible_gpu_is_said_or_the_cpu_is_selected(value, monkeypatch, lightning_log):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert f"does not see GPU 0, 1 of the machine (CUDA_VISIBLE_DEVICES={value!r})" in refused([FakeGpu(), FakeGpu()])
    selection = select_gpus(2, fallback="cpu", nvml=FakeNvml([FakeGpu(), FakeGpu()]))
    assert (selection.accelerator, selection.devices, selection.gpus) == ("cpu", 1, ())
    assert selection.cuda_visible_devices == "-1"
    (line,) = [message for _, message in lightning_log if "select_gpus" in message]
    assert line.startswith("select_gpus selects the CPU. No GPU can be selected. This process does not see GPU 0, 1")


@pytest.mark.parametrize("init_error", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"])
def test_no_driver_is_said_or_the_cpu_is_selected(init_error, lock_folder):
    nvml = FakeNvml(init_error=init_error)
    with pytest.raises(NoGpuAvailableError, match=r"No GPU can be selected: NVML does not start .*driver"):
        select_gpus(nvml=nvml, timeout=1000)  # it does not wait for a driver
    assert select_gpus(nvml=nvml, fallback="cpu").accelerator == "cpu"
    assert not lock_folder.exists()


def test_a_driver_without_gpus_and_too_few_gpus_do_not_make_it_wait():
    assert "finds none" in refused([], timeout=1000)
    assert "1 of 1 GPUs qualify, and n=2" in refused([FakeGpu()], 2, timeout=1000)


@pytest.mark.parametrize("value", ["0,0", "5,0", "0,abc", "GPU-ffff", "MIG-x", "0,GPU-00000001"])
def test_a_wrong_variable_is_an_error_in_spite_of_the_fallback(value, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES='{value}'"):
        select_gpus(fallback="cpu", nvml=FakeNvml([FakeGpu(), FakeGpu()]))


# CUDA's variables


@cases("value, expected, uuid", ("2,0", [0], 2), ("0,2", [1], 2), ("GPU-00000001,GPU-00000000", [1], 0), (" 2", [0], 2))
def test_indices_are_those_among_the_visible_gpus(value, expected, uuid, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    gpus = [FakeGpu(memory_used="1GiB"), FakeGpu(memory_used="2GiB"), FakeGpu()]
    selection = select_gpus(nvml=FakeNvml(gpus))
    assert selection.devices == expected
    assert selection.gpus[0].index == uuid
    assert selection.cuda_visible_devices == f"GPU-{uuid:08x}-0000-4000-8000-000000000000"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == value


@pytest.mark.trap("devices: NVML's index is PCI order, CUDA's is not")
def test_cuda_is_made_to_count_like_nvml_or_the_order_is_an_error(monkeypatch):
    selected([FakeGpu(), FakeGpu()])
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    for value in (None, "1,0"):
        if value:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        with pytest.raises(ValueError, match=r"CUDA_DEVICE_ORDER='FASTEST_FIRST'.* set it to PCI_BUS_ID"):
            selected([FakeGpu(), FakeGpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000001")  # here no order matters
    assert selected([FakeGpu(), FakeGpu()]) == [0]
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert selected([FakeGpu()]) == [0]


@pytest.mark.trap("devices: NVML failing for one GPU of three")
def test_beside_a_gpu_that_does_not_answer_gpus_are_named_by_uuid(monkeypatch):
    gpus = [FakeGpu(fails=LOST), FakeGpu(memory_used="1GiB"), FakeGpu()]
    selection = select_gpus(nvml=FakeNvml(gpus))
    assert (selection.devices, selection.gpus[0].index) == ([0], 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == selection.gpus[0].uuid
    assert select_gpus(2, nvml=FakeNvml(gpus)).devices == [0, 1]  # of all GPUs again
    selection = select_gpus(nvml=FakeNvml(gpus[1:]))
    assert selection.devices == [1]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


SLICES = FakeMigSlice("MIG-1", memory_used="9GiB"), FakeMigSlice("MIG-2", gpu_instance=2)


def test_one_slice_is_selected_by_setting_the_variable(monkeypatch):
    gpus = [FakeGpu(memory_used="75GiB"), split_gpu(*SLICES)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with select_gpus(nvml=FakeNvml(gpus)) as selection:
        assert (selection.devices, selection.cuda_visible_devices) == ([0], "MIG-2")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-2"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_a_whole_gpu_beside_slices_is_named_by_uuid_as_cuda_would_see_a_slice_only():
    selection = select_gpus(nvml=FakeNvml([split_gpu(*SLICES), FakeGpu()]))
    assert (selection.devices, selection.gpus[0].index) == ([0], 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == selection.gpus[0].uuid


def test_several_slices_are_refused_at_once_and_a_busy_slice_says_who_uses_it():
    message = refused([split_gpu(*SLICES)], 2, timeout=1000)
    assert "GPU 0, MIG slice 1 (NVIDIA H100 80GB HBM3 MIG 1g.10gb): is a MIG slice: a CUDA process sees" in message
    full = FakeMigSlice("MIG-1", memory_used="9GiB", gpu_instance=5)
    busy = [FakeProcess(1 << 22, "9GiB", gpu_instance=5), FakeProcess(5, "1GiB", gpu_instance=6)]
    message = refused([split_gpu(full, processes=busy)])
    assert "1 GiB free, less than min_free_memory=8 GiB, process 4194304 with 9 GiB uses it" in message


# CUDA that is initialized

DRIVER = """
    #include <string.h>
    int cuDeviceGetCount(int *count) { *count = 2; return INITIALIZED ? 0 : 3; }
    int cuDeviceGet(int *device, int number) { *device = number; return 0; }
    int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
        unsigned char bytes[16] = {0, 0, 0, 1 - device, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 0};
        memcpy(uuid, bytes, 16);
        return 0;
    }
"""
ASK = """
    import ctypes, os
    ctypes.CDLL(os.environ["FAKE_DRIVER"])
    from lightning_tricks.devices import select_gpus
    from tests.devices.fake_nvml import FakeGpu, FakeNvml
    selection = select_gpus(nvml=FakeNvml([FakeGpu(), FakeGpu(memory_used="1GiB"), FakeGpu(memory_used="0")]))
    print(selection.devices, selection.gpus[0].index, os.environ.get("CUDA_DEVICE_ORDER"))
"""


@pytest.mark.skipif(not (shutil.which("cc") and sys.platform == "linux"), reason="compiles a driver for Linux")
@pytest.mark.parametrize(("initialized", "expected"), [(1, "[1] 0 FASTEST_FIRST"), (0, "error")])
def test_where_cuda_is_initialized_the_driver_tells_its_order(initialized, expected, tmp_path, monkeypatch):
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(textwrap.dedent(DRIVER))
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-DINITIALIZED={initialized}"]
    subprocess.run([*command, "-o", library, source], check=True)
    monkeypatch.setenv("FAKE_DRIVER", str(library))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    command = [sys.executable, "-c", textwrap.dedent(ASK)]
    result = subprocess.run(command, capture_output=True, text=True)
    if expected == "error":
        assert "ValueError: CUDA_DEVICE_ORDER='FASTEST_FIRST'" in result.stderr
    else:
        assert result.stdout.strip() == expected, result.stderr


def test_where_cuda_sees_a_part_of_the_gpus_only_those_are_selected(monkeypatch):
    seen = ["00000002-0000-4000-8000-000000000000", "2"]
    monkeypatch.setattr("lightning_tricks.devices.core.visible_devices.uuids_seen_by_cuda", lambda: seen)
    gpus = [split_gpu(*SLICES), FakeGpu(), FakeGpu(utilization=50)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")  # too late
    with select_gpus(nvml=FakeNvml(gpus)) as selection:
        assert (selection.devices, selection.gpus[0].index) == ([1], 0)
    gpus[2].utilization = 0
    selection = select_gpus(nvml=FakeNvml(gpus))
    assert (selection.devices, selection.gpus[0].index) == ([0], 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    seen[:] = ["of another machine, as NVML is a fake"]
    assert select_gpus(nvml=FakeNvml([FakeGpu(utilization=50), FakeGpu()])).devices == [1]


@pytest.mark.trap("devices: `find_usable_cuda_devices` opens a CUDA context on each GPU")
def test_nothing_of_torch_is_loaded():
    code = textwrap.dedent(ASK).replace('ctypes.CDLL(os.environ["FAKE_DRIVER"])', "import sys")
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["[0]", "0", "PCI_BUS_ID", "False"]


# Waiting


def test_it_waits_until_a_gpu_is_free_and_says_once_why(lightning_log, monkeypatch):
    gpu, waits = FakeGpu(utilization=50), []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            gpu.utilization = 0

    monkeypatch.setattr(time, "sleep", sleep)
    assert selected([gpu], timeout=1000) == [0]
    assert waits == [1.0, 1.0, 1.0]
    (line,) = [message for _, message in lightning_log if "select_gpus" in message]
    assert line.startswith("select_gpus waits up to 1000 s. 0 of 1 GPUs qualify")
    assert "50 % busy" in line


def test_it_waits_no_longer_than_the_timeout(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    refused([FakeGpu(utilization=50)], timeout=2.5)
    assert now == [2.5]
    assert selected([FakeGpu(utilization=50)], timeout=1, fallback="cpu") == 1


# The selection


def test_gpus_without_uuid_are_told_apart_by_their_address():
    gpus = [FakeGpu(memory_used="1GiB"), FakeGpu()]
    for gpu in gpus:
        gpu.fails = {"nvmlDeviceGetUUID": "NOT_SUPPORTED"}
    selection = select_gpus(nvml=FakeNvml(gpus))
    assert (selection.devices, selection.cuda_visible_devices) == ([1], "1")


_READ_BY = {
    "idle": "nvmlDeviceGetMemoryInfo",
    "cool": "nvmlDeviceGetUtilizationRates",
    "free_memory": "nvmlDeviceGetTemperature",
}


@pytest.mark.parametrize("prefer", _READ_BY)
def test_a_gpu_that_does_not_tell_what_is_limited_comes_last(prefer):
    silent = FakeGpu(temperature=0, fails={_READ_BY[prefer]: "NOT_SUPPORTED"})
    gpus = [silent, *(FakeGpu(memory_used="9GiB", utilization=number, temperature=number) for number in (8, 7))]
    limits = {"min_free_memory": 1, "max_utilization": 10, "max_temperature": 90}
    unlimited = {"min_free_memory": 0, "max_utilization": None, "max_temperature": None}
    assert selected(gpus, 2, prefer=prefer, **limits) == [1, 2]
    assert 0 in selected(gpus, 2, prefer=prefer, **unlimited)
