"""How busy the host and its GPUs are, measured beside the training."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_tricks._shared.extras import import_extra
from lightning_tricks.devices.core.device_summary import GIB, QUANTITIES
from lightning_tricks.devices.core.gpu import THROTTLE_REASONS, Gpu, gpu_handles, mig_handles, read_field, read_fields
from lightning_tricks.devices.core.nvml import DeviceReader
from lightning_tricks.devices.core.visible_devices import bare_uuid

CONTAINER_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # in microseconds, of a period
_MEASURED = ("energy", "throttle_reasons", *(quantity.field for quantity in QUANTITIES.values() if quantity.field))
PATIENCE = 10.0  # seconds


def available_cores() -> int:
    """Return how many cores this process may use; a container may have a quota of the time of all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CONTAINER_QUOTA.read_text(encoding="ascii").split()
        return min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # there is no such file, or its quota is "max"
        return cores


class HostUtilization:
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


class GpuUtilization:
    """Measures one GPU, by NVML.

    Args:
        nvml: The module `pynvml`, initialized.
        handle: The device.
        name: What its keys start with, such as "gpu0".
        clock: Returns the time in seconds.

    Attributes:
        name: As given.
        product: The name of the product; None if the driver does not tell.
        problem: Why it no longer responds; None while it does.
        energy: The joules that it has used since this object was made; None if that is not known.
        reasons: How often it was slowed down for a reason, of all `n_measurements`.
        n_measurements: How often its throttling was measured.
    """

    def __init__(self, nvml: Any, handle: Any, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.problem: str | None = None
        self.energy: float | None = None
        self.reasons: Counter[str] = Counter()
        self.n_measurements = 0
        self._nvml, self._handle = nvml, handle
        self._clock = clock
        self._first_energy: float | None = None
        self._last_power: tuple[float, float] | None = None
        self.product: str | None = None
        try:
            self.product = read_field(DeviceReader(nvml, handle), "name")
        except nvml.NVMLError as error:
            self.problem = str(error)

    def measure(self) -> dict[str, float]:
        """Return the values of the GPU now; none if it does not respond."""
        if self.problem is not None:
            return {}
        try:
            told = dict(read_fields(DeviceReader(self._nvml, self._handle), Gpu, _MEASURED))
        except self._nvml.NVMLError as error:
            self.problem = str(error)
            return {}
        self._count_energy(told["energy"], told["power"])
        values = {
            key.removeprefix("gpu/"): told[quantity.field] / quantity.divisor
            for key, quantity in QUANTITIES.items()
            if quantity.field and told[quantity.field] is not None  # whatever is not reported is left out
        }
        if told["throttle_reasons"] is not None:
            found = told["throttle_reasons"]
            slowed = [reason.words for reason in THROTTLE_REASONS if reason.slows and reason.words in found]
            self.n_measurements += 1
            self.reasons.update(slowed)
            values["throttled"] = 100.0 if slowed else 0.0
        return {f"{self.name}/{name}": value for name, value in values.items()}

    def _count_energy(self, energy: float | None, power: float | None) -> None:
        if energy is not None:  # counted by the GPU
            if self._first_energy is None:
                self._first_energy = energy
            self.energy = energy - self._first_energy
        elif power is not None:  # the mean of two measurements, over the time between them
            now = self._clock()
            if self._last_power is not None:
                then, before = self._last_power
                self.energy = (self.energy or 0.0) + (now - then) * (before + power) / 2
            self._last_power = now, power


def find_cuda_handles(nvml: Any, indices: Iterable[int]) -> dict[int, Any]:
    """Return NVML's handles of CUDA devices by their index, without a context on them; CUDA has to be initialized.

    Devices that NVML does not know, or that do not answer, are left out.
    """
    by_uuid: dict[str, Any] = {}
    for handle in gpu_handles(nvml):
        if not isinstance(handle, nvml.NVMLError):
            with suppress(nvml.NVMLError):  # it no longer responds
                by_uuid |= _uuids(nvml, handle)
    found = {index: by_uuid.get(bare_uuid(cuda_uuid(index))) for index in indices}
    return {index: handle for index, handle in found.items() if handle is not None}


def _uuids(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the handles of a GPU and of its MIG slices by their UUIDs, if NVML reports these."""
    devices = (handle, *(part for _, part in mig_handles(DeviceReader(nvml, handle))))
    uuids = [read_field(DeviceReader(nvml, device), "uuid") for device in devices]
    return {bare_uuid(uuid): device for uuid, device in zip(uuids, devices, strict=True) if uuid is not None}


def cuda_uuid(index: int) -> str:
    """Return the UUID of a CUDA device."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


class BackgroundSampler:
    """Calls a function every few seconds, in a thread that ends with the process, or when it is stopped.

    Args:
        sample: The function; it is called once more when the thread is stopped. If it raises, it is not called again.
        interval: The seconds between two calls, > 0.
        finish: Called by the thread when it ends, so that nothing is released while `sample` hangs.

    Attributes:
        error: What the function raised; None while it runs.
    """

    def __init__(self, sample: Callable[[], None], interval: float, finish: Callable[[], None] = lambda: None) -> None:
        self.error: Exception | None = None
        self._sample = sample
        self._interval = interval
        self._finish = finish
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_tricks device monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        try:
            self._thread.start()
        except RuntimeError:  # there may be no more threads
            self._finish()
            raise

    def stop(self) -> bool:
        """Stop the thread, and return whether it has ended; one that hangs is waited for 10 seconds, once."""
        patience = 0.0 if self._stop.is_set() else PATIENCE
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                self._sample()
            self._sample()
        except Exception as error:  # reported by the thread that trains
            self.error = error
        finally:
            self._finish()
