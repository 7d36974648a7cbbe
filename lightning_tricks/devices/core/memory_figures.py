"""What allocators and the operating system say about memory: sizes, peaks and growth; and a limit to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import torch

from lightning_tricks._shared.checks import check_number

_FEW_EPOCHS = 4  # in which memory has to grow one after another
_LEAST_GROWTH = 2**20  # bytes in these epochs together; the allocator hands out blocks of 512 bytes


def resolve_device(device: int | str | torch.device | None) -> torch.device:
    """Return a device, with its index if it is a CUDA device; None is the current one if this process uses CUDA.

    Raises:
        RuntimeError: If it is a CUDA device and there is none, or if the device does not exist.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise RuntimeError(
            f'memory_report(device="{device}") needs a CUDA device, and torch finds none: use device="cpu".'
        )
    if device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def memory_figures(device: torch.device) -> dict[str, int | None]:
    """Return what is known of a device, in bytes, by the names that it has in `MemoryReport`."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        free = total = None
        if reserved or torch.cuda.max_memory_reserved(device):  # otherwise asking would create a context on the device
            with suppress(RuntimeError):  # after some errors the device no longer responds
                free, total = torch.cuda.mem_get_info(device)
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": reserved,
            "peak_allocated": torch.cuda.max_memory_allocated(device),
            "peak_reserved": torch.cuda.max_memory_reserved(device),
            "total": total,
            "free": free,
        }
    if device.type != "cpu":
        return {}
    try:
        import psutil
    except ModuleNotFoundError:
        return {"peak_reserved": _peak_resident()}
    memory, machine = psutil.Process().memory_info(), psutil.virtual_memory()
    peak = getattr(memory, "peak_wset", None) or _peak_resident()  # peak_wset: on Windows
    return {"reserved": memory.rss, "peak_reserved": peak, "total": machine.total, "free": machine.available}


def _peak_resident() -> int | None:
    """Return the peak of the resident memory; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StagePeaks:
    """The peaks of stages that interrupt each other, as validation interrupts training.

    Args:
        read_peak: Returns the peak since the last reset, in bytes.
        reset_peak: Resets it.

    Attributes:
        overall: The peak since this object was created, in bytes.
    """

    def __init__(self, read_peak: Callable[[], int], reset_peak: Callable[[], None]) -> None:
        self._read_peak, self._reset_peak = read_peak, reset_peak
        self._stage = ""
        self._peaks: dict[str, int] = {}
        self.overall = 0

    def enter(self, stage: str) -> None:
        """Count what follows for a stage; "" for none."""
        peak = self._read_peak()
        self.overall = max(self.overall, peak)
        if self._stage:
            self._peaks[self._stage] = max(peak, self._peaks.get(self._stage, 0))
        self._reset_peak()
        self._stage = stage

    def take(self) -> dict[str, int]:
        """Return the peak of each stage since the last call, in bytes, and count what follows for none."""
        self.enter("")
        peaks, self._peaks = self._peaks, {}
        return peaks


class EpochGrowth:
    """How much memory was allocated at the ends of epochs."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._epochs = 0
        self._last: list[int] = []

    def add(self, allocated: int) -> None:
        """Add the size at the end of an epoch, in bytes."""
        if self._first is None:
            self._first = allocated
        self._epochs += 1
        self._last = [*self._last[-_FEW_EPOCHS:], allocated]

    @property
    def per_epoch(self) -> int | None:
        """The growth from the end of the first epoch, by epoch, in bytes; None before the end of the second."""
        if self._first is None or self._epochs < 2:
            return None
        return round((self._last[-1] - self._first) / (self._epochs - 1))

    def steady(self) -> list[int]:
        """Return the sizes at the ends of the last epochs if they grew in each of them; else an empty list."""
        grows = all(before < after for before, after in zip(self._last, self._last[1:], strict=False))
        enough = len(self._last) > _FEW_EPOCHS and self._last[-1] - self._last[0] >= _LEAST_GROWTH
        return list(self._last) if grows and enough else []


def limit_memory(fraction: float, device: int | str | torch.device | None = None) -> None:
    """Limit this process to a share of the memory of one CUDA device.

    An allocation beyond the limit raises `torch.OutOfMemoryError`, even if the device has free memory. The limit
    applies to torch's allocator: the CUDA context, libraries and other processes need additional memory. It remains
    until the process ends or you set another limit.

    Before a Trainer runs, the current device of each rank is the first GPU: without `device`, each rank would limit the
    first GPU and use another one without a limit. With a Trainer, use `CudaMemory(limit=...)`, which applies the limit
    to the device of each rank.

    Args:
        fraction: The share of the device's total memory, > 0 and <= 1; 1.0 allows all of it.
        device: The CUDA device. None for the current one.

    Raises:
        TypeError: If `fraction` is not a number.
        ValueError: If `fraction` is out of range, or `device` is not a CUDA device of this process.
        RuntimeError: If there is no CUDA device.

    Examples:
        >>> if torch.cuda.is_available():
        ...     limit_memory(0.5, "cuda:0")
    """
    share = check_fraction("fraction", fraction)
    if device is not None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            raise ValueError(f'device must be a CUDA device such as "cuda:0", got {str(device)!r}.')
    if not torch.cuda.is_available():
        raise RuntimeError(
            "limit_memory needs a CUDA device, and torch finds none: check the driver (nvidia-smi), "
            "CUDA_VISIBLE_DEVICES and that torch was built with CUDA, or do not call it on this machine."
        )
    count = torch.cuda.device_count()
    if device is not None and device.index is not None and device.index >= count:
        raise ValueError(f"device must be one of cuda:0 to cuda:{count - 1}, got {str(device)!r}.")
    torch.cuda.set_per_process_memory_fraction(share, device)


def check_fraction(name: str, value: object) -> float:
    """Return `value` as a float, or raise an error if it is not a share of the memory in (0, 1]."""
    return check_number(name, value, above=0, at_most=1, note="the share of the device's memory")
