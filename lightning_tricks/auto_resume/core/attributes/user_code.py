"""The user's own code: which modules are the user's, what functions keep, and which variables they name."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from lightning_tricks.auto_resume.core.attributes.attribute_access import has_only_attributes, remembered_by_type

FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)  # what is known by its name
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def is_user_module(name: object) -> bool:
    """Whether a module is the user's own code, by the place of its file: not Python's, not installed, and not ours.

    One without a file is the user's, as that of a notebook is, unless Python brings it.
    """
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or not isinstance(name, str):
        return False
    file = getattr(module, "__file__", None)
    return is_users_file(name, file) if isinstance(file, str) else name.partition(".")[0] not in sys.stdlib_module_names


@cache
def is_users_file(name: str, file: str) -> bool:
    """Whether the file of a module is the user's own code."""
    path = Path(file)
    level = min(name.count(".") + (path.stem == "__init__"), len(path.parents) - 1)
    return name.partition(".")[0] != "lightning_tricks" and not _is_of_packages(path.parents[level])


@cache
def _is_of_packages(folder: Path) -> bool:
    """Whether a folder of modules is Python's, or one into which pip installs: it puts `*.dist-info` beside them."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return not standard.isdisjoint(map(str, (folder, *folder.parents))) or any(folder.glob("*.dist-info"))


@remembered_by_type
def is_user_class(kind: type) -> bool:
    """Whether a class is defined in the user's own code."""
    return is_user_module(kind.__module__)


def can_be_rebuilt(kind: type, owners: list[Any]) -> bool:
    """Whether an object of a class can be created for its owners from its attributes alone, without running code.

    The modules that define the owners' classes must define or import the class, or import its module: so a checkpoint
    cannot have objects of arbitrary classes created.
    """
    if issubclass(kind, nn.Module) or hasattr(kind, "__del__") or not has_only_attributes(kind):
        return False
    bases = [base for owner in owners for base in type(owner).__mro__]
    modules = [sys.modules.get(base.__module__) for base in bases if is_user_module(base.__module__)]
    modules += [owner for owner in owners if type(owner) is types.ModuleType]
    named = [value for module in modules if module is not None for value in vars(module).values()]
    return any(value is kind or value is sys.modules.get(kind.__module__) for value in named)


def is_users(function: types.FunctionType) -> bool:
    """Whether a function is the user's own, not one of an installed package or of this one."""
    if not is_user_module(function.__module__):
        return False
    # the code that dataclasses and attrs write for a class is in no file, while the class is
    is_generated = function.__code__.co_filename.startswith(("<string>", "<attrs "))
    return not (is_generated and hasattr(sys.modules[function.__module__], "__file__"))


def held_parts(value: Any) -> list[tuple[str, Any]]:
    """Return what a function, a method or a partial holds, by name: it may change in place."""
    if type(value) is types.MethodType:
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), *((str(n), part) for n, part in enumerate(value.args)), *value.keywords.items()]
    if type(value) is not types.FunctionType or not is_users(value):
        return []
    defaults = [(f"defaults.{number}", part) for number, part in enumerate(value.__defaults__ or ())]
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    return [*defaults, *(value.__kwdefaults__ or {}).items(), *vars(value).items(), *cells]


@lru_cache(4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function uses, among which are those of the global variables that it reads and sets."""
    names, pending = set[str](), [code]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(names)


def functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield the functions that a class itself defines, also those of its properties."""
    for member in tuple(vars(kind).values()):
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        found = (inner.fget, inner.fset, inner.fdel) if isinstance(inner, property) else (inner,)
        yield from (function for function in found if type(function) is types.FunctionType)


def is_stateful(owner: Any) -> bool:
    """Whether an object, or those of a type, have a `state_dict` and a `load_state_dict`, as samplers of torchdata."""
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))
