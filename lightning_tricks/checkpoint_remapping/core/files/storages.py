"""The tensors of a file of weights: their storages, mapped from the file or read and moved to their devices.

A file names the functions of torch that construct tensors over storages. Ours stand for them, and check all arguments.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.read_budget import Budget
from lightning_tricks._torch_compat.tensors import negative_view, untyped_storage
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.numpy_arrays import array_constructors
from lightning_tricks.checkpoint_remapping.core.files.other_formats import DOWNLOAD_AGAIN
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import (
    Constructor,
    Global,
    Placeholder,
    check_tensor,
    checked_sizes,
    describe_value,
)

MapLocation = str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None


@dataclass
class TypedStorage:
    """A storage and the type of its elements."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


class FileStorages:
    """The storages of one file: each is mapped or read once, and moved by `map_location`.

    Args:
        path: Path of the file.
        map_location: As in `torch.load`.
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
            self.known[key] = restore(read(key, dtype), location, self.map_location)
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
        if self.on_meta:
            return torch.UntypedStorage(size, device="meta")
        if self.mmap and size and start % 16 == 0:
            return cast(torch.UntypedStorage, self.mapped[start : start + size])
        self.budget.spend(size)
        storage = torch.UntypedStorage(size)
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().data
        with self.open() as stream:
            stream.seek(start)
            if size and stream.readinto(memory) != size:  # type: ignore[attr-defined]
                raise NotACheckpointError(f"truncated. {DOWNLOAD_AGAIN}")
        return storage

    def open(self) -> IO[bytes]:
        """Open the file."""
        return open_file(self.path)

    @contextmanager
    def mapped_bytes(self) -> Iterator[mmap]:
        """Give the bytes of the file as long as the context lasts."""
        with self.open() as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
            yield data

    @property
    def on_meta(self) -> bool:
        """Whether tensors go to the meta device, without values."""
        return str(self.map_location) == "meta"


class InMemoryStorages(FileStorages):
    """The storages of a file that is embedded in another one."""

    def __init__(self, data: bytes, map_location: MapLocation, budget: Budget) -> None:
        super().__init__(Path(), map_location, mmap=False, budget=budget)
        self.data = data
        self.length = len(data)

    def open(self) -> IO[bytes]:
        """Open the file."""
        return io.BytesIO(self.data)


def restore(storage: torch.UntypedStorage, location: str, map_location: MapLocation) -> torch.UntypedStorage:
    """Move a storage that was saved at `location` to where `map_location` says, as `torch.load` does.

    Raises:
        CheckpointError: If the device is not available.
    """
    if storage.device.type == "meta":
        return storage
    if callable(map_location):
        placed: Any = map_location(storage, location)
        if placed is not None:
            return untyped_storage(placed)
    elif isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    try:
        there: torch.UntypedStorage = torch.serialization.default_restore_location(storage, location)
        return there
    except (AssertionError, RuntimeError) as error:
        raise CheckpointError(
            f"a checkpoint with tensors for {describe_value(location)}, which is unavailable: pass map_location='cpu'."
        ) from error


def at_location(tensor: torch.Tensor, map_location: MapLocation, budget: Budget) -> torch.Tensor:
    """Return a tensor of the CPU where `map_location` says."""
    if str(map_location) == "meta":
        return tensor.to("meta")
    storage = tensor.untyped_storage()
    placed = restore(storage, "cpu", map_location)
    if placed is storage:
        return tensor
    typed = TypedStorage(placed, tensor.dtype)
    return strided_tensor(budget, typed, int(tensor.storage_offset()), tensor.shape, tensor.stride())


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
