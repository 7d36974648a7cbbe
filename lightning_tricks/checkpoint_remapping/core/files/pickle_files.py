"""Files of pickles: the format of torch.save before 1.6, and values that `pickle.dump` wrote."""

from __future__ import annotations

import io
import os
import struct
from typing import IO, Any

from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.other_frameworks import describe_by_name
from lightning_tricks.checkpoint_remapping.core.files.pickle_interpreter import read_pickle
from lightning_tricks.checkpoint_remapping.core.files.storages import (
    DOWNLOAD_AGAIN,
    INVALID_TENSOR,
    FileStorages,
    InMemoryStorages,
    TypedStorage,
    storage_dtype,
    storage_key,
)
from lightning_tricks.checkpoint_remapping.core.files.tensor_constructors import tensor_constructors

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


def read_pickles(storages: FileStorages, head: bytes) -> tuple[Any, str, dict[str, str]]:
    """Read what torch.save wrote before 1.6 or pickle.dump wrote, as `read_container` does; `head` is its beginning."""
    budget = storages.budget

    def nested_storage(data: bytes) -> Any:
        """Read a storage as `pickle.dump` keeps it: as a whole file of torch.save."""
        inside = io.BytesIO(data)
        if not _is_legacy(read_pickle(inside, budget)):
            raise NotACheckpointError(INVALID_TENSOR)
        return _read_legacy(inside, InMemoryStorages(data, storages.map_location, budget))[0]

    constructors = {**tensor_constructors(budget), "torch.storage._load_from_bytes": nested_storage}
    with storages.open() as stream:
        try:
            first = read_pickle(stream, budget, constructors)
            return _read_legacy(stream, storages) if _is_legacy(first) else (first, "pickle", {})
        except NotACheckpointError as error:
            if head[:1] == b"\x80" and head[1:2] <= b"\x05":
                raise NotACheckpointError(f"{str(error).rstrip('.')}. {DOWNLOAD_AGAIN}") from error
            if described := describe_by_name(storages.path.name):
                raise NotACheckpointError(described) from error
            if _is_text(head):
                beginning = head[:40].decode("utf-8", "replace").strip().splitlines()[:1]
                raise NotACheckpointError(f"a text file, which begins with {''.join(beginning)!r}.") from error
            raise NotACheckpointError(f"not in a format of weights that this reader knows. {DOWNLOAD_AGAIN}") from error


def _is_legacy(first: Any) -> bool:
    return type(first) is int and first == _LEGACY_MAGIC


def _is_text(head: bytes) -> bool:
    return all(32 <= byte < 127 or byte in b"\t\r\n\f" for byte in head)


def _read_legacy(stream: IO[bytes], storages: FileStorages) -> tuple[Any, str, dict[str, str]]:
    """Read the format of torch before 1.6: pickles, one of them with the names of the storages, and their bytes."""
    budget = storages.budget
    read_pickle(stream, budget)  # the version of the protocol
    system = read_pickle(stream, budget)
    if not system["little_endian"]:
        raise NotACheckpointError("a checkpoint of a machine with the other byte order.")
    start = stream.tell()
    ranges = _storage_ranges(stream, storages)

    def persistent(identifier: Any) -> Any:
        if identifier[0] == "module":
            return identifier[1]
        _, kind, key, location, _, view = identifier
        dtype, key = storage_dtype(kind), storage_key(key)
        whole = storages.get(key, dtype, location, lambda: storages.part(*ranges[key]))
        return whole if view is None else _view(whole, view)

    stream.seek(start)
    return read_pickle(stream, budget, tensor_constructors(budget), persistent), "legacy", {}


def _storage_ranges(stream: IO[bytes], storages: FileStorages) -> dict[str, tuple[int, int]]:
    """Return where the bytes of each storage start, and how many they are.

    They stand behind the pickle of the values, which is read twice: first for the sizes of the elements alone.
    """
    widths: dict[str, int] = {}

    def note_width(identifier: Any) -> Any:
        if identifier[0] == "module":
            return identifier[1]
        widths[storage_key(identifier[2])] = storage_dtype(identifier[1]).itemsize
        return None

    budget = storages.budget
    left = budget.left
    read_pickle(stream, budget, dict.fromkeys(tensor_constructors(budget), lambda *_: None), note_width)
    budget.refund(left)
    ranges: dict[str, tuple[int, int]] = {}
    for key in map(storage_key, read_pickle(stream, budget)):
        count = stream.read(8)
        if len(count) < 8:
            raise NotACheckpointError("a checkpoint that is truncated")
        size = struct.unpack("<q", count)[0] * widths[key]
        ranges[key] = stream.tell(), size
        storages.part(*ranges[key]) if size < 0 else stream.seek(size, os.SEEK_CUR)
    if stream.tell() > storages.length:
        raise NotACheckpointError("a checkpoint that is truncated")
    return ranges


def _view(whole: TypedStorage, view: Any) -> TypedStorage:
    """Return a part of a storage, which torch before 0.4 saved with its offset and its number of elements."""
    _, offset, count = view
    if not all(type(number) is int and number >= 0 for number in (offset, count)):
        raise NotACheckpointError(INVALID_TENSOR)
    dtype = whole.dtype
    first = offset * dtype.itemsize
    return TypedStorage(whole.storage[first : first + count * dtype.itemsize], dtype)
