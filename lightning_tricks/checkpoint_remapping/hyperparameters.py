"""Hyper-parameters of a checkpoint as arguments of a module; nothing that the file names is imported or called.

Checkpoints of LightningCLI hold hyper-parameters as in YAML, and the name of a function of Lightning that builds
objects from them: it imports any class and function that they name, and calls the classes. Here a value is taken only
where the annotations of the module say that it is in YAML what it is in Python.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Global, Placeholder, children

_MODULE_KEYS = ("hparams", "module_arguments", "hyper_parameters")  # the last one wins, as in Lightning
# Entries of a checkpoint that the Trainer does not restore, and which may hold placeholders
ARGUMENT_KEYS = (*_MODULE_KEYS, "datamodule_hyper_parameters", "hparams_type")

_PLAIN = (Any, bool, int, float, str, list, dict, Sequence, Mapping, Iterable, Literal, Union, UnionType, NoneType)


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
        saved.update(copy.deepcopy(values or {}))  # its tensors may be mapped from the file
    return saved, None


def module_arguments(
    module: type, checkpoint: Checkpoint, saved: Mapping[str, Any] | Placeholder, given: Mapping[str, Any], of_cli: bool
) -> dict[str, Any]:
    """Return the arguments of which a module is built: the caller's, and plain values of the file for the others.

    Args:
        module: The class of the module.
        checkpoint: What `read_checkpoint` returned.
        saved: The hyper-parameters of the file, or the object that they are.
        given: The arguments of the caller; after `save_hyperparameters(config)`, items of `config`, too.
        of_cli: Whether LightningCLI wrote the file: then a `class_path` describes an object, and so does a value whose
            annotation is not plain. Otherwise values are as they were saved.

    Raises:
        CheckpointError: If one is not restored, or is missing; the message has all that have to be given.
    """
    parameters = inspect.signature(module).parameters.values()
    by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    required = {each.name: each.default is each.empty for each in by_name}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if isinstance(saved, Mapping):
        saved = {name: value for name, value in saved.items() if name not in given}
    taken: dict[str, Any]
    items: dict[str, Any] = {}
    whole: Any = checkpoint.metadata.get("hparams_name")
    if whole in list(required):  # all are the items of one argument, as after `save_hyperparameters(config)`
        taken = {} if whole in given else {whole: saved}
        items = {name: value for name, value in given.items() if taken and not takes_all and name not in required}
    elif isinstance(saved, Placeholder):
        taken = {} if given else dict.fromkeys(required or ["name"], saved)
    else:
        taken = {name: value for name, value in saved.items() if takes_all or name in required}
    missing = [name for name, needed in required.items() if needed and name not in (*taken, *given)]
    _check_restored(checkpoint.source, taken, missing, _annotations(module) if of_cli else None)
    if items:
        taken = {whole: {**taken[whole], **items}}
    return taken | {name: value for name, value in given.items() if name not in items}


def _check_restored(
    source: str, taken: Mapping[str, Any], missing: Sequence[str], annotations: Mapping[str, Any] | None
) -> None:
    """Refuse arguments that are objects or missing; the annotations are those of a checkpoint of LightningCLI."""
    needed = {name: _object_in(value, annotations is not None) for name, value in taken.items()}
    for name, annotation in (annotations or {}).items():
        if taken.get(name) is not None and not _is_plain(annotation):
            needed[name] = needed[name] or inspect.formatannotation(annotation)
    why = {name: f"a {kind[:100]}" for name, kind in needed.items() if kind} | dict.fromkeys(missing, "not in the file")
    if why:
        raise CheckpointError(
            f"Give these arguments: load_from_checkpoint(path, {', '.join(f'{name}=...' for name in why)}). "
            f"{source} lacks them or has them as objects, and to restore these would run code of the file: "
            f"{list_names((f'{name} ({what})' for name, what in why.items()), most=8)}."
        )


def _object_in(value: Any, of_cli: bool) -> str | None:
    """Return the type of an object that a value holds or describes, other than those that `Tricks` builds."""
    if isinstance(value, Placeholder | Global):
        return value.name if isinstance(value, Placeholder) else str(value)
    if of_cli and isinstance(value, Mapping) and "class_path" in value:
        named = str(value["class_path"])
        if not named.startswith("lightning_tricks."):
            return named
    return next(filter(None, (_object_in(part, of_cli) for _, part in children(value))), None)


def _annotations(owner: type) -> dict[str, Any]:
    """Return the annotations of the arguments of a class, those of its bases' among them, as `**kwargs` may be."""
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        with suppress(NameError):  # names under TYPE_CHECKING
            found |= get_type_hints(vars(base).get("__init__", object.__init__))
    return found


def _is_plain(annotation: Any) -> bool:
    """Whether the values of an annotation are in YAML what they are in Python; a `Tricks` is made of its dict."""
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Literal:
        inner = tuple(map(type, inner))
    elif getattr(kind, "__module__", "") == "lightning_tricks.tricks":
        return True
    return kind in _PLAIN and all(map(_is_plain, inner))
