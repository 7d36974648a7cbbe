"""What functions of the user's code keep values in: bound objects, closures, default arguments, global variables."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from lightning_tricks.auto_resume.core.attributes.value_types import is_subclass
from lightning_tricks.auto_resume.core.attributes.walkable_types import is_user_module

_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def is_callable_with_state(kind: type) -> bool:
    """Whether objects of a type are functions, methods or partials, which may hold other objects."""
    return is_subclass(kind, *_CALLABLES)


def is_users(function: types.FunctionType) -> bool:
    """Whether a function is the user's own, not one of an installed package or of this one."""
    if not is_user_module(function.__module__) or function.__module__.startswith("lightning_tricks."):
        return False
    # what dataclasses and attrs write for a class comes from no file, where the class does
    is_generated = function.__code__.co_filename.startswith(("<string>", "<attrs "))
    return not (is_generated and hasattr(sys.modules[function.__module__], "__file__"))


def held_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a method or a partial holds, by name: it stays the same, but may change in place."""
    if is_subclass(type(value), types.MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif is_subclass(type(value), functools.partial):
        yield "func", value.func
        yield from ((str(number), part) for number, part in enumerate(value.args))
        yield from value.keywords.items()
    else:
        yield from ((f"defaults.{number}", part) for number, part in enumerate(value.__defaults__ or ()))
        yield from (value.__kwdefaults__ or {}).items()


def closure_variables(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the cells of a function's closure by the names of their variables."""
    return list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def global_names(function: types.FunctionType) -> set[str]:
    """Return the names that a function uses, among which are those of the global variables that it reads and sets."""
    names, pending = set[str](), [function.__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return names


def functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield the functions that a class itself defines, also those of its properties."""
    for member in tuple(vars(kind).values()):
        if is_subclass(type(member), classmethod, staticmethod):
            member = member.__func__
        found = (member.fget, member.fset, member.fdel) if is_subclass(type(member), property) else (member,)
        yield from (one for one in found if type(one) is types.FunctionType)
