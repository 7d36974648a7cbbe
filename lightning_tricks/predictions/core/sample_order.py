"""Whether a `collate_fn` returns the samples of a batch in another order than it gets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor


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
            columns = [[*column] for column in zip(*(map(_plain, _parts(sample)) for sample in given), strict=False)]
            parts = [
                [*map(_plain, part)] for part in _parts(batch) if getattr(part, "ndim", isinstance(part, list | tuple))
            ]
            parts = [part for part in parts if len({*part}) > 1]
            is_sorted = any(one is not other for one, other in zip(given, samples, strict=False))  # in its place
            is_sorted |= any(len({*part}) > 2 and Counter(part) in map(Counter, columns) for part in parts)
            if is_sorted and not any(part in columns for part in parts):
                self.changed.fill_(True)
        return batch


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else (value,)


def _plain(value: Any) -> Any:
    """Return a number or a text, and the length of anything that has one."""
    if isinstance(value, Tensor) and not value.ndim:
        return value.item()
    return value if isinstance(value, str | Number) else len(value) if hasattr(value, "__len__") else None
