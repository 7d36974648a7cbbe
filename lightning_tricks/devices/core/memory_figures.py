"""What allocators and the operating system say about memory, in bytes; None for what they do not say."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MemoryFigures:
    """Sizes in bytes, as in `MemoryReport`."""

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    total: int | None = None
    free: int | None = None


def resolve_device(device: int | str | torch.device | None) -> torch.device:
    """Return a device with its index where it is of CUDA; None is the current one if this process uses CUDA.

    Raises:
        RuntimeError: If it is a CUDA device and there is none, or if there is no such device at all.
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


def memory_figures(device: torch.device) -> MemoryFigures:
    """Return what is known of a device; what a report counts itself is None."""
    if device.type == "cuda":
        return _of_cuda(device)
    return _of_process() if device.type == "cpu" else MemoryFigures()


def _of_cuda(device: torch.device) -> MemoryFigures:
    reserved = torch.cuda.memory_reserved(device)
    free = total = None
    if reserved or torch.cuda.max_memory_reserved(device):  # otherwise asking would create a context on the device
        with suppress(RuntimeError):  # after some errors the device answers nothing any more
            free, total = torch.cuda.mem_get_info(device)
    return MemoryFigures(
        allocated=torch.cuda.memory_allocated(device),
        reserved=reserved,
        peak_allocated=torch.cuda.max_memory_allocated(device),
        peak_reserved=torch.cuda.max_memory_reserved(device),
        total=total,
        free=free,
    )


def _of_process() -> MemoryFigures:
    try:
        import psutil
    except ModuleNotFoundError:
        return MemoryFigures(peak_reserved=_peak_resident())
    memory, machine = psutil.Process().memory_info(), psutil.virtual_memory()
    return MemoryFigures(
        reserved=memory.rss,
        peak_reserved=getattr(memory, "peak_wset", None) or _peak_resident(),  # peak_wset: on Windows
        total=machine.total,
        free=machine.available,
    )


def _peak_resident() -> int | None:
    """Return the peak of the resident memory; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
