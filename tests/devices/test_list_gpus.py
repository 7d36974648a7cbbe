"""`list_gpus`: all that drivers and boards tell, and None for what they do not."""

import getpass
import os
import subprocess
import sys
from dataclasses import asdict
from unittest.mock import patch

import psutil
import pytest

from lightning_tricks.devices import GpuProcess, list_gpus
from tests.devices.boards import DRIVER_470, MIG_ENABLED
from tests.devices.fake_nvml import FakeGpu, FakeMigSlice, FakeNvml, FakeProcess
from tests.small import cases

# What each function tells
_FIELDS = {
    "nvmlDeviceGetPciInfo": ("bus_id",),
    "nvmlDeviceGetUUID": ("uuid",),
    "nvmlDeviceGetName": ("name",),
    "nvmlDeviceGetVbiosVersion": ("vbios_version",),
    "nvmlDeviceGetMemoryInfo": ("memory_total", "memory_used", "memory_free"),
    "nvmlDeviceGetUtilizationRates": ("utilization", "memory_utilization"),
    "nvmlDeviceGetTemperature": ("temperature",),
    "nvmlDeviceGetPowerUsage": ("power",),
    "nvmlDeviceGetEnforcedPowerLimit": ("power_limit",),
    "nvmlDeviceGetTotalEnergyConsumption": ("energy",),
    "nvmlDeviceGetFanSpeed": ("fan",),
    "nvmlDeviceGetPerformanceState": ("performance_state",),
    "nvmlDeviceGetPersistenceMode": ("persistence_mode",),
    "nvmlDeviceGetComputeMode": ("compute_mode",),
    "nvmlDeviceGetDisplayActive": ("display_active",),
    "nvmlDeviceGetTotalEccErrors": ("ecc_errors",),
    "nvmlDeviceGetClockInfo": ("sm_clock", "memory_clock"),
    "nvmlDeviceGetCurrentClocksEventReasons": ("throttle_reasons",),
    "nvmlDeviceGetMigMode": ("mig_mode",),
    "nvmlDeviceGetComputeRunningProcesses": ("processes",),
}
# Other names of the same, in older or newer drivers
_INSTEAD = {
    "nvmlDeviceGetTemperature": "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons",
}
_MINE = FakeProcess(os.getpid(), memory="3GiB")


def _one(*, nvml=None, **gpu_fields):
    (gpu,) = list_gpus(nvml=nvml or FakeNvml([FakeGpu(**gpu_fields)]))
    return gpu


def test_all_fields():
    as_told = {
        "name": "NVIDIA A100-SXM4-40GB", "uuid": "GPU-8f6d", "bus_id": "00000000:07:00.0", "utilization": 97,
        "memory_utilization": 41, "temperature": 61, "power": 312.5, "power_limit": 400.0, "energy": 1e6, "fan": 33,
        "performance_state": 2, "persistence_mode": False, "display_active": True, "ecc_errors": 2, "sm_clock": 1410,
        "memory_clock": 1215, "vbios_version": "92.00",
    }  # fmt: skip
    sizes = {"memory_total": "40GiB", "memory_used": "10GiB"}
    fake = FakeGpu(**as_told, **sizes, compute_mode=3, throttle_reasons=0x1 | 0x4 | 0x40, processes=[_MINE])
    gpu = _one(nvml=FakeNvml([fake], driver_version="550.54"))
    assert asdict(gpu) | {"processes": None} == as_told | {
        "index": 0, "memory_total": 40 << 30, "memory_used": 10 << 30, "memory_free": 30 << 30,
        "compute_mode": "Exclusive_Process", "throttle_reasons": ("power cap", "hardware thermal slowdown"),
        "driver_version": "550.54", "mig_mode": False, "mig_slices": (), "processes": None, "error": None,
        "unreadable": (),
    }  # fmt: skip
    (process,) = gpu.processes
    assert (process.pid, process.kind, process.memory, process.gpu_instance) == (os.getpid(), "C", 3 << 30, None)
    assert process.user == getpass.getuser()
    assert "pytest" in process.command


