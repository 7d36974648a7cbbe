"""A walk over objects and what they hold, which finds their attributes.

It also finds the states that the Trainer does not save: a teacher in a list, averaged weights in a callback, an
optimizer that a module creates for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks._torch_compat.modules import REGISTRIES, module_internals
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    CELL_CONTENTS,
    MISSING,
    REQUIRES_GRAD,
    SCALARS,
    TRAINING,
    CannotRestoreError,
    attribute_dict,
    attributes,
    has_attributes,
    is_subclass,
    labelled,
)
from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.attributes.user_code import (
    closure_variables,
    functions_of,
    global_names,
    held_parts,
    is_callable_with_state,
    is_never_walked,
    is_stateful,
    is_user_class,
    is_user_module,
    is_users,
    is_walkable,
)
from lightning_tricks.auto_resume.core.attributes.value_kinds import container_kind, is_mutable

STATE_KEY = "state_dict()"  # the name of an object's own state among its attributes
MAX_OBJECTS = 20_000
MAX_ENTRIES = 10_000  # of a container whose objects are walked
MAX_OBJECT_DEPTH = 40  # attributes of attributes
MAX_CONTAINER_DEPTH = 4  # containers in containers whose objects are walked

_LEAVES = SCALARS | {Tensor, np.ndarray, bytes}  # they hold no objects that are walked

SkippedNames = Callable[[Any], Collection[str]]


def nothing_skipped(_: Any) -> Collection[str]:
    """Skip no attribute."""
    return ()


@dataclass
class AttributeSlot:
    """One attribute.

    Attributes:
        owner: The object that has it; None for a root that is a container.
        owner_path: Path of the owner.
        name: Name of the attribute.
        value: Its value.
        target: Path of the object that it holds, if that is walked; empty if not.
        is_flag: Whether it is the mode of a module, or whether a parameter trains.
    """

    owner: Any
    owner_path: str
    name: str
    value: Any
    target: str = ""
    is_flag: bool = False


@dataclass
class ObjectWalk:
    """What a walk over objects found: each object once, under the first path that leads to it.

    Attributes:
        skipped: Returns the names of attributes to leave out of an object.
        with_code: Whether functions of the user's code are walked as well: what they are bound to, their closures and
            default arguments, and the global variables that they name.
        slots: Path -> attribute.
        owners: Path -> object.
        modules: Path of each module that another one registers -> path of that one, and the name in it.
        stateful: Path -> object with a `state_dict` and a `load_state_dict`: an object that is not a module, or the
            tensors of a module that is neither registered by another one nor a root.
        tensors: Path -> parameter or buffer.
        registered: Id of each parameter and buffer -> its path.
        paths: Id of each object -> its path.
        references: Id -> path of objects, parameters and buffers.
        truncated: Paths of objects beyond the bounds on their number and depth.
        has_models: Whether the model is among the roots: elsewhere, modules that functions name are left out.
    """

    skipped: SkippedNames
    with_code: bool = False
    slots: dict[str, AttributeSlot] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, tuple[str, str]] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    registered: dict[int, str] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    references: dict[int, str] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)
    has_models: bool = False
    _seen_functions: set[int] = field(default_factory=set)
    _open_owners: set[int] = field(default_factory=set)
    _seen_containers: set[int] = field(default_factory=set)

    @classmethod
    def from_roots(cls, roots: Mapping[str, Any], skipped: SkippedNames, *, with_code: bool = False) -> ObjectWalk:
        """Walk over objects, given by name."""
        walk = cls(skipped, with_code)
        walk.has_models = any(is_subclass(type(root), nn.Module) for root in roots.values())
        for name, root in roots.items():
            kind = type(root)
            if kind in SCALARS or (is_never_walked(kind) and not is_subclass(kind, Optimizer)):
                continue
            if has_attributes(kind) and container_kind(kind) is None:
                walk._visit(root, name, 0)
            else:
                walk._add_slot(AttributeSlot(None, name, "", root), name, 0)
        walk.references = walk.registered | walk.paths
        walk.slots = {path: slot for path, slot in walk.slots.items() if id(slot.value) not in walk.registered}
        return walk

    def digest(self, value: Any, *, same_process: bool = True) -> ValueDigest:
        """Return the digest of a value, in which walked objects, parameters and buffers count by their paths."""
        return ValueDigest.of(value, self.references, same_process, lambda part: is_walkable(type(part)))

    def _visit(self, value: Any, path: str, depth: int, *, is_part: bool = False) -> str:
        """Walk over an object unless it was seen before; return its path, empty if it is beyond the bounds."""
        if id(value) in self.paths:
            return self.paths[id(value)]
        if depth > MAX_OBJECT_DEPTH or len(self.owners) >= MAX_OBJECTS:
            self.truncated.append(path)
            return ""
        self.paths[id(value)] = path
        self.owners[path] = value
        skipped = self.skipped(value)
        if is_subclass(type(value), nn.Module):
            if depth and not is_part and "state_dict" not in skipped:
                self.stateful[path] = UnsavedModuleState(value, self.registered)
            self._visit_module(value, path, depth, skipped)
            if path in self.stateful:
                self._add_flags(value, path, depth)
            skipped = module_internals().union(skipped)
        elif "state_dict" not in skipped and is_stateful(type(value)):
            self.stateful[path] = value
        self._visit_callable(value, path, depth)
        for name, part in attributes(value):
            if name not in skipped:
                self._add_slot(AttributeSlot(value, path, name, part), f"{path}.{name}", depth + 1)
        for kind in type(value).__mro__:
            if id(kind) not in self.paths and is_user_class(kind):
                self._visit_class(kind, f"{path}.{kind.__name__}", depth, skipped)
        return path

    def _visit_class(self, kind: type, path: str, depth: int, skipped: Collection[str]) -> None:
        """Add the values that all objects of a class share and may change: its plain and its mutable ones."""
        self.paths[id(kind)] = path
        self.owners[path] = kind
        for name, part in tuple(vars(kind).items()):
            if not name.startswith("__") and name not in skipped and (type(part) in SCALARS or is_mutable(type(part))):
                self._add_slot(AttributeSlot(kind, path, name, part), f"{path}.{name}", depth + 1)
        for function in functions_of(kind) if self.with_code else ():
            self._visit_callable(function, f"{path}.{function.__name__}", depth)

    def _visit_callable(self, value: Any, path: str, depth: int) -> None:
        """Add the values that a function, a method or a partial keeps."""
        if not self.with_code or not is_callable_with_state(type(value)):
            return
        if type(value) is FunctionType:
            if id(value) in self._seen_functions or not is_users(value):
                return
            self._seen_functions.add(id(value))
            self.owners[path] = value
            for name, part in attributes(value):
                if type(part) in SCALARS or is_mutable(type(part)):
                    self._add_slot(AttributeSlot(value, path, name, part), f"{path}.{name}", depth + 1)
            for name, cell in closure_variables(value):
                self._visit_variables(cell, {CELL_CONTENTS}, f"{path}.{name}", depth)
            self._visit_variables(sys.modules[value.__module__], global_names(value), "", depth)
        for name, part in held_parts(value):
            inner = f"{path}.{name}"
            if is_callable_with_state(type(part)):
                self._visit_callable(part, inner, depth + 1)
            elif self._may_hold_state(part) and (is_walkable(type(part)) or is_mutable(type(part))):
                self._add_slot(AttributeSlot(None, inner, "", part), inner, depth + 1)

    def _visit_variables(self, owner: Any, names: Collection[str], path: str, depth: int) -> None:
        """Add the variable of a closure's cell, or those of the user's modules that have some names."""
        is_module = type(owner) is ModuleType
        path = self.paths.setdefault(id(owner), f"globals.{owner.__name__}" if is_module else path)
        self.owners[path] = owner
        own, skipped = dict(attributes(owner)), self.skipped(owner)
        self._open_owners.add(id(owner))  # modules may import each other
        for name in sorted(own.keys() & names):
            value, inner = own[name], f"{path}.{name}"
            if name in skipped or name.startswith("__") or inner in self.slots:
                continue
            if is_subclass(type(value), ModuleType):  # packages that import their parts later are subclasses
                if is_user_module(value.__name__) and id(value) not in self._open_owners:
                    self._visit_variables(value, names, "", depth)
            elif type(value) is FunctionType:
                self._visit_callable(value, inner, depth + 1)
            elif is_subclass(type(value), type):
                if is_user_class(value) and id(value) not in self.paths:
                    self._visit_class(value, inner, depth, ())
            elif self._may_hold_state(value):
                self._add_slot(AttributeSlot(owner, path, name, value), inner, depth + 1)
        self._open_owners.discard(id(owner))

    def _may_hold_state(self, value: Any) -> bool:
        """Whether a function's value is tracked here: models only with the model, and nothing of this package."""
        if str(type(value).__module__).startswith("lightning_tricks."):
            return False
        return self.has_models or not is_subclass(type(value), nn.Module)

    def _visit_module(self, module: Any, path: str, depth: int, skipped: Collection[str]) -> None:
        own = attribute_dict(module) or {}
        *tensors, modules = (own.get(kind, {}) for kind in REGISTRIES)
        for registry in tensors:
            for name, part in registry.items():
                if part is not None:
                    inner = f"{path}.{name}"
                    self.registered.setdefault(id(part), inner)
                    self.tensors[inner] = part
        for name, child in modules.items():
            if child is not None and name not in skipped:
                inner = f"{path}.{name}"
                if self._visit(child, inner, depth + 1, is_part=True) == inner:
                    self.modules[inner] = path, name

    def _add_flags(self, module: Any, path: str, depth: int) -> None:
        """Add the modes and frozen parameters of a module that no other one registers: nobody else restores them."""
        for parts, known, flag in (
            (module.named_modules(), self.paths, TRAINING),
            (module.named_parameters(), self.registered, REQUIRES_GRAD),
        ):
            for name, part in parts:
                inner, value = f"{path}.{name}".removesuffix("."), getattr(part, flag, None)  # frozen scripts have none
                if known.get(id(part)) == inner:
                    self._add_slot(AttributeSlot(part, inner, flag, value, is_flag=True), f"{inner}.{flag}", depth + 1)

    def _add_slot(self, slot: AttributeSlot, path: str, depth: int) -> None:
        """Add an attribute, and walk over what it holds."""
        self.slots[path] = slot
        if type(slot.value) not in SCALARS:
            slot.target = self._visit_value(slot.value, path, depth, 0)

    def _visit_value(self, value: Any, path: str, depth: int, nested: int) -> str:
        """Walk over the value of an attribute, or an entry of a container; return the path of an object."""
        kind = type(value)
        if is_walkable(kind):
            return self._visit(value, path, depth)
        if is_callable_with_state(kind):
            self._visit_callable(value, path, depth)
        elif container_kind(kind) is not None:
            self._visit_container(value, path, depth, nested)
        elif has_own_state_dict(kind) or (not nested and is_stateful(kind)):
            self._add_stateful(value, path)
        return ""

    def _visit_container(self, value: Any, path: str, depth: int, nested: int) -> None:
        """Walk over the objects in a container and in containers in it, and the attributes of subclasses of these."""
        container: Any = container_kind(type(value))
        is_subclassed = container.container is not type(value) and has_attributes(type(value))
        if is_subclassed and id(value) not in self._seen_containers and attribute_dict(value) is not value:
            self._seen_containers.add(id(value))
            inner = f"{path}.__dict__"
            self.owners[inner] = value
            for name, part in attributes(value):
                self._add_slot(AttributeSlot(value, inner, name, part), f"{inner}.{name}", depth + 1)
        is_searched = nested <= MAX_CONTAINER_DEPTH and container.has_order
        if not is_searched or container.container.__len__(value) > MAX_ENTRIES:
            return
        pairs = list(container.entries(value))
        if _LEAVES.issuperset(type(part) for _, part in pairs):
            return
        names = self.registered | self.paths if container.is_keyed else {}
        labels = labelled((key for key, _ in pairs), names) if container.is_keyed else map(str, range(len(pairs)))
        for (_, part), label in zip(pairs, labels, strict=True):
            kind = type(part)
            if not (kind in _LEAVES or (kind in (list, tuple) and _LEAVES.issuperset(map(type, part)))):
                self._visit_value(part, f"{path}.{label}", depth, nested + 1)

    def _add_stateful(self, value: Any, path: str) -> None:
        """Add an object that is not walked, by its state."""
        if "state_dict" not in self.skipped(value) and id(value) not in self.paths:
            self.paths[id(value)] = path
            self.stateful[path] = InPlaceOptimizerState(value) if is_subclass(type(value), Optimizer) else value


