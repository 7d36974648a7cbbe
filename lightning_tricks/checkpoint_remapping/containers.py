"""The files that weights come in: what a file really is, and the values inside it, memory-mapped."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_tricks.checkpoint_remapping.errors import CheckpointError, NotACheckpointError
from lightning_tricks.checkpoint_remapping.pickles import Global, Placeholder, Rebuild, read_pickle

MapLocation = str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_AGAIN = "Download it again."
_UNPACK = "Unpack it, and give the file inside."
# How the files begin that people take for checkpoints: where, what, its name, what to do
_SIGNATURES = (
    (0, b"version https://git-lfs", "a git-LFS pointer", "Run `git lfs pull` where it was cloned."),
    (0, b"\x89PNG", "a PNG picture", ""),
    (0, b"\xff\xd8\xff", "a JPEG picture", ""),
    (0, b"GIF8", "a GIF picture", ""),
    (0, b"%PDF", "a PDF document", ""),
    (0, b"\x1f\x8b", "a gzip archive", _UNPACK),
    (0, b"BZh", "a bzip2 archive", _UNPACK),
    (0, b"\xfd7zXZ", "an xz archive", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard archive", _UNPACK),
    (0, b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (0, b"Rar!", "a RAR archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
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


def read_container(path: Path, map_location: MapLocation, mmap: bool) -> tuple[Any, str, dict[str, str]]:
    """Read a file of weights.

    Args:
        path: Of a file.
        map_location: As in `torch.load`.
        mmap: Whether tensors are mapped from the file instead of read.

    Returns:
        The value inside, the kind of the container (`"zip"`, `"legacy"`, `"pickle"`, `"torchscript"`, `"safetensors"`
        or `"sharded"`), and the header's metadata.

    Raises:
        NotACheckpointError, UnsafeCheckpointError: Whose message is a phrase after "it is".
    """
    storages = _Storages(path, map_location, mmap)
    with path.open("rb") as stream:
        head = stream.read(1024)
    if not head:
        raise NotACheckpointError("an empty file. " + _AGAIN)
    for offset, signature, name, remedy in _SIGNATURES:
        if head[offset:].startswith(signature):
            raise NotACheckpointError(f"{name}. {remedy}".strip())
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<script")):
        raise NotACheckpointError("an HTML page. Take the address of the file itself, not of the page that shows it.")
    if text.startswith((b"<?xml", b"<!--")):
        raise NotACheckpointError("an XML document, as servers send instead of a file. " + _AGAIN)
    if head.startswith(b"PK"):
        return _read_zip(path, storages)
    if head[8:9] == b"{" and head[7] == 0:
        return _read_safetensors(path, storages)
    if text.startswith(b"{"):
        return _read_index(path, map_location, mmap)
    return _read_pickles(path, storages, head)


@dataclass
class _Typed:
    """A storage and the type of its elements."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


class _Storages:
    """The storages of one file: each is read once, from the file's mapping where that goes, and moved by location."""

    def __init__(self, path: Path, map_location: MapLocation, mmap: bool) -> None:
        self.path = path
        self.map_location = map_location
        self.mmap = mmap
        self.known: dict[str, torch.UntypedStorage] = {}

    def get(self, key: str, dtype: torch.dtype, location: str, read: Callable[[], torch.UntypedStorage]) -> _Typed:
        if key not in self.known:
            self.known[key] = restore(read(), location, self.map_location)
        return _Typed(self.known[key], dtype)

    @cached_property
    def mapped(self) -> torch.UntypedStorage:
        """The whole file, mapped once; its storages are parts of it."""
        return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(str(self.path), False, self.length))

    @property
    def length(self) -> int:
        """Of the file, in bytes."""
        return self.path.stat().st_size

    def part(self, start: int, size: int) -> torch.UntypedStorage:
        """Return `size` bytes of the file from `start`."""
        length = self.length
        if start < 0 or size < 0:
            raise NotACheckpointError("a checkpoint with a broken tensor.")
        if start + size > length:
            raise NotACheckpointError(f"cut off: it has {length:,} bytes of at least {start + size:,}. {_AGAIN}")
        if self.on_meta:
            return torch.UntypedStorage(size, device="meta")
        if self.mmap and size and start % 16 == 0:
            return cast(torch.UntypedStorage, self.mapped[start : start + size])
        storage = torch.UntypedStorage(size)
        with self.open() as stream:
            stream.seek(start)
            if size and stream.readinto(_bytes_of(storage)) != size:
                raise NotACheckpointError(f"cut off. {_AGAIN}")
        return storage

    def open(self) -> io.BufferedIOBase:
        """Open the file."""
        return self.path.open("rb")

    @property
    def on_meta(self) -> bool:
        return str(self.map_location) == "meta"


