"""Hyper-parameters of a checkpoint as arguments of a module; nothing that the file names is imported or called.

Checkpoints of LightningCLI hold hyper-parameters as in YAML, and the name of a function of Lightning that builds
objects from them: it imports any class and function that they name, and calls the classes. Here the annotations of the
module's own `__init__` decide, and only members of enumerations, paths, tuples, sets and dataclasses are built.
"""

from __future__ import annotations

import csv
import enum
import inspect
import os
import sys
from ast import literal_eval
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import torch

from lightning_tricks._lightning_compat.flavor import LightningModule
from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.read_budget import read_yaml
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, UnsafeCheckpointError
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Placeholder

# Entries of a checkpoint that the Trainer does not restore, and which may hold placeholders
ARGUMENT_KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type", "hparams", "module_arguments")
_MODULE_KEYS = ("hyper_parameters", "hparams", "module_arguments")
_MAX_DEPTH = 50  # nested annotations, and nested values
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
            rest[key], unbuilt = _convert_arguments(module, rest[key])
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
        values = read_yaml(path, max_depth=_MAX_DEPTH, max_scalar_length=_MAX_SCALAR_LENGTH, allow_tuples=True)
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


def clone_mapped_tensors(value: Any) -> Any:
    """Copy mapped tensors, so that the file may be overwritten while they are in use."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)({name: clone_mapped_tensors(part) for name, part in value.items()})
    if type(value) in (list, tuple):
        return type(value)(clone_mapped_tensors(part) for part in value)
    return value


def nested_values(value: Any) -> Iterator[Any]:
    """Yield a value and everything in its containers; an object that occurs several times is yielded once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value


# Plain values, as JSON and YAML hold them, in the types of annotations


class _NotPlainError(Exception):
    """A value for which an object would have to be built."""


def _convert_arguments(module: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments that are plain values, and the types by name of those that would have to be built."""
    parameters = inspect.signature(module).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    converted, not_plain = {}, {}
    for name, value in values.items():
        if not (takes_all or name in parameters):
            continue
        annotation = _annotation(module, name)
        try:
            converted[name] = _convert(value, annotation, _MAX_DEPTH)
        except _NotPlainError:
            not_plain[name] = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return converted, not_plain


def _annotation(owner: type, name: str) -> Any:
    """Return the annotation of an argument in the first `__init__` that has it; Any if it has none."""
    for base in owner.__mro__:
        init = vars(base).get("__init__")
        parameter = None if init is None else inspect.signature(init).parameters.get(name)
        if parameter is None or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.annotation is parameter.empty:
            return Any
        alone: Any = SimpleNamespace(__annotations__={name: parameter.annotation})
        with suppress(AttributeError, NameError, TypeError):  # names under TYPE_CHECKING
            return get_type_hints(alone, vars(sys.modules[base.__module__]))[name]
    return Any


def _convert(value: Any, annotation: Any, depth: int) -> Any:
    """Convert a plain value, and the values in its containers, to the type of an annotation.

    Raises:
        _NotPlainError: If an object would have to be built.
    """
    annotation = getattr(annotation, "__supertype__", annotation)  # of a NewType
    if value is None:
        return value
    origin, inner = get_origin(annotation), get_args(annotation)
    _require(depth > 0)
    if origin is Annotated:
        return _convert(value, inner[0], depth - 1)
    if origin in (Union, UnionType):
        # strings last, as anything may be one; jsonargparse does the same
        for kind in sorted(inner, key=lambda kind: kind is str):
            with suppress(_NotPlainError):
                return _convert(value, kind, depth - 1)
        raise _NotPlainError
    if origin is Literal:
        _require(value in inner)
        return value
    if origin is None:
        return (
            _convert_to_class(value, annotation, depth) if isinstance(annotation, type) else _require_no_objects(value)
        )
    _require(isinstance(origin, type))
    if isinstance(value, Mapping):
        _require(issubclass(origin, Mapping))
        converted = {_convert_key(name, inner[0]): _convert(part, inner[-1], depth - 1) for name, part in value.items()}
        return OrderedDict(converted) if origin is OrderedDict else converted
    _require(isinstance(value, list | tuple) and issubclass(origin, Iterable) and not issubclass(origin, Mapping))
    kinds = inner if len(inner) == len(value) and Ellipsis not in inner else inner[:1] * len(value)
    made = origin if origin in (tuple, set, frozenset) else list
    return made(_convert(part, kind, depth - 1) for part, kind in zip(value, kinds, strict=True))


def _convert_key(name: Any, annotation: Any) -> Any:
    """Convert a key of a dict, which JSON and YAML may have made a string."""
    with suppress(ValueError):
        return annotation(name) if annotation in (int, float) and isinstance(name, str) else name
    raise _NotPlainError


def _convert_to_class(value: Any, kind: type, depth: int) -> Any:
    if issubclass(kind, enum.Enum):
        _require(isinstance(value, str) and value in kind.__members__)
        return kind[value]
    if is_dataclass(kind):
        _require(isinstance(value, Mapping) and value.keys() <= inspect.signature(kind).parameters.keys())
        return kind(**{name: _convert(part, _annotation(kind, name), depth - 1) for name, part in value.items()})
    if is_typeddict(kind):
        _require(isinstance(value, Mapping))
        return _require_no_objects(value)
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    if kind in (tuple, set, frozenset) and isinstance(value, list):
        return kind(_require_no_objects(value))
    number = kind in (float, complex) and isinstance(value, int | float)
    _require(kind is Any or number or isinstance(value, kind))  # Any is a class from Python 3.11 on
    return _require_no_objects(value)


def _require_no_objects(value: Any) -> Any:
    """Return a value unless it describes an object other than those that `Tricks` builds."""
    described = (
        part["class_path"] for part in nested_values(value) if isinstance(part, Mapping) and "class_path" in part
    )
    _require(all(str(name).startswith("lightning_tricks.") for name in described))
    return value


def _require(fits: bool) -> None:
    if not fits:
        raise _NotPlainError
