"""Contents of containers, tensors, arrays and generators, replaced in place."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks.auto_resume.core.attributes.generators import generator_state, set_generator_state
from lightning_tricks.auto_resume.core.attributes.value_parts import PART_KINDS, part_kind_of
from lightning_tricks.auto_resume.core.attributes.value_types import container_base, is_subclass


def fill_container(target: Any, pairs: Iterable[Any], base: type) -> None:
    """Replace what a container holds, by the methods of its base: (key, value) pairs of a dict, entries of others."""
    if is_subclass(base, dict):
        owner: Any = OrderedDict if is_subclass(base, OrderedDict) else dict
        pairs = list(pairs)
        owner.clear(target)
        for key, part in pairs:
            owner.__setitem__(target, key, part)
    elif base is list:
        list.__setitem__(target, slice(None), list(pairs))
    else:
        pairs = list(pairs)
        base.clear(target)  # type: ignore[attr-defined]
        (deque.extend if base is deque else set.update)(target, pairs)


def replace_contents(target: Any, value: Any) -> bool:
    """Replace the contents of an object by those of another of its type; return whether that was possible in place."""
    kind = type(target)
    if kind is not type(value) and not (is_subclass(kind, Tensor) and is_subclass(type(value), Tensor)):
        return False
    fill = PART_KINDS[name].fill if (name := part_kind_of(target)) else None
    if fill is not None:
        try:
            fill(target, value)
        except Exception:  # of the library that the value is from
            return False
        return True
    base = container_base(kind)
    if base in (list, set, deque) or (base is not None and is_subclass(base, dict)):
        if base is deque and target.maxlen != value.maxlen:
            return False
        fill_container(target, value.items() if is_subclass(base, dict) else value, base)
        return True
    if is_subclass(kind, Tensor):
        return _copy_tensor(target, value)
    if kind is np.ndarray and (target.shape, target.dtype) == (value.shape, value.dtype) and target.flags.writeable:
        np.copyto(target, value)
        return True
    if kind is bytearray:
        target[:] = value
        return True
    state, other = generator_state(target), generator_state(value)
    if state is None or other is None or state[0] != other[0]:
        return False
    set_generator_state(target, other[1])
    return True


def _copy_tensor(target: Tensor, value: Tensor) -> bool:
    if (target.shape, target.dtype) != (value.shape, value.dtype) or target.requires_grad != value.requires_grad:
        return False
    try:
        with torch.no_grad():
            target.copy_(value)
    except RuntimeError:  # a tensor of inference mode, or an expanded one
        return False
    return True
