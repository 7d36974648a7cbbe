"""The tensors that a fingerprint of any value is computed of."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from datetime import date, time, timedelta
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# their `repr` shows the whole value, and no address
_PLAIN = (type(None), str, bytes, bytearray, Number, np.generic, range, date, time, timedelta, os.PathLike)
_WITHOUT_VALUE = (type, nn.Module, FunctionType, BuiltinFunctionType, MethodType)


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors in containers, dataclasses and other objects; plain values as tensors of bytes.

    Of an object its attributes count; of a module, a function and the like only the type.
    """
    return _parts(value, name, ())


def children_of(value: Any) -> dict[str, Any]:
    """Return the items of a container or the attributes of an object, by name; {"batch": value} for a single value."""
    inner = None if isinstance(value, Tensor) else _children(value)
    return {"batch": value} if inner is None else {str(name): part for name, part in inner.items()}


def _parts(value: Any, name: str, around: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        yield name, torch.from_numpy(np.array(value))
    elif isinstance(value, _PLAIN):
        yield name, _as_bytes(value)
    elif id(value) not in around:
        inner = _children(value)
        if inner is None:
            yield name, _as_bytes(type(value).__qualname__)
        around = (*around, id(value))
        for key, part in (inner or {}).items():
            label = f"{name}.{key}" if name else str(key)
            if isinstance(part, Tensor):  # most are, and there may be many
                yield label, part
            else:
                yield from _parts(part, label, around)


def _children(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Set):
        return dict(enumerate(sorted(value, key=repr)))
    if isinstance(value, np.ndarray):
        value = np.atleast_1d(value).tolist()
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, _WITHOUT_VALUE):
        return None
    if hasattr(type(value), "__array__") or hasattr(type(value), "__array_interface__"):  # pictures, data frames
        with suppress(Exception):
            return {"values": np.asarray(value)}
    return _attributes(value)


def _attributes(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object, also those in slots; None if it can have none."""
    slots: list[str] = []
    for base in type(value).__mro__:
        own = vars(base).get("__slots__", ())
        private = f"_{base.__name__.lstrip('_')}"  # before names with two underscores; the special ones drop out
        slots += [
            private + name if name.startswith("__") else name for name in ([own] if isinstance(own, str) else own)
        ]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(getattr(value, "__dict__", {}))


def _as_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
