"""Read the containers of weights: zip archives, files of pickles, safetensors, and indexes of shards."""

from __future__ import annotations

import struct
import sys
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from io import BytesIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.read_budget import Budget, OverBudgetError, parse_json
from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.other_formats import (
    DOWNLOAD_AGAIN,
    describe_archive,
    describe_other,
    refuse_formats,
)
from lightning_tricks.checkpoint_remapping.core.files.pickle_interpreter import read_pickle
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import check_tensor, describe_value
from lightning_tricks.checkpoint_remapping.core.files.storages import (
    FileStorages,
    MapLocation,
    TypedStorage,
    storage_key,
    tensor_constructors,
)

Contents = tuple[Any, str, dict[str, str]]  # the value inside, the kind of the container, and the header's metadata
_HEADER = 30  # bytes of the header of a zip archive's record, before its name
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


def read_container(
    path: Path, map_location: MapLocation, mmap: bool, budget: Budget, *, shard: bool = False
) -> Contents:
    """Read a file of weights in the format that its content shows.

    Args:
        path: Path of the file.
        map_location: As in `torch.load`.
        mmap: Whether tensors are mapped from the file instead of read.
        budget: Limits on memory and time; the file's size is added.
        shard: Whether an index names the file, so that it cannot be an index itself.

    Returns:
        The value inside, the kind of the container (`"zip"`, `"legacy"`, `"pickle"`, `"torchscript"`, `"safetensors"`
        or `"sharded"`), and the header's metadata.

    Raises:
        NotACheckpointError, UnsafeCheckpointError: If it is not such a file; the message continues "it is".
        OverBudgetError: If it exceeds the budget.
    """
    storages = FileStorages(path, map_location, mmap, budget)
    with open_file(path) as stream:
        head = stream.read(1024)
    budget.add(storages.length)
    if not head:
        raise NotACheckpointError(f"an empty file. {DOWNLOAD_AGAIN}")
    refuse_formats(head)
    if head.startswith(b"PK"):
        with open_file(path) as stream, zipfile.ZipFile(stream) as archive:
            return _read_zip(archive, storages)
    if head[8:9] == b"{" and head[7] == 0:
        return _read_safetensors(storages, head)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and not shard:
        return _read_index(storages)
    try:
        return _read_pickles(storages)
    except NotACheckpointError as error:
        raise NotACheckpointError(describe_other(head, error)) from error


# Zip archives of torch.save and TorchScript, whose records are not compressed


def _read_zip(archive: zipfile.ZipFile, storages: FileStorages) -> Contents:
    """Read what torch.save or TorchScript wrote."""
    names = archive.namelist()
    pickles = [name for name in names if name.count("/") <= 1 and name.rpartition("/")[2] == "data.pkl"]
    if not pickles:
        raise NotACheckpointError(describe_archive(names))
    prefix = pickles[0].removesuffix("data.pkl")
    order = f"{prefix}byteorder"
    if order in archive.NameToInfo and archive.read(_stored(archive, order)) != sys.byteorder.encode():
        raise NotACheckpointError(
            "a checkpoint of a machine with the other byte order. Save it there as .safetensors, which has one order."
        )

    def persistent(identifier: Any) -> TypedStorage:
        tag, kind, key, location, count = identifier
        check_tensor(tag == "storage" and type(count) is int and count >= 0)

        def read(key: str, dtype: torch.dtype) -> torch.UntypedStorage:
            return _storage(archive, f"{prefix}data/{key}", count * dtype.itemsize, storages)

        return storages.get(kind, key, location, read)

    info = _stored(archive, pickles[0])
    storages.budget.spend(info.file_size)
    constructors = tensor_constructors(storages.budget)
    value = read_pickle(BytesIO(archive.read(info)), storages.budget, constructors, persistent)
    return value, "torchscript" if f"{prefix}constants.pkl" in archive.NameToInfo else "zip", {}


