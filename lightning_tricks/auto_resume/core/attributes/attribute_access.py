"""Types, names and attributes of objects, read and set without calling any method of theirs."""

from __future__ import annotations

import enum
import logging
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks._torch_compat.modules import REGISTRIES

SCALARS = frozenset({type(None), bool, int, float, str})
MISSING: Any = object()
TRAINING = "training"  # the attribute of a module that says its mode
REQUIRES_GRAD = "requires_grad"  # that of a parameter that says whether it trains
CELL_CONTENTS = "cell_contents"  # the attribute of a cell, which is a variable of a closure
# a fresh process has these anyway, or they say nothing about a run
IGNORED_TYPES = (types.ModuleType, logging.Logger, type(threading.Lock()), type(threading.RLock()))
# objects in Python that stand for something else: processes, and what reads data, whose position is restored elsewhere
HANDLES = (threading.Thread, BaseProcess, DataLoader, type)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_METHODS = (types.FunctionType, classmethod, staticmethod, property)
Found = TypeVar("Found")


class CannotRestoreError(ValueError):
    """A saved value needs something that this process lacks."""


def remembered_by_type(function: Callable[[type], Found]) -> Callable[[type], Found]:
    """Let a function remember what it returned for a type, as long as the type lives."""
    known: WeakKeyDictionary[type, Found] = WeakKeyDictionary()

    def remembered(kind: type) -> Found:
        found: Found = known.get(kind, MISSING)
        if found is MISSING:
            found = known[kind] = function(kind)
        return found

    return remembered


def is_subclass(kind: type, *bases: type) -> bool:
    """Whether a type inherits from one of others; `__subclasscheck__` of a metaclass is not asked."""
    ancestors = kind.__mro__
    for base in bases:  # noqa: SIM110  # asked for each attribute, and `any` takes twice as long
        if base in ancestors:
            return True
    return False


def type_name(kind: type) -> str:
    """Return the qualified name of a type, without the module for built-in types and those of the main script."""
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    return f"{module}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")


def function_name(value: Any) -> str:
    """Return the qualified name of a function or method written in Python; empty for other values."""
    if type(value) not in (types.FunctionType, types.MethodType):
        return ""
    return f"function {value.__module__}.{value.__qualname__}"


def key_label(key: Any) -> str:
    """Return the name of a container's entry in a path."""
    kind = type(key)
    if kind in SCALARS or (kind is tuple and all(type(part) in SCALARS for part in key)):
        return str(key)[:100]
    return f"{kind.__name__}.{key._name_}" if is_subclass(kind, enum.Enum) else kind.__name__


def labelled(keys: Iterable[Any], names: Mapping[int, str]) -> Iterator[str]:
    """Yield a label for each key of a dict, or entry of a set: by its path, if it has one, and no label twice.

    Args:
        keys: The keys.
        names: Id -> path of parameters and objects.
    """
    seen = set[str]()
    for key in keys:
        label = key_label(key) if type(key) in SCALARS else names.get(id(key)) or key_label(key)
        while label in seen:
            label += "'"  # of another key
        seen.add(label)
        yield label


def find_class(name: str, base: type, present: Any = MISSING) -> type:
    """Return a class of a module that is imported already, by its qualified name.

    Raises:
        CannotRestoreError: If there is no such class, or it does not extend `base`.
    """
    if present is not MISSING and name == f"{type(present).__module__}.{type(present).__qualname__}":
        return type(present)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:] if found is not None else ():
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if isinstance(found, type) and is_subclass(found, base):
            return found
    raise CannotRestoreError(f"there is no class {name}")


def has_attributes(kind: type) -> bool:
    """Whether objects of a type can have attributes of their own."""
    return bool(kind.__dictoffset__) or bool(_slots(kind))


