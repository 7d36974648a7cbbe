"""The attributes of objects and of what they hold, as far as they are a user's and not machinery."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import multiprocessing.process
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.attributes.digests import MAX_ENTRIES
from lightning_tricks.auto_resume.core.attributes.plain_values import (
    MISSING,
    SCALARS,
    CannotRestoreError,
    container_base,
    container_items,
    is_mutable,
    is_subclass,
    key_label,
)
from lightning_tricks.auto_resume.core.attributes.unsaved_states import (
    UnsavedModuleState,
    as_stateful,
    has_own_state_dict,
)

MAX_OBJECTS = 20_000
_IS_HEAP_TYPE = 1 << 9  # of a class statement
_NUMBERS = frozenset({bool, int, float})
MAX_OBJECT_DEPTH = 40  # attributes of attributes
MAX_CONTAINER_DEPTH = 4  # containers in containers in which objects are sought
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_NEVER_WALKED = (
    *(Optimizer, LRScheduler, DataLoader, torch.jit.ScriptModule, threading.Thread, io.IOBase, enum.Enum, type),
    *(multiprocessing.process.BaseProcess, BaseException, Tensor, np.ndarray, str, bytes, int, float, complex),
)
_NAMESPACE_TYPES = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_WALKED_TORCH_MODULES = ("torch.utils.data.", "torch.distributions.")
# whose objects are handles to something else, or have ways of their own to be kept
_FOREIGN_NAMES = (
    "torch numpy lightning pytorch_lightning lightning_fabric lightning_utilities matplotlib PIL "
    "plotly wandb "
    "tensorboard tensorboardX mlflow comet_ml neptune aim clearml pandas pyarrow polars h5py lmdb zarr ray jax "
    "tensorflow rich tqdm loguru triton cv2 grpc boto3 botocore fsspec s3fs requests urllib3 sqlalchemy redis"
)
_FOREIGN_PACKAGES = frozenset(_FOREIGN_NAMES.split())
_walkable_types: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_slots_of: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()

SkippedNames = Callable[[Any], Collection[str]]


def nothing_skipped(_: Any) -> Collection[str]:
    """Leave no attribute out."""
    return ()


@dataclass
class AttributeSlot:
    """One attribute.

    Attributes:
        owner: Whose it is; None for a root that is a container.
        owner_path: Of the owner.
        name: Of the attribute.
        value: That it has.
        target: Path of the object that it holds, where its attributes are looked at on their own.
    """

    owner: Any
    owner_path: str
    name: str
    value: Any
    target: str = ""


@dataclass
class ObjectWalk:
    """What a walk over objects found, each object once, under the first path that leads to it.

    Attributes:
        skipped: Gives the names that are left out of an object.
        slots: Path -> attribute.
        owners: Path -> object.
        modules: Path of each module that another registers -> path of that, and its name there.
        stateful: Path -> what has a `state_dict` and a `load_state_dict`: an object that is no module, or the tensors
            of a module that is no part of another one and no root.
        registered: Ids of parameters and buffers.
        paths: Id of each object -> its path.
        truncated: Paths of objects that were left out because of the bounds.
        num_built: Number of objects that were made since.
    """

    skipped: SkippedNames
    slots: dict[str, AttributeSlot] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, tuple[str, str]] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    registered: set[int] = field(default_factory=set)
    paths: dict[int, str] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)
    num_built: int = 0

    @classmethod
    def from_roots(cls, roots: Mapping[str, Any], skipped: SkippedNames) -> ObjectWalk:
        """Walk over objects by name."""
        walk = cls(skipped)
        for name, root in roots.items():
            if is_subclass(type(root), *_NEVER_WALKED) or type(root) in SCALARS:
                continue
            if _has_attributes(type(root)) and container_base(type(root)) is None:
                walk._visit(root, name, 0)
            else:
                walk._add_slot(AttributeSlot(None, name, "", root), name, 0)
        walk.slots = {path: slot for path, slot in walk.slots.items() if id(slot.value) not in walk.registered}
        return walk

    def _visit(self, value: Any, path: str, depth: int, *, is_part: bool = False) -> str:
        """Walk over an object that was not seen yet; return where it is, or nothing where it is too much."""
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
            skipped = _MODULE_INTERNALS.union(skipped)
        elif "state_dict" not in skipped and is_stateful(type(value)):
            self.stateful[path] = value
        for name, part in attributes(value):
            if name not in skipped:
                self._add_slot(AttributeSlot(value, path, name, part), f"{path}.{name}", depth + 1)
        for kind in type(value).__mro__:
            if id(kind) not in self.paths and is_user_class(kind):
                self._visit_class(kind, f"{path}.{kind.__name__}", depth, skipped)
        return path

    def _visit_class(self, kind: type, path: str, depth: int, skipped: Collection[str]) -> None:
        """Take what all objects of a class share and change: its numbers and containers."""
        self.paths[id(kind)] = path
        self.owners[path] = kind
        for name, part in tuple(vars(kind).items()):
            if not name.startswith("__") and name not in skipped and (type(part) in _NUMBERS or is_mutable(type(part))):
                self._add_slot(AttributeSlot(kind, path, name, part), f"{path}.{name}", depth + 1)

    def _visit_module(self, module: Any, path: str, depth: int, skipped: Collection[str]) -> None:
        own = attribute_dict(module) or {}
        for kind in ("_parameters", "_buffers"):
            self.registered.update(id(part) for part in own.get(kind, {}).values() if part is not None)
        for name, child in own.get("_modules", {}).items():
            if child is not None and name not in skipped:
                inner = f"{path}.{name}"
                if self._visit(child, inner, depth + 1, is_part=True) == inner:
                    self.modules[inner] = path, name

    def _add_slot(self, slot: AttributeSlot, path: str, depth: int) -> None:
        """Take an attribute, and walk over what it holds."""
        value, kind = slot.value, type(slot.value)
        self.slots[path] = slot
        if kind in SCALARS:
            return
        if is_walkable(kind):
            slot.target = self._visit(value, path, depth)
        elif container_base(kind) is not None:
            self._visit_container(value, path, depth, 0)
        elif has_own_state_dict(kind) or is_stateful(kind):
            self._add_stateful(value, path)

    def _visit_container(self, value: Any, path: str, depth: int, nested: int) -> None:
        """Walk over the objects in a container."""
        base = container_base(type(value))
        if base is None or nested > MAX_CONTAINER_DEPTH or is_subclass(base, set, frozenset):
            return
        if base.__len__(value) > MAX_ENTRIES:  # type: ignore[attr-defined]
            return
        for key, part in list(container_items(value, base)):
            kind = type(part)
            if kind in SCALARS or is_subclass(kind, Tensor):
                continue
            if is_walkable(kind):
                self._visit(part, f"{path}.{key_label(key)}", depth)
            elif has_own_state_dict(kind):
                self._add_stateful(part, f"{path}.{key_label(key)}")
            elif container_base(kind) is not None:
                self._visit_container(part, f"{path}.{key_label(key)}", depth, nested + 1)

    def _add_stateful(self, value: Any, path: str) -> None:
        """Take an object whose attributes are not looked at, by its state."""
        if "state_dict" not in self.skipped(value) and id(value) not in self.paths:
            self.paths[id(value)] = path
            self.stateful[path] = as_stateful(value)


def is_skipped(owner: Any, name: str, skipped: SkippedNames) -> bool:
    """Whether a name of an object is never looked at."""
    return name in skipped(owner) or (is_subclass(type(owner), nn.Module) and name in _MODULE_INTERNALS)


def is_walkable(kind: type) -> bool:
    """Whether the attributes of a type's objects are looked at: it is a module or of somebody's own Python code."""
    found = _walkable_types.get(kind)
    if found is None:
        found = _walkable_types[kind] = _is_walkable(kind)
    return found


def _is_walkable(kind: type) -> bool:
    if is_subclass(kind, *_NEVER_WALKED) or container_base(kind) is not None:
        return False
    if is_subclass(kind, nn.Module) or is_subclass(kind, *_NAMESPACE_TYPES):
        return True
    module = kind.__module__ if isinstance(kind.__module__, str) else "builtins"
    top = module.partition(".")[0]
    known = top in sys.stdlib_module_names or top in _FOREIGN_PACKAGES
    return (not known or module.startswith(_WALKED_TORCH_MODULES)) and _has_attributes(kind)


def is_user_class(kind: type) -> bool:
    """Whether a class is the user's own and not of something that was installed."""
    if not (is_walkable(kind) or is_subclass(kind, nn.Module)) or not isinstance(kind.__module__, str):
        return False
    if kind.__module__.partition(".")[0] in _FOREIGN_PACKAGES | sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def can_be_rebuilt(kind: type, owner: Any) -> bool:
    """Whether an object of a class can be made for an owner without running anything, as its attributes are all it is.

    The class has to be one that the modules in which the owner's classes are defined define, or know, by itself or by
    its module: a file cannot name any other.
    """
    if not is_walkable(kind) or is_subclass(kind, nn.Module) or hasattr(kind, "__del__"):
        return False
    if any(part.__flags__ & _IS_HEAP_TYPE == 0 for part in kind.__mro__[:-1]):
        return False  # made in C, with more to it than attributes
    modules = (sys.modules.get(part.__module__) for part in type(owner).__mro__ if is_user_class(part))
    names = [named for module in modules if module is not None for named in vars(module).values()]
    return any(named is kind or named is sys.modules.get(kind.__module__) for named in names)


