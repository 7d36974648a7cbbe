"""Which GPUs qualify, why the others do not, and in which order they are taken."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_tricks._shared.checks import check_choice, check_count, check_not_negative, check_number
from lightning_tricks._shared.units import format_bytes
from lightning_tricks.devices.core.gpu import GpuProcess
from lightning_tricks.devices.core.gpu_reading import owner_of
from lightning_tricks.devices.core.sizes import parse_size
from lightning_tricks.devices.core.visible_devices import VisibleDevice


@dataclass(frozen=True)
class Request:
    """The arguments of `select_gpus`, checked."""

    n: int
    min_free_memory: int
    max_utilization: float | None
    max_temperature: float | None
    prefer: str
    timeout: float
    fallback: str | None
    lock: bool

    @classmethod
    def of(cls, **arguments: Any) -> Request:
        """Check the arguments.

        Raises:
            TypeError: If one is of a wrong type.
            ValueError: If one is out of range.
        """
        check_count("n", arguments["n"])
        arguments["min_free_memory"] = parse_size("min_free_memory", arguments["min_free_memory"])
        if arguments["max_utilization"] is not None:
            check_not_negative("max_utilization", arguments["max_utilization"])
            check_number("max_utilization", arguments["max_utilization"], at_most=100, note="percent")
        if arguments["max_temperature"] is not None:
            check_not_negative("max_temperature", arguments["max_temperature"])
        check_choice("prefer", arguments["prefer"], _KEYS)
        check_not_negative("timeout", arguments["timeout"])
        if arguments["fallback"] not in (None, "cpu"):
            raise ValueError(f"fallback must be None or 'cpu', got {arguments['fallback']!r}.")
        return cls(**arguments)


@dataclass(frozen=True)
class Load:
    """What limits are compared with; None where driver or device do not tell."""

    memory_free: int | None
    utilization: float | None
    temperature: float | None
    processes: tuple[GpuProcess, ...] | None


def load_of(device: VisibleDevice, held: bool) -> Load:
    """Return the load of a device.

    Args:
        device: The device.
        held: Whether this process has selected it before, and may use it: then its own load does not count.
    """
    gpu, part = device.gpu, device.part
    memory = gpu if part is None else part
    processes = gpu.processes
    if part is not None and processes is not None:
        processes = tuple(process for process in processes if process.gpu_instance == part.gpu_instance)
    free, busy = memory.memory_free, None if part else gpu.utilization
    if held:
        own = [process for process in processes or () if process.pid == os.getpid()]
        processes = None if processes is None else tuple(process for process in processes if process not in own)
        busy = None if busy is None else 0
        if own and free is not None:
            free += sum(process.memory or 0 for process in own)
        elif not own:  # containers hide which process is this one
            free, processes = memory.memory_total, None
    return Load(free, busy, gpu.temperature, processes)


def refusal(device: VisibleDevice, request: Request, held: bool) -> str | None:
    """Return why a device does not qualify, or None if it does."""
    gpu = device.gpu
    if gpu.error is not None:
        return f"does not answer: {gpu.error}"
    if gpu.mig_mode and device.part is None:
        return "is in MIG mode, and has no slices"
    if device.part is not None and request.n > 1:
        return f"is a MIG slice, of which a CUDA process sees one only, and n={request.n}"
    if device.part is not None and device.uuid is None:
        return "is a MIG slice without a UUID, so CUDA cannot be told to use it"
    load = load_of(device, held)
    computing = [process for process in load.processes or () if "C" in process.kind]
    if gpu.compute_mode == "Prohibited":
        return "is in compute mode Prohibited, which its administrator has set"
    if gpu.compute_mode in ("Exclusive_Process", "Exclusive_Thread") and computing:
        return f"is in compute mode {gpu.compute_mode}, and {_describe(computing[0])} uses it"
    return _above_limits(load, request)


def _above_limits(load: Load, request: Request) -> str | None:
    by = f", {_describe(load.processes[0])} uses it" if load.processes else ""
    if load.memory_free is not None and load.memory_free < request.min_free_memory:
        free, limit = format_bytes(load.memory_free), format_bytes(request.min_free_memory)
        return f"{free} free, less than min_free_memory={limit}{by}"
    if _exceeds(load.utilization, request.max_utilization):
        return f"{load.utilization:g} % busy, more than max_utilization={request.max_utilization:g}{by}"
    if _exceeds(load.temperature, request.max_temperature):
        return f"{load.temperature:g} °C, more than max_temperature={request.max_temperature:g}"
    return None


def _exceeds(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def describe_owner(pid: int | None) -> str:
    """Return what is known about another process."""
    if pid is None:
        return "another process"
    owner = owner_of(pid)
    return _describe(GpuProcess(pid=pid, kind="C", user=owner.get("user")))


def _describe(process: GpuProcess) -> str:
    user = f" of {process.user}" if process.user else ""
    memory = f" with {format_bytes(process.memory)}" if process.memory else ""
    return f"process {process.pid}{user}{memory}"


def in_order(devices: Sequence[VisibleDevice], request: Request, held: Collection[str]) -> list[VisibleDevice]:
    """Return devices in the order in which they are taken.

    First come those that this process has selected before, as its memory lies there; last those that do not tell what a
    limit is about. GPUs that drive a display are last among equals.
    """

    def key(device: VisibleDevice) -> tuple[Any, ...]:
        mine = device.key in held
        load = load_of(device, mine)
        limited: list[tuple[float | None, float | None]] = [(load.memory_free, request.min_free_memory or None)]
        limited += [(load.utilization, request.max_utilization), (load.temperature, request.max_temperature)]
        untold = any(limit is not None and value is None for value, limit in limited)
        place = (bool(device.gpu.display_active), device.gpu.index, device.part.index if device.part else 0)
        return (not mine, untold, *_KEYS[request.prefer](load), *place)

    return sorted(devices, key=key)


def _known_first(value: float | None) -> tuple[bool, float]:
    return (value is None, value or 0)


def _most_memory(load: Load) -> tuple[Any, ...]:
    return _known_first(None if load.memory_free is None else -load.memory_free)


def _most_idle(load: Load) -> tuple[Any, ...]:
    processes = None if load.processes is None else len(load.processes)
    return (*_known_first(load.utilization), *_known_first(processes), *_most_memory(load))


def _coolest(load: Load) -> tuple[Any, ...]:
    return _known_first(load.temperature)


_KEYS = {"free_memory": _most_memory, "idle": _most_idle, "cool": _coolest}
