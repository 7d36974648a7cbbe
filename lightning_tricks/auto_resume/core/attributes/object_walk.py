"""Where attributes are looked for: in modules and what they register, in objects that are given, in the user's code.

Of the user's code, these are attributes of classes, and the global variables that their methods and functions name.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_tricks._torch_compat.modules import COMPILED_MODULE, REGISTRIES, module_internals
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    CELL_CONTENTS,
    HANDLES,
    MISSING,
    SCALARS,
    attribute_dict,
    attributes,
    has_attributes,
    is_subclass,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.encoding import (
    SkippedNames,
    attributes_beside,
    content_of,
    has_identity,
    is_held_object,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.user_code import (
    CALLABLES,
    functions_of,
    global_names,
    held_parts,
    is_user_class,
    is_user_module,
    is_users,
)
from lightning_tricks.auto_resume.core.attributes.value_kinds import container_kind

MAX_OBJECTS = 20_000
MAX_ENTRIES = 10_000  # of a container in which objects are looked for
_LEAVES = SCALARS | {Tensor, np.ndarray, bytes}  # they hold no objects


@dataclass(slots=True)
class AttributeSlot:
    """One attribute.

    Attributes:
        owner: The object that has it; None for a root that has no attributes.
        owner_path: Path of the owner.
        name: Name of the attribute.
        value: Its value.
    """

    owner: Any
    owner_path: str
    name: str
    value: Any


@dataclass
class ObjectWalk:
    """What a walk found.

    Attributes:
        skipped: Returns the names of attributes to leave out of an object.
        slots: Path -> attribute.
        owners: Path -> object that has them: roots, registered modules and parameters, and the user's code.
        modules: Path of each module that another one registers -> path of that one, and the name in it.
        tensors: Path -> parameter or buffer.
        references: Id -> path of what is saved elsewhere: registered modules and tensors, and what is given as known.
        known: Path -> object that is given as known.
    """

    skipped: SkippedNames
    known: Mapping[str, Any] = field(default_factory=dict)
    slots: dict[str, AttributeSlot] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, tuple[str, str]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    references: dict[int, str] = field(default_factory=dict)

    @classmethod
    def from_roots(
        cls,
        roots: Mapping[str, Any],
        skipped: SkippedNames = nothing_skipped,
        *,
        with_code: bool = False,
        known: Mapping[str, Any] | None = None,
    ) -> ObjectWalk:
        """Walk over objects, given by name; `with_code` over the user's classes and global variables, too."""
        walk = cls(skipped, known or {})
        walk.references = {id(value): path for path, value in walk.known.items()}
        for path, root in roots.items():
            if is_subclass(type(root), nn.Module):
                walk._add_module(root, path)
            elif is_held_object(type(root)) or (
                has_attributes(type(root))
                and container_kind(type(root)) is None
                and not is_subclass(type(root), *CALLABLES)  # which hold more than their attributes
            ):
                walk._add_owner(root, path, walk.skipped(root))
            elif type(root) not in SCALARS and not is_subclass(type(root), *HANDLES):
                walk.slots[path] = AttributeSlot(None, path, "", root)
        if with_code:
            has_models = any(is_subclass(type(root), nn.Module) for root in roots.values())
            _CodeWalk(walk, has_models).visit(roots.values())
        return walk

    def _add_owner(self, value: Any, path: str, skipped: Collection[str]) -> None:
        """Add the attributes of an object unless it was met before."""
        if self.references.setdefault(id(value), path) != path:
            return
        self.owners[path] = value
        for name, part in attributes(value):
            if name not in skipped:
                self.slots[f"{path}.{name}"] = AttributeSlot(value, path, name, part)

    def _add_module(self, module: Any, path: str) -> None:
        """Add a module with all that it registers."""
        if id(module) in self.references:
            return
        own, left_out = attribute_dict(module) or {}, self.skipped(module)
        *tensors, modules = (own.get(kind, {}) for kind in REGISTRIES)
        # torch.compile's module hands what the user sets to the one inside, and keeps nothing but its own
        internals = own if COMPILED_MODULE in modules else module_internals()
        self._add_owner(module, path, {*left_out, *internals} if left_out else internals)
        for name, part in ((name, part) for registry in tensors for name, part in registry.items()):
            if part is not None:
                inner = f"{path}.{name}"
                self.tensors[inner] = part
                if beside := attributes_beside(part):  # such as a mask that the user gave a parameter
                    self.owners[inner] = part
                    for to, value in beside:
                        self.slots[f"{inner}.{to}"] = AttributeSlot(part, inner, to, value)
                self.references.setdefault(id(part), inner)
        for name, child in modules.items():
            if child is not None and name not in left_out:
                inner = f"{path}.{name}"
                self._add_module(child, inner)
                if self.references[id(child)] == inner:
                    self.modules[inner] = path, name


