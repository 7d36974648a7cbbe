"""The state of the NVIDIA GPUs of a machine, as plain values; None stands for whatever driver or device do not report.

A field of `Gpu` or `MigSlice` is one line: its type, and by `_told` which function of NVML tells it. `list_gpus`, the
measurements of `DeviceMonitor` and the stand-in of the tests follow from that line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

from lightning_tricks._shared.extras import import_extra
from lightning_tricks.devices.core.nvml import DeviceReader, NvmlUnavailableError, available, open_nvml

_MEMORY_INFO_V2 = 0x02000028  # the struct that includes the memory that the driver reserves
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_UNCORRECTED, _SINCE_START = 1, 0
_COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_PERFORMANCE_STATE_UNKNOWN = 32
_NO_TEMPERATURE = 0xFF  # a device that has fallen off the bus reads as all bits set
PROCESS_LISTS = {  # the functions without a version fail where driver and module differ in it
    "C": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "G": ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
}


class ThrottleReason(NamedTuple):
    """Why a clock is not higher: NVML's bit, words for it, and whether it slows a busy GPU down."""

    bit: int
    words: str
    slows: bool


THROTTLE_REASONS = (  # that it is idle (bit 0) slows nothing down
    ThrottleReason(0x2, "application clocks", False),
    ThrottleReason(0x4, "power cap", True),
    ThrottleReason(0x8, "hardware slowdown", True),
    ThrottleReason(0x10, "sync boost", False),
    ThrottleReason(0x20, "software thermal slowdown", True),
    ThrottleReason(0x40, "hardware thermal slowdown", True),
    ThrottleReason(0x80, "power brake", True),
    ThrottleReason(0x100, "display clocks", False),
)


class Told(NamedTuple):
    """How NVML reports a field.

    Attributes:
        calls: Functions with what they take after the device; the first that driver and module know is called.
        label: What the field is called where it cannot be read.
        convert: Returns the field's value from NVML's.
    """

    calls: tuple[str | tuple[Any, ...], ...]
    label: str = ""
    convert: Callable[[Any], Any] = lambda value: value


def _told(*calls: str | tuple[Any, ...], **how: Any) -> Any:
    """Return a field of a dataclass that NVML reports, see `Told`; None stands for whatever it does not report."""
    return field(default=None, metadata={"told": Told(calls, **how)})


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _thousandth(value: int) -> float:
    return value / 1000


def _unless(unknown: int) -> Callable[[int], int | None]:
    return lambda value: None if value == unknown else value


def _reasons(bits: int) -> tuple[str, ...]:
    known = {reason.bit: reason.words for reason in THROTTLE_REASONS}
    single = (1 << number for number in range(1, bits.bit_length()))
    return tuple(known.get(bit, f"reason {bit:#x}") for bit in single if bits & bit)  # newer drivers know more of them


def _memory(part: str) -> Any:
    """Return a field of the memory; the boards whose memory is the host's tell a total of 0."""

    def convert(memory: Any) -> int | None:
        return getattr(memory, part) if available(memory.total) else None

    calls = (("nvmlDeviceGetMemoryInfo", _MEMORY_INFO_V2), "nvmlDeviceGetMemoryInfo")  # the second before driver 510
    return _told(*calls, label="memory", convert=convert)


