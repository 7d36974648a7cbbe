"""Reads, sets and deletes attributes of an object without calling any method of its class."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lightning_tricks._torch_compat.modules import REGISTRIES
from lightning_tricks.auto_resume.core.attributes.value_types import MISSING, CannotRestoreError, is_subclass

CELL_CONTENTS = "cell_contents"  # the attribute of a cell, which is a variable of a closure
_slots_of: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def has_attributes(kind: type) -> bool:
    """Whether objects of a type can have attributes of their own."""
    return bool(kind.__dictoffset__) or bool(_slots(kind))


def attribute_dict(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes; None if it has none. No method of the class is called."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # a property of a strange class may raise anything
        return None
    return found if isinstance(found, dict) else None


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return names and values of the attributes that an object itself has, those in `__slots__` included."""
    if type(value) is types.CellType:
        part = _slot(value, CELL_CONTENTS)
        return [] if part is MISSING else [(CELL_CONTENTS, part)]
    found = [(name, part) for name, part in (attribute_dict(value) or {}).items() if type(name) is str]
    for name in _slots(type(value)):
        part = _slot(value, name)
        if part is not MISSING:
            found.append((name, part))
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
        raise CannotRestoreError("it is registered in the module here")
    if type(owner) in (types.ModuleType, types.CellType) and _is_code(dict(attributes(owner)).get(name)):
        raise CannotRestoreError("it is a function, a class or a module here")
    if is_subclass(type(owner), type):
        type.__setattr__(owner, name, value)
    elif own is None or name in _slots(type(owner)):
        object.__setattr__(owner, name, value)
    else:
        own[name] = value


def delete_attribute(owner: Any, name: str) -> None:
    """Delete an attribute without calling `__delattr__` of the class."""
    own = attribute_dict(owner)
    if is_subclass(type(owner), type):
        type.__delattr__(owner, name)
    elif own is None or name in _slots(type(owner)):
        object.__delattr__(owner, name)
    else:
        del own[name]


def _is_code(value: Any) -> bool:
    return is_subclass(type(value), types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def _is_method(owner: Any, name: str) -> bool:
    kind = owner if is_subclass(type(owner), type) else type(owner)
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return is_subclass(type(found), types.FunctionType, classmethod, staticmethod, property)


def _slots(kind: type) -> tuple[str, ...]:
    found = _slots_of.get(kind)
    if found is None:
        found = _slots_of[kind] = _find_slots(kind)
    return found


def _find_slots(kind: type) -> tuple[str, ...]:
    names = [name for part in kind.__mro__ for name in _names(vars(part).get("__slots__", ()))]
    return tuple(
        dict.fromkeys(name for name in names if isinstance(getattr(kind, name, None), types.MemberDescriptorType))
    )


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if isinstance(name, str))


def _slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except (AttributeError, ValueError):  # the latter of a closure's variable that is not set
        return MISSING
