"""What a step returns for a batch, as named columns with one value for each sample, in the order of the samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, reduce
from numbers import Number
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.tensors import full_tensor

Column: TypeAlias = Tensor | list[Tensor] | list[str]  # a list of tensors that differ in their first dimension
Kind: TypeAlias = tuple[torch.dtype | None, tuple[int, ...]]  # dtype (None: text) and shape of a value; -1: it varies
_EMPTY: Kind = (torch.bool, (0,))  # of an empty list, which holds none of whatever others hold
_NUMBER = int | float | np.generic
_matches = lru_cache(maxsize=1024)(Pattern.matches)


def to_columns(outputs: Any, rows: int | None = None, patterns: tuple[Pattern, ...] = ()) -> dict[str, Column]:
    """Return what a step returned for a batch as columns, on the CPU; they may share its memory.

    Names of nested dicts, dataclasses and tuples are joined by dots; a tuple has the names of its fields, or numbers. A
    list has one value for each sample: tensors, numbers, strings, or dicts or tuples of them. A tensor alone is
    "prediction".

    Args:
        outputs: What the step returned.
        rows: The number of samples in the batch; None takes that of the first column.
        patterns: The names of the columns that are wanted; () wants all.

    Raises:
        TypeError: If there is a value of another type.
        ValueError: If a column has not one value for each sample, or a pattern matches none.
    """
    leaves = [*_leaves(outputs, "")]
    for pattern in patterns:
        if not any(_matches(pattern, name) for name, _ in leaves):
            names = ", ".join(name for name, _ in leaves)
            raise ValueError(f"the pattern {pattern.text!r} of columns matches none of {names}")
    found: dict[str, Column] = {}
    for name, value in leaves:
        if patterns and not any(_matches(pattern, name) for pattern in patterns):
            continue
        if name in (*found, "loader", "index"):
            raise ValueError(f"two columns are called {name!r}: return one of them under another name")
        found[name] = column = _to_column(value, name)
        rows = len(column) if rows is None else rows
        if len(column) != rows:
            raise ValueError(f"{name!r} has {len(column):,} values for the {rows:,} samples of the batch")
    if not rows or not found:
        raise ValueError("there is nothing in it to write")
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(value)
    if isinstance(value, list) and value and all(_parts(row, (_NUMBER,)) is not None for row in value):
        rows = [_parts(row, (_NUMBER,)) or {} for row in value]
        if any(row.keys() != rows[0].keys() for row in rows):
            raise ValueError(f"{name!r} has other names in one sample than in another")
        parts = {key: [row[key] for row in rows] for key in rows[0]}
    if parts is None:
        yield name or "prediction", value
    for key, part in (parts or {}).items():
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _parts(value: Any, plain: tuple[Any, ...] = (str, _NUMBER)) -> Mapping[Any, Any] | None:
    """Return the parts of a value that has several with names, or None, as of a plain tuple of one of some types."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        if names or not any(all(isinstance(part, kind) for part in value) for kind in plain):
            return dict(zip(names or range(len(value)), value, strict=True))
    return None  # so is a tuple of strings or numbers, which collating makes of a column


def _to_column(value: Any, name: str) -> Column:
    is_text = getattr(getattr(value, "dtype", None), "kind", "") in ("O", "S", "U")  # of an array, or a pandas.Series
    values = value.tolist() if is_text else value
    if isinstance(values, Tensor) and values.is_nested:
        values = values.unbind()
    if isinstance(values, list | tuple) and all(isinstance(row, str) for row in values):
        return list(values)
    if isinstance(values, list | tuple) and any(isinstance(row, Tensor | np.ndarray | list | tuple) for row in values):
        tensors = [_to_tensor(row, name) for row in values]
        kinds: list[Kind] = [(part.dtype, tuple(part.shape)) for part in tensors]
        dtype, shape = reduce(lambda kind, other: _join(name, kind, other), kinds)
        if -1 not in shape:
            return torch.stack([tensor.to(dtype) for tensor in tensors])
        return [tensor.to(dtype).reshape(len(tensor), *shape[1:]) for tensor in tensors]
    tensor = _to_tensor(values, name)
    if not tensor.ndim:
        raise ValueError(f"{name!r} is {value!r} for the whole batch: return one value for each sample")
    return tensor


