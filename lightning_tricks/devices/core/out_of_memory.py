"""Errors that say that memory ran out, and the batch at which it did."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._shared.text import format_shape
from lightning_tricks._shared.units import format_bytes

_OF_DEVICE = re.compile(
    r"(^|: )(CUDA|HIP|XPU|MPS backend) out of memory|(CUDA|HIP)( driver)? error: out of memory"
    r"|\b(CU|HIP)[A-Z_]*_ALLOC_FAILED\b|Cuda failure (\d+ )?'out of memory'",  # of libraries, and of NCCL
    re.MULTILINE,
)
_OF_HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|Caught MemoryError in DataLoader worker"  # of NumPy, which torch cannot raise again as what it was
)
_REQUESTED = re.compile(r"(?i)(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)")
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "eib": 2**60}
_MOST_LINES = 40
_DEEPEST = 5


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


def is_of_worker(error: BaseException) -> bool:
    """Whether an error was raised in a worker process of a DataLoader."""
    return "in DataLoader worker process" in str(error)


def requested_bytes(error: BaseException) -> int | None:
    """Return how much memory was asked for when it ran out, as the error says it."""
    found = _REQUESTED.search(str(error)) or _REQUESTED.search(str(error.__cause__ or ""))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else None


def describe_batch(batch: Any) -> list[str]:
    """Return a line for each part of a batch: tensors with dtype, shape, device and size, others with their type.

    Values, also those of strings and numbers, are not shown.
    """
    lines: list[str] = []
    for line in _describe(batch, "batch", 0):
        if len(lines) == _MOST_LINES:
            return [*lines, "..."]
        lines.append(line)
    return lines


def _describe(value: Any, name: str, depth: int) -> Iterator[str]:
    indent = "  " * depth + name
    if isinstance(value, Tensor):
        yield f"{indent}: {_describe_tensor(value)}"
        return
    parts = _parts(value) if depth < _DEEPEST else []
    size = f" of {len(value)}" if isinstance(value, Mapping | list | tuple | set) else ""
    yield f"{indent}: {type(value).__name__}{size}"
    for part_name, part in parts:
        yield from _describe(part, part_name, depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]" if isinstance(key, str | int) else "[...]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [(f".{name}", getattr(value, name, None)) for name in value.__dataclass_fields__]
    return []


def _describe_tensor(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = format_bytes(tensor.numel() * tensor.element_size())
    try:
        shape = format_shape(tensor.shape) or "scalar"
    except RuntimeError:  # of a nested tensor
        shape = f"nested, {tensor.numel():,} elements"
    return f"{dtype} {shape} on {tensor.device}, {size}"
