"""Build a module from a checkpoint that is read as data, as `load_from_checkpoint` does."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch

from lightning_tricks._lightning_compat.flavor import LightningModule, rank_zero_warn
from lightning_tricks._lightning_compat.hyperparameters import CLASS_PATH, INSTANTIATOR
from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, UnsafeCheckpointError
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint
from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint
from lightning_tricks.checkpoint_remapping.hyperparameters import module_arguments, saved_arguments

# Whether a module is being built of hyper-parameters of a file: a `Tricks` that is made meanwhile names no path
IS_BUILT_OF_FILE: ContextVar[bool] = ContextVar("a module is built of hyper-parameters of a file", default=False)


class SafeStateDict(dict[str, Any]):
    """The weights of a checkpoint that was read safely; the type distinguishes them from other state dicts."""

    def __init__(self, origin: Checkpoint, weights: Mapping[str, Any]) -> None:
        super().__init__(weights)
        self.origin = origin


def read_module_checkpoint(path: Any, map_location: Any, hparams_file: Any) -> Checkpoint:
    """Read a checkpoint; the arguments are those of `load_from_checkpoint`.

    Raises:
        CheckpointError: If the file is unsafe or cannot be read, or a file of hyper-parameters is given.
    """
    if hparams_file is not None:
        check_path("hparams_file", hparams_file, "a file of hyper-parameters")
        raise CheckpointError(
            f"hparams_file={os.fspath(hparams_file)!r} is not read. Give what it holds as arguments: "
            "load_from_checkpoint(path, **yaml.safe_load(text))."
        )
    return read_checkpoint(path, map_location=map_location)


def build_module(
    module: type[LightningModule],
    checkpoint: Checkpoint,
    strict: bool | None,
    overrides: dict[str, Any],
) -> LightningModule:
    """Build a module, or the imported subclass of its class that the checkpoint names.

    Args:
        module: The class of the module.
        checkpoint: The checkpoint that `read_module_checkpoint` returned.
        strict: As in Lightning's `load_from_checkpoint`.
        overrides: Arguments of the caller, which replace hyper-parameters and may be any objects.

    Raises:
        CheckpointError: If it names another class, or an argument is neither restored nor among `overrides`.
    """
    saved, described = saved_arguments(checkpoint)
    named, instantiator = saved.pop(CLASS_PATH, None), saved.pop(INSTANTIATOR, None)
    kind = _imported_subclass(module, named, checkpoint.source)
    given = module_arguments(kind, checkpoint, described or saved, overrides, bool(named or instantiator))
    token = IS_BUILT_OF_FILE.set(IS_BUILT_OF_FILE.get() or bool(given.keys() - overrides.keys()))
    try:
        made = kind(**given)
        IS_BUILT_OF_FILE.set(True)  # hooks get all of the file
        made.configure_model()
        values = {**copy.deepcopy(checkpoint.metadata), "state_dict": checkpoint.state_dict}
        values["hyper_parameters"] = {**saved, **overrides}
        made.on_load_checkpoint(values)
        strict = made.strict_loading if strict is None else strict
        keys = made.load_state_dict(SafeStateDict(checkpoint, values["state_dict"]), strict=strict)
    finally:
        IS_BUILT_OF_FILE.reset(token)
    if keys.missing_keys or keys.unexpected_keys:
        rank_zero_warn(
            f"{checkpoint.source}: {len(keys.missing_keys)} tensors are missing ({list_names(keys.missing_keys)}), "
            f"{len(keys.unexpected_keys)} are not used ({list_names(keys.unexpected_keys)})."
        )
    first = next((t for t in checkpoint.state_dict.values() if isinstance(t, torch.Tensor)), torch.empty(0))
    return made.to(first.device)


def _imported_subclass(module: type[LightningModule], name: Any, source: str) -> type[LightningModule]:
    """Return the imported subclass of `module` that a checkpoint of LightningCLI names; `module` if it names none."""
    known = {f"{found.__module__}.{found.__qualname__}": found for found in _subclasses(module)}
    if name is None:
        return module
    if not isinstance(name, str) or name not in known:
        raise UnsafeCheckpointError(
            f"{source} asks for {name!r}, which is not an imported subclass of {module.__name__}. "
            "Nothing of it was imported; import its module first if you trust it."
        )
    return known[name]


def _subclasses(module: type) -> list[type]:
    children: list[type] = module.__subclasses__()
    return [module, *(inner for child in children for inner in _subclasses(child))]
