"""What a rank remembers in the middle of an epoch and a checkpoint of the Trainer does not hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks.auto_resume.core.attributes.model_structure import resize_to_state_dict

BufferVersion = tuple["ref[Tensor]", int]  # of a tensor: an id alone may be another's later


def unsaved_buffer_versions(module: nn.Module) -> dict[str, BufferVersion]:
    """Return what tells whether a buffer that is no part of the state dict was changed since."""
    saved = module.state_dict().keys()
    return {name: (ref(value), value._version) for name, value in module.named_buffers() if name not in saved}


def buffer_digests(module: nn.Module) -> dict[str, str]:
    """Return the digests of all buffers."""
    return {name: _digest(value) for name, value in module.named_buffers()}


def rank_specific_buffers(
    module: nn.Module, initial_versions: Mapping[str, BufferVersion], rank_zero_digests: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the buffers that a rank cannot get from rank zero's checkpoint.

    These are buffers that are no part of the state dict and were changed, and, on other ranks, those that differ from
    rank zero's: without SyncBatchNorm each rank has statistics of its own.

    Args:
        module: Of this rank.
        initial_versions: Of `unsaved_buffer_versions` at the start.
        rank_zero_digests: Rank zero's `buffer_digests`.
    """
    own, saved = dict(module.named_buffers()), module.state_dict().keys()
    changed = [name for name in own if name not in saved and not _is_unchanged(own[name], initial_versions.get(name))]
    differing = [
        name for name, value in own.items() if name in rank_zero_digests and _digest(value) != rank_zero_digests[name]
    ]
    return {name: own[name].detach() for name in dict.fromkeys(changed + differing)}


def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Put buffers back, in place where they have the same shape."""
    resize_to_state_dict(module, saved, list(saved))
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in saved.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)


def _is_unchanged(value: Tensor, version: BufferVersion | None) -> bool:
    return version is not None and version[0]() is value and version[1] == value._version


def run_identity(module: LightningModule, seed: str | None) -> dict[str, Any]:
    """Return what tells a run from another: the module's class, its parameters' names and shapes, arguments, seed."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters() if not is_lazy(parameter)}
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}".replace("__main__.", ""),
        "parameters": hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16],
        "arguments": _as_json(dict(module.hparams_initial)),  # which a search for a learning rate leaves alone
        "seed": seed,
    }


def shape_differences(module: nn.Module, saved: Mapping[str, Any], max_names: int = 5) -> list[str]:
    """Say in which parameters a module differs from a state dict."""
    own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    found = [
        f"{name} is {shape} here and {tuple(saved[name].shape) if name in saved else 'missing'} there"
        for name, shape in own.items()
        if name not in saved or tuple(saved[name].shape) != shape
    ]
    mine = module.state_dict().keys()
    found += [f"{name} is only there" for name in saved if name not in mine]
    return [*found[:max_names], *([f"and {len(found) - max_names} more"] if len(found) > max_names else [])]


def move_to_device(value: Any, device: torch.device | str) -> Any:
    """Return plain containers with their tensors, detached, on a device."""
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


def _as_json(value: Any) -> Any:
    """Return a value as JSON gives it back; of what JSON does not know, the type alone."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if value is None or (isinstance(value, bool | int | float | str) and value == value):  # NaN equals nothing
        return value
    return f"a {type(value).__qualname__}"
