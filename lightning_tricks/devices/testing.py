"""A stand-in for NVML, to test scripts on machines without NVIDIA GPUs.

Example:
    >>> from lightning_tricks.devices import select_gpus
    >>> from lightning_tricks.devices.testing import FakeGpu, FakeNvml
    >>> with FakeNvml([FakeGpu(memory_used="79GiB"), FakeGpu(temperature=31)]):
    ...     select_gpus(lock=False).devices
    [1]
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from lightning_tricks.devices.core import nvml as codes
from lightning_tricks.devices.core.sizes import parse_size

ERRORS = {
    "UNINITIALIZED": (codes.UNINITIALIZED, "Uninitialized"),
    "NOT_SUPPORTED": (codes.NOT_SUPPORTED, "Not Supported"),
    "NO_PERMISSION": (codes.NO_PERMISSION, "Insufficient Permissions"),
    "NOT_FOUND": (codes.NOT_FOUND, "Not Found"),
    "DRIVER_NOT_LOADED": (codes.DRIVER_NOT_LOADED, "Driver Not Loaded"),
    "LIBRARY_NOT_FOUND": (codes.LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
    "FUNCTION_NOT_FOUND": (codes.FUNCTION_NOT_FOUND, "Function Not Found"),
    "GPU_IS_LOST": (codes.GPU_IS_LOST, "GPU is lost"),
    "RESET_REQUIRED": (codes.RESET_REQUIRED, "GPU requires restart"),
    "LIB_RM_VERSION_MISMATCH": (codes.LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch."),
    "UNKNOWN": (999, "Unknown Error"),
}

# What kinds of boards and drivers do not tell: function -> error, for `FakeGpu(fails=...)`
CONSUMER_BOARD = {
    "nvmlDeviceGetTotalEccErrors": "NOT_SUPPORTED",
    "nvmlDeviceGetMigMode": "NOT_SUPPORTED",
}
PASSIVELY_COOLED = {"nvmlDeviceGetFanSpeed": "NOT_SUPPORTED"}
UNIFIED_MEMORY = {
    "nvmlDeviceGetMemoryInfo": "NOT_SUPPORTED",
    "nvmlDeviceGetFanSpeed": "NOT_SUPPORTED",
    "nvmlDeviceGetEnforcedPowerLimit": "NOT_SUPPORTED",
    "nvmlDeviceGetTotalEccErrors": "NOT_SUPPORTED",
    "nvmlDeviceGetMigMode": "NOT_SUPPORTED",
}
MIG_ENABLED = {"nvmlDeviceGetUtilizationRates": "NOT_SUPPORTED", "nvmlDeviceGetFanSpeed": "NOT_SUPPORTED"}
LOST = {"nvmlDeviceGetHandleByIndex": "GPU_IS_LOST"}

# Functions that drivers do not have yet, for `FakeNvml(missing=...)`
DRIVER_470 = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMemoryInfo_v2",
)


@dataclass
class FakeProcess:
    """A process on a `FakeGpu`.

    Attributes:
        pid: Its number; that of a process of this machine has a user and a command.
        memory: The device memory that it uses: bytes, text such as "2GiB", or None where the driver does not tell.
        kind: "C", "G" or "C+G".
        gpu_instance: The GPU instance that it runs on, if the GPU is split by MIG.
    """

    pid: int
    memory: int | str | None = None
    kind: str = "C"
    gpu_instance: int | None = None


@dataclass
class FakeMigSlice:
    """A part of a `FakeGpu` in MIG mode; sizes are bytes, or text such as "5GiB"."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    gpu_instance: int = 1
    compute_instance: int = 0
    memory_total: int | str = "10GiB"
    memory_used: int | str = 0


