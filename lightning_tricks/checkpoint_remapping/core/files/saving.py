"""`save_weights`: write the weights of a model atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import atomic_write
from lightning_tricks._shared.tensors import is_on_meta
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.remapping import strip_wrappers


def save_weights(
    model: nn.Module | Mapping[str, Any], path: str | os.PathLike[str], *, clean: bool = True, metadata: Any = None
) -> None:
    """Write the weights of a model to a file, atomically: an error leaves an existing file unchanged.

    Args:
        model: The model, or its tensors by name.
        path: Path of the file; its suffix decides the format: `.safetensors`, or `.pt`, `.pth`, `.ckpt` or `.bin` for
            `torch.save`.
        clean: Whether to leave out the parts of names that wrappers add, and thop's counters.
        metadata: A dict of strings for the header of a `.safetensors`.

    Raises:
        ValueError: If the suffix is another one, or the format cannot hold a value.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights(torch.nn.DataParallel(torch.nn.Linear(2, 3)), f"{folder}/weights.safetensors")
        ...     os.listdir(folder)
        ['weights.safetensors']
    """
    path = Path(check_path("path", path, "a file"))
    tensors = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    if clean:
        names = strip_wrappers(tensors)
        tensors = {new: tensors[old] for old, new in names.items() if new is not None}
    on_meta = [name for name, tensor in tensors.items() if is_on_meta(tensor)]
    if on_meta:
        raise ValueError(f"{list_names(on_meta)} are on the meta device and have no values to save.")
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        stored, header = _for_safetensors(tensors)
        with atomic_write(path) as temporary:
            save_file(stored, temporary, metadata={"format": "pt"} | header | (metadata or {}))
    elif path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        with atomic_write(path) as temporary:
            torch.save(tensors, temporary)
    else:
        raise ValueError(f"path must end in .safetensors, .pt, .pth, .ckpt or .bin, got {os.fspath(path)!r}.")


def _for_safetensors(tensors: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor once, contiguous, and a header that names the tied ones that were left out."""
    stored: dict[str, torch.Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    header: dict[str, str] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{name} is not a tensor ({type(tensor).__name__}), and .safetensors holds only tensors: use .pt."
            )
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(place, name) != name:
            header[name] = first[place]
            continue
        storage = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.detach().clone() if storage in used and tensor.numel() else tensor.detach().contiguous()
        used.add(storage)
    return stored, header
