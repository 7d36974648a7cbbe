"""Build a module from a checkpoint that is read as data, as `load_from_checkpoint` does."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from lightning_tricks._lightning_compat.flavor import LightningModule, rank_zero_warn
from lightning_tricks._lightning_compat.hyperparameters import CLASS_PATH, INSTANTIATOR
from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, UnsafeCheckpointError
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Global, Placeholder, children
from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint

_MODULE_KEYS = ("hparams", "module_arguments", "hyper_parameters")  # the last one wins, as in Lightning
# Entries of a checkpoint that the Trainer does not restore, and which may hold placeholders
ARGUMENT_KEYS = (*_MODULE_KEYS, "datamodule_hyper_parameters", "hparams_type")

_PLAIN = (Any, bool, int, float, str, list, dict, Sequence, Mapping, Iterable, Literal, Union, UnionType, NoneType)

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
            f"hparams_file={os.fspath(hparams_file)!r} is not read. Give its values as arguments: "
            "load_from_checkpoint(path, **yaml.safe_load(text))."
        )
    return read_checkpoint(path, map_location=map_location)


def build_module(
    module: type[LightningModule], checkpoint: Checkpoint, strict: bool | None, overrides: dict[str, Any]
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


# Hyper-parameters as arguments. Checkpoints of LightningCLI hold them as in YAML, and the name of a function of
# Lightning that builds objects from them: it imports any class and function that they name, and calls the classes.
# Here a value is taken only where the annotations of the module say that it is in YAML what it is in Python.


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