class _CodeWalk:
    """Looks through values for objects and functions of the user, and adds the variables of their code to a walk.

    Args:
        walk: The walk.
        has_models: Whether the model is among the roots: elsewhere, modules that functions name are left out.
    """

    def __init__(self, walk: ObjectWalk, has_models: bool) -> None:
        self._walk, self._has_models = walk, has_models
        self._seen = set[Any]()
        self._functions = list[FunctionType]()

    def visit(self, roots: Iterable[Any]) -> None:
        """Visit what the roots and the attributes hold, and then the code, which may name more."""
        pending = [*roots, *self._walk.owners.values()]
        known = 0
        while True:
            slots = [*self._walk.slots.values()][known:]  # those that the code has added
            known += len(slots)
            pending += [slot.value for slot in slots]
            while pending and len(self._seen) < MAX_OBJECTS:
                pending += self._parts_of(pending.pop())
            if not self._functions:
                return
            functions, self._functions = self._functions, []
            for function in functions:
                self._add_variables(sys.modules[function.__module__], global_names(function.__code__))

    def _parts_of(self, value: Any) -> Iterable[Any]:
        """Return what a value holds, unless it was visited; note its code."""
        kind = type(value)
        if kind in _LEAVES or id(value) in self._seen:
            return ()
        if is_subclass(kind, nn.Module) and not self._has_models:
            return ()
        self._seen.add(id(value))
        if (container := container_kind(kind)) is not None:
            if container.container.__len__(value) > MAX_ENTRIES or (
                not container.is_keyed and _LEAVES.issuperset(map(type, _entries_of_rows(value)))
            ):
                return ()
            return [part for _, part in container.entries(value)] if container.has_order else ()
        if is_subclass(kind, *CALLABLES):
            if kind is FunctionType and is_users(value):
                self._functions.append(value)
            return [content_of(part) for _, part in held_parts(value)]
        place = self._walk.references.get(id(value))
        is_known = place in self._walk.owners  # whose attributes, and what it registers, are visited by themselves
        is_module = is_subclass(kind, nn.Module)
        if not is_known and (place or not (is_module or is_held_object(kind))):  # such as the Trainer
            return ()
        self._add_classes(kind)
        if is_module:
            modules = [value] if is_known else value.modules()
            return [part for one in modules for part in (one, *_held_by_module(one))]
        if is_known:
            return ()
        left_out = self._walk.skipped(value)
        return [part for name, part in attributes(value) if name not in left_out]

    def _add_classes(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) not in self._seen:
                self._seen.add(id(base))
                if is_user_class(base) and not is_subclass(base, Enum):
                    self._add_class(base)

    def _add_class(self, kind: type) -> None:
        """Add the values that all objects of a class share and may change: its plain and its mutable ones."""
        path = type_name(kind)
        while path in self._walk.owners:
            path += "'"  # another class of the same name
        self._walk.owners[path] = kind
        for name, part in tuple(vars(kind).items()):
            if not name.startswith("__") and (type(part) in SCALARS or has_identity(type(part))):
                self._walk.slots[f"{path}.{name}"] = AttributeSlot(kind, path, name, part)
        for function in functions_of(kind):
            if is_users(function):
                self._add_function(function, f"{path}.{function.__name__}")

    def _add_function(self, function: FunctionType, path: str) -> None:
        """Add the variables of a function's closure, and its default arguments, which change in place."""
        self._seen.add(id(function))
        self._functions.append(function)
        self._walk.owners[path] = function
        for name, part in vars(function).items():
            if not name.startswith("__"):  # as functools.wraps sets one
                self._walk.slots[f"{path}.{name}"] = AttributeSlot(function, path, name, part)
        for name, part in held_parts(function):
            value, inner = content_of(part), f"{path}.{name}"
            if part is value:
                self._walk.slots.setdefault(inner, AttributeSlot(None, inner, "", value))
            elif value is not MISSING and not is_subclass(type(value), type, ModuleType):
                self._walk.owners[inner] = part
                self._walk.slots[f"{inner}.{CELL_CONTENTS}"] = AttributeSlot(part, inner, CELL_CONTENTS, value)

    def _add_variables(self, module: ModuleType, names: frozenset[str]) -> None:
        """Add the variables of a module of the user that have some names."""
        path = f"globals.{module.__name__}"
        own, left_out = vars(module), self._walk.skipped(module)
        for name in sorted(own.keys() & names - {*left_out}):
            value, inner = own[name], f"{path}.{name}"
            if (
                name.startswith("__")
                or inner in self._walk.slots
                or str(type(value).__module__).startswith("lightning_tricks.")
            ):
                continue
            if is_subclass(type(value), ModuleType):  # packages that import their parts later are subclasses
                if is_user_module(value.__name__) and (id(value), *sorted(names)) not in self._seen:
                    self._seen.add((id(value), *sorted(names)))
                    self._add_variables(value, names)
            elif type(value) is FunctionType:
                if id(value) not in self._seen and is_users(value):
                    self._add_function(value, inner)
            elif is_subclass(type(value), type):
                self._add_classes(value)
            elif self._has_models or not is_subclass(type(value), nn.Module):
                self._walk.owners[path] = module
                self._walk.slots[inner] = AttributeSlot(module, path, name, value)


def _held_by_module(module: Any) -> list[Any]:
    """Return the attributes of a module, and of torch's own what is neither empty nor registered: dicts of hooks."""
    internals = module_internals()
    return [
        part
        for name, part in attributes(module)
        if name not in internals or (part and name not in REGISTRIES and is_subclass(type(part), dict))
    ]


def _entries_of_rows(value: Any) -> Iterable[Any]:
    """Return what the tuples in a container hold; its entries if there are others."""
    return chain.from_iterable(value) if set(map(type, value)) == {tuple} else value
