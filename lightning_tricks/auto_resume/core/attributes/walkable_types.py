"""Which objects are walked: modules and those of the user's own classes, not the internals of libraries."""

from __future__ import annotations

import argparse
import collections
import ctypes
import enum
import io
import multiprocessing.process
import queue
import sys
import threading
import types
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.attributes.attribute_access import has_attributes
from lightning_tricks.auto_resume.core.attributes.value_types import container_base, is_subclass

_IS_HEAP_TYPE = 1 << 9  # the flag of types that a class statement made
_NEVER_WALKED = (
    *(Optimizer, LRScheduler, DataLoader, torch.jit.ScriptModule, threading.Thread, io.IOBase, enum.Enum, type),
    *(
        ctypes.c_int.__mro__[-2],
        multiprocessing.process.BaseProcess,
        BaseException,
        Tensor,
        np.ndarray,
        str,
        bytes,
        int,
        float,
        complex,
    ),
)
_NAMESPACE_TYPES = (
    *(types.SimpleNamespace, argparse.Namespace, queue.Queue),
    *(collections.UserDict, collections.UserList, collections.UserString, collections.ChainMap),
)
_WALKED_TORCH_MODULES = ("torch.utils.data.", "torch.distributions.")
# packages whose objects are handles to something else, or are saved in ways of their own
_FOREIGN_NAMES = (
    "torch numpy lightning pytorch_lightning lightning_fabric lightning_utilities matplotlib PIL "
    "plotly wandb "
    "tensorboard tensorboardX mlflow comet_ml neptune aim clearml pandas pyarrow polars h5py lmdb zarr ray jax "
    "tensorflow rich tqdm loguru triton cv2 grpc boto3 botocore fsspec s3fs requests urllib3 sqlalchemy redis"
)
_FOREIGN_PACKAGES = frozenset(_FOREIGN_NAMES.split())
_FOREIGN_MODULES = _FOREIGN_PACKAGES | sys.stdlib_module_names - {"__main__"}
_walkable_types: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_never_walked(kind: type) -> bool:
    """Whether objects of a type are not walked even where they are given by name."""
    return is_subclass(kind, *_NEVER_WALKED)


def is_walkable(kind: type) -> bool:
    """Whether objects of a type are walked: modules, and objects of classes that no known library defines."""
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
    return (not known or module.startswith(_WALKED_TORCH_MODULES)) and has_attributes(kind)


def is_user_class(kind: type) -> bool:
    """Whether a class is defined in the user's own code, not in an installed package."""
    if not (is_walkable(kind) or is_subclass(kind, nn.Module)) or not isinstance(kind.__module__, str):
        return False
    return is_user_module(kind.__module__)


def is_user_module(name: str) -> bool:
    """Whether a module that is imported is the user's own code, not one of an installed package."""
    if type(name) is not str or name not in sys.modules or _is_foreign(name):
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _is_foreign(name: str) -> bool:
    return name.partition(".")[0] in _FOREIGN_MODULES


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
    modules = [sys.modules.get(part.__module__) for part in type(owner).__mro__ if is_user_module(part.__module__)]
    modules += [owner] if type(owner) is types.ModuleType else []
    names = [named for module in modules if module is not None for named in vars(module).values()]
    return any(named is kind or named is sys.modules.get(kind.__module__) for named in names)


def is_stateful(kind: type) -> bool:
    """Whether objects of a type have a `state_dict` and a `load_state_dict`, as samplers of torchdata do."""
    if is_subclass(kind, nn.Module, *_NEVER_WALKED):
        return False
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))