@remembered_by_type
def has_only_attributes(kind: type) -> bool:
    """Whether objects of a type hold nothing but attributes, as no part of the class that has fields is written in C.

    Then an object is not larger than `object`, its slots, and the pointers to its dict and its weak references; by the
    same sum, `object.__reduce_ex__` decides whether `pickle` can copy an object by its attributes (Python 3.6 on).
    From 3.11 on the dict, from 3.12 on the weak references may lie in front of the object: their offsets are negative.
    """
    pointers = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    size = object.__basicsize__ + struct.calcsize("P") * (len(_slots(kind)) + pointers)
    is_local = is_subclass(kind, threading.local)  # written in C, with a dict for each thread
    return is_local or (not kind.__itemsize__ and kind.__basicsize__ == size and kind is not object)


def attribute_dict(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes; None if it has none."""
    try:
        is_local = is_subclass(type(value), threading.local)  # which has a dict for each thread
        found: Any = vars(value) if is_local else object.__getattribute__(value, "__dict__")
    except Exception:  # a property of a strange class may raise anything
        return None
    return found if isinstance(found, dict) else None


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return names and values of the attributes that an object itself has, those in `__slots__` included.

    Not those that begin with two underscores: Python writes the class before a user's, and others are machinery, such
    as what torch's composable API (FSDP2, `replicate`) keeps with a module of the process.
    """
    own = {} if type(value) is types.CellType else attribute_dict(value) or {}
    found = [(name, part) for name, part in own.items() if type(name) is str and not name.startswith("__")]
    for name in (CELL_CONTENTS,) if type(value) is types.CellType else _slots(type(value)):
        try:
            found.append((name, object.__getattribute__(value, name)))
        except (AttributeError, ValueError):  # it is not set; the latter of a closure's variable
            continue
    return found


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute without calling `__setattr__` or a property of the class.

    Raises:
        CannotRestoreError: If the name is that of a method or, in a module, of a parameter, a buffer or a module.
    """
    own = attribute_dict(owner)
    if (name.startswith("__") and name not in _slots(type(owner))) or _is_method(owner, name):
        raise CannotRestoreError("it is a method of the class")
    if is_subclass(type(owner), nn.Module) and any(name in (own or {}).get(kind, ()) for kind in REGISTRIES):
        raise CannotRestoreError("it is a parameter, buffer or submodule in this run")
    is_code = is_subclass(type(dict(attributes(owner)).get(name)), *_CODE)
    if is_code and type(owner) in (types.ModuleType, types.CellType):
        raise CannotRestoreError("it is a function, a class or a module in this run")
    own, base = _own_dict(owner, name), type if is_subclass(type(owner), type) else object
    if own is None:
        base.__setattr__(owner, name, value)
    else:
        own[name] = value


def delete_attribute(owner: Any, name: str) -> None:
    """Delete an attribute without calling `__delattr__` of the class."""
    own, base = _own_dict(owner, name), type if is_subclass(type(owner), type) else object
    if own is None:
        base.__delattr__(owner, name)
    else:
        del own[name]


@contextmanager
def patched(owner: Any, replaced: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of an object for the length of a block, without calling its `__setattr__`."""
    own = vars(owner)
    before = {name: own[name] for name in replaced if name in own}
    own.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            own.pop(name, None)
        own.update(before)


def _own_dict(owner: Any, name: str) -> dict[str, Any] | None:
    """Return the dict that holds an attribute; None for an attribute of a class, and for one in `__slots__`."""
    return None if is_subclass(type(owner), type) or name in _slots(type(owner)) else attribute_dict(owner)


def _is_method(owner: Any, name: str) -> bool:
    kind = owner if is_subclass(type(owner), type) else type(owner)
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return is_subclass(type(found), *_METHODS)


@remembered_by_type
def _slots(kind: type) -> tuple[str, ...]:
    declared = [vars(part).get("__slots__", ()) for part in kind.__mro__]
    names = [name for found in declared for name in ((found,) if isinstance(found, str) else found)]
    slots = [name for name in names if isinstance(name, str)]
    return tuple(
        name for name in dict.fromkeys(slots) if isinstance(getattr(kind, name, None), types.MemberDescriptorType)
    )
