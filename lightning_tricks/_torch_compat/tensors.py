"""Tensors, their storages, and nested containers of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._torch_compat.guards import needs_private

with needs_private("RunFingerprint"):
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
with needs_private("lightning_tricks"):
    from torch.utils._pytree import tree_map, tree_map_only

__all__ = ["negative_view", "outside_transforms", "tensor_version", "tree_map", "tree_map_only"]


@contextmanager
def outside_transforms(value: Any) -> Iterator[Any]:
    """Leave the transforms of `torch.func` that run, such as vmap; yield a value without the wrappers of its tensors.

    What is computed of a wrapped tensor inside a transform cannot be read after it.
    """
    # The usual case, at each step: nothing of `torch.func` runs.
    if peek_interpreter_stack() is None:
        yield value
        return
    with needs_private("RunFingerprint"):
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    with temporarily_clear_interpreter_stack():
        yield tree_map_only(Tensor, _without_wrappers, value)


def _without_wrappers(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    with needs_private("AutoResume"):
        # torch raises it with each operation in place, except those that write past it, such as a batch norm's (pytorch
        # #13402).
        return tensor._version


def negative_view(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that is read with the other sign."""
    with needs_private("CheckpointRemapping"):
        # `torch.save` keeps the bit of such views (as of `x.conj().imag`) apart from the memory, and loading has to set
        # it again.
        return torch._neg_view(tensor)