def _to_tensor(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
            value = torch.tensor(array if array.size else array.astype(bool))  # without values it becomes any dtype
        except (TypeError, ValueError) as error:
            what = f"{value!r:.80}, a {type(value).__name__}"
            raise TypeError(f"{name!r} holds {what}: return tensors, or lists of numbers or strings") from error
    tensor = full_tensor(value.detach())
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.cpu().resolve_conj().resolve_neg()


def kinds_of(columns: Mapping[str, Column]) -> dict[str, Kind]:
    """Return the kind of each column of a batch."""
    return {name: _kind(column) for name, column in columns.items()}


def _kind(column: Column) -> Kind:
    if isinstance(column, Tensor):
        return column.dtype, tuple(column.shape[1:])
    first = column[0]
    return (None, (-1,)) if isinstance(first, str) else (first.dtype, (-1, *first.shape[1:]))


def join_kinds(kinds: Mapping[str, Kind], others: Mapping[str, Kind]) -> Mapping[str, Kind]:
    """Return the kinds of columns that hold what they held before, if anything, and those of other batches.

    Raises:
        ValueError: If the names differ, or a column would hold both texts and numbers, or shapes that differ otherwise
            than in the first dimension of a value.
    """
    if kinds and kinds.keys() != others.keys():
        raise ValueError(f"its columns are {', '.join(others)}, and those of another batch {', '.join(kinds)}")
    return {name: _join(name, kind, others[name]) for name, kind in (kinds or others).items()}


def _join(name: str, kind: Kind, other: Kind) -> Kind:
    if kind == other:
        return kind
    if kind == _EMPTY:
        kind, other = other, kind
    (dtype, shape), (other_dtype, other_shape) = kind, other
    if other == _EMPTY and dtype is not None and shape:
        return dtype, (-1, *shape[1:])
    if dtype is None or other_dtype is None or (len(shape), shape[1:]) != (len(other_shape), other_shape[1:]):
        each = " and ".join(f"{part[0] or 'texts'} {(*part[1],)}" for part in (kind, other))
        raise ValueError(f"{name!r} holds {each}: only the first dimension of a value may vary")
    try:
        joined = torch.promote_types(dtype, other_dtype)
    except RuntimeError as error:  # torch does not join each two, such as uint16 and int64
        raise ValueError(f"{name!r} holds {dtype} and {other_dtype}: return one of them") from error
    return joined, shape if shape == other_shape else (-1, *shape[1:])


@lru_cache(maxsize=64)
def array_dtype(dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the dtype of the arrays that hold values of a dtype, or the bytes of texts, whose dtype is None."""
    return to_array(torch.empty(0, dtype=dtype or torch.uint8)).dtype


def to_array(values: Any) -> npt.NDArray[Any]:
    """Return a tensor as an array; that of a dtype that numpy lacks, such as bfloat16, as float32."""
    try:
        array: npt.NDArray[Any] = values.numpy()
    except TypeError:
        array = values.float().numpy()
    return array


class OrderWatch:
    """A `collate_fn` that calls another one, and compares numbers, texts and lengths of the samples and of the batch.

    Args:
        collate: The other one.

    Attributes:
        changed: Whether a batch held values of its samples in another order, and none in their order; a bool, shape (),
            in memory that the processes of workers share.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self.changed = torch.zeros((), dtype=torch.bool).share_memory_()

    def __call__(self, samples: Any) -> Any:
        """Return the batch."""
        given = list(samples) if isinstance(samples, list) else []  # a data set may give whole batches
        batch = self._collate(samples)
        if not self.changed:
            columns = [[*column] for column in zip(*(map(_plain, _entries(sample)) for sample in given), strict=False)]
            lists = (part for part in _entries(batch) if getattr(part, "ndim", isinstance(part, list | tuple)))
            parts = [part for part in ([*map(_plain, values)] for values in lists) if len({*part}) > 1]
            is_sorted = any(one is not other for one, other in zip(given, samples, strict=False))  # in its place
            is_sorted |= any(len({*part}) > 2 and Counter(part) in map(Counter, columns) for part in parts)
            if is_sorted and not any(part in columns for part in parts):
                self.changed.fill_(True)
        return batch


def _entries(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else (value,)


def _plain(value: Any) -> Any:
    """Return a number or a text, and the length of anything that has one."""
    if isinstance(value, Tensor) and not value.ndim:
        return value.item()
    return value if isinstance(value, str | Number) else len(value) if hasattr(value, "__len__") else None
