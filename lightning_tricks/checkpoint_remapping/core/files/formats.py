"""The files that weights come in: what a file really is, and the values inside it, memory-mapped."""

from __future__ import annotations

import io
import os
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.read_budget import Budget, OverBudgetError, parse_json
from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_interpreter import read_pickle
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import describe_value
from lightning_tricks.checkpoint_remapping.core.files.storages import (
    DOWNLOAD_AGAIN,
    FileStorages,
    InMemoryStorages,
    MapLocation,
    TypedStorage,
    restore,
    storage_dtype,
    storage_key,
)
from lightning_tricks.checkpoint_remapping.core.files.tensor_constructors import strided_tensor, tensor_constructors
from lightning_tricks.checkpoint_remapping.core.files.zip_archives import UNPACK_IT, read_zip

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# How the files begin that people take for checkpoints: where, what, its name, what to do
_SIGNATURES = (
    (0, b"version https://git-lfs", "a git-LFS pointer", "Run `git lfs pull` where it was cloned."),
    (0, b"\x89PNG", "a PNG picture", ""),
    (0, b"\xff\xd8\xff", "a JPEG picture", ""),
    (0, b"GIF8", "a GIF picture", ""),
    (0, b"%PDF", "a PDF document", ""),
    (0, b"\x1f\x8b", "a gzip archive", UNPACK_IT),
    (0, b"BZh", "a bzip2 archive", UNPACK_IT),
    (0, b"\xfd7zXZ", "an xz archive", UNPACK_IT),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard archive", UNPACK_IT),
    (0, b"7z\xbc\xaf", "a 7z archive", UNPACK_IT),
    (0, b"Rar!", "a RAR archive", UNPACK_IT),
    (257, b"ustar", "a tar archive", UNPACK_IT),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes them", "Convert it to .safetensors where Keras is installed."),
    (0, b"GGUF", "a GGUF file, whose weights are quantised", "Take the .safetensors of the same model."),
    (
        0,
        b"\x93NUMPY",
        "a NumPy array",
        "Save a dict of tensors: {name: torch.from_numpy(array)}.",
    ),
    (0, b"\x7fELF", "a program", ""),
)


def read_container(
    path: Path, map_location: MapLocation, mmap: bool, budget: Budget, *, shard: bool = False
) -> tuple[Any, str, dict[str, str]]:
    """Read a file of weights.

    Args:
        path: Of a file.
        map_location: As in `torch.load`.
        mmap: Whether tensors are mapped from the file instead of read.
        budget: What it may cost; the file's size is added.
        shard: Whether an index names it, so that it cannot be an index.

    Returns:
        The value inside, the kind of the container (`"zip"`, `"legacy"`, `"pickle"`, `"torchscript"`, `"safetensors"`
        or `"sharded"`), and the header's metadata.

    Raises:
        NotACheckpointError, UnsafeCheckpointError: Whose message is a phrase after "it is".
        OverBudgetError: If it asks for too much.
    """
    with open_file(path) as stream:
        head = stream.read(1024)
    storages = FileStorages(path, map_location, mmap, budget)
    budget.add(storages.length)
    if not head:
        raise NotACheckpointError("an empty file. " + DOWNLOAD_AGAIN)
    for offset, signature, name, remedy in _SIGNATURES:
        if head[offset:].startswith(signature):
            raise NotACheckpointError(f"{name}. {remedy}".strip())
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<script")):
        raise NotACheckpointError("an HTML page. Take the address of the file itself, not of the page that shows it.")
    if text.startswith((b"<?xml", b"<!--")):
        raise NotACheckpointError("an XML document, as servers send instead of a file. " + DOWNLOAD_AGAIN)
    if head.startswith(b"PK"):
        return read_zip(storages)
    if head[8:9] == b"{" and head[7] == 0:
        return _read_safetensors(storages, head)
    if text.startswith(b"{") and not shard:
        return _read_index(storages)
    return _read_pickles(storages, head)


def _read_pickles(storages: FileStorages, head: bytes) -> tuple[Any, str, dict[str, str]]:
    budget = storages.budget

    def nested_storage(data: bytes) -> Any:
        """Read a storage as `pickle.dump` keeps it: as a whole file of torch.save."""
        inside = io.BytesIO(data)
        if not _is_legacy(read_pickle(inside, budget)):
            raise NotACheckpointError("a checkpoint with a broken tensor.")
        return _read_legacy(inside, InMemoryStorages(data, storages.map_location, budget))[0]

    constructors = {**tensor_constructors(budget), "torch.storage._load_from_bytes": nested_storage}
    with storages.open() as stream:
        try:
            first = read_pickle(stream, budget, constructors)
            return _read_legacy(stream, storages) if _is_legacy(first) else (first, "pickle", {})
        except NotACheckpointError as error:
            if head[:1] == b"\x80" and head[1:2] <= b"\x05":
                raise NotACheckpointError(f"{str(error).rstrip('.')}. {DOWNLOAD_AGAIN}") from error
            if _is_text(head):
                beginning = head[:40].decode("utf-8", "replace").strip().splitlines()[:1]
                raise NotACheckpointError(f"a text file, which begins with {''.join(beginning)!r}.") from error
            raise NotACheckpointError(f"no format of weights that this reader knows. {DOWNLOAD_AGAIN}") from error


def _is_legacy(first: Any) -> bool:
    return type(first) is int and first == _LEGACY_MAGIC


