"""The NumPy arrays of a pickle: those of numbers are made, with all arguments checked; others stay placeholders.

A pickle makes an array by a call and gives it a state, or gives a function its bytes (protocol 5). Its dtype is a
`Placeholder`, of which two things count: the name of the type, which must be in a list, and the order of the bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lightning_tricks._shared.read_budget import Budget
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import (
    Constructor,
    Placeholder,
    check_tensor,
    checked_sizes,
    describe_value,
)

ARRAY = "numpy.ndarray"  # the name of the placeholder of an array
_NUMBERS = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"})


def array_constructors(budget: Budget) -> dict[str, Constructor]:
    """Return our functions by the qualified names of those of NumPy 1 and 2 that make arrays and numbers."""

    def of_buffer(*arguments: Any) -> Any:
        array = _array(budget, *arguments)
        return Placeholder(ARRAY, arguments) if array is None else array

    def number(dtype: Any, data: Any = b"") -> Any:
        array = _array(budget, data, dtype, ())
        return Placeholder("numpy.generic", (dtype, data)) if array is None else array[()]

    constructors: dict[str, Constructor] = {}
    for core in ("numpy.core", "numpy._core"):
        constructors[f"{core}.multiarray._reconstruct"] = lambda kind, *_: Placeholder(describe_value(kind))
        constructors[f"{core}.multiarray.scalar"] = number
        constructors[f"{core}.numeric._frombuffer"] = of_buffer
    return constructors


def array_of_state(state: Any, budget: Budget) -> np.ndarray[Any, Any] | None:
    """Return the array that a state describes; None if it is not one of numbers.

    Raises:
        NotACheckpointError: If its shape is not that of its bytes.
    """
    if not isinstance(state, tuple) or len(state) != 5:
        return None
    _, shape, dtype, in_columns, data = state
    return _array(budget, data, dtype, shape, "F" if in_columns else "C")


def _array(
    budget: Budget, data: Any, dtype: Any, shape: Any, order: Any = "C", axes: Any = None
) -> np.ndarray[Any, Any] | None:
    """Return a copy of bytes as an array in the byte order of this machine; None if they are no numbers."""
    code = _code(dtype)
    if code not in _NUMBERS:
        return None
    bytes_order = dtype.state[1] if isinstance(dtype.state, tuple) else None
    check_tensor(bytes_order in ("<", ">", "|", "="))
    stored = np.dtype(bytes_order + code)
    data = data.encode("latin-1") if isinstance(data, str) else data  # as Python 2 stored bytes
    shape = checked_sizes(shape)
    check_tensor(isinstance(data, bytes | bytearray) and math.prod(shape) * stored.itemsize == len(data))
    check_tensor(axes is None or sorted(checked_sizes(axes)) == [*range(len(shape))])
    budget.spend(512 + len(data))
    array: np.ndarray[Any, Any] = np.ndarray(shape, stored, data, order="F" if order == "F" else "C").astype(
        stored.newbyteorder("=")
    )
    return array if axes is None else array.transpose(axes)


def _code(dtype: Any) -> Any:
    """Return the name of a type that a pickle describes, such as "f4"; of none of NumPy's, what it is."""
    is_dtype = isinstance(dtype, Placeholder) and dtype.name == "numpy.dtype" and dtype.args
    code = dtype.args[0] if is_dtype else dtype
    return code if isinstance(code, str) else describe_value(code)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numbers that torch has."""
    return isinstance(value, np.ndarray) and f"{value.dtype.kind}{value.dtype.itemsize}" in _NUMBERS


def tensor_of(value: Any) -> Any:
    """Return an array as a tensor; other values as they are."""
    if not is_array(value):
        return value
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))