def _stored(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Return the entry of a record; compressed ones are refused, as 1 GB of zeros compresses to 1 MB."""
    try:
        info = archive.getinfo(name)
    except KeyError as error:
        raise NotACheckpointError(f"a checkpoint without the data of a tensor ({name}). {DOWNLOAD_AGAIN}") from error
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise NotACheckpointError(
            "a zip archive with compressed records, which torch does not write. Unpack it, and pack it again without "
            "compression (zip -0)."
        )
    return info


def _storage(archive: zipfile.ZipFile, name: str, size: int, storages: FileStorages) -> torch.UntypedStorage:
    info = _stored(archive, name)
    if info.file_size < size:
        raise NotACheckpointError(f"a checkpoint with too little data for a tensor ({name}). {DOWNLOAD_AGAIN}")
    archive.fp.seek(info.header_offset)  # type: ignore[union-attr]
    name_length, extra_length = struct.unpack("<26x2H", archive.fp.read(_HEADER))  # type: ignore[union-attr]
    return storages.part(info.header_offset + _HEADER + name_length + extra_length, size)


# Files of pickles


def _read_pickles(storages: FileStorages) -> Contents:
    """Read what torch.save wrote before 1.6, or pickle.dump."""
    budget = storages.budget

    def nested_storage(data: Any) -> Any:
        """Read a storage as `pickle.dump` keeps it: as a whole file of torch.save."""
        check_tensor(isinstance(data, bytes))
        stream = BytesIO(data)
        check_tensor(_is_legacy(read_pickle(stream, budget)))
        inside = FileStorages(storages.path, storages.map_location, False, budget)
        return _read_legacy(stream, inside)[0]

    constructors = {**tensor_constructors(budget), "torch.storage._load_from_bytes": nested_storage}
    with open_file(storages.path) as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
        first = read_pickle(data, budget, constructors)
        return _read_legacy(data, storages) if _is_legacy(first) else (first, "pickle", {})


def _is_legacy(first: Any) -> bool:
    return type(first) is int and first == _LEGACY_MAGIC


def _read_legacy(stream: Any, storages: FileStorages) -> Contents:
    """Read the format of torch before 1.6: pickles, one of them with the names of the storages, and their bytes."""
    budget = storages.budget
    read_pickle(stream, budget)  # the version of the protocol
    system = read_pickle(stream, budget)
    if not system["little_endian"]:
        raise NotACheckpointError("a checkpoint of a machine with the other byte order.")
    counts: dict[str, int] = {}  # elements of the storages, whose bytes follow all pickles

    def empty(key: str, dtype: torch.dtype) -> torch.UntypedStorage:
        size = counts[key] * dtype.itemsize
        check_tensor(0 <= size <= storages.length)
        budget.spend(size)
        return torch.UntypedStorage(size)

    def persistent(identifier: Any) -> Any:
        if identifier[0] == "module":
            return identifier[1]
        _, kind, key, location, count, view = identifier
        check_tensor(type(count) is int)
        if view is not None:
            raise NotACheckpointError("a checkpoint of torch before 0.4. Save it again with a newer one.")
        counts.setdefault(storage_key(key), count)
        return storages.get(kind, key, location, empty)

    value = read_pickle(stream, budget, tensor_constructors(budget), persistent)
    for key in map(storage_key, read_pickle(stream, budget)):
        storage = storages.known[key]
        if struct.unpack("<q", stream.read(8)) != (counts[key],):
            raise NotACheckpointError("a checkpoint that is corrupt or truncated")
        data = bytearray(stream.read(storage.nbytes()))
        if len(data) < storage.nbytes():
            raise NotACheckpointError("a checkpoint that is truncated")
        if data:
            storage.copy_(torch.frombuffer(data, dtype=torch.uint8).untyped_storage())
    return value, "legacy", {}


# Files in the safetensors format


def _read_safetensors(storages: FileStorages, head: bytes) -> Contents:
    """Read a .safetensors; `head` is its beginning."""
    from safetensors import safe_open

    storages.budget.spend(12 * min(int.from_bytes(head[:8], "little"), storages.length))  # what its JSON takes
    with safe_open(storages.path, framework="pt", device="cpu") as file:
        tensors = {name: _tensor_at_location(file, name, storages) for name in file.keys()}  # noqa: SIM118  # not a dict
        return tensors, "safetensors", dict(file.metadata() or {})


def _tensor_at_location(file: Any, name: str, storages: FileStorages) -> torch.Tensor:
    storages.budget.spend(1024)
    tensor: torch.Tensor = file.get_tensor(name)  # mapped from the file
    if not storages.mmap:
        storages.budget.spend(tensor.nbytes)
        tensor = tensor.clone()
    return tensor if storages.map_location is None else tensor.to(storages.map_location)


# Indexes of shards


def _read_index(storages: FileStorages) -> Contents:
    """Read the shards that a `*.index.json` names; they must be in its folder, and cannot be an index themselves."""
    folder, budget = storages.path.parent, storages.budget
    names: dict[str, list[str]] = defaultdict(list)
    try:
        with open_file(storages.path) as stream:
            budget.spend(2 * storages.length)
            index = parse_json(stream.read(), budget)
        for key, file in index["weight_map"].items():
            names[file].append(key)
        metadata = (index.get("metadata") or {}).items()
    except OverBudgetError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotACheckpointError("a JSON file without a weight_map, so it is not an index of shards.") from error
    tensors: dict[str, Any] = {}
    for name, wanted in names.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise NotACheckpointError(
                f"an index that names {describe_value(name)}, which is not the name of a file in its folder."
            )
        if not (folder / name).is_file():
            raise NotACheckpointError(f"an index whose shard {name[:80]} is missing in its folder.")
        shard, _, _ = read_container(folder / name, storages.map_location, storages.mmap, budget, shard=True)
        lost = [key for key in wanted if not isinstance(shard, Mapping) or key not in shard]
        if lost:
            raise NotACheckpointError(f"an index whose shard {name[:80]} lacks {lost[0][:80]}. {DOWNLOAD_AGAIN}")
        tensors |= {key: shard[key] for key in wanted}
    order = index["weight_map"]
    return {key: tensors[key] for key in order}, "sharded", {key: str(value) for key, value in metadata}
