"""The load of the host and of GPUs, measured in a moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_tricks._shared.extras import import_extra
from lightning_tricks.devices.core.gpu_reading import read_load
from lightning_tricks.devices.core.nvml import DeviceReader

GIB = 2**30
_SLOWED_DOWN = (
    "power cap",
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "power brake",
)


class HostLoad:
    """Measures the CPU and the memory of this machine, by psutil.

    Raises:
        ModuleNotFoundError: If psutil is missing; the message names the extra.
    """

    def __init__(self) -> None:
        self._psutil = import_extra("psutil", "devices", "Measuring CPU and memory needs psutil")
        self._process = self._psutil.Process(os.getpid())
        self._times = self._cpu_times()

    def measure(self) -> dict[str, float]:
        """Return the values now; the CPU's utilization is that since the last call."""
        before, self._times = self._times, self._cpu_times()
        busy, all_ = (now - then for now, then in zip(self._times, before, strict=True))
        memory = self._psutil.virtual_memory()
        values = {
            "host/ram_used_gib": (memory.total - memory.available) / GIB,
            "host/process_ram_gib": self._process.memory_info().rss / GIB,
        }
        return values | ({"host/cpu_utilization": min(100.0, max(0.0, 100 * busy / all_))} if all_ > 0 else {})

    def _cpu_times(self) -> tuple[float, float]:
        """Return the CPU time in which the machine worked, and that in which it could have."""
        times = self._psutil.cpu_times()._asdict()
        parts = {name: value for name, value in times.items() if name not in ("guest", "guest_nice")}  # part of user
        idle = sum(parts.get(name, 0.0) for name in ("idle", "iowait"))
        whole = sum(parts.values())
        return whole - idle, whole


class GpuLoad:
    """Measures one GPU, by NVML.

    Args:
        nvml: The module `pynvml`, initialized.
        handle: The device.
        name: What its keys start with, such as "gpu0".
        clock: Returns the time in seconds.

    Attributes:
        name: As given.
        product: The name of the product; None if the driver does not tell.
        problem: Why it does not answer any more; None while it does.
        energy: The joules that it has used since this object was made; None if that is not known.
        reasons: How often it was slowed down for a reason, of all `n_measurements`.
        n_measurements: How often its throttling was measured.
    """

    def __init__(self, nvml: Any, handle: Any, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.problem: str | None = None
        self.energy: float | None = None
        self.reasons: dict[str, int] = {}
        self.n_measurements = 0
        self._reader = DeviceReader(nvml, handle)
        self._clock = clock
        self._first_energy: float | None = None
        self._last_power: tuple[float, float] | None = None
        self.product: str | None = None
        try:
            self.product = self._reader("name", "nvmlDeviceGetName")
        except nvml.NVMLError as error:
            self.problem = str(error)

    def measure(self) -> dict[str, float]:
        """Return what the GPU tells now; nothing if it does not answer."""
        if self.problem is not None:
            return {}
        try:
            load = read_load(self._reader)
        except self._reader.nvml.NVMLError as error:
            self.problem = str(error)
            return {}
        self._reader.problems.clear()  # what is not told is left out
        self._count_energy(load)
        values = {
            "utilization": load["utilization"],
            "memory_utilization": load["memory_utilization"],
            "memory_used_gib": None if load.get("memory_used") is None else load["memory_used"] / GIB,
            "temperature": load["temperature"],
            "power_w": load["power"],
            "sm_clock_mhz": load["sm_clock"],
            "fan": load["fan"],
            "throttled": self._count_reasons(load["throttle_reasons"]),
        }
        return {f"{self.name}/{name}": float(value) for name, value in values.items() if value is not None}

    def _count_energy(self, load: Mapping[str, Any]) -> None:
        if load["energy"] is not None:  # counted by the GPU
            if self._first_energy is None:
                self._first_energy = load["energy"]
            self.energy = load["energy"] - self._first_energy
        elif load["power"] is not None:  # the mean of two measurements, over the time between them
            now = self._clock()
            if self._last_power is not None:
                then, power = self._last_power
                self.energy = (self.energy or 0.0) + (now - then) * (power + load["power"]) / 2
            self._last_power = now, load["power"]

    def _count_reasons(self, reasons: tuple[str, ...] | None) -> float | None:
        if reasons is None:
            return None
        slowed = [reason for reason in reasons if reason in _SLOWED_DOWN]
        self.n_measurements += 1
        for reason in slowed:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return 100.0 if slowed else 0.0
