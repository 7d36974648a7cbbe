"""NVML's errors and constants under the names that the module `pynvml` has for them, for `FakeNvml`."""

from __future__ import annotations

from string import capwords
from typing import Any

ERRORS = {  # name -> NVML's code and words; https://docs.nvidia.com/deploy/nvml-api
    "UNINITIALIZED": (1, "Uninitialized"),
    "INVALID_ARGUMENT": (2, "Invalid Argument"),
    "NOT_SUPPORTED": (3, "Not Supported"),
    "NO_PERMISSION": (4, "Insufficient Permissions"),
    "ALREADY_INITIALIZED": (5, "Already Initialized"),
    "NOT_FOUND": (6, "Not Found"),
    "INSUFFICIENT_SIZE": (7, "Insufficient Size"),
    "INSUFFICIENT_POWER": (8, "Insufficient External Power"),
    "DRIVER_NOT_LOADED": (9, "Driver Not Loaded"),
    "TIMEOUT": (10, "Timeout"),
    "IRQ_ISSUE": (11, "Interrupt Request Issue"),
    "LIBRARY_NOT_FOUND": (12, "NVML Shared Library Not Found"),
    "FUNCTION_NOT_FOUND": (13, "Function Not Found"),
    "CORRUPTED_INFOROM": (14, "Corrupted infoROM"),
    "GPU_IS_LOST": (15, "GPU is lost"),
    "RESET_REQUIRED": (16, "GPU requires restart"),
    "OPERATING_SYSTEM": (17, "The operating system has blocked the request."),
    "LIB_RM_VERSION_MISMATCH": (18, "RM has detected an NVML/RM version mismatch."),
    "IN_USE": (19, "NVML Error with code 19"),
    "MEMORY": (20, "Insufficient Memory"),
    "NO_DATA": (21, "NVML Error with code 21"),
    "INSUFFICIENT_RESOURCES": (23, "NVML Error with code 23"),
    "ARGUMENT_VERSION_MISMATCH": (25, "NVML Error with code 25"),
    "DEPRECATED": (26, "NVML Error with code 26"),
    "NOT_READY": (27, "NVML Error with code 27"),
    "GPU_NOT_FOUND": (28, "NVML Error with code 28"),
    "UNKNOWN": (999, "Unknown Error"),
}
_WORDS = dict(ERRORS.values())
_CLASSES: dict[int | None, type[FakeNvmlError]] = {}

CONSTANTS: dict[str, Any] = {f"NVML_ERROR_{name}": code for name, (code, _) in ERRORS.items()} | {
    "NVML_SUCCESS": 0,
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_CLOCK_GRAPHICS": 0,
    "NVML_CLOCK_SM": 1,
    "NVML_CLOCK_MEM": 2,
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_AGGREGATE_ECC": 1,
    "NVML_COMPUTEMODE_DEFAULT": 0,
    "NVML_COMPUTEMODE_PROHIBITED": 2,
    "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS": 3,
    "NVML_FEATURE_DISABLED": 0,
    "NVML_FEATURE_ENABLED": 1,
    "NVML_DEVICE_MIG_DISABLE": 0,
    "NVML_DEVICE_MIG_ENABLE": 1,
    "nvmlMemory_v2": 0x02000028,
}


class FakeNvmlError(Exception):
    """What the functions of `FakeNvml` raise: as `pynvml.NVMLError`, of which each code has a subclass.

    Args:
        value: NVML's code, or its name, such as "NOT_SUPPORTED".

    Attributes:
        value: NVML's code.
    """

    value: int

    def __new__(cls, value: int | str | None = None) -> FakeNvmlError:
        """Return an error of the subclass for this code."""
        code = ERRORS[value][0] if isinstance(value, str) else value
        if cls is FakeNvmlError:
            cls = _CLASSES.get(code, cls)
        error = super().__new__(cls)
        if cls not in _CLASSES.values() and code is not None:
            error.value = code
        return error

    def __str__(self) -> str:
        return _WORDS.get(self.value, f"NVML Error with code {self.value}")


for _name, (_code, _) in ERRORS.items():
    _class = f"NVMLError_{capwords(_name, '_').replace('_', '')}"
    _CLASSES[_code] = type(_class, (FakeNvmlError,), {"value": _code, "__module__": __name__})
    globals()[_class] = CONSTANTS[_class] = _CLASSES[_code]
