"""What the functions of `FakeNvml` that are about one device return, by their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_tricks.devices.core.sizes import parse_size
from lightning_tricks.devices.fake_errors import FakeNvmlError


def _memory(device: Any, version: int | None = None) -> SimpleNamespace:
    total, used = parse_size("memory_total", device.memory_total), parse_size("memory_used", device.memory_used)
    more = {"reserved": 0, "version": version} if version else {}
    return SimpleNamespace(total=total, used=used, free=total - used, **more)


def _slice(gpu: Any, index: int) -> Any:
    if index >= len(gpu.mig_slices) or gpu.mig_slices[index] is None:
        raise FakeNvmlError("NOT_FOUND")
    return gpu.mig_slices[index]


def _running(kind: str) -> Any:
    def running(fake: Any, gpu: Any) -> list[SimpleNamespace]:
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


READINGS: dict[str, Any] = {
    "nvmlDeviceGetPciInfo": lambda fake, gpu: fake._bus(gpu),
    "nvmlDeviceGetPciInfo_v3": lambda fake, gpu: fake._bus(gpu),
    "nvmlDeviceGetUUID": lambda fake, device: fake._uuid(device),
    "nvmlDeviceGetName": lambda fake, device: device.name,
    "nvmlDeviceGetVbiosVersion": lambda fake, gpu: gpu.vbios_version,
    "nvmlDeviceGetMemoryInfo": lambda fake, device, version=None: _memory(device, version),
    "nvmlDeviceGetUtilizationRates": lambda fake, gpu: SimpleNamespace(
        gpu=gpu.utilization, memory=gpu.memory_utilization
    ),
    "nvmlDeviceGetTemperature": lambda fake, gpu, sensor: gpu.temperature,
    "nvmlDeviceGetTemperatureV": lambda fake, gpu, sensor, version=0: gpu.temperature,
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
OF_SLICES_ONLY = ("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId")
OF_SLICES = (*OF_SLICES_ONLY, "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo")
UNVERSIONED = {  # what fails by one name fails by the others of the function
    "nvmlDeviceGetMemoryInfo_v2": "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetPciInfo_v3": "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetTemperatureV": "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "nvmlDeviceGetCurrentClocksEventReasons",
    **{
        f"nvmlDeviceGet{kind}RunningProcesses_{version}": f"nvmlDeviceGet{kind}RunningProcesses"
        for kind in ("Compute", "Graphics")
        for version in ("v2", "v3")
    },
}
