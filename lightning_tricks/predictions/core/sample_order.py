"""Whether a `collate_fn` returns the samples of a batch in another order than it gets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = str | int | float


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
        given = list(samples)
        batch = self._collate(samples)
        if not self.changed:
            columns, parts = _columns(given), [part for part in map(_values, _leaves(batch)) if len(set(part)) > 1]
            is_sorted = any(one is not other for one, other in zip(given, samples, strict=False))  # in its place
            for part in parts if not is_sorted else ():
                is_sorted |= len(set(part)) > 2 and any(Counter(part) == Counter(column) for column in columns)
            if is_sorted and not any(part in columns for part in parts):
                self.changed.fill_(True)
        return batch


def _columns(samples: list[Any]) -> list[list[Any]]:
    """Return the numbers and texts of the samples, and the lengths of others, of each part one for each sample."""
    rows = [map(_plain, _leaves(sample, leaf=list)) for sample in samples]
    return [[*column] for column in zip(*rows, strict=False)]


def _leaves(value: Any, leaf: Any = (list, tuple)) -> Iterator[Any]:
    """Yield the parts of mappings, tuples and lists; numbers and texts in a `leaf` are one part."""
    parts = [*value.values()] if isinstance(value, Mapping) else value
    is_leaf = isinstance(value, leaf) and all(isinstance(part, _PLAIN) for part in value)
    if is_leaf or not isinstance(parts, list | tuple):
        yield value
        return
    for part in parts:
        yield from _leaves(part, leaf)


def _values(part: Any) -> list[Any]:
    """Return the numbers or texts of a part of a batch; none if it is no list of them."""
    if isinstance(part, Tensor):
        return part.tolist() if part.ndim == 1 else []
    return [*part] if isinstance(part, list | tuple) else []


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.ndim:
        return value.item()
    return value if isinstance(value, _PLAIN) else len(value) if hasattr(value, "__len__") else None
