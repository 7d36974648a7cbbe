"""Hyper-parameters of a checkpoint as arguments of a module; nothing that the file names is imported or called.

Checkpoints of LightningCLI hold hyper-parameters as in YAML, and the name of a function of Lightning that builds
objects from them: it imports any class and function that they name, and calls the classes. Here the annotations of the
module's own `__init__` decide, and only members of enumerations, paths, tuples, sets and dataclasses are built.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import PurePath
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch

from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Global, Placeholder, children

_MODULE_KEYS = ("hparams", "module_arguments", "hyper_parameters")  # the last one wins, as in Lightning
# Entries of a checkpoint that the Trainer does not restore, and which may hold placeholders
ARGUMENT_KEYS = (*_MODULE_KEYS, "datamodule_hyper_parameters", "hparams_type")


def saved_arguments(checkpoint: Checkpoint) -> tuple[dict[str, Any], Placeholder | None]:
    """Return the hyper-parameters of a module in a checkpoint, or the object without items that they are.

    Raises:
        CheckpointError: If they are not names and values.
    """
    saved: dict[str, Any] = {}
    for key in _MODULE_KEYS:
        values = checkpoint.metadata.get(key)
        if isinstance(values, Placeholder):
            if not values.items:
                return {}, values
            values = values.items
        if not isinstance(values, Mapping | None):
            raise CheckpointError(
                f"{checkpoint.source} has a {type(values).__name__} as {key} instead of names and values."
            )
        saved.update(clone_mapped_tensors(values or {}))
    return saved, None


def arguments_by_name(
    module: type, checkpoint: Checkpoint, saved: Mapping[str, Any] | Placeholder, overrides: Collection[str]
) -> dict[str, Any]:
    """Return those of the hyper-parameters that the module takes and the caller does not give.

    Args:
        module: The class of the module.
        checkpoint: What `read_checkpoint` returned.
        saved: The hyper-parameters, or the object that they are.
        overrides: The names of the arguments of the caller.
    """
    accepted, takes_all = _parameters(module)
    if isinstance(saved, Mapping):
        saved = {name: value for name, value in saved.items() if name not in overrides}
    whole = checkpoint.metadata.get("hparams_name")
    if whole in list(accepted):  # all are the items of one argument, as after `save_hyperparameters(config)`
        return {} if whole in overrides else {whole: saved}
    if isinstance(saved, Placeholder):
        return {} if overrides else dict.fromkeys(accepted or ["name"], saved)
    return {name: value for name, value in saved.items() if takes_all or name in accepted}


def plain_arguments(
    module: type, checkpoint: Checkpoint, saved: Mapping[str, Any], overrides: Mapping[str, Any], *, of_cli: bool
) -> dict[str, Any]:
    """Return arguments of which a module is built without an import or a call.

    Args:
        module: The class of the module.
        checkpoint: What `read_checkpoint` returned.
        saved: The arguments that `arguments_by_name` returned.
        overrides: The arguments of the caller.
        of_cli: As in `convert_arguments`.

    Raises:
        CheckpointError: If one is not restored, or is missing; the message has all that have to be given.
    """
    plain, unbuilt = convert_arguments(module, saved, of_cli=of_cli)
    accepted, takes_all = _parameters(module)
    needed = {name: f"a {kind[:100]}" for name, kind in unbuilt.items()}
    for name, is_required in accepted.items():
        if is_required and name not in saved and name not in overrides:
            needed[name] = "not in the file"
    if needed:
        what = list_names((f"{name} ({why})" for name, why in needed.items()), most=8)
        raise CheckpointError(
            f"Give these arguments: load_from_checkpoint(path, {', '.join(f'{name}=...' for name in needed)}). "
            f"{checkpoint.source} lacks them or has them as objects, and to restore these would run code of the file: "
            f"{what}."
        )
    items = {} if takes_all else {name: value for name, value in overrides.items() if name not in accepted}
    whole = checkpoint.metadata.get("hparams_name")
    if not items or whole not in list(plain):
        return {**plain, **overrides}
    arguments = {name: value for name, value in overrides.items() if name in accepted}
    return {**plain, **arguments, whole: {**plain[whole], **items}}


def _parameters(module: type) -> tuple[dict[str, bool], bool]:
    """Return whether each argument by name is required, and whether any other name is taken."""
    parameters = inspect.signature(module).parameters.values()
    by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {each.name: each.default is each.empty for each in by_name}, takes_all


def clone_mapped_tensors(value: Any) -> Any:
    """Copy mapped tensors, so that the file may be overwritten while they are in use."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)({name: clone_mapped_tensors(part) for name, part in value.items()})
    if type(value) in (list, tuple):
        return type(value)(clone_mapped_tensors(part) for part in value)
    return value