@dataclass
class FakeGpu:
    """A GPU of a `FakeNvml`; all fields may be changed at any time, also while something reads them.

    Attributes:
        name: The name.
        uuid: The UUID; None for one that is made of the number of the GPU.
        bus_id: The PCI bus address; None for one that is made of the number of the GPU.
        memory_total: Bytes, or text such as "80GiB".
        memory_used: The same.
        utilization: In percent.
        memory_utilization: In percent.
        temperature: In degrees Celsius.
        power: In watts.
        power_limit: In watts.
        energy: In joules since the driver was loaded.
        fan: In percent.
        performance_state: From 0 to 15, or 32 for unknown.
        persistence_mode: Whether the driver stays loaded.
        compute_mode: 0 for Default, 2 for Prohibited, 3 for Exclusive_Process.
        display_active: Whether it drives a display.
        ecc_errors: Uncorrected memory errors.
        sm_clock: In MHz.
        memory_clock: In MHz.
        throttle_reasons: NVML's bits.
        vbios_version: The version of the video BIOS.
        mig_mode: Whether it is split by MIG.
        mig_slices: Its parts.
        processes: The processes that use it.
        fails: Which functions of NVML fail with which error, such as `{"nvmlDeviceGetPowerUsage": "NOT_SUPPORTED"}`;
            `CONSUMER_BOARD`, `PASSIVELY_COOLED`, `UNIFIED_MEMORY`, `MIG_ENABLED` and `LOST` are those of kinds of
            boards.
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
    mig_slices: Sequence[FakeMigSlice] = ()
    processes: Sequence[FakeProcess] = ()
    fails: Mapping[str, str] = field(default_factory=dict)


class FakeNvmlError(Exception):
    """What the functions of `FakeNvml` raise, with NVML's code as `value`."""

    def __init__(self, name: str) -> None:
        self.value, words = ERRORS[name]
        super().__init__(words)


class FakeNvml:
    """Has the functions of the module `pynvml` that this package calls, and tells what it was given.

    It is passed as `nvml=...`, or used as a context manager: then `import pynvml` finds it.

    Args:
        gpus: The GPUs, in NVML's order.
        driver_version: The driver's version.
        cuda_version: The CUDA version of the driver.
        init_error: The name of the error with which NVML does not start, such as "DRIVER_NOT_LOADED".
        missing: Functions that the driver does not have, such as `DRIVER_470`.

    Attributes:
        calls: The names of the functions that were called, in their order.
    """

    NVMLError = FakeNvmlError

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        *,
        driver_version: str = "580.65.06",
        cuda_version: int = 13000,
        init_error: str | None = None,
        missing: Collection[str] = (),
    ) -> None:
        self.gpus = list(gpus)
        self.driver_version = driver_version
        self.cuda_version = cuda_version
        self.init_error = init_error
        self.missing = missing
        self.calls: list[str] = []
        self._users = 0
        self._replaced: Any = None

    def __enter__(self) -> FakeNvml:
        """Let `import pynvml` find this object."""
        self._replaced = sys.modules.get("pynvml")
        sys.modules["pynvml"] = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        del sys.modules["pynvml"]
        if self._replaced is not None:
            sys.modules["pynvml"] = self._replaced

    def nvmlInit(self) -> None:  # noqa: N802, D102
        if self.init_error is not None:
            raise FakeNvmlError(self.init_error)
        self._users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802, D102
        self._check()
        self._users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802, D102
        self._check()
        return self.driver_version

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802, D102
        self._check()
        return self.cuda_version

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802, D102
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802, D102
        gpu = self.gpus[index]
        self._check("nvmlDeviceGetHandleByIndex", gpu)
        return gpu

    def __getattr__(self, name: str) -> Any:
        if name not in _READINGS:
            raise AttributeError(f"FakeNvml has no {name!r}: this package does not call it")

        def function(handle: FakeGpu | FakeMigSlice, *arguments: Any) -> Any:
            version = "_v2" if name == "nvmlDeviceGetMemoryInfo" and arguments else ""
            self._check(name + version, handle)
            return _READINGS[name](self, handle, *arguments)

        return function

    def _check(self, name: str = "", device: FakeGpu | FakeMigSlice | None = None) -> None:
        self.calls.append(name)
        if not self._users:
            raise FakeNvmlError("UNINITIALIZED")
        if name in self.missing:
            raise FakeNvmlError("FUNCTION_NOT_FOUND")
        fails = getattr(device, "fails", {})
        for failing in (name, name.removesuffix("_v2")):
            if failing in fails:
                raise FakeNvmlError(fails[failing])

    def _number(self, device: FakeGpu | FakeMigSlice) -> int:
        return next(number for number, gpu in enumerate(self.gpus) if gpu is device)

    def _uuid(self, device: FakeGpu | FakeMigSlice) -> str:
        return device.uuid or f"GPU-{self._number(device):08x}-0000-4000-8000-000000000000"

    def _bus(self, device: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(busId=device.bus_id or f"00000000:{self._number(device) + 1:02X}:00.0")


def _memory(device: Any, version: int | None = None) -> SimpleNamespace:
    total, used = parse_size("memory_total", device.memory_total), parse_size("memory_used", device.memory_used)
    return SimpleNamespace(total=total, used=used, free=total - used)


def _slice(gpu: FakeGpu, index: int) -> FakeMigSlice:
    if index >= len(gpu.mig_slices):
        raise FakeNvmlError("NOT_FOUND")
    return gpu.mig_slices[index]


def _running(kind: str) -> Any:
    def running(fake: FakeNvml, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                pid=process.pid,
                usedGpuMemory=None if process.memory is None else parse_size("memory", process.memory),
                gpuInstanceId=0xFFFFFFFF if process.gpu_instance is None else process.gpu_instance,
            )
            for process in gpu.processes
            if kind in process.kind.split("+")
        ]

    return running


