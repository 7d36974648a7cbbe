"""Hyper-parameters of a checkpoint as arguments of a module; what the file names is neither imported nor called.

What LightningCLI trained has hyper-parameters as YAML has them, and the name of a function of Lightning that makes
objects of these: it imports any class and function that they name, and calls the classes. Here the annotations of the
module's own `__init__` decide, and only members of enumerations, paths, tuples, sets and dataclasses are made.
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

from lightning.pytorch import LightningModule

from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.plain_yaml import read_yaml
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, UnsafeCheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Placeholder
from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint
from lightning_tricks.checkpoint_remapping.lightning_checkpoint import ARGUMENT_KEYS, clone_tensors

_MODULE_KEYS = ("hyper_parameters", "hparams", "module_arguments")
_MAX_DEPTH = 50  # annotations inside of annotations, and values inside of values
_MAX_SCALAR_LENGTH = 100_000  # characters of a value


def class_named_in(module: type[LightningModule], checkpoint: Checkpoint) -> type[LightningModule]:
    """Return the subclass of `module` that a checkpoint of LightningCLI is of, if it is imported; else `module`.

    Raises:
        UnsafeCheckpointError: If the checkpoint asks for another class.
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
    """Return the rest of a checkpoint, with hyper-parameters that make a module without an import or a call.

    Args:
        module: The class that is made, of `class_named_in`.
        checkpoint: As read.
        overrides: Arguments of the caller, who may give anything.
        hparams: Arguments of a file beside the checkpoint, which override the checkpoint's.

    Raises:
        CheckpointError: If a hyper-parameter was not restored and is not overridden.
    """
    rest = {name: clone_tensors(value) for name, value in checkpoint.metadata.items() if name != "hparams_type"}
    unrestored = dict(_placeholders(checkpoint, {*overrides, *hparams}))
    for key in ARGUMENT_KEYS:
        values = rest.get(key)
        if isinstance(values, Placeholder):
            if not (values.items or overrides):
                raise CheckpointError(
                    f"{checkpoint.source} has a {values.name} as {key}, which is not restored, as that would run code "
                    "of the file. Give the arguments of the module: load_from_checkpoint(path, name=...)."
                )
            values = values.items
        if key in _MODULE_KEYS and not isinstance(values, Mapping | None):
            raise CheckpointError(
                f"{checkpoint.source} has a {type(values).__name__} as {key}, and no names and values."
            )
        if isinstance(values, Mapping):
            rest[key] = {name: value for name, value in values.items() if name not in overrides}
    for key in _MODULE_KEYS:
        if rest.get(key, ()) is None:
            del rest[key]
    if hparams:
        own = rest.setdefault("hyper_parameters", {})
        own.update({name: value for name, value in hparams.items() if name not in overrides})
    for key in _MODULE_KEYS:
        if not isinstance(rest.get(key), Mapping):
            continue
        of_cli = {name: rest[key].pop(name, None) for name in ("_instantiator", "_class_path")}
        if any(of_cli.values()):
            rest[key], not_plain = _convert_arguments(module, rest[key])
            unrestored |= not_plain
    if unrestored:
        what = ", ".join(f"{name} (a {kind})" for name, kind in unrestored.items())
        arguments = ", ".join(f"{name}=..." for name in unrestored)
        raise CheckpointError(
            f"{checkpoint.source} has hyper-parameters that are not restored, as that would run code of the file: "
            f"{what}. Give them: load_from_checkpoint(path, {arguments})."
        )
    return rest


def read_hparams_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the file of hyper-parameters that a logger of Lightning wrote: `hparams.yaml` or `meta_tags.csv`.

    Raises:
        CheckpointError: If it is none, or holds other than plain values.
    """
    import yaml

    try:
        if Path(path).suffix == ".csv":
            with open_file(path) as stream:
                rows = list(csv.reader(stream.read(1 << 20).decode().splitlines()))[1:]
            return {name: _parse_literal(value) for name, value in rows}
        values = read_yaml(path, max_depth=_MAX_DEPTH, max_scalar_length=_MAX_SCALAR_LENGTH, allow_tuples=True)
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"hparams_file={os.fspath(path)!r} is no file of plain hyper-parameters: {error}. Give the arguments "
            "themselves: load_from_checkpoint(path, name=...)."
        ) from error
    if not isinstance(values, dict | None) or not all(isinstance(name, str) for name in values or ()):
        raise CheckpointError(f"hparams_file={os.fspath(path)!r} must hold names and values, got {type(values)}.")
    return values or {}


def nested_values(value: Any) -> Iterator[Any]:
    """Yield a value and all that its containers hold; what stands in several places comes once."""
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


# Plain values as annotations want them


class _NotPlainError(Exception):
    """A value that somebody would have to build."""


def _convert_arguments(module: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments that are made of plain values, and name -> type of those that would have to be built."""
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
    """Return the annotation of an argument in the first `__init__` that names it; Any where there is none."""
    for base in owner.__mro__:
        init = vars(base).get("__init__")
        parameter = None if init is None else inspect.signature(init).parameters.get(name)
        if parameter is None or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.annotation is parameter.empty:
            return Any
        alone: Any = SimpleNamespace(__annotations__={name: parameter.annotation})
        with suppress(AttributeError, NameError, TypeError):  # names that only a type checker knows
            return get_type_hints(alone, vars(sys.modules[base.__module__]))[name]
    return Any


def _convert(value: Any, annotation: Any, depth: int) -> Any:
    """Return a plain value as an annotation wants it; of values in containers those, too.

    Raises:
        _NotPlainError: If it would have to be built.
    """
    annotation = getattr(annotation, "__supertype__", annotation)  # of a NewType
    if value is None:
        return value
    origin, inner = get_origin(annotation), get_args(annotation)
    _require(depth > 0)
    if origin is Annotated:
        return _convert(value, inner[0], depth - 1)
    if origin in (Union, UnionType):
        for one in sorted(inner, key=lambda kind: kind is str):  # which takes anything, as jsonargparse has it
            with suppress(_NotPlainError):
                return _convert(value, one, depth - 1)
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
    """Return a key of a dict, which JSON and YAML may have made a text."""
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
    """Return a value that describes no object but those which `Tricks` knows."""
    described = (
        part["class_path"] for part in nested_values(value) if isinstance(part, Mapping) and "class_path" in part
    )
    _require(all(str(name).startswith("lightning_tricks.") for name in described))
    return value


def _require(fits: bool) -> None:
    if not fits:
        raise _NotPlainError
