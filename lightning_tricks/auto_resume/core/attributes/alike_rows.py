"""Rows that are alike, such as the transitions of a replay buffer: their columns, each as one block of bytes.

A digest of ten thousand tensors takes most of its time for what is done once for each of them.
"""

from __future__ import annotations

import itertools
import marshal
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks.auto_resume.core.attributes.attribute_access import SCALARS
from lightning_tricks.auto_resume.core.attributes.value_parts import is_plain_dtype

WHOLE_TENSOR, WHOLE_ARRAY = 2**18, 2**24  # bytes of a value that is digested as a whole
_SIZE, _SHAPE = operator.attrgetter("nbytes"), operator.attrgetter("shape")
# these have to be the same for values to be joined
_TRAITS: Mapping[type, Callable[[Any], Any]] = {
    Tensor: operator.attrgetter("dtype", "layout", "device", "requires_grad", "is_nested"),
    np.ndarray: operator.attrgetter("dtype"),
}


def columns(rows: Sequence[Any]) -> tuple[str, list[Any]] | None:
    """Return the kind of the rows, and their columns; None if they are not alike. No method of them is called."""
    if len(rows) < 2:
        return None
    kinds = set(map(type, rows))
    kind = type(rows[0])
    if kinds not in ({tuple}, {list}, {dict}):
        return "entries", [rows]
    if len(set(map(len, rows))) > 1 or not rows[0]:
        return None
    if kind is not dict:
        return kind.__name__, list(zip(*rows, strict=True))
    if set(map(type, itertools.chain.from_iterable(rows))) != {str} or len(set(map(tuple, rows))) > 1:
        return None
    return f"dict {list(rows[0])}", list(zip(*map(dict.values, rows), strict=True))


def joined(column: Sequence[Any], max_bytes: int) -> tuple[str, Any] | None:
    """Return the kind of a column's values, and all of them as one block of bytes; None if they are not alike."""
    kinds, first = set(map(type, column)), column[0]
    if kinds <= SCALARS:
        return "scalars", marshal.dumps(list(column), 2)  # later versions also encode which objects are identical
    if kinds not in ({Tensor}, {np.ndarray}) or len(set(map(_TRAITS[type(first)], column))) > 1:
        return None
    if type(first) is Tensor and (
        first.requires_grad or first.is_nested or first.layout is not torch.strided or first.device.type == "meta"
    ):
        return None
    sizes, shapes = list(map(_SIZE, column)), list(map(_SHAPE, column))
    limit = WHOLE_TENSOR if type(first) is Tensor else WHOLE_ARRAY
    if max(sizes) > limit or sum(sizes) > max_bytes:
        return None
    are_equal = shapes.count(shapes[0]) == len(shapes)
    text = f"{first.dtype} {tuple(shapes[0]) if are_equal else list(map(tuple, shapes))}"
    if type(first) is np.ndarray:
        if not is_plain_dtype(first.dtype):
            return None
        data = b"".join([array.tobytes() for array in column])
        return f"arrays {first.dtype.descr} {text}", np.frombuffer(data, np.uint8)
    try:
        joined = torch.stack(list(column)) if are_equal else torch.cat([tensor.reshape(-1) for tensor in column])
        return f"tensors {text}", joined.reshape(-1).cpu().view(torch.uint8).numpy()
    except RuntimeError:  # such as quantized ones
        return None