_READINGS: dict[str, Any] = {
    "nvmlDeviceGetPciInfo_v3": lambda fake, gpu: fake._bus(gpu),
    "nvmlDeviceGetUUID": lambda fake, device: fake._uuid(device),
    "nvmlDeviceGetName": lambda fake, device: device.name,
    "nvmlDeviceGetVbiosVersion": lambda fake, gpu: gpu.vbios_version,
    "nvmlDeviceGetMemoryInfo": lambda fake, device, version=None: _memory(device, version),
    "nvmlDeviceGetUtilizationRates": lambda fake, gpu: SimpleNamespace(
        gpu=gpu.utilization, memory=gpu.memory_utilization
    ),
    "nvmlDeviceGetTemperature": lambda fake, gpu, sensor: gpu.temperature,
    "nvmlDeviceGetPowerUsage": lambda fake, gpu: round(gpu.power * 1000),
    "nvmlDeviceGetEnforcedPowerLimit": lambda fake, gpu: round(gpu.power_limit * 1000),
    "nvmlDeviceGetTotalEnergyConsumption": lambda fake, gpu: round(gpu.energy * 1000),
    "nvmlDeviceGetFanSpeed": lambda fake, gpu: gpu.fan,
    "nvmlDeviceGetPerformanceState": lambda fake, gpu: gpu.performance_state,
    "nvmlDeviceGetPersistenceMode": lambda fake, gpu: int(gpu.persistence_mode),
    "nvmlDeviceGetComputeMode": lambda fake, gpu: gpu.compute_mode,
    "nvmlDeviceGetDisplayActive": lambda fake, gpu: int(gpu.display_active),
    "nvmlDeviceGetTotalEccErrors": lambda fake, gpu, kind, counter: gpu.ecc_errors,
    "nvmlDeviceGetClockInfo": lambda fake, gpu, clock: gpu.memory_clock if clock == 2 else gpu.sm_clock,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda fake, gpu: gpu.throttle_reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda fake, gpu: gpu.throttle_reasons,
    "nvmlDeviceGetMigMode": lambda fake, gpu: [int(gpu.mig_mode)] * 2,
    "nvmlDeviceGetMaxMigDeviceCount": lambda fake, gpu: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda fake, gpu, index: _slice(gpu, index),
    "nvmlDeviceGetGpuInstanceId": lambda fake, device: device.gpu_instance,
    "nvmlDeviceGetComputeInstanceId": lambda fake, device: device.compute_instance,
    "nvmlDeviceGetComputeRunningProcesses_v3": _running("C"),
    "nvmlDeviceGetComputeRunningProcesses_v2": _running("C"),
    "nvmlDeviceGetGraphicsRunningProcesses_v3": _running("G"),
    "nvmlDeviceGetGraphicsRunningProcesses_v2": _running("G"),
}
