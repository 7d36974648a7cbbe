"""Batches of any structure: the number of their rows, their parts, and what the parts returned as one whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
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
    if numbers := _row_numbers(batch):
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
    limits = [*pairwise(rows * index // parts for index in range(parts + 1))]
    return [take_rows(batch, rows, slice(*limit)) for limit in limits], [stop - start for start, stop in limits]


def copy_batch(batch: Any, *, with_values: bool = False) -> Any:
    """Return a batch in new containers, from which a step may take what it likes, with the same tensors or copies."""
    if with_values and isinstance(batch, Tensor | np.ndarray):
        return batch.detach().clone() if isinstance(batch, Tensor) else batch.copy()
    if _is_plain(batch):
        return copy(batch)
    return _with_parts(batch, [copy_batch(part, with_values=with_values) for part in _parts(batch)])


def versions_in(batch: Any) -> list[int]:
    """Return a number for each tensor of a batch that each writing into it raises."""
    if isinstance(batch, Tensor):
        return [] if batch.is_inference() else [batch._version]
    return [] if _is_plain(batch) else [number for part in _parts(batch) for number in versions_in(part)]


def take_rows(batch: Any, rows: int, chosen: slice) -> Any:
    """Return some rows of a batch that has `rows` of them, in new containers."""
    if isinstance(batch, Tensor) and batch.layout is torch.sparse_coo:
        return batch.narrow_copy(0, chosen.start, chosen.stop - chosen.start)
    if isinstance(batch, Tensor | np.ndarray):
        return batch[chosen] if batch.ndim else batch
    if _is_plain(batch):
        return batch[chosen] if len(batch) == rows else batch
    if _is_list(batch) and len(batch) == rows and (_are_labelled(batch) or rows not in (_common_numbers(batch) or ())):
        return batch[chosen]  # samples
    return _with_parts(batch, [take_rows(part, rows, chosen) for part in _parts(batch)])


def _parts(value: Any) -> Sequence[Any]:
    """Return what a container holds."""
    if isinstance(value, Mapping):
        return [*value.values()]
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return value if isinstance(value, list | tuple) and not isinstance(value, PackedSequence) else ()


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    """Return what a container holds, with its place as it is written behind the container's name."""
    if isinstance(value, Mapping):
        names = [f"[{key!r}]" for key in value]
    elif is_dataclass(value):
        names = [f".{field.name}" for field in fields(value)]
    else:
        names = [f"[{index}]" for index in range(len(_parts(value)))]
    return [*zip(names, _parts(value), strict=True)]


def _is_plain(value: Any) -> bool:
    """Whether a value is a list of numbers or words, such as the tokens of a text."""
    return _is_list(value) and len(value) > 0 and all(isinstance(part, _PLAIN) for part in value)


def _with_parts(value: Any, parts: Sequence[Any]) -> Any:
    """Return a container like another one that holds other parts."""
    if not parts:
        return value
    if isinstance(value, list | tuple):
        return type(value)(parts) if _is_list(value) else type(value)(*parts)
    made = copy(value)
    for key, part in zip(value if isinstance(value, Mapping) else fields(value), parts, strict=True):
        if isinstance(value, Mapping):
            made[key] = part
        else:
            object.__setattr__(made, key.name, part)  # it may be frozen
    return made


def _is_list(value: Any) -> bool:
    """Whether a value is a list, or a tuple whose elements have no names."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _row_numbers(value: Any) -> list[int] | None:
    """Return what the number of rows may be, the likeliest first; None for what has no rows."""
    if isinstance(value, Tensor) and (value.is_nested or value.layout not in (torch.strided, torch.sparse_coo)):
        return []
    if isinstance(value, Tensor | np.ndarray):
        return [len(value)] if value.ndim else None
    if _is_plain(value):
        return None
    parts = _parts(value)
    if not parts:
        hidden = tensors_in((value, getattr(value, "__dict__", {})))
        return [] if next(hidden, None) is not None else None
    columns = _common_numbers(parts)
    if not _is_list(value):
        return columns
    samples = [len(parts)] if _are_alike(parts) else []
    return [*samples, *(columns or ())] if _are_labelled(parts) else [*(columns or ()), *samples]


def _common_numbers(values: Iterable[Any]) -> list[int] | None:
    all_numbers = [numbers for numbers in map(_row_numbers, values) if numbers is not None]
    if not all_numbers:
        return None
    return [number for number in all_numbers[0] if all(number in numbers for numbers in all_numbers)]


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether values may be samples: tensors of one type and number of dimensions, or containers of one kind."""

    def form(value: Any) -> tuple[Any, ...]:
        if isinstance(value, Tensor | np.ndarray):
            return type(value), value.ndim, value.dtype
        return type(value), tuple(value) if isinstance(value, Mapping) else isinstance(value, tuple) and len(value)

    return len({*map(form, values)}) == 1