def convert_arguments(
    owner: type, values: Mapping[str, Any], *, of_cli: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that are data, and by name the types of those for which an object would have to be built.

    Args:
        owner: The class that takes them.
        values: Values by name.
        of_cli: Whether LightningCLI wrote them: then a `class_path` describes an object, and annotations say what a
            value becomes. Otherwise they are as they were saved.
    """
    converted, unbuilt = {}, {}
    for name, value in values.items():
        described = _object_in(value, of_cli)
        if described is not None:
            unbuilt[name] = described
            continue
        annotation = _annotation(owner, name) if of_cli else Any
        try:
            converted[name] = _convert(value, annotation)
        except TypeError:
            unbuilt[name] = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return converted, unbuilt


def _object_in(value: Any, of_cli: bool) -> str | None:
    """Return the type of an object that a value holds or describes, other than those that `Tricks` builds."""
    if isinstance(value, Placeholder | Global):
        return value.name if isinstance(value, Placeholder) else str(value)
    if of_cli and isinstance(value, Mapping) and "class_path" in value:
        named = str(value["class_path"])
        if not named.startswith("lightning_tricks."):
            return named
    return next(filter(None, (_object_in(part, of_cli) for _, part in children(value))), None)


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


def _convert(value: Any, annotation: Any) -> Any:
    """Convert a plain value, and the values in its containers, to the type of an annotation.

    Raises:
        TypeError: If it does not fit, or an object would have to be built.
    """
    annotation = getattr(annotation, "__supertype__", annotation)  # of a NewType
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    if value is None or kind is Any or (kind is Literal and value in inner):
        return value
    if kind in (Union, UnionType):
        for choice in sorted(inner, key=lambda choice: choice is str):
            # strings last, as anything may be one; jsonargparse does the same
            with suppress(TypeError):
                return _convert(value, choice)
    elif isinstance(kind, type):
        return _convert_to_class(value, kind, inner)
    raise TypeError


def _convert_to_class(value: Any, kind: type, inner: tuple[Any, ...]) -> Any:
    """Convert a value as `_convert` does to a class, whose items have the types of `inner`."""
    if is_dataclass(kind) and isinstance(value, Mapping):
        arguments, unbuilt = convert_arguments(kind, value)
        if unbuilt:
            raise TypeError
        return cast(Any, kind)(**arguments)
    if isinstance(value, Mapping) and isinstance(value, kind):
        of_keys, of_values = inner or (Any, Any)
        return {_convert_key(name, of_keys): _convert(part, of_values) for name, part in value.items()}
    if isinstance(value, list | tuple):
        made = kind if kind in (tuple, set, frozenset) else list
        kinds = inner if kind is tuple and inner and Ellipsis not in inner else (inner or (Any,))[:1] * len(value)
        if not issubclass(made, kind) or len(kinds) != len(value):
            raise TypeError
        return made(map(_convert, value, kinds))
    if isinstance(value, str) and issubclass(kind, enum.Enum) and value in kind.__members__:
        return kind[value]
    if isinstance(value, str) and issubclass(kind, PurePath):
        return kind(value)
    if isinstance(value, kind) or (isinstance(value, int) and kind in (float, complex)):
        return value
    raise TypeError


def _convert_key(name: Any, annotation: Any) -> Any:
    """Convert a key of a dict, which JSON and YAML may have made a string."""
    is_number = isinstance(name, str) and annotation is int and name.lstrip("-").isdecimal()
    return int(name) if is_number else _convert(name, annotation)
