"""The storages of a file of weights: mapped from the file or read, and moved to their devices."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.read_budget import Budget
from lightning_tricks._torch_compat.tensors import untyped_storage
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Global, describe_value

MapLocation = str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None

DOWNLOAD_AGAIN = "Download it again."
INVALID_TENSOR = "a checkpoint with a tensor whose data, shape or strides are invalid."


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
        self, key: str, dtype: torch.dtype, location: Any, read: Callable[[], torch.UntypedStorage]
    ) -> TypedStorage:
        """Return the storage of a key, read at the first call; `location` is the device that it was saved from."""
        if not isinstance(location, str):
            raise NotACheckpointError(INVALID_TENSOR)
        self.budget.spend(192)
        if key not in self.known:
            self.budget.spend(512)
            self.known[key] = restore(read(), location, self.map_location)
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
        if start < 0 or size < 0:
            raise NotACheckpointError(INVALID_TENSOR)
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
        with self.open() as stream:
            stream.seek(start)
            if size and stream.readinto(bytes_of(storage)) != size:  # type: ignore[attr-defined]
                raise NotACheckpointError(f"truncated. {DOWNLOAD_AGAIN}")
        return storage

    def open(self) -> IO[bytes]:
        """Open the file."""
        return open_file(self.path)

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


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the memory of a storage on the CPU."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data


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
    if not isinstance(key, str | int):
        raise NotACheckpointError(INVALID_TENSOR)
    return str(key)
