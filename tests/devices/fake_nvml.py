"""A stand-in for NVML, to test on machines without NVIDIA GPUs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pynvml as _pynvml

from lightning_tricks.devices.core.gpu import PROCESS_LISTS, Gpu, MigSlice
from lightning_tricks.devices.core.scoring import parse_size

_GPU_NOT_FOUND = 28
_ABSENT = object()  # None in sys.modules stands for a module that must not be imported


@dataclass
class FakeProcess:
    """A process on a `FakeGpu`; its memory is in bytes, text such as "2GiB", or None where it is not reported."""

    pid: int
    memory: int | str | None = None
    kind: str = "C"
    gpu_instance: int | None = None


@dataclass
class FakeMigSlice:
    """A part of a `FakeGpu` in MIG mode; sizes are bytes, or text such as "5GiB"; `fails` is as in `FakeGpu`."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    gpu_instance: int = 1
    compute_instance: int = 0
    memory_total: int | str = "10GiB"
    memory_used: int | str = 0
    fails: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FakeGpu:
    """A GPU of a `FakeNvml`; all fields may be changed at any time, also while something reads them.

    Memory is in bytes, or text such as "80GiB"; other units are those of `Gpu`. Without `uuid` and `bus_id`, they are
    made of its number. `fails` says which functions fail, such as `{"nvmlDeviceGetFanSpeed": "NOT_SUPPORTED"}`.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str | None = None
    bus_id: str | None = None
    memory_total: int | str = "80GiB"
    memory_used: int | str = 0
    utilization: int = 0
    memory_utilization: int = 0
    temperature: int = 30
    power: float = 70.0
    power_limit: float = 700.0
    energy: float = 0.0
    fan: int = 0
    performance_state: int = 0
    persistence_mode: bool = True
    compute_mode: int = 0
    display_active: bool = False
    ecc_errors: int = 0
    sm_clock: int = 1980
    memory_clock: int = 2619
    throttle_reasons: int = 0
    vbios_version: str = "96.00.74.00.01"
    mig_mode: bool = False
    mig_slices: Sequence[FakeMigSlice | None] = ()
    processes: Sequence[FakeProcess] = ()
    fails: Mapping[str, str] = field(default_factory=dict)


def _size(value: int | str) -> int:
    return parse_size("size", value)


def _memory(device: FakeGpu | FakeMigSlice, version: int | None = None) -> SimpleNamespace:
    total, used = _size(device.memory_total), _size(device.memory_used)
    return SimpleNamespace(total=total, used=used, free=total - used, **({"reserved": 0} if version else {}))


def _processes(kind: str, gpu: FakeGpu) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            pid=process.pid,
            usedGpuMemory=None if process.memory is None else _size(process.memory),
            gpuInstanceId=0xFFFFFFFF if process.gpu_instance is None else process.gpu_instance,
        )
        for process in gpu.processes
        if kind in process.kind.split("+")
    ]


def _slice(gpu: FakeGpu, index: int) -> FakeMigSlice:
    found = gpu.mig_slices[index] if index < len(gpu.mig_slices) else None
    if found is None:
        raise _error("NOT_FOUND")
    return found


def _functions_of(kind: type[Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each function that tells a field of a class, with the first that tells it and the field's name."""
    for each in fields(kind):
        told = each.metadata.get("told")
        names = [call if isinstance(call, str) else call[0] for call in told.calls] if told else []
        yield from ((name, (names[0], each.name)) for name in names)


_OF_GPUS, _OF_SLICES = dict(_functions_of(Gpu)), dict(_functions_of(MigSlice))
_MIG = ("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex")
_LISTS = [name for names in PROCESS_LISTS.values() for name in names]
_FUNCTIONS = {name: (name, "") for name in (*_MIG, *_LISTS)} | _OF_SLICES | _OF_GPUS

# What functions return that do not return a field as it is; without the versions in their names
_READINGS: dict[str, Any] = {
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.utilization, memory=gpu.memory_utilization),
    "nvmlDeviceGetClockInfo": lambda gpu, clock: gpu.memory_clock if clock == _pynvml.NVML_CLOCK_MEM else gpu.sm_clock,
    "nvmlDeviceGetPowerUsage": lambda gpu: round(gpu.power * 1000),
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: round(gpu.power_limit * 1000),
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: round(gpu.energy * 1000),
    "nvmlDeviceGetMigMode": lambda gpu: [int(gpu.mig_mode)] * 2,
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": _slice,
    "nvmlDeviceGetComputeRunningProcesses": partial(_processes, "C"),
    "nvmlDeviceGetGraphicsRunningProcesses": partial(_processes, "G"),
}


