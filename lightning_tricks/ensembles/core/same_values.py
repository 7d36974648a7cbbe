"""Whether the attributes of two modules, which they use beside parameters and layers, are the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = vars(nn.Module()).keys()


def different_attributes(
    first: nn.Module, other: nn.Module, counterparts: Set[tuple[int, int]] = frozenset()
) -> Iterator[str]:
    """Yield the names of the attributes that two modules of one type do not share.

    Parameters, buffers, submodules, hooks and the mode do not count. Objects that cannot be compared are the same
    only if they are identical.

    Args:
        first: A module, of one model.
        other: Its counterpart in another model.
        counterparts: The identities of pairs that count as the same: modules of one model and their counterparts.

    Examples:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> one.activation, other.activation = torch.relu, torch.tanh
        >>> list(different_attributes(one, other))
        ['activation']
    """
    a, b = ({k: v for k, v in vars(part).items() if k not in _OF_EVERY_MODULE} for part in (first, other))
    known = {(id(first), id(other)), *counterparts}
    for name in dict.fromkeys([*a, *b]):
        try:
            if name not in a or name not in b or not _is_same(a[name], b[name], known):
                yield name
        except (RuntimeError, TypeError, ValueError):  # of an `==` of its own, such as that of a data frame
            yield name


def same_or_rows_of(value: Any, parts: Sequence[Any], tolerance: float) -> bool:
    """Whether a value equals each of several, or contains the rows of these tensors one after another.

    Args:
        value: The value of a module for all members.
        parts: The value of the module of each member.
        tolerance: How much tensors may differ, relative to the largest value.
    """
    if any(type(part) is not type(value) for part in parts):
        return False
    if isinstance(value, Tensor):
        choices = [parts] if all(part.shape == value.shape for part in parts) else []
        if value.ndim and len({part.shape[1:] for part in parts}) == 1:
            choices.append([torch.cat(list(parts))])
        return any(all(_is_close(value, part, tolerance) for part in choice) for choice in choices)
    if isinstance(value, Mapping):
        return all(list(part) == list(value) for part in parts) and all(
            same_or_rows_of(value[name], [part[name] for part in parts], tolerance) for name in value
        )
    if isinstance(value, list | tuple):
        return all(len(part) == len(value) for part in parts) and all(
            same_or_rows_of(own, others, tolerance) for own, *others in zip(value, *parts, strict=True)
        )
    return all(_is_same(value, part, set()) for part in parts)


def relative_difference(given: Sequence[Tensor], expected: Sequence[Tensor], floor: float = 0.0) -> float:
    """Return the largest difference of tensors of the same shapes, as a share of the largest value, or of `floor`."""
    off = largest = 0.0
    for ours, theirs in zip(given, expected, strict=True):
        if not ours.numel():
            continue
        if not ours.is_floating_point():
            if not torch.equal(ours, theirs):
                return math.inf
            continue
        ours, theirs = (value.detach().nan_to_num(0.0, 0.0, 0.0).float() for value in (ours, theirs))
        off, largest = max(off, float((ours - theirs).abs().max())), max(largest, float(theirs.abs().max()))
    largest = max(largest, floor)
    if not largest:
        return math.inf if off else 0.0
    return off / largest


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and relative_difference([a], [b]) <= tolerance


def _is_same(a: Any, b: Any, known: set[tuple[int, int]]) -> bool:
    """Whether two values are the same, or a pair that is being compared already."""
    if a is b or (id(a), id(b)) in known:
        return True
    if type(a) is not type(b) or isinstance(a, type | nn.Module):
        return False
    known = {*known, (id(a), id(b))}
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and bool(torch.equal(a, b))
    if isinstance(a, torch.Generator):
        return bool(torch.equal(a.get_state(), b.get_state()))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and bool(np.array_equal(a, b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_is_same(a[name], b[name], known) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_is_same(x, y, known) for x, y in zip(a, b, strict=True))
    if isinstance(a, partial):
        return _is_same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), known)
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and _is_same(a.__self__, b.__self__, known)
    if isinstance(a, FunctionType):
        return a.__code__ is b.__code__ and _is_same(_values_of(a), _values_of(b), known)
    equal: Any = type(a).__eq__
    if equal is not object.__eq__:
        return bool(a == b)
    return bool(hasattr(a, "__dict__")) and _is_same(vars(a), vars(b), known)


def _values_of(function: FunctionType) -> tuple[Any, ...]:
    """Return the values that a function made in place, such as a lambda, uses beside its arguments."""
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return function.__defaults__, function.__kwdefaults__, cells
