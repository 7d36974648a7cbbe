"""Small immutable values without a JSON form, such as dates, paths and dtypes: how they are written and read."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable, Collection
from typing import Any

import torch

from lightning_tricks.auto_resume.core.attributes.value_types import SCALARS, CannotRestoreError

_TIMES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}
_PATHS = {kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath)}


def write_scalar(value: Any) -> dict[str, Any] | None:
    """Return a value as JSON; None if it is of another type."""
    kind = type(value)
    for kinds, write in _WRITERS:
        if kind in kinds:
            return {"kind": _KIND_NAMES.get(kind, kind.__name__), "value": write(value)}
    return None


def read_scalar(encoded: dict[str, Any]) -> Any:
    """Return the value that `write_scalar` wrote."""
    return _READERS[encoded["kind"]](encoded["value"])


def _write_time(value: Any) -> str:
    if getattr(value, "tzinfo", None) is not None and type(value.tzinfo) is not datetime.timezone:
        raise ValueError("only datetime.timezone can be written as a time zone")
    return str(value.isoformat())


def _validated_int(value: Any) -> Any:
    if type(value) not in SCALARS:
        raise TypeError("a slice of values that are no numbers")
    return value


def _validated(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise CannotRestoreError(f"{value!r} is not a {kind.__name__}")
    return value


_KIND_NAMES: dict[type, str] = {pathlib.PosixPath: "Path", pathlib.WindowsPath: "Path"}
_WRITERS: tuple[tuple[Collection[Any], Callable[[Any], Any]], ...] = (
    ((int,), hex),
    ((complex,), lambda value: [value.real, value.imag]),
    ((torch.Size,), list),
    ((torch.dtype, torch.device), str),
    (tuple(_TIMES.values()), _write_time),
    ((datetime.timedelta,), lambda value: [value.days, value.seconds, value.microseconds]),
    ((*_PATHS.values(), *_KIND_NAMES), str),
    ((fractions.Fraction,), lambda value: [hex(value.numerator), hex(value.denominator)]),
    ((decimal.Decimal, uuid.UUID), str),
    ((range,), lambda value: [value.start, value.stop, value.step]),
    ((slice,), lambda value: [_validated_int(part) for part in (value.start, value.stop, value.step)]),
)
_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda value: int(value, 16),
    "complex": lambda value: complex(*value),
    "Size": torch.Size,
    "dtype": lambda value: _validated(vars(torch).get(value.removeprefix("torch.")), torch.dtype),
    "device": torch.device,
    **{name: kind.fromisoformat for name, kind in _TIMES.items()},
    "timedelta": lambda value: datetime.timedelta(*value),
    **_PATHS,
    "Path": pathlib.Path,
    "Fraction": lambda value: fractions.Fraction(*(int(part, 16) for part in value)),
    "Decimal": decimal.Decimal,
    "UUID": uuid.UUID,
    "range": lambda value: range(*value),
    "slice": lambda value: slice(*value),
}
