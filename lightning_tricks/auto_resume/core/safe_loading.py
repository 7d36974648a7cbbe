"""Reads checkpoints as data, without running code of them, and finds the objects that this leaves out."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Global, Placeholder, children
from lightning_tricks.checkpoint_remapping.core.files.reading import read_values

# A resume does not restore these: they may hold any object
_ARGUMENTS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type")


def load_plain_data(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint without running code of it.

    Args:
        path: Path of the file.
        mmap: Whether tensors are mapped from the file, where it is a zip archive.

    Returns:
        The values of the checkpoint; a `Placeholder` for each object that is neither plain data nor a tensor.

    Raises:
        CheckpointError: If it is not a checkpoint, or holds a call that no checkpoint needs.
    """
    mmap = mmap and zipfile.is_zipfile(path)
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        checkpoint = read_values(path, mmap=mmap)
    return checkpoint


def find_objects(checkpoint: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """Return the objects that a resume needs and `load_plain_data` left out: keys -> qualified name of the class."""
    return {
        key_path: kind
        for key, value in checkpoint.items()
        if key not in _ARGUMENTS
        for key_path, kind in _objects(value, (str(key),))
    }


def _objects(value: Any, key_path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    seen: set[int] = set()
    pending = [(value, key_path)]
    while pending:
        value, key_path = pending.pop()
        if isinstance(value, Global | Placeholder):
            yield key_path, str(value) if isinstance(value, Global) else value.name
        elif id(value) not in seen:
            seen.add(id(value))
            for key, part in children(value):
                pending += [(key, (*key_path, "a key")), (part, (*key_path, str(key)))]
