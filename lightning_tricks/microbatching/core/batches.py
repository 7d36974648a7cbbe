"""Batches of any structure: the number of their rows, their parts, and what the parts returned as one whole."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_tricks._shared.tensors import tensors_in, to_double
from lightning_tricks._shared.text import list_names

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the first dimension of its tensors, or the length of its lists of samples.

    Args:
        batch: A tensor or array, a dict, tuple, list, named tuple or dataclass of them, nested, or a list of samples.

    Raises:
        ValueError: If its parts do not agree on a number of rows, or cannot be cut into rows.
    """
    numbers = _row_numbers(batch)
    if numbers:
        return numbers[0]
    found = [f"{name} {number}" for name, number in _named_rows("batch", batch)]
    reason = f"their first dimensions differ ({list_names(found, 6)})" if found else "it holds no tensor with rows"
    raise ValueError(
        f"A batch cannot be cut into rows: {reason}. Give all that belongs to the rows one first dimension, or pass "
        "the samples as a list, and keep what is the same for all rows in the module."
    )


def cut_batch(batch: Any, parts: int) -> tuple[list[Any], list[int]]:
    """Cut a batch into parts whose numbers of rows differ by at most one.

    Args:
        batch: As `count_rows` takes it. Tensors without dimensions, numbers and strings are the same in each part.
        parts: Their number, at most the number of rows.

    Returns:
        The parts, which are views, and their numbers of rows.
    """
    rows = count_rows(batch)
    bounds = [rows * index // parts for index in range(parts + 1)]
    limits = list(pairwise(bounds))
    return [take_rows(batch, rows, slice(*limit)) for limit in limits], [stop - start for start, stop in limits]


def take_rows(batch: Any, rows: int, chosen: slice) -> Any:
    """Return some rows of a batch that has `rows` of them."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch[chosen] if batch.ndim else batch
    if isinstance(batch, Mapping):
        part: Any = copy.copy(batch)
        for key, value in batch.items():
            part[key] = take_rows(value, rows, chosen)
        return part
    if is_dataclass(batch):
        part = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(part, field.name, take_rows(getattr(batch, field.name), rows, chosen))
        return part
    if hasattr(batch, "_fields"):
        return type(batch)(*(take_rows(value, rows, chosen) for value in batch))
    if isinstance(batch, list | tuple):
        if _is_plain(batch):
            return batch[chosen] if len(batch) == rows else batch
        if _are_samples(batch, rows):
            return batch[chosen]
        return type(batch)(take_rows(value, rows, chosen) for value in batch)
    return batch


def _row_numbers(value: Any) -> list[int] | None:
    """Return what the number of rows may be, the likeliest first; None for what has no rows."""
    if isinstance(value, Tensor | np.ndarray):
        return [len(value)] if value.ndim else None
    if isinstance(value, Mapping):
        return _common_numbers(value.values())
    if is_dataclass(value):
        return _common_numbers(getattr(value, field.name) for field in fields(value))
    if isinstance(value, PackedSequence):
        return []
    if hasattr(value, "_fields"):
        return _common_numbers(value)
    if isinstance(value, list | tuple):
        if _is_plain(value):
            return None
        columns, samples = _common_numbers(value) or [], [len(value)] if _are_alike(value) else []
        return samples + columns if _look_like_samples(value) else columns + samples
    return [] if next(tensors_in(getattr(value, "__dict__", {})), None) is not None else None


def _common_numbers(values: Iterable[Any]) -> list[int] | None:
    all_numbers = [numbers for numbers in map(_row_numbers, values) if numbers is not None]
    if not all_numbers:
        return None
    return [number for number in all_numbers[0] if all(number in numbers for numbers in all_numbers)]


def _is_plain(values: Sequence[Any]) -> bool:
    return all(isinstance(value, _PLAIN) for value in values)


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether the elements may be samples: tensors of one type and number of dimensions, or containers of one kind."""
    return len({*map(_form, values)}) == 1


def _form(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return type(value), value.ndim, value.dtype
    if isinstance(value, Mapping):
        return type(value), tuple(value)
    return type(value), len(value) if isinstance(value, tuple) else None


def _look_like_samples(values: Sequence[Any]) -> bool:
    """Whether the elements are alike, with a number in each, as a label is in a sample."""
    return _are_alike(values) and all(map(_holds_number, values))


def _holds_number(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(part, int | float) or (isinstance(part, Tensor) and not part.ndim) for part in parts)


def _are_samples(values: Sequence[Any], rows: int) -> bool:
    if len(values) != rows:
        return False
    return _look_like_samples(values) or rows not in (_common_numbers(values) or ())


def _named_rows(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield name, f"has {len(value)}"
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named_rows(f"{name}[{key!r}]", part)
    elif isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
        for index, part in enumerate(value):
            yield from _named_rows(f"{name}[{index}]", part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _named_rows(f"{name}.{field.name}", getattr(value, field.name))
    elif _row_numbers(value) == []:
        yield name, f"is a {type(value).__name__}"


def join_rows(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join what a step has returned for the parts of a batch to what it would return for the whole.

    Rows are put together; other floating-point values are averaged over the rows, and integers are added.

    Args:
        parts: What was returned, alike for all parts.
        sizes: Their numbers of rows.
    """
    first = parts[0]
    if len(parts) == 1 or any(type(part) is not type(first) for part in parts):
        return parts[-1]
    if isinstance(first, Tensor):
        if first.ndim and all(part.ndim and len(part) == size for part, size in zip(parts, sizes, strict=True)):
            return torch.cat(list(parts))
        if any(part.shape != first.shape for part in parts) or first.dtype == torch.bool:
            return parts[-1]
        return weighted_mean(parts, sizes) if first.is_floating_point() else sum(parts)
    if isinstance(first, float):
        return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    if isinstance(first, dict):
        return {key: join_rows([part[key] for part in parts if key in part], sizes) for key in first}
    if isinstance(first, list) and all(len(part) == size for part, size in zip(parts, sizes, strict=True)):
        return [element for part in parts for element in part]
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        return type(first)(join_rows(values, sizes) for values in zip(*parts, strict=False))
    return parts[-1]


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors of one shape, computed in float64, in their type."""
    total: Any = sum(to_double(value) * weight for value, weight in zip(values, weights, strict=True))
    mean: Tensor = (total / sum(weights)).to(values[0].dtype)
    return mean


def merge_logged(
    values: Sequence[Tensor], rows: Sequence[int], batch_sizes: Sequence[int | None], reduction: str
) -> tuple[Tensor, int | None]:
    """Merge what was logged under a key for the parts of a batch.

    Args:
        values: The values.
        rows: The numbers of rows of the parts.
        batch_sizes: The batch sizes that were logged with them; None where none was.
        reduction: "mean", "sum", "max" or "min".

    Returns:
        The value for the whole batch, and its batch size, None where none was logged.
    """
    if len(values) == 1:
        return values[0], batch_sizes[0]
    known = [size for size in batch_sizes if size is not None]
    # the same number for unequal parts, or that of all rows, is the size of the whole batch
    is_of_whole = len({*known}) == 1 and (known[0] == sum(rows) or len({*rows}) > 1)
    are_counts = len(known) == len(values) and not is_of_whole
    floats = [value if value.dtype in (torch.float32, torch.float64) else value.float() for value in values]
    if reduction in ("mean", "avg"):
        merged = weighted_mean(floats, known if are_counts else rows)
    else:
        merged = getattr(torch, {"max": "amax", "min": "amin"}.get(reduction, reduction))(torch.stack(floats), dim=0)
    return merged, sum(known) if are_counts else known[0] if known else None
