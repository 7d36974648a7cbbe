"""Torch's record of allocations on CUDA devices, errors that say that memory ran out, and storages behind tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._torch_compat.guards import needs_private

_MAX_ENTRIES = 100_000  # of the history, which lies in the memory of the host
# torch's own allocator raises `torch.OutOfMemoryError`; cuBLAS, cuDNN and NCCL allocate by themselves, and what they
# say comes as a plain RuntimeError.
_OF_DEVICE = re.compile(
    r"(^|: )(CUDA|HIP|XPU|MPS backend) out of memory|(CUDA|HIP)( driver)? error: out of memory"
    r"|\b(CU|HIP)[A-Z_]*_ALLOC_FAILED\b|Cuda failure (\d+ )?'out of memory'",  # of libraries, and of NCCL
    re.MULTILINE,
)
_OF_HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|Caught MemoryError in DataLoader worker"  # of NumPy, which torch cannot raise again as what it was
)


@contextmanager
def recording_memory_history() -> Iterator[None]:
    """Let torch record each allocation on CUDA devices with its Python stack, until the context is left."""
    with needs_private("CudaMemory(record_history=True)", TypeError):
        # Without C++ frames, which take long to look up, and with an end, which the default has not.
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_snapshot(path: Path) -> None:
    """Write the recorded history to a file for pytorch.org/memory_viz."""
    with needs_private("CudaMemory(record_history=True)", TypeError):
        torch.cuda.memory._dump_snapshot(str(path))


def as_plain_tensors() -> AbstractContextManager[Any]:
    """Let no subclass of Tensor see, in the context, that attributes and methods of its tensors are used."""
    with needs_private("memory_report"):
        # Else `tensor.shape` of a DTensor or a quantized tensor runs its `__torch_function__`, which may compute or
        # communicate.
        context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
        return context


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return what tells a storage from the others that are alive; unlike its `data_ptr`, this copies no lazy copy."""
    with needs_private("memory_report"):
        # `data_ptr` makes a lazy clone copy its memory (torch/csrc's copy on write), and that of an empty storage is 0
        # for all.
        identity: int = storage._cdata
        return identity


def parts_of_sparse(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a sparse tensor consists of, without coalescing it; none for any other."""
    if tensor.layout is torch.sparse_coo:
        with needs_private("memory_report"):
            # `indices()` raises an error for a tensor that is not coalesced, and coalescing allocates.
            return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def memory_that_ran_out(error: BaseException) -> Literal["device", "host", ""]:
    """Return whose memory an error says that has run out; "" for any other error.

    An error that was raised from such an error counts as well, as compilers raise it.
    """
    # `__cause__` of an error may lead round in a circle.
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
