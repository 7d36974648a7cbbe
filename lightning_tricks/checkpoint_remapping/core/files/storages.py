"""The tensors of a file of weights: their storages, mapped from the file or read and moved to their devices.

A file names the functions of torch that construct tensors over storages. Ours stand for them, and check all arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from lightning_tricks._shared.read_budget import Budget
from lightning_tricks._torch_compat.tensors import negative_view
from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.other_formats import DOWNLOAD_AGAIN
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import (
    Constructor,
    Global,
    Placeholder,
    array_constructors,
    check_tensor,
    checked_sizes,
    describe_value,
)

MapLocation = str | torch.device | None


@dataclass
class TypedStorage:
    """A storage and the type of its elements."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


class FileStorages:
    """The storages of one file: each is mapped or read once, and moved by `map_location`.

    Args:
        path: Path of the file.
        map_location: As in `read_checkpoint`.
        mmap: Whether storages are mapped from the file instead of read.
        budget: Limits on memory and time.
    """

    def __init__(self, path: Path, map_location: MapLocation, mmap: bool, budget: Budget) -> None:
        self.path = path
        self.map_location = map_location
        self.mmap = mmap
        self.budget = budget
        self.known: dict[str, torch.UntypedStorage] = {}

    def get(
        self, kind: Any, key: Any, location: Any, read: Callable[[str, torch.dtype], torch.UntypedStorage]
    ) -> TypedStorage:
        """Return a storage that a file names.

        Args:
            kind: The class of the storage, which says the type of its elements.
            key: Its key in the file.
            location: The device that it was saved from.
            read: Reads the storage of a key and a type; it is called once for each key.
        """
        dtype, key = storage_dtype(kind), storage_key(key)
        check_tensor(isinstance(location, str))
        self.budget.spend(192)
        if key not in self.known:
            self.budget.spend(512)
            self.known[key] = _restored(read(key, dtype), location, self.map_location)
        return TypedStorage(self.known[key], dtype)

    @cached_property
    def mapped(self) -> torch.UntypedStorage:
        """A mapping of the whole file, of which its storages are slices."""
        return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(str(self.path), False, self.length))

    @cached_property
    def length(self) -> int:
        """Size of the file in bytes."""
        return self.path.stat().st_size

    def part(self, start: int, size: int) -> torch.UntypedStorage:
        """Return `size` bytes of the file from `start`."""
        length = self.length
        check_tensor(start >= 0 and size >= 0)
        if start + size > length:
            raise NotACheckpointError(
                f"truncated: it has {length:,} bytes, but needs at least {start + size:,}. {DOWNLOAD_AGAIN}"
            )
        if self.mmap and size and start % 16 == 0:
            return cast(torch.UntypedStorage, self.mapped[start : start + size])
        self.budget.spend(size)
        data = np.fromfile(self.path, np.uint8, size, offset=start)
        if len(data) != size:
            raise NotACheckpointError(f"truncated. {DOWNLOAD_AGAIN}")
        return torch.from_numpy(data).untyped_storage()


def is_available(device: str | torch.device) -> bool:
    """Whether there is such a device."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError):
        return False
    return True


def _restored(storage: torch.UntypedStorage, location: str, map_location: MapLocation) -> torch.UntypedStorage:
    """Move a storage to `map_location`, which is available, or to where it was saved; to the CPU if that is not."""
    place = (location if is_available(location) else "cpu") if map_location is None else str(map_location)
    there: torch.UntypedStorage = torch.serialization.default_restore_location(storage, place)
    return there


_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}


def storage_dtype(kind: Any) -> torch.dtype:
    """Return the dtype of a storage by the class that a file names."""
    if isinstance(kind, Global) and kind.module.startswith("torch"):
        kind = kind.name.rpartition(".")[2]
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise NotACheckpointError(f"a file with tensors of {describe_value(kind)}, which this reader does not know.")
    return _DTYPES[kind]


def storage_key(key: Any) -> str:
    """Return the key of a storage in its file, checked."""
    check_tensor(isinstance(key, str | int))
    return str(key)


def strided_tensor(budget: Budget, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """Return a tensor over a storage; a tensor that is larger than its storage is refused.

    A tensor that repeats its elements, as of `expand`, is charged the memory that a copy would take.
    """
    budget.spend(512)
    size, stride = checked_sizes(size), checked_sizes(stride)
    check_tensor(isinstance(storage, TypedStorage) and len(size) == len(stride) and bool(checked_sizes((offset,))))
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    width = storage.dtype.itemsize
    if extent and (offset + extent) * width > storage.storage.nbytes():
        raise NotACheckpointError("a checkpoint with a tensor that is larger than its data.")
    budget.spend(max(math.prod(size) - extent, 0) * width)
    empty = torch.empty(0, dtype=storage.dtype, device=storage.storage.device)
    return empty.set_(storage.storage, offset, size, stride)


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
        check_tensor(isinstance(storage, TypedStorage) and isinstance(dtype, torch.dtype))
        return strided_tensor(budget, TypedStorage(storage.storage, dtype), offset, size, stride)

    def of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        check_tensor(isinstance(arguments, tuple))
        budget.spend(512 + 8 * len(arguments))
        make = constructors.get(str(function)) if isinstance(function, Global) else None
        return make(*arguments) if make else Placeholder(describe_value(kind), arguments, state)

    def on_meta(dtype: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
        budget.spend(1024)
        return torch.empty_strided(checked_sizes(size), checked_sizes(stride), dtype=dtype, device="meta")

    constructors: dict[str, Constructor] = {
        **array_constructors(budget),
        "torch._tensor._rebuild_from_type_v2": of_type,
        "torch._utils._rebuild_meta_tensor_no_storage": on_meta,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
        "torch._utils._rebuild_tensor": of_storage,
        "torch._utils._rebuild_tensor_v2": of_storage,
        "torch._utils._rebuild_tensor_v3": of_dtype,
    }
    return constructors
