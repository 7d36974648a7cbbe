"""Which GPUs qualify, why the others do not, and in which order they are taken."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from lightning_tricks._shared.checks import check_choice, check_count, check_not_negative, check_number
from lightning_tricks._shared.text import format_bytes
from lightning_tricks.devices.core.gpu import GpuProcess, owner_of
from lightning_tricks.devices.core.visible_devices import VisibleDevice

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power, _letter: 1024**_power}
_UNITS |= {unit.lower(): size for unit, size in _UNITS.items()}


@dataclass(frozen=True)
class Request:
    """The arguments of `select_gpus`, checked.

    Raises:
        TypeError: If one is of a wrong type.
        ValueError: If one is out of range.
    """

    n: int
    min_free_memory: int
    max_utilization: float | None
    max_temperature: float | None
    prefer: str
    timeout: float
    fallback: str | None
    lock: bool

    def __post_init__(self) -> None:
        check_count("n", self.n)
        if self.max_utilization is not None:
            check_not_negative("max_utilization", self.max_utilization)
            check_number("max_utilization", self.max_utilization, at_most=100, note="percent")
        if self.max_temperature is not None:
            check_not_negative("max_temperature", self.max_temperature)
        check_choice("prefer", self.prefer, _SCORES)
        check_not_negative("timeout", self.timeout)
        if self.fallback not in (None, "cpu"):
            raise ValueError(f"fallback must be None or 'cpu', got {self.fallback!r}.")

    def limits(self, usage: Usage) -> tuple[tuple[float | None, float | None], ...]:
        """Return each value of a device with its limit; None for a value that is not reported, or not limited."""
        return (
            (usage.memory_free, self.min_free_memory or None),
            (usage.utilization, self.max_utilization),
            (usage.temperature, self.max_temperature),
        )


@dataclass(frozen=True)
class Usage:
    """The values that limits are compared with; None where driver or device do not report them."""

    memory_free: int | None
    utilization: float | None
    temperature: float | None
    processes: tuple[GpuProcess, ...] | None


def usage_of(device: VisibleDevice, held: bool) -> Usage:
    """Return the usage of a device.

    Args:
        device: The device.
        held: Whether this process has selected it before, and may use it: then its own usage does not count.
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
    return Usage(free, busy, gpu.temperature, processes)


def refusal(device: VisibleDevice, request: Request, held: bool) -> str | None:
    """Return why a device does not qualify, or None if it does."""
    gpu = device.gpu
    if gpu.error is not None:
        return f"does not answer: {gpu.error}"
    if gpu.mig_mode and device.part is None:
        return "is in MIG mode, and has no slices"
    if device.part is not None and request.n > 1:
        return f"is a MIG slice: a CUDA process sees only one, and n={request.n}"
    if device.part is not None and device.uuid is None:
        return "is a MIG slice without a UUID, so CUDA cannot be told to use it"
    usage = usage_of(device, held)
    computing = [process for process in usage.processes or () if "C" in process.kind]
    if gpu.compute_mode == "Prohibited":
        return "is in compute mode Prohibited, which its administrator has set"
    if gpu.compute_mode in ("Exclusive_Process", "Exclusive_Thread") and computing:
        return f"is in compute mode {gpu.compute_mode}, and {_describe(computing[0])} uses it"
    return _above_limits(usage, request)


def _above_limits(usage: Usage, request: Request) -> str | None:
    by = f", {_describe(usage.processes[0])} uses it" if usage.processes else ""
    if usage.memory_free is not None and usage.memory_free < request.min_free_memory:
        free, limit = format_bytes(usage.memory_free), format_bytes(request.min_free_memory)
        return f"{free} free, less than min_free_memory={limit}{by}"
    if _exceeds(usage.utilization, request.max_utilization):
        return f"{usage.utilization:g} % busy, more than max_utilization={request.max_utilization:g}{by}"
    if _exceeds(usage.temperature, request.max_temperature):
        return f"{usage.temperature:g} °C, more than max_temperature={request.max_temperature:g}"
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

    First come those that this process has selected before, as its memory lies there; last those that do not report
    a value that is limited. GPUs that drive a display are last among equals.
    """

    def key(device: VisibleDevice) -> tuple[Any, ...]:
        mine = device.key in held
        usage = usage_of(device, mine)
        untold = any(limit is not None and value is None for value, limit in request.limits(usage))
        place = (bool(device.gpu.display_active), device.gpu.index, device.part.index if device.part else 0)
        return (not mine, untold, *_SCORES[request.prefer](usage), *place)

    return sorted(devices, key=key)


def _known_first(value: float | None) -> tuple[bool, float]:
    return (value is None, value or 0)


def _most_memory(usage: Usage) -> tuple[Any, ...]:
    return _known_first(None if usage.memory_free is None else -usage.memory_free)


def _most_idle(usage: Usage) -> tuple[Any, ...]:
    processes = None if usage.processes is None else len(usage.processes)
    return (*_known_first(usage.utilization), *_known_first(processes), *_most_memory(usage))


def _coolest(usage: Usage) -> tuple[Any, ...]:
    return _known_first(usage.temperature)


_SCORES = {"free_memory": _most_memory, "idle": _most_idle, "cool": _coolest}


def parse_size(name: str, value: object) -> int:
    """Return a size in bytes from a number of bytes, or text such as "8GiB", "500 MB" or "8G" (binary).

    Args:
        name: The name of the argument, for the error.
        value: The size.

    Raises:
        TypeError: If the value is neither a number nor text.
        ValueError: If it is negative, or no size.

    Examples:
        >>> parse_size("size", "1.5 GiB"), parse_size("size", "2GB"), parse_size("size", 512)
        (1610612736, 2000000000, 512)
    """
    must = f"{name} must be a number of bytes, or text such as '8GiB' or '500MB'"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{must}, got {value!r}.")
    if not isinstance(value, str) and 0 <= value < math.inf:
        return round(value)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", str(value).strip())
    unit = match and (_UNITS.get(match[2]) or _UNITS.get(match[2].lower()))
    if not match or not unit or not isinstance(value, str):
        raise ValueError(f"{must}, got {value!r}.")
    return round(Decimal(match[1]) * unit)