def _are_labelled(values: Sequence[Any]) -> bool:
    """Whether values are alike, with a number in each, as a label is in a sample."""
    return _are_alike(values) and all(
        any(isinstance(part, int | float) or (isinstance(part, Tensor) and not part.ndim) for part in parts)
        for parts in map(_parts, values)
    )


def _named_rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    parts, numbers = _named_parts(value), _row_numbers(value)
    inner = [found for place, part in parts for found in _named_rows(name + place, part)]
    yield from inner
    if numbers and not inner:  # of a list without tensors, its length
        yield name, f"has {numbers[0]}"
    elif numbers == [] and not parts:
        yield name, f"is a {getattr(value, 'layout', type(value).__name__)}"


def join_rows(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join what a step has returned for the parts of a batch to what it would return for the whole.

    Rows are put together; other floating-point values are averaged over the rows, and integers are added.

    Args:
        parts: What was returned, alike for all parts.
        sizes: Their numbers of rows.
    """
    first, are_alike = parts[0], len({*map(type, parts)}) == 1
    if len(parts) == 1 or not are_alike:
        return parts[-1]
    if isinstance(first, Tensor):
        if first.ndim and all(part.shape == (n, *first.shape[1:]) for part, n in zip(parts, sizes, strict=True)):
            return torch.cat(list(parts))
        if any(part.shape != first.shape for part in parts) or first.dtype == torch.bool:
            return parts[-1]
        return weighted_mean(parts, sizes) if first.is_floating_point() else sum(parts)
    if isinstance(first, float):
        return float(np.average(parts, weights=sizes))
    if isinstance(first, list) and all(len(part) == size for part, size in zip(parts, sizes, strict=True)):
        return [element for part in parts for element in part]
    named = [dict(_named_parts(part)) for part in parts]
    if any(each.keys() != named[0].keys() for each in named):
        return parts[-1]
    return _with_parts(parts[-1], [join_rows([each[place] for each in named], sizes) for place in named[0]])


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors of one shape, computed in float64, in their type."""
    total: Any = sum(to_double(value) * weight for value, weight in zip(values, weights, strict=True))
    mean: Tensor = (total / sum(weights)).to(values[0].dtype)
    return mean


class LoggedValues:
    """Merges what was logged for the parts of batches.

    Args:
        of_whole: For each key, whether the size of a whole batch is logged with a part, as far as batches have told.
    """

    def __init__(self, of_whole: dict[str, bool]) -> None:
        self._of_whole = of_whole

    def merge(
        self,
        key: str,
        values: Sequence[Tensor],
        rows: Sequence[int],
        batch_sizes: Sequence[int | None],
        reduction: str,
    ) -> tuple[Tensor, int | None]:
        """Merge what was logged under a key for the parts of a batch.

        Args:
            key: The key.
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
        are_counts = len(known) == len(values) and not self._is_size_of_whole(key, known, rows)
        floats = [value if value.dtype in (torch.float32, torch.float64) else value.float() for value in values]
        if reduction in ("mean", "avg"):
            merged = weighted_mean(floats, known if are_counts else rows)
        else:
            merged = getattr(torch, {"max": "amax", "min": "amin"}.get(reduction, reduction))(
                torch.stack(floats), dim=0
            )
        return merged, sum(known) if are_counts else known[0] if known else None

    def _is_size_of_whole(self, key: str, known: Sequence[int], rows: Sequence[int]) -> bool:
        """Whether the same number for parts is that of all rows, as far as this batch, or one before it, tells."""
        size = known[0]
        if len({*known}) > 1 or (len({*rows}) == 1 and size == rows[0]):
            self._of_whole[key] = False
        elif len({*rows}) > 1 or size == sum(rows):
            self._of_whole[key] = True
        return self._of_whole.get(key, size < rows[0])
