"""What CUDA has made of its environment variables in this process, asked without initializing it."""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from typing import Any

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
_PCI_ORDER = "PCI_BUS_ID"


def uuids_seen_by_cuda() -> list[str] | None:
    """Return the UUIDs of the devices of this process in CUDA's order, or None if CUDA is not initialized.

    CUDA reads its environment variables once, when anything initializes it, `torch.cuda.is_available()` included, which
    `torch.cuda.is_initialized()` does not tell. The driver itself does, and creates no context for it.

    Returns:
        UUIDs without "GPU-" or "MIG-" in front.
    """
    driver = _loaded_driver()
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    return [_uuid(driver, ordinal) for ordinal in range(count.value)]


def bare_uuid(uuid_: str) -> str:
    """Return a UUID without "GPU-" or "MIG-" in front, as CUDA and torch tell it."""
    return uuid_.removeprefix("MIG-").removeprefix("GPU-").lower()


def _uuid(driver: Any, ordinal: int) -> str:
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetUuid_v2(ctypes.byref(found), device)  # that of the slice, on a GPU in MIG mode
    return str(uuid.UUID(bytes=bytes(found)))


def _loaded_driver() -> Any:
    """Return the CUDA driver if this process has loaded it."""
    if sys.platform == "win32":
        kernel = ctypes.windll.kernel32
        kernel.GetModuleHandleW.restype = ctypes.c_void_p
        handle = kernel.GetModuleHandleW("nvcuda.dll")
        return ctypes.WinDLL("nvcuda.dll", handle=handle) if handle else None
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):  # not loaded; macOS has no driver
        return None


def number_gpus_by_bus(gpu_count: int, order_matters: bool) -> None:
    """Let CUDA number the GPUs as NVML does, by the PCI bus; for a process in which CUDA is not initialized.

    Args:
        gpu_count: The number of GPUs of the machine.
        order_matters: Whether CUDA_VISIBLE_DEVICES leaves the order to CUDA_DEVICE_ORDER.

    Raises:
        ValueError: If CUDA_DEVICE_ORDER asks for another order.
    """
    order = os.environ.get(ORDER_VARIABLE)
    if not order:
        os.environ[ORDER_VARIABLE] = _PCI_ORDER
    elif order != _PCI_ORDER and order_matters and gpu_count > 1:
        raise ValueError(
            f"{ORDER_VARIABLE}={order!r}: CUDA would number the {gpu_count} GPUs in another order than NVML does, "
            f"which select_gpus reads, and no one but CUDA knows which. Unset it, or set it to {_PCI_ORDER}."
        )