class UnsavedModuleState:
    """The parameters and buffers of a module that are saved nowhere else.

    Args:
        module: The module.
        saved: Ids of tensors that are saved elsewhere.
    """

    def __init__(self, module: nn.Module, saved: Collection[int]) -> None:
        self._module, self._saved = module, frozenset(saved)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors, including non-persistent buffers."""
        return {name: tensor.detach() for name, tensor in self.tensors().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy saved values into the tensors.

        Raises:
            CannotRestoreError: If a tensor is missing or has another shape.
        """
        own = self.tensors()
        for name, value in state.items():
            if name not in own or own[name].shape != value.shape:
                raise CannotRestoreError(f"it has no tensor {name} of shape {tuple(value.shape)}")
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors themselves: name -> tensor."""
        tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        return {
            name: tensor
            for name, tensor in tensors.items()
            if id(tensor) not in self._saved and not is_lazy(tensor) and tensor.device.type != "meta"
        }


class InPlaceOptimizerState:
    """An optimizer whose state is replaced in place, as other objects may share it.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the dicts that the optimizer has, where `Optimizer.load_state_dict` would set new ones."""
        optimizer = self._optimizer
        groups, kept = optimizer.param_groups, optimizer.state
        optimizer.load_state_dict(state)
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        loaded_state = dict(optimizer.state)
        kept.clear()
        kept.update(loaded_state)
        optimizer.param_groups, optimizer.state = groups, kept


def has_own_state_dict(kind: type) -> bool:
    """Whether objects of a type are tracked by their states alone: optimizers and schedulers."""
    return is_subclass(kind, Optimizer, LRScheduler)


def get_state(stateful: Any) -> Any:
    """Return the state of an object; `MISSING` if it raises."""
    try:
        return stateful.state_dict()
    except Exception:  # user code
        return MISSING