def _is_text(head: bytes) -> bool:
    return all(32 <= byte < 127 or byte in b"\t\r\n\f" for byte in head)


def _read_legacy(stream: IO[bytes], storages: FileStorages) -> tuple[Any, str, dict[str, str]]:
    """Read the format of torch before 1.6: three pickles, the names of the storages, and their bytes."""
    budget = storages.budget
    read_pickle(stream, budget)  # the version of the protocol
    system = read_pickle(stream, budget)
    if not system["little_endian"]:
        raise NotACheckpointError("a checkpoint of a machine with the other byte order.")
    start = stream.tell()
    widths: dict[str, int] = {}
    constructors = tensor_constructors(budget)

    def note(identifier: Any) -> Any:
        if identifier[0] == "module":
            return identifier[1]
        widths[storage_key(identifier[2])] = storage_dtype(identifier[1]).itemsize
        return None

    left = budget.left
    read_pickle(stream, budget, dict.fromkeys(constructors, lambda *_: None), note)  # only the storages that there are
    budget.refund(left)
    places: dict[str, tuple[int, int]] = {}
    for key in map(storage_key, read_pickle(stream, budget)):
        count = stream.read(8)
        if len(count) < 8:
            raise NotACheckpointError("a checkpoint that is cut off")
        size = struct.unpack("<q", count)[0] * widths[key]
        places[key] = stream.tell(), size
        storages.part(*places[key]) if size < 0 else stream.seek(size, os.SEEK_CUR)
    end = stream.tell()
    if end > storages.length:
        raise NotACheckpointError("a checkpoint that is cut off")

    def persistent(identifier: Any) -> Any:
        if identifier[0] == "module":
            return identifier[1]
        _, kind, key, location, _, view = identifier
        dtype, key = storage_dtype(kind), storage_key(key)
        whole = storages.get(key, dtype, location, lambda: storages.part(*places[key]))
        if view is None:
            return whole
        _, offset, count = view
        if not all(type(number) is int and number >= 0 for number in (offset, count)):
            raise NotACheckpointError("a checkpoint with a broken tensor.")
        first = offset * dtype.itemsize
        return TypedStorage(whole.storage[first : first + count * dtype.itemsize], dtype)

    stream.seek(start)
    return read_pickle(stream, budget, constructors, persistent), "legacy", {}


def _read_safetensors(storages: FileStorages, head: bytes) -> tuple[Any, str, dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    storages.budget.spend(12 * min(int.from_bytes(head[:8], "little"), storages.length))  # what its JSON takes
    try:
        with safe_open(storages.path, framework="pt", device="cpu") as file:
            tensors = {name: _tensor_at_location(file, name, storages) for name in file.keys()}  # noqa: SIM118  # it is no dict
            return tensors, "safetensors", dict(file.metadata() or {})
    except SafetensorError as error:
        problem = str(error)[:200]
        raise NotACheckpointError(
            f"a safetensors file that is broken or cut off ({problem}). {DOWNLOAD_AGAIN}"
        ) from error


def _tensor_at_location(file: Any, name: str, storages: FileStorages) -> torch.Tensor:
    storages.budget.spend(1024)
    if storages.on_meta:
        part = file.get_slice(name)
        return torch.empty(part.get_shape(), dtype=_SAFETENSORS_DTYPES[part.get_dtype()], device="meta")
    tensor: torch.Tensor = file.get_tensor(name)
    if not storages.mmap:
        storages.budget.spend(tensor.nbytes)
        tensor = tensor.clone()
    storage = tensor.untyped_storage()
    placed = restore(storage, "cpu", storages.map_location)
    if placed is storage:
        return tensor
    typed = TypedStorage(placed, tensor.dtype)
    return strided_tensor(storages.budget, typed, int(tensor.storage_offset()), tensor.shape, tensor.stride())


_SAFETENSORS_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "U8": torch.uint8,
}


def _read_index(storages: FileStorages) -> tuple[Any, str, dict[str, str]]:
    """Read the shards that a `*.index.json` names; they must lie beside it, and are no index themselves."""
    folder, budget = storages.path.parent, storages.budget
    names: dict[str, list[str]] = defaultdict(list)
    try:
        with storages.open() as stream:
            budget.spend(2 * storages.length)
            index = parse_json(stream.read(), budget)
        for key, file in index["weight_map"].items():
            names[file].append(key)
        metadata = (index.get("metadata") or {}).items()
    except OverBudgetError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotACheckpointError("a JSON file without a weight_map, so no index of shards.") from error
    tensors: dict[str, Any] = {}
    for name, wanted in names.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise NotACheckpointError(f"an index that names {describe_value(name)}, which is not a file beside it.")
        if not (folder / name).is_file():
            raise NotACheckpointError(f"an index whose shard {name[:80]} is missing beside it.")
        shard, _, _ = read_container(folder / name, storages.map_location, storages.mmap, budget, shard=True)
        lost = [key for key in wanted if not isinstance(shard, Mapping) or key not in shard]
        if lost:
            raise NotACheckpointError(f"an index whose shard {name[:80]} lacks {lost[0][:80]}. {DOWNLOAD_AGAIN}")
        tensors |= {key: shard[key] for key in wanted}
    order = index["weight_map"]
    return {key: tensors[key] for key in order}, "sharded", {key: str(value) for key, value in metadata}
