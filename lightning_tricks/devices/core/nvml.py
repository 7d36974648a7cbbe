"""NVML, the library behind nvidia-smi: opening it, and reading the values that a driver and a device support.

None of this creates a CUDA context: GPUs that other processes use are only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning_tricks._shared.extras import import_extra

# NVML's error codes: https://docs.nvidia.com/deploy/nvml-api
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28

# How NVML says that there is no such value, in 32 and in 64 bits
_NOT_AVAILABLE = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)

_UNSUPPORTED = (NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED)
_DEVICE_IS_GONE = (GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND)
_REMEDIES = {
    LIBRARY_NOT_FOUND: "this machine has no NVIDIA driver, or the container was started without its GPUs",
    DRIVER_NOT_LOADED: "the NVIDIA driver is installed, but not loaded",
    LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated while it was loaded; the machine has to be restarted",
    NO_PERMISSION: "this user has no permission to use the NVIDIA driver",
}


class NvmlUnavailableError(RuntimeError):
    """Raised if NVML cannot be used; the message gives the reason."""


@contextmanager
def open_nvml(nvml: Any = None) -> Iterator[Any]:
    """Initialize NVML, and shut it down on leaving; this may be nested.

    Args:
        nvml: A replacement for the module `pynvml`; None imports it.

    Yields:
        The module.

    Raises:
        ModuleNotFoundError: If nvidia-ml-py is missing; the message names the extra.
        NvmlUnavailableError: If there is no working driver; the message says why.
    """
    if nvml is None:
        nvml = import_extra("pynvml", "devices", "Reading the state of NVIDIA GPUs needs nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        reason = _REMEDIES.get(error_code(error), "see nvidia-smi")
        raise NvmlUnavailableError(f"NVML does not start ({error}): {reason}.") from error
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):  # the values that were read before are still right
            nvml.nvmlShutdown()


def error_code(error: BaseException) -> int:
    """Return the code of an `NVMLError`."""
    return int(getattr(error, "value", -1))


def available(value: Any) -> Any:
    """Return the value of NVML, or None if it stands for "not available"."""
    return None if isinstance(value, int) and value in _NOT_AVAILABLE else value


class DeviceReader:
    """Calls functions of NVML for one device, each once, and returns None for whatever driver or device do not report.

    Args:
        nvml: The module `pynvml`, initialized.
        handle: The device.

    Attributes:
        problems: What failed for another reason than missing support, such as "power: Unknown Error".
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle
        self.problems: list[str] = []
        self._results: dict[tuple[Any, ...], Any] = {}

    def __call__(self, label: str, *calls: str | tuple[Any, ...]) -> Any:
        """Return the result of the first of several functions that driver and module know, or None.

        Args:
            label: What is read, for `problems`.
            calls: Names of functions, the preferred one first; tuples of a name and what it takes after the device.

        Raises:
            NVMLError: If the device no longer responds.
        """
        if calls not in self._results:
            self._results[calls] = self._call_first(label, calls)
        return self._results[calls]

    def _call_first(self, label: str, calls: tuple[str | tuple[Any, ...], ...]) -> Any:
        for name, *arguments in ((call,) if isinstance(call, str) else call for call in calls):
            function = getattr(self.nvml, name, None)  # an older nvidia-ml-py does not have it
            if function is None:
                continue
            try:
                return available(function(self.handle, *arguments))
            except self.nvml.NVMLError as error:
                code = error_code(error)
                if code in _DEVICE_IS_GONE:
                    raise
                if code not in _UNSUPPORTED:
                    self.problems.append(f"{label}: {error}")
                    return None
            except UnicodeDecodeError as error:  # pynvml reads text as UTF-8
                return error.object.decode(errors="replace")
        return None
