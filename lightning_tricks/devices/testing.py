"""A stand-in for NVML, to test scripts on machines without NVIDIA GPUs.

Examples:
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
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

from lightning_tricks.devices.fake_errors import CONSTANTS, FakeNvmlError
from lightning_tricks.devices.fake_readings import OF_SLICES, OF_SLICES_ONLY, READINGS, UNVERSIONED

_ABSENT = object()  # None in sys.modules stands for a module that must not be imported

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
        mig_slices: Its parts by their index; None where there is none of an index.
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
    mig_slices: Sequence[FakeMigSlice | None] = ()
    processes: Sequence[FakeProcess] = ()
    fails: Mapping[str, str] = field(default_factory=dict)


class FakeNvml:
    """Has the functions of the module `pynvml` that this package calls, and tells what it was given.

    It is passed as `nvml=...`, or used as a context manager: then `import pynvml` finds it. A module that has imported
    the real one before keeps that.

    Args:
        gpus: The GPUs, in NVML's order.
        driver_version: The driver's version.
        cuda_version: The CUDA version of the driver.
        init_error: The name of the error with which NVML does not start, such as "DRIVER_NOT_LOADED".
        missing: Functions that the driver does not have, such as `DRIVER_470`.
        fails: Which functions that are not about one GPU fail with which error, such as
            `{"nvmlDeviceGetCount": "UNKNOWN"}`.

    Attributes:
        calls: The names of the functions that were called, in their order.
    """

    NVMLError = FakeNvmlError
    __name__ = "pynvml"
    __spec__ = ModuleSpec("pynvml", None)

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        *,
        driver_version: str = "580.65.06",
        cuda_version: int = 13000,
        init_error: str | None = None,
        missing: Collection[str] = (),
        fails: Mapping[str, str] | None = None,
    ) -> None:
        self.gpus = list(gpus)
        self.driver_version = driver_version
        self.cuda_version = cuda_version
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

    def nvmlInit(self) -> None:  # noqa: N802, D102
        self.calls.append("nvmlInit")
        if self.init_error is not None:
            raise FakeNvmlError(self.init_error)
        self._users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802, D102
        self._check("nvmlShutdown")
        self._users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802, D102
        self._check("nvmlSystemGetDriverVersion")
        return self.driver_version

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802, D102
        self._check("nvmlSystemGetCudaDriverVersion_v2")
        return self.cuda_version

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802, D102
        self._check("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802, D102
        gpu = self.gpus[index] if 0 <= index < len(self.gpus) else None
        self._check("nvmlDeviceGetHandleByIndex", gpu)
        if gpu is None:
            raise FakeNvmlError("INVALID_ARGUMENT")
        return gpu

    def __getattr__(self, name: str) -> Any:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name not in READINGS:
            raise AttributeError(f"FakeNvml has no {name!r}: this package does not call it")

        def function(handle: FakeGpu | FakeMigSlice, *arguments: Any, **keywords: Any) -> Any:
            version = "_v2" if name == "nvmlDeviceGetMemoryInfo" and (arguments or keywords) else ""
            self._check(name + version, handle)
            if isinstance(handle, FakeMigSlice) and name not in OF_SLICES:
                raise FakeNvmlError("NOT_SUPPORTED")
            if isinstance(handle, FakeGpu) and name in OF_SLICES_ONLY:
                raise FakeNvmlError("INVALID_ARGUMENT")
            return READINGS[name](self, handle, *arguments, **keywords)

        return function

    def _check(self, name: str, device: FakeGpu | FakeMigSlice | None = None) -> None:
        self.calls.append(name)
        if not self._users:
            raise FakeNvmlError("UNINITIALIZED")
        if name in self.missing:
            raise FakeNvmlError("FUNCTION_NOT_FOUND")
        fails = {**self.fails, **getattr(device, "fails", {})}
        for failing in (name, UNVERSIONED.get(name, name)):
            if failing in fails:
                raise FakeNvmlError(fails[failing])

    def _number(self, device: FakeGpu | FakeMigSlice) -> int:
        return next((number for number, gpu in enumerate(self.gpus) if gpu is device), len(self.gpus))

    def _uuid(self, device: FakeGpu | FakeMigSlice) -> str | bytes:
        return device.uuid or f"GPU-{self._number(device):08x}-0000-4000-8000-000000000000"

    def _bus(self, device: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(busId=device.bus_id or f"00000000:{self._number(device) + 1:02X}:00.0")
