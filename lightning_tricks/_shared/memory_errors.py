"""Errors that say that memory ran out."""

from __future__ import annotations

import re
from typing import Literal

import torch

_OF_DEVICE = re.compile(
    r"(^|: )(CUDA|HIP|XPU|MPS backend) out of memory|(CUDA|HIP)( driver)? error: out of memory"
    r"|\b(CU|HIP)[A-Z_]*_ALLOC_FAILED\b|Cuda failure (\d+ )?'out of memory'",  # of libraries, and of NCCL
    re.MULTILINE,
)
_OF_HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|Caught MemoryError in DataLoader worker"  # of NumPy, which torch cannot raise again as what it was
)


def memory_that_ran_out(error: BaseException) -> Literal["device", "host", ""]:
    """Return whose memory an error says that has run out; "" for any other error.

    An error that was raised from such an error counts as well, as compilers raise it.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, MemoryError):
            return "host"
        if isinstance(cause, RuntimeError):
            text = str(cause)
            if _OF_HOST.search(text):
                return "host"
            if isinstance(cause, torch.OutOfMemoryError) or _OF_DEVICE.search(text):
                return "device"
        cause = cause.__cause__
    return ""
