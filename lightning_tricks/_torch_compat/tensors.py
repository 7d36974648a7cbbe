"""Tensors, their storages, and nested containers of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_tricks._torch_compat.guards import needs_private

with needs_private("lightning_tricks"):
    from torch.utils._pytree import tree_map, tree_map_only

__all__ = ["negative_view", "tensor_version", "tree_map", "tree_map_only", "untyped_storage"]


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    with needs_private("AutoResume"):
        return tensor._version


def negative_view(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that is read with the other sign."""
    with needs_private("CheckpointRemapping"):
        return torch._neg_view(tensor)


def untyped_storage(storage: Any) -> torch.UntypedStorage:
    """Return the storage inside a TypedStorage, whose own method warns; an untyped one as it is."""
    if isinstance(storage, torch.TypedStorage):
        with needs_private("CheckpointRemapping"):
            storage = storage._untyped_storage
    untyped: torch.UntypedStorage = storage
    return untyped
