"""Read the state of the NVIDIA GPUs of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lightning_tricks._shared.extras import import_extra
from lightning_tricks.devices.core.gpu import Gpu, GpuProcess, MigSlice
from lightning_tricks.devices.core.nvml import NOT_AVAILABLE, DeviceReader, NvmlUnavailableError, open_nvml

_MEMORY_INFO_V2 = 0x02000028  # the struct that tells what the driver reserves
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_UNCORRECTED, _SINCE_START = 1, 0
_COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_PERFORMANCE_STATE_UNKNOWN = 32
_NO_TEMPERATURE = 0xFF  # all bits set is what is read of a device that has fallen off the bus
_PROCESS_LISTS = {  # the functions without a version fail where driver and module differ in it
    "C": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "G": ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
}
THROTTLE_REASONS = {  # that it is idle (bit 0) slows nothing down
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}


def list_gpus(*, nvml: Any = None) -> list[Gpu]:
    """Return the state of all NVIDIA GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says.

    NVML is read, as nvidia-smi does it: no CUDA context is created. A GPU that does not answer is in the list, with an
    `error`; whatever a driver or device does not tell is None.

    Args:
        nvml: What is used as the module `pynvml`, such as a `FakeNvml`; None imports it.

    Returns:
        The GPUs in the order of the PCI bus; an empty list if there is a driver, and no GPU.

    Raises:
        ModuleNotFoundError: If nvidia-ml-py or psutil is missing; the message names the extra.
        NvmlUnavailableError: If there is no working driver.

    Examples:
        >>> from lightning_tricks.devices.testing import FakeGpu, FakeNvml
        >>> [(gpu.index, gpu.name, gpu.utilization) for gpu in list_gpus(nvml=FakeNvml([FakeGpu(utilization=97)]))]
        [(0, 'NVIDIA H100 80GB HBM3', 97)]
    """
    with open_nvml(nvml) as nvml:
        driver = driver_version(nvml)
        return [
            Gpu(index=index, error=str(handle), driver_version=driver)
            if isinstance(handle, nvml.NVMLError)
            else _read_gpu(nvml, handle, index, driver)
            for index, handle in enumerate(gpu_handles(nvml))
        ]


def driver_version(nvml: Any) -> str | None:
    """Return the version of the driver, or None if it does not tell."""
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None


def gpu_handles(nvml: Any) -> list[Any]:
    """Return the handle of each GPU in the order of the PCI bus, or the error of one that does not answer."""
    answering: list[tuple[str, Any]] = []
    fixed: dict[int, Any] = {}  # where these lie is not known: they keep their numbers
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML does not tell how many GPUs there are ({error}): see nvidia-smi.") from error
    for number in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            bus_id = _bus_id(DeviceReader(nvml, handle))
        except nvml.NVMLError as error:
            fixed[number] = error
            continue
        if bus_id is None:
            fixed[number] = handle
        else:
            answering.append((bus_id, handle))
    ordered = iter(sorted(answering, key=lambda pair: pair[0]))
    return [fixed[number] if number in fixed else next(ordered)[1] for number in range(count)]


def _read_gpu(nvml: Any, handle: Any, index: int, driver: str | None) -> Gpu:
    reader = DeviceReader(nvml, handle)
    values: dict[str, Any] = {}
    try:
        for part in (read_identity, read_load, _read_settings, _read_parts):
            values.update(part(reader))
    except nvml.NVMLError as error:
        values["error"] = str(error)
    return Gpu(index=index, driver_version=driver, unreadable=tuple(reader.problems), **values)


def read_identity(reader: DeviceReader) -> dict[str, Any]:
    """Return the fields of `Gpu` that say which GPU it is."""
    return {
        "bus_id": _bus_id(reader),
        "uuid": read_uuid(reader),
        "name": _text(reader("name", "nvmlDeviceGetName")),
        "vbios_version": _text(reader("VBIOS version", "nvmlDeviceGetVbiosVersion")),
    }


def read_uuid(reader: DeviceReader) -> str | None:
    """Return the UUID of a GPU or of a MIG slice."""
    return _text(reader("UUID", "nvmlDeviceGetUUID"))


def read_load(reader: DeviceReader) -> dict[str, Any]:
    """Return the fields of `Gpu` that change while it works."""
    rates = reader("utilization", "nvmlDeviceGetUtilizationRates")
    temperature = reader("temperature", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", arguments=(0,))
    power = reader("power", "nvmlDeviceGetPowerUsage")
    energy = reader("energy", "nvmlDeviceGetTotalEnergyConsumption")
    reasons = reader(
        "throttle reasons", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
    )
    return {
        **_read_memory(reader),
        "utilization": rates and _available(rates.gpu),
        "memory_utilization": rates and _available(rates.memory),
        "temperature": None if temperature == _NO_TEMPERATURE else temperature,
        "power": None if power is None else power / 1000,
        "energy": None if energy is None else energy / 1000,
        "fan": reader("fan", "nvmlDeviceGetFanSpeed"),
        "sm_clock": reader("SM clock", "nvmlDeviceGetClockInfo", arguments=(_SM_CLOCK,)),
        "memory_clock": reader("memory clock", "nvmlDeviceGetClockInfo", arguments=(_MEMORY_CLOCK,)),
        "throttle_reasons": None if reasons is None else tuple(_throttle_reasons(reasons)),
    }


def _throttle_reasons(bits: int) -> Iterator[str]:
    for bit in (1 << number for number in range(1, bits.bit_length())):
        if bits & bit:  # newer drivers know more of them
            yield THROTTLE_REASONS.get(bit, f"reason {bit:#x}")


def _read_memory(reader: DeviceReader) -> dict[str, int]:
    memory = reader("memory", "nvmlDeviceGetMemoryInfo", arguments=(_MEMORY_INFO_V2,))
    if memory is None and not reader.failed("memory"):  # a driver before 510
        memory = reader("memory", "nvmlDeviceGetMemoryInfo")
    if memory is None or not _available(memory.total):  # boards whose memory is the host's
        return {}
    return {"memory_total": memory.total, "memory_used": memory.used, "memory_free": memory.free}


def _read_settings(reader: DeviceReader) -> dict[str, Any]:
    limit = reader("power limit", "nvmlDeviceGetEnforcedPowerLimit")
    state = reader("performance state", "nvmlDeviceGetPerformanceState")
    mode = reader("compute mode", "nvmlDeviceGetComputeMode")
    return {
        "power_limit": None if limit is None else limit / 1000,
        "performance_state": None if state == _PERFORMANCE_STATE_UNKNOWN else state,
        "persistence_mode": _switch(reader("persistence mode", "nvmlDeviceGetPersistenceMode")),
        "compute_mode": None if mode is None else _COMPUTE_MODES.get(mode, str(mode)),
        "display_active": _switch(reader("display", "nvmlDeviceGetDisplayActive")),
        "ecc_errors": reader("ECC errors", "nvmlDeviceGetTotalEccErrors", arguments=(_UNCORRECTED, _SINCE_START)),
    }


def _read_parts(reader: DeviceReader) -> dict[str, Any]:
    mode = reader("MIG mode", "nvmlDeviceGetMigMode")  # now, and after the next reset
    return {
        "mig_mode": None if mode is None else bool(mode[0]),
        "mig_slices": tuple(_mig_slices(reader)) if mode and mode[0] else (),
        "processes": _processes(reader),
    }


def _mig_slices(reader: DeviceReader) -> Iterator[MigSlice]:
    for index, handle in mig_handles(reader):
        part = DeviceReader(reader.nvml, handle)
        yield MigSlice(
            index=index,
            uuid=read_uuid(part),
            name=_text(part("name", "nvmlDeviceGetName")),
            gpu_instance=part("GPU instance", "nvmlDeviceGetGpuInstanceId"),
            compute_instance=part("compute instance", "nvmlDeviceGetComputeInstanceId"),
            **_read_memory(part),
        )
        reader.problems += [f"MIG slice {index}, {problem}" for problem in part.problems]


def mig_handles(reader: DeviceReader) -> Iterator[tuple[int, Any]]:
    """Yield the index and the handle of each MIG slice of a GPU; the indices may have gaps."""
    for index in range(reader("MIG slices", "nvmlDeviceGetMaxMigDeviceCount") or 0):
        handle = reader(f"MIG slice {index}", "nvmlDeviceGetMigDeviceHandleByIndex", arguments=(index,))
        if handle is not None:
            yield index, handle


def _processes(reader: DeviceReader) -> tuple[GpuProcess, ...] | None:
    found: dict[tuple[int, int | None], dict[str, Any]] = {}
    for kind, functions in _PROCESS_LISTS.items():
        running = reader("processes", *functions)
        if running is None and kind == "C":  # without these, an empty list would tell of an idle GPU
            return None
        for process in running or ():
            instance = _available(getattr(process, "gpuInstanceId", None))
            entry = found.setdefault((process.pid, instance), {"kinds": [], "memory": None})
            entry["kinds"].append(kind)
            memory = _available(process.usedGpuMemory)
            if memory is not None:  # both lists tell all of a process
                entry["memory"] = max(entry["memory"] or 0, memory)
    processes = [
        GpuProcess(
            pid=pid, kind="+".join(entry["kinds"]), memory=entry["memory"], gpu_instance=instance, **owner_of(pid)
        )
        for (pid, instance), entry in found.items()
    ]
    return tuple(sorted(processes, key=lambda process: (-(process.memory or 0), process.pid)))


def owner_of(pid: int) -> dict[str, str]:
    """Return the user and the command of a process, as far as this user may see it, and it runs."""
    psutil = import_extra("psutil", "devices", "Naming the processes of a GPU needs psutil")
    found: dict[str, str] = {}
    with _without_permission(psutil):
        process = psutil.Process(pid)
        with _without_permission(psutil):
            found["command"] = process.name()
            found["command"] = " ".join(process.cmdline()) or found["command"]
        with _without_permission(psutil):
            found["user"] = process.username()
    return found


def _without_permission(psutil: Any) -> suppress:
    # KeyError: a user without a name; ValueError and OverflowError: a number that no process here can have
    return suppress(psutil.Error, OSError, KeyError, ValueError, OverflowError)


def _bus_id(reader: DeviceReader) -> str | None:
    info = reader("PCI bus", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo")
    return None if info is None else _text(info.busId)


def _available(value: int | None) -> int | None:
    return None if value in NOT_AVAILABLE else value


def _switch(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # type: ignore[return-value]