@pytest.mark.trap("devices: NotSupported in the middle")
@pytest.mark.trap("devices: fields that are not supported are None, never 0")
@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "NO_PERMISSION", "UNKNOWN", "FUNCTION_NOT_FOUND", "TIMEOUT"])
@pytest.mark.parametrize("function", _FIELDS)
def test_a_function_that_fails_leaves_its_fields_none_and_all_others_as_they_were(function, error):
    whole = asdict(_one(processes=[_MINE]))
    gpu = asdict(_one(processes=[_MINE], fails={function: error}))
    unreadable = gpu.pop("unreadable")
    whole.pop("unreadable")
    assert gpu == whole | dict.fromkeys(_FIELDS[function])
    if error in ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND"):
        assert unreadable == ()
    else:
        assert unreadable
        assert len({*unreadable}) == len(unreadable)


def test_graphics_processes_that_are_not_told_leave_the_others():
    for error, unreadable in (("NOT_SUPPORTED", ()), ("UNKNOWN", ("processes: Unknown Error",))):
        gpu = _one(processes=[_MINE], fails={"nvmlDeviceGetGraphicsRunningProcesses": error})
        assert [process.pid for process in gpu.processes] == [os.getpid()]
        assert gpu.unreadable == unreadable


@pytest.mark.parametrize("error", ["GPU_IS_LOST", "RESET_REQUIRED"])
@pytest.mark.parametrize("function", _FIELDS)
def test_a_gpu_that_is_lost_while_it_is_read_keeps_what_was_read(function, error):
    first, lost, last = list_gpus(nvml=FakeNvml([FakeGpu(), FakeGpu(fails={function: error}), FakeGpu()]))
    assert lost.error in ("GPU is lost", "GPU requires restart")
    assert (first.error, last.error) == (None, None)
    assert (first.index, lost.index, last.index) == (0, 1, 2)
    assert first.bus_id < last.bus_id
    if function not in ("nvmlDeviceGetPciInfo", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetVbiosVersion"):
        assert lost.name == first.name
    assert lost.processes is None


@pytest.mark.trap("devices: three GPUs, one failing (GpuIsLost, Unknown)")
@pytest.mark.parametrize("failing", [0, 1, 2])
@cases(
    "error, words",
    ("GPU_IS_LOST", "GPU is lost"),
    ("UNKNOWN", "Unknown Error"),
    ("INVALID_ARGUMENT", "Invalid Argument"),
)
def test_one_of_three_has_no_handle(failing, error, words):
    fakes = [FakeGpu(name=f"GPU {number}") for number in range(3)]
    fakes[failing].fails = {"nvmlDeviceGetHandleByIndex": error}
    gpus = list_gpus(nvml=FakeNvml(fakes))
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert [gpu.error for gpu in gpus] == [words if number == failing else None for number in range(3)]
    assert [gpu.name for gpu in gpus] == [None if number == failing else f"GPU {number}" for number in range(3)]
    assert {gpu.driver_version for gpu in gpus} == {"580.65.06"}


def test_a_gpu_that_is_unplugged_between_count_and_handle():
    class Unplugged(FakeNvml):
        def nvmlDeviceGetCount(self):  # noqa: N802
            return super().nvmlDeviceGetCount() + 1

    first, gone = list_gpus(nvml=Unplugged([FakeGpu()]))
    assert (first.error, gone.error) == (None, "Invalid Argument")


@pytest.mark.trap("devices: NVML's index is PCI order")
def test_the_order_is_that_of_the_pci_bus():
    addresses = ["00000001:01:00.0", "00000000:C1:00.0", "00000000:0A:00.0", "00000000:0a:00.1"]
    fakes = [FakeGpu(bus_id=address) for address in addresses[:3]]
    gpus = list_gpus(nvml=FakeNvml(fakes))
    assert [gpu.bus_id for gpu in gpus] == sorted(addresses[:3])
    assert [gpu.index for gpu in gpus] == [0, 1, 2]


@pytest.mark.trap("devices: process structs by driver")
def test_an_old_driver_tells_all():
    whole = {"processes": [_MINE], "throttle_reasons": 4}
    for missing in (DRIVER_470, *([function] for function in _INSTEAD)):  # it has some functions by other names
        assert asdict(_one(nvml=FakeNvml([FakeGpu(**whole)], missing=missing))) == asdict(_one(**whole))


class _OlderModule(FakeNvml):
    """An nvidia-ml-py that does not have some functions."""

    lacks = ()

    def __getattr__(self, name):
        if name in self.lacks:
            raise AttributeError(name)
        return super().__getattr__(name)


_VERSIONS = {"nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetPciInfo_v3"}  # other versions do as well


@pytest.mark.parametrize("function", sorted(_FIELDS.keys() - {"nvmlDeviceGetPciInfo"} | _VERSIONS))
def test_an_older_module_lacks_a_function(function):
    nvml = _OlderModule([FakeGpu(processes=[_MINE])])
    nvml.lacks = [function, *(f"{function}_{version}" for version in ("v2", "v3")), _INSTEAD.get(function)]
    assert asdict(_one(nvml=nvml)) == asdict(_one(processes=[_MINE])) | dict.fromkeys(_FIELDS.get(function, ()))


def test_bytes_and_odd_text():
    gpu = _one(name=b"NVIDIA \xff H100", uuid=b"GPU-1", vbios_version=b"96", bus_id=b"00000000:01:00.0")
    assert (gpu.name, gpu.uuid, gpu.vbios_version) == ("NVIDIA \ufffd H100", "GPU-1", "96")
    assert gpu.bus_id == "00000000:01:00.0"


def test_values_that_are_none_in_disguise():
    short, long = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
    disguised = dict.fromkeys(("fan", "utilization", "memory_utilization", "sm_clock", "memory_clock"), short)
    disguised |= dict.fromkeys(("ecc_errors", "memory_total", "throttle_reasons"), long)
    disguised |= {"temperature": 255, "performance_state": 32, "power": short / 1000, "power_limit": short / 1000}
    gpu = _one(**disguised, energy=long / 1000)
    assert {name: value for name in disguised if (value := getattr(gpu, name)) is not None} == {}
    assert [_one(ecc_errors=errors).ecc_errors for errors in (short - 1, long - 1)] == [short - 1, long - 1]
    assert _one(ecc_errors=short).ecc_errors is None
    gpu = _one(memory_total=0)  # unified memory
    assert (gpu.memory_total, gpu.memory_used, gpu.memory_free) == (None, None, None)


def test_values_that_are_unusual_and_true():
    gpu = _one(energy=1e15, fan=104, temperature=0, ecc_errors=1 << 40, compute_mode=7, utilization=0, power=0)
    assert (gpu.energy, gpu.fan, gpu.temperature, gpu.ecc_errors) == (1e15, 104, 0, 1 << 40)
    assert (gpu.compute_mode, gpu.utilization, gpu.power) == ("7", 0, 0.0)


def test_a_reason_that_is_not_known_yet_is_a_reason():
    assert _one(throttle_reasons=0x1).throttle_reasons == ()
    assert _one(throttle_reasons=0x404).throttle_reasons == ("power cap", "reason 0x400")


def test_mig_slices():
    slices = [
        None,  # indices may have gaps
        FakeMigSlice("MIG-1", memory_used="1GiB"),
        None,
        FakeMigSlice("MIG-2", gpu_instance=2, compute_instance=1),
    ]
    process = FakeProcess(os.getpid(), memory="1GiB", gpu_instance=1)
    gpu = _one(mig_mode=True, mig_slices=slices, fails=MIG_ENABLED, processes=[process])
    assert gpu.mig_mode is True
    assert [(part.index, part.uuid, part.gpu_instance, part.compute_instance) for part in gpu.mig_slices] == [
        (1, "MIG-1", 1, 0),
        (3, "MIG-2", 2, 1),
    ]
    assert (gpu.mig_slices[0].memory_used, gpu.mig_slices[0].memory_free) == (1 << 30, 9 << 30)
    assert gpu.processes[0].gpu_instance == 1
    assert gpu.unreadable == ()
    assert _one(mig_slices=slices).mig_slices == (), "not in MIG mode"


def test_a_mig_slice_that_does_not_tell_all():
    slices = [FakeMigSlice("MIG-1", fails={"nvmlDeviceGetMemoryInfo": "NO_PERMISSION"}), FakeMigSlice("MIG-2")]
    gpu = _one(mig_mode=True, mig_slices=slices)
    assert [part.memory_used for part in gpu.mig_slices] == [None, 0]
    assert gpu.unreadable == ("MIG slice 0, memory: Insufficient Permissions",)


# Processes


@pytest.fixture
def ended():
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.mark.trap("devices: pids that vanish")
@pytest.mark.parametrize("pid", ["ended", 2**31 - 1, 2**32 - 1, 2**63, 0, -1])
def test_a_process_that_is_not_here_has_neither_user_nor_command(pid, ended):
    gpu = _one(processes=[FakeProcess(ended if pid == "ended" else pid, memory="1GiB"), _MINE])
    pids = [process.pid for process in gpu.processes]
    assert pids == [os.getpid(), ended if pid == "ended" else pid]
    assert gpu.processes[0].user
    assert gpu.error is None
    if pid != 0:  # some systems have a process 0
        assert gpu.processes[1] == GpuProcess(pid=pids[1], kind="C", memory=1 << 30)


def test_a_zombie_has_a_user():
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()
        (found,) = _one(processes=[FakeProcess(process.pid)]).processes
        assert found.user == getpass.getuser()
        assert found.command
    finally:
        process.wait()


@cases(
    "error", psutil.AccessDenied(1), psutil.NoSuchProcess(1), PermissionError(), FileNotFoundError(), KeyError("1234")
)
@cases("method, left", ("name", {"user"}), ("cmdline", {"user", "command"}), ("username", {"command"}))
def test_what_is_denied_is_none_and_the_rest_is_told(method, left, error):
    with patch.object(psutil.Process, method, side_effect=error):
        (found,) = _one(processes=[_MINE]).processes
    assert {name for name in ("user", "command") if getattr(found, name)} == left


def test_processes_that_compute_and_draw():
    pid = os.getpid()
    processes = [FakeProcess(pid, "1GiB", "C+G"), FakeProcess(pid, None, "C", 3), FakeProcess(2**31 - 1, "2GiB", "G")]
    found = _one(processes=processes).processes
    assert [(p.pid, p.kind, p.memory, p.gpu_instance) for p in found] == [
        (2**31 - 1, "G", 2 << 30, None),
        (pid, "C+G", 1 << 30, None),
        (pid, "C", None, 3),
    ]
    for memory, told in ((2**64 - 1, None), (0, 0)):
        assert _one(processes=[FakeProcess(pid, memory=memory)]).processes[0].memory == told


@pytest.mark.gpu("it compares with nvidia-smi")
def test_the_gpus_of_this_machine():
    import torch

    before = torch.cuda.is_initialized()
    gpus = list_gpus()
    assert torch.cuda.is_initialized() == before
    names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    assert names <= {gpu.name for gpu in gpus}
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    told = [[cell.strip() for cell in line.split(",")] for line in smi.splitlines()]
    assert told == [[str(gpu.index), gpu.uuid, gpu.bus_id, str(gpu.memory_total >> 20)] for gpu in gpus]