def is_stateful(kind: type) -> bool:
    """Whether a type's objects give and take a state, as samplers of torchdata do."""
    if is_subclass(kind, nn.Module, *_NEVER_WALKED):
        return False
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def _has_attributes(kind: type) -> bool:
    return bool(kind.__dictoffset__) or bool(_slots(kind))


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


def attribute_dict(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes; no method of its own is called."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # a property of a strange class may raise anything
        return None
    return found if isinstance(found, dict) else None


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes that an object itself has, those in `__slots__` as well."""
    found = [(name, part) for name, part in (attribute_dict(value) or {}).items() if type(name) is str]
    for name in _slots(type(value)):
        part = _slot(value, name)
        if part is not MISSING:
            found.append((name, part))
    return found


def _slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return MISSING


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, past what `__setattr__` and properties of the class do.

    Raises:
        CannotRestoreError: If a module has a parameter, a buffer or a module under that name, or a class a method.
    """
    own = attribute_dict(owner)
    if name.startswith("__") or _is_method(owner, name):
        raise CannotRestoreError("it is what the class does")
    if is_subclass(type(owner), nn.Module) and any(
        name in (own or {}).get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")
    ):
        raise CannotRestoreError("it is registered in the module here")
    if is_subclass(type(owner), type):
        type.__setattr__(owner, name, value)
    elif own is None or name in _slots(type(owner)):
        object.__setattr__(owner, name, value)
    else:
        own[name] = value


def _is_method(owner: Any, name: str) -> bool:
    kind = owner if is_subclass(type(owner), type) else type(owner)
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return is_subclass(type(found), types.FunctionType, classmethod, staticmethod, property)


def delete_attribute(owner: Any, name: str) -> None:
    """Delete an attribute, past what `__delattr__` of the class does."""
    own = attribute_dict(owner)
    if is_subclass(type(owner), type):
        type.__delattr__(owner, name)
    elif own is None or name in _slots(type(owner)):
        object.__delattr__(owner, name)
    else:
        del own[name]
