"""The tensors that a fingerprint of any value is computed of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


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
    elif value is None or isinstance(value, str | bytes | int | float | complex | os.PathLike):
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
    if isinstance(value, list | tuple | np.ndarray):
        return dict(enumerate(value))
    if isinstance(value, type | nn.Module) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return dict(vars(value))


def _as_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