def _utilization(part: str) -> Any:
    return _told("nvmlDeviceGetUtilizationRates", label="utilization", convert=attrgetter(part))


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU.

    Attributes:
        pid: Its process id; in a container, the id on the host.
        kind: "C" for compute, "G" for graphics, "C+G" for both.
        memory: The device memory that it uses, in bytes.
        user: Its user; None if it has ended or runs outside the container.
        command: Its command line; None in the same cases.
        gpu_instance: The GPU instance (MIG) that it runs on.
    """

    pid: int
    kind: str
    memory: int | None = None
    user: str | None = None
    command: str | None = None
    gpu_instance: int | None = None


@dataclass(frozen=True, kw_only=True)
class MigSlice:
    """A part of a GPU in MIG mode that CUDA treats as a device.

    Attributes:
        index: Its index on the GPU.
        uuid: Its UUID, `MIG-...`, which CUDA_VISIBLE_DEVICES accepts.
        name: Its name, such as "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
        gpu_instance: The id of its GPU instance.
        compute_instance: The id of its compute instance.
        memory_total: In bytes.
        memory_used: In bytes.
        memory_free: In bytes.
    """

    index: int
    uuid: str | None = _told("nvmlDeviceGetUUID", label="UUID", convert=_text)
    name: str | None = _told("nvmlDeviceGetName", convert=_text)
    gpu_instance: int | None = _told("nvmlDeviceGetGpuInstanceId", label="GPU instance")
    compute_instance: int | None = _told("nvmlDeviceGetComputeInstanceId")
    memory_total: int | None = _memory("total")
    memory_used: int | None = _memory("used")
    memory_free: int | None = _memory("free")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The state of an NVIDIA GPU; values that the driver or device does not report are None, never 0.

    Attributes:
        index: The index in the order of the PCI bus, as in nvidia-smi, and in CUDA if CUDA_DEVICE_ORDER is
            PCI_BUS_ID.
        bus_id: The address on the PCI bus, such as "00000000:07:00.0".
        uuid: The UUID, such as "GPU-8f6d...", which CUDA_VISIBLE_DEVICES accepts.
        name: The name, such as "NVIDIA H100 80GB HBM3".
        memory_total: The memory in bytes.
        memory_used: The memory that all processes use, in bytes, without memory reserved by the driver.
        memory_free: The free memory, in bytes.
        utilization: The share of the last fraction of a second in which a kernel ran, in percent.
        memory_utilization: The share of that time in which memory was read or written, in percent.
        temperature: In degrees Celsius.
        power: The power draw, in watts.
        power_limit: The power limit, in watts.
        energy: The energy used since the driver was loaded, in joules (Volta and later).
        fan: The speed of the fan, in percent of its maximum.
        performance_state: From 0 (P0, fastest) to 15 (P15).
        persistence_mode: Whether the driver stays loaded without a process.
        compute_mode: "Default", "Exclusive_Process" (one process) or "Prohibited" (none).
        display_active: Whether it drives a display.
        ecc_errors: Uncorrected memory errors since the last start.
        sm_clock: The clock of the multiprocessors, in MHz.
        memory_clock: The clock of the memory, in MHz.
        throttle_reasons: Why the clock is not higher, such as "power cap"; empty if the GPU is not slowed down.
        driver_version: The driver's version.
        vbios_version: The version of the video BIOS.
        mig_mode: Whether it is split by MIG.
        mig_slices: Its MIG slices, if any.
        processes: The processes that use it, by descending memory; None if they are not reported.
        error: Why it does not answer, if it does not; all other values may then be None.
        unreadable: The values that could not be read though they may be supported, such as "power: Unknown Error".
    """

    index: int
    bus_id: str | None = _told(
        "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo", label="PCI bus", convert=lambda info: _text(info.busId)
    )
    uuid: str | None = _told("nvmlDeviceGetUUID", label="UUID", convert=_text)
    name: str | None = _told("nvmlDeviceGetName", convert=_text)
    memory_total: int | None = _memory("total")
    memory_used: int | None = _memory("used")
    memory_free: int | None = _memory("free")
    utilization: int | None = _utilization("gpu")
    memory_utilization: int | None = _utilization("memory")
    temperature: int | None = _told(
        ("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetTemperatureV", 0), convert=_unless(_NO_TEMPERATURE)
    )
    power: float | None = _told("nvmlDeviceGetPowerUsage", convert=_thousandth)
    power_limit: float | None = _told("nvmlDeviceGetEnforcedPowerLimit", convert=_thousandth)
    energy: float | None = _told("nvmlDeviceGetTotalEnergyConsumption", convert=_thousandth)
    fan: int | None = _told("nvmlDeviceGetFanSpeed")
    performance_state: int | None = _told("nvmlDeviceGetPerformanceState", convert=_unless(_PERFORMANCE_STATE_UNKNOWN))
    persistence_mode: bool | None = _told("nvmlDeviceGetPersistenceMode", convert=bool)
    compute_mode: str | None = _told(
        "nvmlDeviceGetComputeMode", convert=lambda mode: _COMPUTE_MODES.get(mode, str(mode))
    )
    display_active: bool | None = _told("nvmlDeviceGetDisplayActive", label="display", convert=bool)
    ecc_errors: int | None = _told(("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_START), label="ECC errors")
    sm_clock: int | None = _told(("nvmlDeviceGetClockInfo", _SM_CLOCK), label="SM clock")
    memory_clock: int | None = _told(("nvmlDeviceGetClockInfo", _MEMORY_CLOCK))
    throttle_reasons: tuple[str, ...] | None = _told(
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", convert=_reasons
    )
    driver_version: str | None = None
    vbios_version: str | None = _told("nvmlDeviceGetVbiosVersion", label="VBIOS version", convert=_text)
    mig_mode: bool | None = _told(  # now, and after the next reset
        "nvmlDeviceGetMigMode", label="MIG mode", convert=lambda modes: bool(modes[0])
    )
    mig_slices: tuple[MigSlice, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None
    error: str | None = None
    unreadable: tuple[str, ...] = ()


def list_gpus(*, nvml: Any = None) -> list[Gpu]:
    """Return the state of all NVIDIA GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says.

    It reads NVML, as nvidia-smi does, and creates no CUDA context. A GPU that does not answer is in the list, with an
    `error`; values that a driver or device does not report are None.

    Args:
        nvml: A replacement for the module `pynvml`; None imports it.

    Returns:
        The GPUs in the order of the PCI bus; an empty list if there is a driver but no GPU.

    Raises:
        ModuleNotFoundError: If nvidia-ml-py or psutil is missing; the message names the extra.
        NvmlUnavailableError: If there is no working driver.

    Examples:
        >>> try:
        ...     busy = [gpu.index for gpu in list_gpus() if gpu.utilization]
        ... except NvmlUnavailableError as error:  # this machine has no driver
        ...     reason = str(error)
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
    """Return the version of the driver, or None if it is not reported."""
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
        raise NvmlUnavailableError(
            f"NVML does not report how many GPUs there are ({error}): see nvidia-smi."
        ) from error
    for number in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            bus_id = read_field(DeviceReader(nvml, handle), "bus_id")
        except nvml.NVMLError as error:
            fixed[number] = error
            continue
        if bus_id is None:
            fixed[number] = handle
        else:
            answering.append((bus_id, handle))
    ordered = iter(sorted(answering, key=lambda pair: pair[0]))
    return [fixed[number] if number in fixed else next(ordered)[1] for number in range(count)]


def read_fields(reader: DeviceReader, kind: type[Any], names: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each field that NVML tells of a device.

    Args:
        reader: What reads the device.
        kind: `Gpu` or `MigSlice`.
        names: The fields; empty for all.

    Raises:
        NVMLError: If the device no longer responds.
    """
    for each in fields(kind):
        told = each.metadata.get("told")
        if told is not None and (not names or each.name in names):
            value = reader(told.label or each.name.replace("_", " "), *told.calls)
            yield each.name, None if value is None else available(told.convert(value))


def read_field(reader: DeviceReader, name: str) -> Any:
    """Return one field of `Gpu`, or None if it is not reported."""
    return dict(read_fields(reader, Gpu, (name,)))[name]


def _read_gpu(nvml: Any, handle: Any, index: int, driver: str | None) -> Gpu:
    reader = DeviceReader(nvml, handle)
    values: dict[str, Any] = {}
    try:
        for name, value in read_fields(reader, Gpu):  # values that were read stay if the device is lost meanwhile
            values[name] = value
        if values["mig_mode"]:
            values["mig_slices"] = tuple(_mig_slices(reader))
        values["processes"] = _processes(reader)
    except nvml.NVMLError as error:
        values["error"] = str(error)
    return Gpu(index=index, driver_version=driver, unreadable=tuple(reader.problems), **values)


def _mig_slices(reader: DeviceReader) -> Iterator[MigSlice]:
    for index, handle in mig_handles(reader):
        part = DeviceReader(reader.nvml, handle)
        yield MigSlice(index=index, **dict(read_fields(part, MigSlice)))
        reader.problems += [f"MIG slice {index}, {problem}" for problem in part.problems]


def mig_handles(reader: DeviceReader) -> Iterator[tuple[int, Any]]:
    """Yield the index and the handle of each MIG slice of a GPU; the indices may have gaps."""
    for index in range(reader("MIG slices", "nvmlDeviceGetMaxMigDeviceCount") or 0):
        handle = reader(f"MIG slice {index}", ("nvmlDeviceGetMigDeviceHandleByIndex", index))
        if handle is not None:
            yield index, handle


def _processes(reader: DeviceReader) -> tuple[GpuProcess, ...] | None:
    found: dict[tuple[int, int | None], dict[str, Any]] = {}
    for kind, functions in PROCESS_LISTS.items():
        running = reader("processes", *functions)
        if running is None and kind == "C":  # without these, an empty list would tell of an idle GPU
            return None
        for process in running or ():
            instance = available(getattr(process, "gpuInstanceId", None))
            entry = found.setdefault((process.pid, instance), {"kinds": [], "memory": None})
            entry["kinds"].append(kind)
            memory = available(process.usedGpuMemory)
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
