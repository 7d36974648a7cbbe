"""Hyper-parameters of a checkpoint as arguments of a module; nothing that the file names is imported or called.

Checkpoints of LightningCLI hold hyper-parameters as in YAML, and the name of a function of Lightning that builds
objects from them: it imports any class and function that they name, and calls the classes. Here the annotations of the
module's own `__init__` decide, and only members of enumerations, paths, tuples, sets and dataclasses are built.
"""

from __future__ import annotations

import csv
import os
from ast import literal_eval
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.plain_yaml import read_yaml
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, UnsafeCheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Placeholder
from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint
from lightning_tricks.checkpoint_remapping.lightning_checkpoint import ARGUMENT_KEYS, clone_mapped_tensors
from lightning_tricks.checkpoint_remapping.plain_values import MAX_DEPTH, convert_arguments

_MODULE_KEYS = ("hyper_parameters", "hparams", "module_arguments")
_MAX_SCALAR_LENGTH = 100_000  # characters of a value


def class_named_in(module: type[LightningModule], checkpoint: Checkpoint) -> type[LightningModule]:
    """Return the imported subclass of `module` that a checkpoint of LightningCLI names; `module` if it names none.

    Raises:
        UnsafeCheckpointError: If the checkpoint names a class that is not an imported subclass.
    """
    known = {f"{found.__module__}.{found.__qualname__}": found for found in _subclasses(module)}
    for key in _MODULE_KEYS:
        values = checkpoint.metadata.get(key)
        wanted = values.get("_class_path") if isinstance(values, Mapping) else None
        if wanted is None:
            continue
        if not isinstance(wanted, str) or wanted not in known:
            raise UnsafeCheckpointError(
                f"{checkpoint.source} asks for {wanted!r}, which is not an imported subclass of {module.__name__}. "
                "Nothing of it was imported; import its module first if you trust it."
            )
        return known[wanted]
    return module


def plain_arguments(
    module: type[LightningModule], checkpoint: Checkpoint, overrides: Mapping[str, Any], hparams: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of a checkpoint, with hyper-parameters of which a module is built without an import or a call.

    Args:
        module: The class of the module, as `class_named_in` returns it.
        checkpoint: What `read_checkpoint` returned.
        overrides: Arguments of the caller, which may be any objects.
        hparams: Arguments of a file beside the checkpoint, which override the checkpoint's.

    Raises:
        CheckpointError: If a hyper-parameter was not restored and is not overridden.
    """
    rest = {name: clone_mapped_tensors(value) for name, value in checkpoint.metadata.items() if name != "hparams_type"}
    unrestored = dict(_placeholders(checkpoint, {*overrides, *hparams}))
    for key in (key for key in ARGUMENT_KEYS if key in rest):
        rest[key] = _without_overridden(checkpoint, key, rest[key], overrides)
    for key in _MODULE_KEYS:
        if rest.get(key, ()) is None:
            del rest[key]
    if hparams:
        own = rest.setdefault("hyper_parameters", {})
        own.update({name: value for name, value in hparams.items() if name not in overrides})
    unrestored |= _convert_arguments_of_cli(module, rest)
    if unrestored:
        what = ", ".join(f"{name} (a {kind})" for name, kind in unrestored.items())
        arguments = ", ".join(f"{name}=..." for name in unrestored)
        raise CheckpointError(
            f"{checkpoint.source} has hyper-parameters that are not restored, as that would run code of the file: "
            f"{what}. Give them: load_from_checkpoint(path, {arguments})."
        )
    return rest


def _without_overridden(checkpoint: Checkpoint, key: str, values: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the arguments of one entry of a checkpoint without those that the caller gives."""
    if isinstance(values, Placeholder):
        if not (values.items or overrides):
            raise CheckpointError(
                f"{checkpoint.source} has a {values.name} as {key}, which is not restored, as that would run code "
                "of the file. Give the arguments of the module: load_from_checkpoint(path, name=...)."
            )
        values = values.items
    if key in _MODULE_KEYS and not isinstance(values, Mapping | None):
        raise CheckpointError(
            f"{checkpoint.source} has a {type(values).__name__} as {key} instead of names and values."
        )
    if isinstance(values, Mapping):
        return {name: value for name, value in values.items() if name not in overrides}
    return values


def _convert_arguments_of_cli(module: type, rest: dict[str, Any]) -> dict[str, str]:
    """Convert the entries that LightningCLI wrote; return the types by name of what would have to be built."""
    not_plain: dict[str, str] = {}
    for key in _MODULE_KEYS:
        if not isinstance(rest.get(key), Mapping):
            continue
        of_cli = {name: rest[key].pop(name, None) for name in ("_instantiator", "_class_path")}
        if any(of_cli.values()):
            rest[key], unbuilt = convert_arguments(module, rest[key])
            not_plain |= unbuilt
    return not_plain


def read_hparams_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the file of hyper-parameters that a logger of Lightning wrote: `hparams.yaml` or `meta_tags.csv`.

    Raises:
        CheckpointError: If it is not such a file, or holds other than plain values.
    """
    import yaml

    check_path("hparams_file", path, "a file of hyper-parameters")
    try:
        if Path(path).suffix == ".csv":
            with open_file(path) as stream:
                rows = list(csv.reader(stream.read(1 << 20).decode().splitlines()))[1:]
            return {name: _parse_literal(value) for name, value in rows}
        values = read_yaml(path, max_depth=MAX_DEPTH, max_scalar_length=_MAX_SCALAR_LENGTH, allow_tuples=True)
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"hparams_file={os.fspath(path)!r} is not a file of plain hyper-parameters: {error}. Give the arguments "
            "themselves: load_from_checkpoint(path, name=...)."
        ) from error
    if not isinstance(values, dict | None) or not all(isinstance(name, str) for name in values or ()):
        raise CheckpointError(f"hparams_file={os.fspath(path)!r} must hold names and values, got {type(values)}.")
    return values or {}


def _parse_literal(text: str) -> Any:
    with suppress(MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return literal_eval(text[:_MAX_SCALAR_LENGTH])
    return text


def _placeholders(checkpoint: Checkpoint, overrides: Collection[str]) -> Iterator[tuple[str, str]]:
    for part in checkpoint.placeholders:
        key, _, path = part.location.partition(".")
        name = path.partition(".")[0]
        if key in ARGUMENT_KEYS and name and name not in overrides:
            yield name, part.name


def _subclasses(module: type) -> list[type]:
    children: list[type] = module.__subclasses__()
    return [module, *(inner for child in children for inner in _subclasses(child))]
