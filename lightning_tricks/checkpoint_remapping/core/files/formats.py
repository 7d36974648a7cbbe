"""The formats of files of weights: recognized by content, and the values in a file, memory-mapped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.read_budget import Budget, OverBudgetError, parse_json
from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.other_frameworks import (
    TAKE_SAFETENSORS,
    TENSORFLOW_REMEDY,
    refuse_other_frameworks,
)
from lightning_tricks.checkpoint_remapping.core.files.pickle_files import read_pickles
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import describe_value
from lightning_tricks.checkpoint_remapping.core.files.safetensors_files import read_safetensors
from lightning_tricks.checkpoint_remapping.core.files.storages import DOWNLOAD_AGAIN, FileStorages, MapLocation
from lightning_tricks.checkpoint_remapping.core.files.zip_archives import UNPACK_IT, read_zip

# Files that are often taken for checkpoints: offset, signature, name, remedy
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
    (0, b"GGUF", "a GGUF file, whose weights are quantized", TAKE_SAFETENSORS),
    (0, b"lmgg", "a GGML file, whose weights are quantized", TAKE_SAFETENSORS),
    (0, b"tjgg", "a GGML file, whose weights are quantized", TAKE_SAFETENSORS),
    (4, b"TFL3", "a TensorFlow Lite model", TAKE_SAFETENSORS),
    (0, b"model_checkpoint_path:", "a list of TensorFlow's checkpoints", TENSORFLOW_REMEDY),
    (
        0,
        b"\x93NUMPY",
        "a NumPy array",
        "Save a dict of tensors: {name: torch.from_numpy(array)}.",
    ),
    (0, b"\x7fELF", "an executable program", ""),
)


def read_container(
    path: Path, map_location: MapLocation, mmap: bool, budget: Budget, *, shard: bool = False
) -> tuple[Any, str, dict[str, str]]:
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
    with open_file(path) as stream:
        head = stream.read(1024)
    storages = FileStorages(path, map_location, mmap, budget)
    budget.add(storages.length)
    if not head:
        raise NotACheckpointError("an empty file. " + DOWNLOAD_AGAIN)
    _refuse_other_formats(head)
    if head.startswith(b"PK"):
        return read_zip(storages)
    if head[8:9] == b"{" and head[7] == 0:
        return read_safetensors(storages, head)
    if _without_blanks(head).startswith(b"{") and not shard:
        return _read_index(storages)
    refuse_other_frameworks(path, head, _end_of(storages))
    return read_pickles(storages, head)


def _end_of(storages: FileStorages) -> bytes:
    with storages.open() as stream:
        stream.seek(max(storages.length - 8, 0))
        return stream.read(8)


def _refuse_other_formats(head: bytes) -> None:
    """Refuse files that are often taken for checkpoints, by their first bytes."""
    for offset, signature, name, remedy in _SIGNATURES:
        if head[offset:].startswith(signature):
            raise NotACheckpointError(f"{name}. {remedy}".strip())
    text = _without_blanks(head)
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<script")):
        raise NotACheckpointError("an HTML page. Take the address of the file itself, not of the page that shows it.")
    if text.startswith((b"<?xml", b"<!--")):
        raise NotACheckpointError("an XML document, as servers send in place of a file. " + DOWNLOAD_AGAIN)


def _without_blanks(head: bytes) -> bytes:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()


def _read_index(storages: FileStorages) -> tuple[Any, str, dict[str, str]]:
    """Read the shards that a `*.index.json` names; they must be in its folder, and cannot be an index themselves."""
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
