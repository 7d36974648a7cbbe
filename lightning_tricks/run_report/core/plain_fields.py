"""Dataclasses of plain values, made of what a file holds: each value must be of the type that its field declares."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")


def from_plain(kind: type[Made], content: dict[str, Any]) -> Made:
    """Make a dataclass of a dict of its fields.

    Raises:
        TypeError: If a field is missing or unknown, or its value is of another type.

    Examples:
        >>> from lightning_tricks.run_report.core.record import Resume
        >>> from_plain(Resume, {"step": 3, "epoch": 0, "time": 1.5})
        Resume(step=3, epoch=0, time=1.5, not_restored=[], id='', rows=0)
    """
    declared: Any = kind
    hints = _hints(declared)
    unknown = content.keys() - hints.keys()
    if unknown:
        raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
    return kind(**{name: _checked(hints[name], value, name) for name, value in content.items()})


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked(hint: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is None or hint is type(None):
        if value is not None and hint is not Any:
            raise TypeError(f"{name} must be None")
        return value
    if origin is Literal:
        if value in arguments:
            return value
    elif origin in (Union, types.UnionType):
        return _first_fitting(arguments, value, name)
    elif hint is float:
        if type(value) in (int, float):
            return float(value)
    elif hint in (int, str, bool):
        if type(value) is hint:
            return value
    elif is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value) if isinstance(value, dict) else _refuse(hint, value, name)
    elif origin is dict:
        if isinstance(value, dict):
            return {str(key): _checked(arguments[1], part, name) for key, part in value.items()}
    elif origin is tuple:
        if isinstance(value, list | tuple) and len(value) == len(arguments):
            return tuple(_checked(one, part, name) for one, part in zip(arguments, value, strict=True))
    elif origin in (list, Sequence) and isinstance(value, list | tuple):
        return [_checked(arguments[0], part, name) for part in value]
    return _refuse(hint, value, name)


def _first_fitting(hints: Sequence[Any], value: Any, name: str) -> Any:
    for hint in hints:
        try:
            return _checked(hint, value, name)
        except TypeError:
            continue
    return _refuse(" or ".join(map(str, hints)), value, name)


def _refuse(hint: Any, value: Any, name: str) -> Any:
    raise TypeError(f"{name} must be {getattr(hint, '__name__', hint)}, got {type(value).__name__}")
