"""Our versions of the functions of torch that construct tensors when a file is read; they check all arguments."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_tricks._shared.read_budget import Budget
from lightning_tricks._torch_compat.tensors import negative_view
from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_calls import Constructor
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Global, Placeholder, describe_value
from lightning_tricks.checkpoint_remapping.core.files.storages import INVALID_TENSOR, TypedStorage

_MAX_DIMENSIONS = 64


def strided_tensor(budget: Budget, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """Return a tensor over a storage; a tensor that is larger than its storage is refused.

    A tensor that repeats its elements, as of `expand`, is charged the memory that a copy would take.
    """
    budget.spend(512)
    size, stride = _numbers(size), _numbers(stride)
    if not isinstance(storage, TypedStorage) or len(size) != len(stride) or not _numbers((offset,)):
        raise NotACheckpointError(INVALID_TENSOR)
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    width = storage.dtype.itemsize
    if extent and (offset + extent) * width > storage.storage.nbytes():
        raise NotACheckpointError("a checkpoint with a tensor that is larger than its data.")
    budget.spend(max(math.prod(size) - extent, 0) * width)
    empty = torch.empty(0, dtype=storage.dtype, device=storage.storage.device)
    return empty.set_(storage.storage, offset, size, stride)


def _numbers(values: Any) -> tuple[int, ...]:
    """Return sizes or strides, checked."""
    known = isinstance(values, list | tuple) and len(values) <= _MAX_DIMENSIONS
    if not known or any(type(number) is not int or not 0 <= number < 1 << 63 for number in values):
        raise NotACheckpointError(INVALID_TENSOR)
    return tuple(values)


def tensor_constructors(budget: Budget) -> dict[str, Constructor]:
    """Return our functions by the qualified names of torch's that construct tensors."""

    def of_storage(*parts: Any) -> torch.Tensor:
        made = strided_tensor(budget, *parts)
        bits = parts[6] if len(parts) > 6 and isinstance(parts[6], dict) else {}
        made = negative_view(made) if bits.get("neg") else made
        return made.conj() if bits.get("conj") else made

    def of_dtype(
        storage: Any, offset: Any, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: Any, *_: Any
    ) -> torch.Tensor:
        if not isinstance(storage, TypedStorage) or not isinstance(dtype, torch.dtype):
            raise NotACheckpointError(INVALID_TENSOR)
        return strided_tensor(budget, TypedStorage(storage.storage, dtype), offset, size, stride)

    def sparse(layout: Any, data: Any) -> Any:
        if layout is not torch.sparse_coo or not all(isinstance(part, torch.Tensor) for part in data[:2]):
            return Placeholder("torch._utils._rebuild_sparse_tensor", (layout, data))
        indices, values = data[:2]
        budget.spend(1024 + indices.nbytes + values.nbytes)  # all of them are checked
        return torch.sparse_coo_tensor(indices, values, _numbers(data[2]), check_invariants=True)

    def of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        if not isinstance(arguments, tuple):
            raise NotACheckpointError(INVALID_TENSOR)
        budget.spend(512 + 8 * len(arguments))
        make = constructors.get(str(function)) if isinstance(function, Global) else None
        return make(*arguments) if make else Placeholder(describe_value(kind), arguments, state)

    def on_meta(dtype: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
        budget.spend(1024)
        return torch.empty_strided(_numbers(size), _numbers(stride), dtype=dtype, device="meta")

    constructors: dict[str, Constructor] = {
        "torch._tensor._rebuild_from_type_v2": of_type,
        "torch._utils._rebuild_meta_tensor_no_storage": on_meta,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
        "torch._utils._rebuild_sparse_tensor": sparse,
        "torch._utils._rebuild_tensor": of_storage,
        "torch._utils._rebuild_tensor_v2": of_storage,
        "torch._utils._rebuild_tensor_v3": of_dtype,
    }
    return constructors