class _StoragesInside(_Storages):
    """The storages of a file inside of a file."""

    def __init__(self, data: bytes, map_location: MapLocation) -> None:
        super().__init__(Path(), map_location, mmap=False)
        self.data = data

    @property
    def length(self) -> int:
        return len(self.data)

    def open(self) -> io.BufferedIOBase:
        return io.BytesIO(self.data)


def restore(storage: torch.UntypedStorage, location: str, map_location: MapLocation) -> torch.UntypedStorage:
    """Return a storage where `map_location` puts what was saved at `location`, as `torch.load` does.

    Raises:
        CheckpointError: If there is no such place here.
    """
    if storage.device.type == "meta":
        return storage
    if callable(map_location):
        placed: Any = map_location(storage, location)
        if placed is not None:
            untyped: torch.UntypedStorage = getattr(placed, "_untyped_storage", placed)
            return untyped
    elif isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    try:
        there: torch.UntypedStorage = torch.serialization.default_restore_location(storage, location)
        return there
    except (AssertionError, RuntimeError) as error:
        raise CheckpointError(
            f"a checkpoint with tensors for {location!r}, which is not there: pass map_location='cpu'."
        ) from error


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())  # type: ignore[arg-type]


# Tensors


_STORAGE_DTYPES = {
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


def _storage_dtype(kind: Any) -> torch.dtype:
    name = kind.name.rpartition(".")[2] if isinstance(kind, Global) and kind.module.startswith("torch") else str(kind)
    if name not in _STORAGE_DTYPES:
        raise NotACheckpointError(f"a file with tensors of {name}, which this reader does not know.")
    return _STORAGE_DTYPES[name]


def _dense(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """Return the tensor over a storage; a tensor beyond its storage is refused, not given more memory."""
    size, stride = tuple(size), tuple(stride)
    numbers = (offset, *size, *stride)
    if not isinstance(storage, _Typed) or len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise NotACheckpointError("a checkpoint with a broken tensor.")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * storage.dtype.itemsize > storage.storage.nbytes():
        raise NotACheckpointError("a checkpoint with a tensor that is larger than its data.")
    empty = torch.empty(0, dtype=storage.dtype, device=storage.storage.device)
    return empty.set_(storage.storage, offset, size, stride)


def _of_dtype(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: Any, *_: Any
) -> Any:
    return _dense(_Typed(storage.storage, dtype), offset, size, stride)


def _sparse(layout: Any, data: Any) -> Any:
    if layout is not torch.sparse_coo or not all(isinstance(part, torch.Tensor) for part in data[:2]):
        return Placeholder("torch._utils._rebuild_sparse_tensor", (layout, data))
    return torch.sparse_coo_tensor(data[0], data[1], tuple(data[2]), check_invariants=True)


def _of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    make = _TENSORS.get(str(function))
    return make(*arguments) if make else Placeholder(str(kind), tuple(arguments), state)


def _on_meta(dtype: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")


_TENSORS: dict[str, Rebuild] = {
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_meta_tensor_no_storage": _on_meta,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_tensor": _dense,
    "torch._utils._rebuild_tensor_v2": _dense,
    "torch._utils._rebuild_tensor_v3": _of_dtype,
}


# Containers


def _read_zip(path: Path, storages: _Storages) -> tuple[Any, str, dict[str, str]]:
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(archive, storages)
    except (EOFError, NotImplementedError, zipfile.BadZipFile, zipfile.LargeZipFile, struct.error) as error:
        raise NotACheckpointError(f"a zip archive that is broken or cut off ({error}). {_AGAIN}") from error
    except RuntimeError as error:  # what zipfile raises for a password
        if "password" not in str(error) and "encrypted" not in str(error):
            raise
        raise NotACheckpointError(f"an encrypted zip archive. {_UNPACK}") from error


def _read_archive(archive: zipfile.ZipFile, storages: _Storages) -> tuple[Any, str, dict[str, str]]:
    names = archive.namelist()
    pickles = [name for name in names if name.count("/") <= 1 and name.rpartition("/")[2] == "data.pkl"]
    if not pickles:
        raise NotACheckpointError(_archive_without_checkpoint(names))
    prefix = pickles[0].removesuffix("data.pkl")
    if f"{prefix}byteorder" in names and archive.read(f"{prefix}byteorder").decode("ascii", "replace") != sys.byteorder:
        raise NotACheckpointError(
            "a checkpoint of a machine with the other byte order. Save it there as .safetensors, which has one order."
        )

    def persistent(identifier: Any) -> _Typed:
        tag, kind, key, location, count = identifier
        if tag != "storage" or type(count) is not int or count < 0:
            raise NotACheckpointError("a checkpoint with a broken tensor.")
        dtype = _storage_dtype(kind)
        size = count * dtype.itemsize
        return storages.get(
            str(key), dtype, str(location), lambda: _record(archive, f"{prefix}data/{key}", size, storages)
        )

    with archive.open(pickles[0]) as stream:
        value = read_pickle(stream, _TENSORS, persistent)
    return value, "torchscript" if f"{prefix}constants.pkl" in names else "zip", {}


def _archive_without_checkpoint(names: list[str]) -> str:
    if names and all(name.endswith(".npy") for name in names):
        return "a NumPy .npz archive. Make a dict of tensors of it: {name: torch.from_numpy(array), ...}."
    if any(name.endswith("model.json") for name in names):
        return "a torch.export program. Load it with torch.export.load, and save its state_dict."
    return f"a zip archive without a checkpoint in it (it holds {', '.join(names[:3]) or 'nothing'}). {_UNPACK}"


def _record(archive: zipfile.ZipFile, name: str, size: int, storages: _Storages) -> torch.UntypedStorage:
    try:
        info = archive.getinfo(name)
    except KeyError as error:
        raise NotACheckpointError(f"a checkpoint without the data of a tensor ({name}). {_AGAIN}") from error
    if info.file_size < size:
        raise NotACheckpointError(f"a checkpoint with too little data for a tensor ({name}). {_AGAIN}")
    if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
        with storages.path.open("rb") as stream:
            stream.seek(info.header_offset)
            header = stream.read(30)
        name_length, extra_length = struct.unpack("<26x2H", header)
        return storages.part(info.header_offset + 30 + name_length + extra_length, size)
    storage = torch.UntypedStorage(size)
    with archive.open(info) as stream:
        if size and stream.readinto(_bytes_of(storage)) != size:  # type: ignore[attr-defined]
            raise NotACheckpointError(f"cut off. {_AGAIN}")
    return storage


def _read_pickles(path: Path, storages: _Storages, head: bytes) -> tuple[Any, str, dict[str, str]]:
    with path.open("rb") as stream:

        def storage_inside(data: bytes) -> Any:
            """Read a storage as `pickle.dump` keeps it: as a whole file of torch.save."""
            inside = io.BytesIO(data)
            if read_pickle(inside) != _LEGACY_MAGIC:
                raise NotACheckpointError("a checkpoint with a broken tensor.")
            return _read_legacy(inside, _StoragesInside(data, storages.map_location))[0]

        try:
            first = read_pickle(stream, {**_TENSORS, "torch.storage._load_from_bytes": storage_inside})
            return (first, "pickle", {}) if first != _LEGACY_MAGIC else _read_legacy(stream, storages)
        except NotACheckpointError as error:
            if head[:1] == b"\x80" and head[1:2] <= b"\x05":
                raise NotACheckpointError(f"{str(error).rstrip('.')}. {_AGAIN}") from error
            if _is_text(head):
                beginning = head[:40].decode("utf-8", "replace").strip().splitlines()[:1]
                raise NotACheckpointError(f"a text file, which begins with {''.join(beginning)!r}.") from error
            raise NotACheckpointError(f"no format of weights that this reader knows. {_AGAIN}") from error


def _is_text(head: bytes) -> bool:
    return all(32 <= byte < 127 or byte in b"\t\r\n\f" for byte in head)


def _read_legacy(stream: IO[bytes], storages: _Storages) -> tuple[Any, str, dict[str, str]]:
    """Read the format of torch before 1.6: three pickles, the names of the storages, and their bytes."""
    read_pickle(stream)  # the version of the protocol
    system = read_pickle(stream)
    if not system["little_endian"]:
        raise NotACheckpointError("a checkpoint of a machine with the other byte order.")
    start = stream.tell()
    sizes: dict[str, int] = {}

    def note(identifier: Any) -> Any:
        if identifier[0] == "module":
            return identifier[1]
        sizes[str(identifier[2])] = _storage_dtype(identifier[1]).itemsize
        return None

    read_pickle(stream, dict.fromkeys(_TENSORS, lambda *_: None), note)  # only the storages that there are
    places: dict[str, tuple[int, int]] = {}
    for key in read_pickle(stream):
        count = stream.read(8)
        if len(count) < 8:
            raise NotACheckpointError("a checkpoint that is cut off")
        size = struct.unpack("<q", count)[0] * sizes[str(key)]
        places[str(key)] = stream.tell(), size
        storages.part(*places[str(key)]) if size < 0 else stream.seek(size, os.SEEK_CUR)
    end = stream.tell()
    if end > storages.length:
        raise NotACheckpointError("a checkpoint that is cut off")

    def persistent(identifier: Any) -> Any:
        if identifier[0] == "module":
            return identifier[1]
        _, kind, key, location, _, view = identifier
        dtype = _storage_dtype(kind)
        whole = storages.get(str(key), dtype, str(location), lambda: storages.part(*places[str(key)]))
        if view is None:
            return whole
        _, offset, count = view
        first = offset * dtype.itemsize
        return _Typed(whole.storage[first : first + count * dtype.itemsize], dtype)

    stream.seek(start)
    return read_pickle(stream, _TENSORS, persistent), "legacy", {}


def _read_safetensors(path: Path, storages: _Storages) -> tuple[Any, str, dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: _placed(file, name, storages) for name in file.keys()}  # noqa: SIM118  # it is no dict
            return tensors, "safetensors", dict(file.metadata() or {})
    except SafetensorError as error:
        raise NotACheckpointError(f"a safetensors file that is broken or cut off ({error}). {_AGAIN}") from error


def _placed(file: Any, name: str, storages: _Storages) -> torch.Tensor:
    if storages.on_meta:
        part = file.get_slice(name)
        return torch.empty(part.get_shape(), dtype=_SAFETENSORS_DTYPES[part.get_dtype()], device="meta")
    tensor: torch.Tensor = file.get_tensor(name)
    if not storages.mmap:
        tensor = tensor.clone()
    storage = tensor.untyped_storage()
    placed = restore(storage, "cpu", storages.map_location)
    if placed is storage:
        return tensor
    return _dense(_Typed(placed, tensor.dtype), int(tensor.storage_offset()), tensor.shape, tensor.stride())


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


def _read_index(path: Path, map_location: MapLocation, mmap: bool) -> tuple[Any, str, dict[str, str]]:
    """Read the shards that a `*.index.json` names; they must lie beside it."""
    try:
        index = json.loads(path.read_bytes())
        shards = index["weight_map"]
        files = dict.fromkeys(shards.values())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotACheckpointError("a JSON file without a weight_map, so no index of shards.") from error
    tensors: dict[str, Any] = {}
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise NotACheckpointError(f"an index that names {name!r}, which is not a file beside it.")
        if not (path.parent / name).is_file():
            raise NotACheckpointError(f"an index whose shard {name} is missing beside it.")
        shard, _, _ = read_container(path.parent / name, map_location, mmap)
        wanted = [key for key, file in shards.items() if file == name]
        lost = [key for key in wanted if not isinstance(shard, Mapping) or key not in shard]
        if lost:
            raise NotACheckpointError(f"an index whose shard {name} lacks {lost[0]}. {_AGAIN}")
        tensors |= {key: shard[key] for key in wanted}
    metadata = index.get("metadata") or {}
    return {key: tensors[key] for key in shards}, "sharded", {str(k): str(v) for k, v in metadata.items()}
