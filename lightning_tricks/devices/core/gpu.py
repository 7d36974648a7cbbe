"""What is known about a GPU, as plain values; None stands for what driver or device do not tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU.

    Attributes:
        pid: Its number; in a container, that of the host.
        kind: "C" if it computes, "G" if it draws, "C+G" if both.
        memory: The device memory that it uses, in bytes.
        user: Whose it is; None if it has ended meanwhile or lies outside of the container.
        command: Its command line, likewise.
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
    """A part of a GPU in MIG mode that CUDA takes for a device.

    Attributes:
        index: Its index on the GPU.
        uuid: Its UUID, `MIG-...`, which CUDA_VISIBLE_DEVICES takes.
        name: Its name, such as "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
        gpu_instance: The id of its GPU instance.
        compute_instance: The id of its compute instance.
        memory_total: In bytes.
        memory_used: In bytes.
        memory_free: In bytes.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The state of an NVIDIA GPU; whatever driver or device do not tell is None, never 0.

    Attributes:
        index: The index in the order of the PCI bus, which is that of nvidia-smi, and CUDA's if CUDA_DEVICE_ORDER is
            PCI_BUS_ID.
        bus_id: The address on the PCI bus, such as "00000000:07:00.0".
        uuid: The UUID, such as "GPU-8f6d...", which CUDA_VISIBLE_DEVICES takes.
        name: The name, such as "NVIDIA H100 80GB HBM3".
        memory_total: The memory in bytes.
        memory_used: What all processes use of it, in bytes, without what the driver reserves.
        memory_free: What is free, in bytes.
        utilization: The share of the last fraction of a second in which a kernel ran, in percent.
        memory_utilization: The share in which memory was read or written, in percent.
        temperature: In degrees Celsius.
        power: The power that it draws, in watts.
        power_limit: The limit of it, in watts.
        energy: What it has used since the driver was loaded, in joules (Volta and later).
        fan: The speed of the fan, in percent of its maximum.
        performance_state: From 0 (P0, fastest) to 15 (P15).
        persistence_mode: Whether the driver stays loaded without a process.
        compute_mode: "Default", "Exclusive_Process" (one process) or "Prohibited" (none).
        display_active: Whether it drives a display.
        ecc_errors: Uncorrected memory errors since the last start.
        sm_clock: The clock of the multiprocessors, in MHz.
        memory_clock: The clock of the memory, in MHz.
        throttle_reasons: Why the clock is not higher, such as "power cap"; empty if nothing slows it down.
        driver_version: The driver's version.
        vbios_version: The version of the video BIOS.
        mig_mode: Whether it is split by MIG.
        mig_slices: Its parts, if it is.
        processes: The processes that use it, those with most memory first; None if they are not told.
        error: Why it does not answer, if so; all else may be None then.
        unreadable: What could not be read though it may be supported, such as "power: Unknown Error".
    """

    index: int
    bus_id: str | None = None
    uuid: str | None = None
    name: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    utilization: int | None = None
    memory_utilization: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    energy: float | None = None
    fan: int | None = None
    performance_state: int | None = None
    persistence_mode: bool | None = None
    compute_mode: str | None = None
    display_active: bool | None = None
    ecc_errors: int | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    driver_version: str | None = None
    vbios_version: str | None = None
    mig_mode: bool | None = None
    mig_slices: tuple[MigSlice, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None
    error: str | None = None
    unreadable: tuple[str, ...] = ()
