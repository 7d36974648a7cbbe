"""Zip archives of torch.save and TorchScript, whose records are not compressed."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from typing import Any

import torch

from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_interpreter import read_pickle
from lightning_tricks.checkpoint_remapping.core.files.storages import (
    DOWNLOAD_AGAIN,
    INVALID_TENSOR,
    FileStorages,
    TypedStorage,
    storage_dtype,
    storage_key,
)
from lightning_tricks.checkpoint_remapping.core.files.tensor_constructors import tensor_constructors

UNPACK_IT = "Unpack it, and give the file inside."
_HEADER = 30  # bytes of the header of a record, before its name
_MAX_DIRECTORY_BYTES = 24 << 20  # bytes, of some 300,000 records


def read_zip(storages: FileStorages) -> tuple[Any, str, dict[str, str]]:
    """Read what torch.save or TorchScript wrote, as `read_container` does."""
    try:
        with _Bounded(storages.open()) as stream, zipfile.ZipFile(stream) as archive:
            stream.largest_read = sys.maxsize
            return _read_archive(archive, storages)
    except (EOFError, NotImplementedError, zipfile.BadZipFile, zipfile.LargeZipFile, struct.error) as error:
        raise NotACheckpointError(
            f"a zip archive that is corrupt or truncated ({str(error)[:200]}). {DOWNLOAD_AGAIN}"
        ) from error


class _Bounded(io.BufferedReader):
    """A stream that refuses large reads: `ZipFile` reads a directory at once, and creates an object per record."""

    largest_read = _MAX_DIRECTORY_BYTES

    def __init__(self, stream: Any) -> None:
        super().__init__(stream.detach())

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `largest_read` bytes."""
        if size is None or size > self.largest_read:
            raise NotACheckpointError(f"a zip archive whose directory has more than {_MAX_DIRECTORY_BYTES:,} bytes.")
        return super().read(size)


def _read_archive(archive: zipfile.ZipFile, storages: FileStorages) -> tuple[Any, str, dict[str, str]]:
    names = archive.namelist()
    pickles = [name for name in names if name.count("/") <= 1 and name.rpartition("/")[2] == "data.pkl"]
    if not pickles:
        raise NotACheckpointError(_without_checkpoint(names))
    _check_overlaps(archive)
    prefix = pickles[0].removesuffix("data.pkl")
    if f"{prefix}byteorder" in archive.NameToInfo and _text(archive, f"{prefix}byteorder") != sys.byteorder:
        raise NotACheckpointError(
            "a checkpoint of a machine with the other byte order. Save it there as .safetensors, which has one order."
        )

    def persistent(identifier: Any) -> TypedStorage:
        tag, kind, key, location, count = identifier
        if tag != "storage" or type(count) is not int or count < 0:
            raise NotACheckpointError(INVALID_TENSOR)
        dtype, key = storage_dtype(kind), storage_key(key)
        size = count * dtype.itemsize
        return storages.get(key, dtype, location, lambda: _storage(archive, f"{prefix}data/{key}", size, storages))

    info = _stored(archive, pickles[0])
    storages.budget.spend(info.file_size)
    value = read_pickle(
        io.BytesIO(_bytes(archive, info)), storages.budget, tensor_constructors(storages.budget), persistent
    )
    return value, "torchscript" if f"{prefix}constants.pkl" in archive.NameToInfo else "zip", {}


def _without_checkpoint(names: list[str]) -> str:
    if names and all(name.endswith(".npy") for name in names):
        return "a NumPy .npz archive. Make a dict of tensors of it: {name: torch.from_numpy(array), ...}."
    if "model.weights.h5" in names:
        return "a model of Keras. Convert it to .safetensors where Keras is installed."
    if any(name.endswith("model.json") for name in names):
        return "a torch.export program. Load it with torch.export.load, and save its state_dict."
    shown = ", ".join(name[:80] for name in names[:3])
    return f"a zip archive without a checkpoint in it (it holds {shown or 'nothing'}). {UNPACK_IT}"


def _check_overlaps(archive: zipfile.ZipFile) -> None:
    """Refuse records that share bytes, as many large ones would then fit into a small file."""
    records = sorted(archive.infolist(), key=lambda info: info.header_offset)
    ends = [info.header_offset + _HEADER + info.compress_size for info in records]
    starts = [*(info.header_offset for info in records[1:]), archive.start_dir]
    if any(end > start for end, start in zip(ends, starts, strict=True)):
        raise NotACheckpointError(f"a zip archive whose records overlap. {DOWNLOAD_AGAIN}")


def _stored(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Return the entry of a record; compressed ones are refused, as 1 GB of zeros compresses to 1 MB."""
    try:
        info = archive.getinfo(name)
    except KeyError as error:
        raise NotACheckpointError(f"a checkpoint without the data of a tensor ({name}). {DOWNLOAD_AGAIN}") from error
    if info.flag_bits & 1:
        raise NotACheckpointError(f"an encrypted zip archive. {UNPACK_IT}")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise NotACheckpointError(
            "a zip archive with compressed records, which torch does not write. Unpack it, and pack it again without "
            "compression (zip -0)."
        )
    return info


def _bytes(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as stream:
        return stream.read()


def _text(archive: zipfile.ZipFile, name: str) -> str:
    info = _stored(archive, name)
    return _bytes(archive, info).decode("ascii", "replace") if info.file_size < 100 else ""


def _storage(archive: zipfile.ZipFile, name: str, size: int, storages: FileStorages) -> torch.UntypedStorage:
    info = _stored(archive, name)
    if info.file_size < size:
        raise NotACheckpointError(f"a checkpoint with too little data for a tensor ({name}). {DOWNLOAD_AGAIN}")
    archive.fp.seek(info.header_offset)  # type: ignore[union-attr]
    name_length, extra_length = struct.unpack("<26x2H", archive.fp.read(_HEADER))  # type: ignore[union-attr]
    return storages.part(info.header_offset + _HEADER + name_length + extra_length, size)