class FakeNvml:
    """Has the functions of the module `pynvml` that this package calls, and returns the values of its `FakeGpu`s.

    It is passed as `nvml=...`, or used as a context manager: then `import pynvml` finds it.

    Args:
        gpus: The GPUs, in NVML's order.
        driver_version: The driver's version.
        init_error: The name of the error with which NVML does not start, such as "DRIVER_NOT_LOADED".
        missing: Functions that the driver does not have, such as "nvmlDeviceGetMemoryInfo_v2".
        fails: Which functions that are not about one GPU fail with which error.

    Attributes:
        calls: The names of the functions that were called, in their order.
    """

    NVMLError = _pynvml.NVMLError
    __name__ = "pynvml"
    __spec__ = ModuleSpec("pynvml", None)

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        *,
        driver_version: str = "580.65.06",
        init_error: str | None = None,
        missing: Collection[str] = (),
        fails: Mapping[str, str] | None = None,
    ) -> None:
        self.gpus = list(gpus)
        self.driver_version = driver_version
        self.init_error = init_error
        self.missing = missing
        self.fails = fails or {}
        self.calls: list[str] = []
        self._users = 0
        self._replaced: list[Any] = []  # one for each `with` that is open

    def __enter__(self) -> FakeNvml:
        """Let `import pynvml` find this object."""
        self._replaced.append(sys.modules.get("pynvml", _ABSENT))
        sys.modules["pynvml"] = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        replaced = self._replaced.pop()
        if replaced is _ABSENT:
            sys.modules.pop("pynvml", None)
        else:
            sys.modules["pynvml"] = replaced

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("nvmlInit")
        if self.init_error is not None:
            raise _error(self.init_error)
        self._users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._check("nvmlShutdown")
        self._users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._check("nvmlSystemGetDriverVersion")
        return self.driver_version

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        gpu = self.gpus[index] if 0 <= index < len(self.gpus) else None
        self._check("nvmlDeviceGetHandleByIndex", gpu)
        if gpu is None:
            raise _error("INVALID_ARGUMENT")
        return gpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML") or name == "nvmlMemory_v2":
            return getattr(_pynvml, name)
        if name not in _FUNCTIONS:
            raise AttributeError(f"FakeNvml has no {name!r}: this package does not call it")

        def function(device: FakeGpu | FakeMigSlice, *arguments: Any, **keywords: Any) -> Any:
            version = "_v2" if name == "nvmlDeviceGetMemoryInfo" and (arguments or keywords) else ""
            self._check(name + version, device)
            if isinstance(device, FakeMigSlice) and name not in _OF_SLICES:
                raise _error("NOT_SUPPORTED")
            if isinstance(device, FakeGpu) and name in _OF_SLICES and name not in _OF_GPUS:
                raise _error("INVALID_ARGUMENT")
            return self._read(name, device, *arguments, **keywords)

        return function

    def _read(self, name: str, device: Any, *arguments: Any, **keywords: Any) -> Any:
        number = next((number for number, gpu in enumerate(self.gpus) if gpu is device), len(self.gpus))
        first, attribute = _FUNCTIONS[name]
        if attribute == "bus_id":
            return SimpleNamespace(busId=device.bus_id or f"00000000:{number + 1:02X}:00.0")
        if attribute == "uuid":
            return device.uuid or f"GPU-{number:08x}-0000-4000-8000-000000000000"
        reading = _READINGS.get(_without_version(first))
        if reading is not None:
            return reading(device, *arguments, **keywords)
        value = getattr(device, attribute, _ABSENT)
        if value is _ABSENT:
            raise _error("NOT_SUPPORTED")
        return int(value) if isinstance(value, bool) else value

    def _check(self, name: str, device: FakeGpu | FakeMigSlice | None = None) -> None:
        self.calls.append(name)
        if not self._users:
            raise _error("UNINITIALIZED")
        if name in self.missing:
            raise _error("FUNCTION_NOT_FOUND")
        fails = {**self.fails, **getattr(device, "fails", {})}
        first, _ = _FUNCTIONS.get(name, (name, ""))
        for failing in (name, _without_version(first)):  # what fails by one name fails by the others of the function
            if failing in fails:
                raise _error(fails[failing])


def _without_version(name: str) -> str:
    return name.removesuffix("_v2").removesuffix("_v3")


def _error(name: str) -> Exception:
    # older modules do not name all codes
    code: int = _GPU_NOT_FOUND if name == "GPU_NOT_FOUND" else getattr(_pynvml, f"NVML_ERROR_{name}")
    error: Exception = _pynvml.NVMLError(code)
    return error
