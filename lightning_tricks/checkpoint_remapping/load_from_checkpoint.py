"""Build a module from a checkpoint that is read as data, as `load_from_checkpoint` does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from packaging.version import InvalidVersion, Version

from lightning_tricks._lightning_compat.flavor import LightningModule, lightning_version
from lightning_tricks._lightning_compat.hyperparameters import module_from_checkpoint
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint
from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint
from lightning_tricks.checkpoint_remapping.hyperparameters import (
    ARGUMENT_KEYS,
    class_named_in,
    nested_values,
    plain_arguments,
    read_hparams_file,
)

# Strings among the hyper-parameters of the file from which a module is being built
STRINGS_OF_FILE: ContextVar[frozenset[str]] = ContextVar(
    "strings in the hyper-parameters of a checkpoint", default=frozenset()
)


class SafeStateDict(dict[str, Any]):
    """The weights of a checkpoint that was read safely; the type distinguishes them from other state dicts."""

    def __init__(self, origin: Checkpoint, weights: Mapping[str, Any]) -> None:
        super().__init__(weights)
        self.origin = origin

    def as_checkpoint(self) -> Checkpoint:
        """Return the checkpoint with these weights, as hooks of the module may have changed them."""
        return replace(self.origin, state_dict=dict(self))


class SafeCheckpoint(dict[str, Any]):
    """A checkpoint that was read safely, for Lightning: its `state_dict` is always a `SafeStateDict`."""

    def __init__(self, origin: Checkpoint, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.origin = origin

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name == "state_dict" and not isinstance(value, SafeStateDict):
            value = self[name] = SafeStateDict(self.origin, value)
        return value


def strings_in(value: Any) -> frozenset[str]:
    """Return the strings in a value, also those of paths and in the fields of dataclasses."""
    parts = list(nested_values(value))
    inner = [vars(part) for part in parts if is_dataclass(part) and not isinstance(part, type)]
    strings = {os.fspath(part) for part in parts if isinstance(part, str | os.PathLike)}
    return frozenset(strings).union(*map(strings_in, inner))


def _original_device(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """Move a storage to the device that it was saved from; it stays on the CPU if there is no such device."""
    try:
        there: torch.UntypedStorage = torch.serialization.default_restore_location(storage, location)
        return there
    except (AssertionError, RuntimeError):
        return storage


def _version_of(checkpoint: Checkpoint) -> str:
    """Return the version of Lightning that wrote a checkpoint; the installed one if it names no valid version."""
    try:
        return str(Version(checkpoint.metadata["pytorch-lightning_version"]))
    except (InvalidVersion, KeyError, TypeError):
        return lightning_version()


def read_module_checkpoint(
    path: str | os.PathLike[str] | IO[bytes], map_location: Any, hparams_file: str | os.PathLike[str] | None
) -> tuple[Checkpoint, dict[str, Any]]:
    """Read a checkpoint, and the hyper-parameters in a file beside it.

    Args:
        path: A path, a URL or a stream.
        map_location: As in `torch.load`; None for the devices that tensors were saved from.
        hparams_file: As in Lightning's `load_from_checkpoint`.

    Raises:
        CheckpointError: If a file is unsafe or cannot be read.
    """
    hparams = {} if hparams_file is None else read_hparams_file(hparams_file)
    location = _original_device if map_location is None else map_location
    if isinstance(path, str | os.PathLike):
        return read_checkpoint(path, map_location=location), hparams
    with tempfile.TemporaryDirectory() as folder:  # on Windows, no other one can open a temporary file
        copy = Path(folder, "stream.ckpt")
        with copy.open("wb") as file:
            shutil.copyfileobj(path, file)
        return replace(read_checkpoint(copy, map_location=location, mmap=False), source="the stream"), hparams


def build_module(
    module: type[LightningModule],
    checkpoint: Checkpoint,
    hparams: Mapping[str, Any],
    strict: bool | None,
    overrides: dict[str, Any],
) -> LightningModule:
    """Build a module, or the imported subclass of its class that the checkpoint names.

    Args:
        module: The class of the module.
        checkpoint: The checkpoint that `read_module_checkpoint` returned.
        hparams: The hyper-parameters that it returned.
        strict: As in Lightning's `load_from_checkpoint`.
        overrides: Arguments of the caller, which replace hyper-parameters.

    Raises:
        CheckpointError: If it names another class, or a hyper-parameter was not restored and is not overridden.
    """
    kind = class_named_in(module, checkpoint)
    values = {**plain_arguments(kind, checkpoint, overrides, hparams), "state_dict": checkpoint.state_dict}
    values["pytorch-lightning_version"] = _version_of(checkpoint)
    foreign = [checkpoint.metadata.get(key) for key in ARGUMENT_KEYS]
    token = STRINGS_OF_FILE.set(strings_in((foreign, hparams)))
    try:
        made = module_from_checkpoint(kind, SafeCheckpoint(checkpoint, values), strict, overrides)
    finally:
        STRINGS_OF_FILE.reset(token)
    first = next((t for t in checkpoint.state_dict.values() if isinstance(t, torch.Tensor)), torch.empty(0))
    return made.to(first.device)
