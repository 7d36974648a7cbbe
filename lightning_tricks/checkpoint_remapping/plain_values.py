"""Convert plain values, as JSON and YAML hold them, to the types of a module's annotations."""

from __future__ import annotations

import enum
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import PurePath
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

MAX_DEPTH = 50  # nested annotations, and nested values


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


class _NotPlainError(Exception):
    """A value for which an object would have to be built."""


def convert_arguments(module: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments that are plain values, and the types by name of those that would have to be built."""
    parameters = inspect.signature(module).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    converted, not_plain = {}, {}
    for name, value in values.items():
        if not (takes_all or name in parameters):
            continue
        annotation = _annotation(module, name)
        try:
            converted[name] = _convert(value, annotation, MAX_DEPTH)
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
        for one in sorted(
            inner, key=lambda kind: kind is str
        ):  # last, as anything may be a string; jsonargparse does the same
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
