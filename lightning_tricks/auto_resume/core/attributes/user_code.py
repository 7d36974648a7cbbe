"""The user's own code: which objects are walked, and which values functions keep.

Objects of the user's own classes and modules are walked, not the internals of libraries.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import enum
import functools
import io
import multiprocessing.process
import queue
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    has_attributes,
    is_subclass,
    remembered_by_type,
)
from lightning_tricks.auto_resume.core.attributes.value_kinds import container_kind

_IS_HEAP_TYPE = 1 << 9  # the flag of types that a class statement made
_NEVER_WALKED = (
    *(Optimizer, LRScheduler, DataLoader, torch.jit.ScriptModule, Tensor, np.ndarray, str, bytes, int, float, complex),
    *(threading.Thread, multiprocessing.process.BaseProcess, io.IOBase, enum.Enum, type, BaseException),
    ctypes.c_int.__mro__[-2],
)
_NAMESPACE_TYPES = (
    *(types.SimpleNamespace, argparse.Namespace, queue.Queue, threading.local),
    *(threading.Semaphore, threading.Event, threading.Condition, threading.Barrier),
    *(collections.UserDict, collections.UserList, collections.UserString, collections.ChainMap),
)
_WALKED_TORCH_MODULES = (
    *("torch.utils.data.", "torch.distributions.", "torch.quasirandom"),
    "torch.distributed.algorithms.model_averaging.",
)
# packages whose objects are handles to something else, or are saved in ways of their own
_FOREIGN_NAMES = (
    "torch numpy lightning pytorch_lightning lightning_fabric lightning_utilities matplotlib PIL plotly wandb "
    "tensorboard tensorboardX mlflow comet_ml neptune aim clearml pandas pyarrow polars h5py lmdb zarr ray jax "
    "tensorflow rich tqdm loguru triton cv2 grpc boto3 botocore fsspec s3fs requests urllib3 sqlalchemy redis"
)
_FOREIGN_PACKAGES = frozenset(_FOREIGN_NAMES.split()) | sys.stdlib_module_names
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def is_never_walked(kind: type) -> bool:
    """Whether objects of a type are not walked even where they are given by name."""
    return is_subclass(kind, *_NEVER_WALKED)


@remembered_by_type
def is_walkable(kind: type) -> bool:
    """Whether objects of a type are walked: modules, and objects of classes that no known library defines."""
    if is_subclass(kind, *_NEVER_WALKED) or container_kind(kind) is not None:
        return False
    if is_subclass(kind, nn.Module) or is_subclass(kind, *_NAMESPACE_TYPES):
        return True
    module = kind.__module__ if isinstance(kind.__module__, str) else "builtins"
    return (not _is_foreign(module) or module.startswith(_WALKED_TORCH_MODULES)) and has_attributes(kind)


@remembered_by_type
def is_user_class(kind: type) -> bool:
    """Whether a class is defined in the user's own code, not in an installed package."""
    return (is_walkable(kind) or is_subclass(kind, nn.Module)) and is_user_module(kind.__module__)


def is_user_module(name: str) -> bool:
    """Whether a module that is imported is the user's own code, not one of an installed package or of this one."""
    if is_known_library(name) or name not in sys.modules:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _is_foreign(name: str) -> bool:
    return name.partition(".")[0] in _FOREIGN_PACKAGES


def is_known_library(name: object) -> bool:
    """Whether a module is part of a library whose code is known, or of this package."""
    return type(name) is not str or _is_foreign(name) or name.startswith("lightning_tricks.")


def can_be_rebuilt(kind: type, owner: Any) -> bool:
    """Whether an object of a class can be created for an owner from its attributes alone, without running code.

    The modules that define the owner's classes must define or import the class, or import its module: so a checkpoint
    cannot have objects of arbitrary classes created.
    """
    if not is_walkable(kind) or is_subclass(kind, nn.Module) or hasattr(kind, "__del__"):
        return False
    if any(part.__flags__ & _IS_HEAP_TYPE == 0 for part in kind.__mro__[:-1]):
        return False  # a base is written in C, and may hold more than attributes
    bases = type(owner).__mro__
    modules = [sys.modules.get(part.__module__) for part in bases if not is_known_library(part.__module__)]
    modules += [owner] if type(owner) is types.ModuleType else []
    names = [named for module in modules if module is not None for named in vars(module).values()]
    return any(named is kind or named is sys.modules.get(kind.__module__) for named in names)


def is_stateful(kind: type) -> bool:
    """Whether objects of a type have a `state_dict` and a `load_state_dict`, as samplers of torchdata do."""
    if is_subclass(kind, nn.Module, *_NEVER_WALKED):
        return False
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def is_callable_with_state(kind: type) -> bool:
    """Whether objects of a type are functions, methods or partials, which may hold other objects."""
    return is_subclass(kind, *_CALLABLES)


def is_users(function: types.FunctionType) -> bool:
    """Whether a function is the user's own, not one of an installed package or of this one."""
    if not is_user_module(function.__module__):
        return False
    # the code that dataclasses and attrs write for a class is in no file, while the class is
    is_generated = function.__code__.co_filename.startswith(("<string>", "<attrs "))
    return not (is_generated and hasattr(sys.modules[function.__module__], "__file__"))


def held_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function, a method or a partial holds, by name: they may change in place."""
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
        pending += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return names


def functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield the functions that a class itself defines, also those of its properties."""
    for member in tuple(vars(kind).values()):
        if is_subclass(type(member), classmethod, staticmethod):
            member = member.__func__
        found = (member.fget, member.fset, member.fdel) if is_subclass(type(member), property) else (member,)
        yield from (function for function in found if type(function) is types.FunctionType)
