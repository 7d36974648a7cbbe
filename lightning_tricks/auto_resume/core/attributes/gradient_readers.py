"""Whether code reads gradients before a step clears them: then those of the step before are part of the state."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from lightning_tricks.auto_resume.core.attributes.code_state import closure_variables, functions_of, global_names
from lightning_tricks.auto_resume.core.attributes.value_types import is_subclass
from lightning_tricks.auto_resume.core.attributes.walkable_types import is_known_library

# What is called before training, or between the clearing of the gradients and the end of the batch
_HOOKS_THAT_MAY_READ = {
    *("__init__", "configure_optimizers", "on_before_backward", "backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "on_train_batch_end"),
}
# Functions of torch and Lightning that read the gradients of parameters
_READERS = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_gradients", "grad_norm"}
_MAX_ENTRIES = 1_000  # of a container that is looked into


def reads_gradients(values: Iterable[Any], known: dict[int, Any] | None = None) -> bool:
    """Return whether code of objects, classes or functions may read `grad`, or that of others which it names.

    Not looked into are known libraries, such as torch, and hooks that read the gradients of their own step.

    Args:
        values: The objects, classes and functions.
        known: Classes and functions that were looked at in earlier calls, which returned False; new ones are added.
    """
    pending, seen = list(values), {} if known is None else dict(known)  # by id; kept, or others may get their ids
    while pending:
        value = pending.pop()
        kind = type(value)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if kind is types.FunctionType:
            if is_known_library(value.__module__):
                continue
            if _reads_gradients(value.__code__):
                return True
            pending += _used_by(value)
        elif kind is types.MethodType:
            pending += [value.__func__, value.__self__]
        elif is_subclass(kind, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif kind in (list, tuple, dict):
            pending += itertools.islice(value.values() if kind is dict else value, _MAX_ENTRIES)
        elif is_subclass(kind, type):
            bases = [base for base in value.__mro__ if not is_known_library(base.__module__)]
            functions = [function for base in bases for function in functions_of(base)]
            pending += [one for one in functions if one.__name__ not in _HOOKS_THAT_MAY_READ]
        elif not is_known_library(kind.__module__):
            pending.append(kind)
    if known is not None:
        known.update({key: value for key, value in seen.items() if is_subclass(type(value), type, types.FunctionType)})
    return False


@functools.cache
def _reads_gradients(code: types.CodeType) -> bool:
    if any(_reads_gradients(one) for one in code.co_consts if isinstance(one, types.CodeType)):
        return True
    if not _READERS.isdisjoint(code.co_names) or "grad" in code.co_consts:  # such as `getattr(weight, "grad")`
        return True
    if {"grad", "accumulate_grad_batches"}.isdisjoint(code.co_names):
        return False
    before: Any = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if name == "grad" and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before not in ("autograd", "func"):
            return True
        # between two steps that lets the next one add to the gradients
        if name == "accumulate_grad_batches" and instruction.opname == "STORE_ATTR":
            return True
        before = name
    return False


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield the variables that a function may use: of closures, and of its module and those that it imports."""
    names, pending, seen = global_names(function), list[Any](), set[int]()
    for _, cell in closure_variables(function):
        with suppress(ValueError):  # the variable is not set
            pending.append(cell.cell_contents)
    pending += [function.__globals__[name] for name in names if name in function.__globals__]
    pending += [sys.modules[name] for name in names if name in sys.modules]
    while pending:
        value = pending.pop()
        if type(value) is not types.ModuleType:
            yield value
        elif id(value) not in seen and not is_known_library(value.__name__):
            seen.add(id(value))
            pending += [vars(value)[name] for name in names if name in vars(value)]
