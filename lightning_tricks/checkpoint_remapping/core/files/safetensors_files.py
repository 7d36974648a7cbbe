"""Files in the safetensors format."""

from __future__ import annotations

from typing import Any

import torch

from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.storages import (
    DOWNLOAD_AGAIN,
    FileStorages,
    TypedStorage,
    restore,
)
from lightning_tricks.checkpoint_remapping.core.files.tensor_constructors import strided_tensor


def read_safetensors(storages: FileStorages, head: bytes) -> tuple[Any, str, dict[str, str]]:
    """Read a .safetensors, as `read_container` does; `head` is its beginning."""
    from safetensors import SafetensorError, safe_open

    storages.budget.spend(12 * min(int.from_bytes(head[:8], "little"), storages.length))  # what its JSON takes
    try:
        with safe_open(storages.path, framework="pt", device="cpu") as file:
            tensors = {name: _tensor_at_location(file, name, storages) for name in file.keys()}  # noqa: SIM118  # not a dict
            return tensors, "safetensors", dict(file.metadata() or {})
    except SafetensorError as error:
        problem = str(error)[:200]
        raise NotACheckpointError(
            f"a safetensors file that is corrupt or truncated ({problem}). {DOWNLOAD_AGAIN}"
        ) from error


def _tensor_at_location(file: Any, name: str, storages: FileStorages) -> torch.Tensor:
    storages.budget.spend(1024)
    tensor: torch.Tensor = file.get_tensor(name)  # mapped from the file
    if storages.on_meta:
        return tensor.to("meta")
    if not storages.mmap:
        storages.budget.spend(tensor.nbytes)
        tensor = tensor.clone()
    storage = tensor.untyped_storage()
    placed = restore(storage, "cpu", storages.map_location)
    if placed is storage:
        return tensor
    typed = TypedStorage(placed, tensor.dtype)
    return strided_tensor(storages.budget, typed, int(tensor.storage_offset()), tensor.shape, tensor.stride())
