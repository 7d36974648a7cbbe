"""Parameters and buffers of a module that no checkpoint of the Trainer holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.attributes.model_structure import resize_to_state_dict

# Batch normalization changes these without another version of the tensor
_RUNNING_STATISTICS = ("running_mean", "running_var")
BufferVersion = tuple["ref[Tensor]", int]  # an id alone may belong to another tensor later


def unsaved_buffer_versions(module: nn.Module) -> dict[str, BufferVersion]:
    """Return the versions of the buffers that are not in the state dict, which tell whether they change later."""
    saved = module.state_dict().keys()
    return {name: (ref(value), tensor_version(value)) for name, value in module.named_buffers() if name not in saved}


def tensor_versions(module: nn.Module) -> dict[str, BufferVersion]:
    """Return the versions of all parameters and buffers."""
    return {name: (ref(value), tensor_version(value)) for name, value in _tensors(module).items()}


def tensors_left_out(
    module: nn.Module, state_dict: Mapping[str, Any], initial_versions: Mapping[str, BufferVersion]
) -> dict[str, Tensor]:
    """Return the parameters and buffers that changed, and that a hook such as `on_save_checkpoint` left out.

    Args:
        module: The module.
        state_dict: The state dict of its checkpoint, possibly under other names.
        initial_versions: What `tensor_versions` returned at the start.
    """
    saved = {value.data_ptr() for value in state_dict.values() if _has_data(value)}
    own = _tensors(module)
    names = {*dict(module.named_parameters()), *nn.Module.state_dict(module)}  # others are saved for each rank
    return {
        name: value.detach()
        for name, value in own.items()
        if name in names
        and _has_data(value)
        and value.data_ptr() not in saved
        and not _is_unchanged(name, value, initial_versions.get(name))
    }


def restore_tensors(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy saved parameters and buffers into those that have the same names and shapes."""
    own = _tensors(module)
    with torch.no_grad():
        for name, value in saved.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _has_data(value: Any) -> bool:
    is_plain = isinstance(value, Tensor) and not is_lazy(value) and value.layout is torch.strided
    return is_plain and value.device.type != "meta" and value.numel() > 0


def buffer_digests(module: nn.Module) -> dict[str, str]:
    """Return the SHA-1 of each buffer."""
    return {name: _digest(value) for name, value in module.named_buffers()}


def rank_specific_buffers(
    module: nn.Module, initial_versions: Mapping[str, BufferVersion], rank_zero_digests: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the buffers that a rank cannot get from rank zero's checkpoint.

    These are buffers that are not in the state dict and were changed, and, on other ranks, those that differ from rank
    zero's: without SyncBatchNorm each rank has statistics of its own.

    Args:
        module: The module of this rank.
        initial_versions: What `unsaved_buffer_versions` returned at the start.
        rank_zero_digests: What `buffer_digests` returned on rank zero.
    """
    own, saved = dict(module.named_buffers()), module.state_dict().keys()
    changed = [
        name for name in own if name not in saved and not _is_unchanged(name, own[name], initial_versions.get(name))
    ]
    differing = [
        name for name, value in own.items() if name in rank_zero_digests and _digest(value) != rank_zero_digests[name]
    ]
    return {name: own[name].detach() for name in dict.fromkeys(changed + differing)}


def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restore buffers, also those that were added or have another shape."""
    resize_to_state_dict(module, saved, list(saved))
    restore_tensors(module, saved)


def _is_unchanged(name: str, value: Tensor, version: BufferVersion | None) -> bool:
    if name.rpartition(".")[2] in _RUNNING_STATISTICS:
        return False
    return version is not None and version[0]() is value and version[1] == tensor_version(value)


def move_to_device(value: Any, device: torch.device | str) -> Any:
    """Return a copy of plain containers in which tensors are detached and on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, Mapping):
        return {name: move_to_device(part, device) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [move_to_device(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha1(flat.view(torch.uint8).numpy().tobytes(), usedforsecurity=False).hexdigest()
