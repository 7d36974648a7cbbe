"""The types of values: which are scalars and containers, and what they are called."""

from __future__ import annotations

import enum
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

SCALARS = frozenset({type(None), bool, int, float, str})
MISSING: Any = object()
BASES = (OrderedDict, Counter, defaultdict, dict, list, set, frozenset, deque, tuple)  # special ones first
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


class CannotRestoreError(ValueError):
    """A saved value needs something that this process lacks."""


def is_subclass(kind: type, *bases: type) -> bool:
    """Whether a type inherits from one of others; `__subclasscheck__` of a metaclass is not asked."""
    return any(base in kind.__mro__ for base in bases)


def type_name(kind: type) -> str:
    """Return the qualified name of a type, without the module for built-in types and those of the main script."""
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    return f"{module}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")


def function_name(value: Any) -> str:
    """Return the qualified name of a function or method written in Python; empty for other values."""
    if type(value) not in (types.FunctionType, types.MethodType):
        return ""
    return f"function {value.__module__}.{value.__qualname__}"


def find_class(name: str, base: type, present: Any = MISSING) -> type:
    """Return a class of a module that is imported already, by its qualified name.

    Raises:
        CannotRestoreError: If there is no such class, or it does not extend `base`.
    """
    if present is not MISSING and name in (f"{type(present).__module__}.{type(present).__qualname__}",):
        return type(present)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:] if found is not None else ():
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if isinstance(found, type) and is_subclass(found, base):
            return found
    raise CannotRestoreError(f"there is no class {name}")


def container_base(kind: type) -> type | None:
    """Return the container type of the standard library that a type is or extends; None if it is no container."""
    if kind in BASES:
        return kind
    if is_subclass(kind, torch.Size) or (
        is_subclass(kind, tuple) and kind is not tuple and not hasattr(kind, "_fields")
    ):
        return None
    return next((base for base in BASES if base in kind.__mro__), None)


def container_items(value: Any, base: type) -> Iterable[tuple[Any, Any]]:
    """Return (key, value) or (index, value) pairs of a container; no method of a subclass is called."""
    if is_subclass(base, OrderedDict):
        return OrderedDict.items(value)
    if is_subclass(base, dict):
        return dict.items(value)
    return enumerate(base.__iter__(value))  # type: ignore[attr-defined]


def key_label(key: Any) -> str:
    """Return the name of a container's entry in a path."""
    kind = type(key)
    if kind in SCALARS or (kind is tuple and all(type(part) in SCALARS for part in key)):
        return str(key)[:100]
    return f"{kind.__name__}.{key._name_}" if is_subclass(kind, enum.Enum) else kind.__name__
