"""Rows that are alike, such as the transitions of a replay buffer, by columns: small tensors become few blocks.

To read, write and create a hundred thousand tensors one by one takes most of its time for what is done once for each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_tricks.auto_resume.core.attributes.attribute_access import MISSING, SCALARS

_MIN_ROWS = 8  # fewer are not worth it
Block = tuple[list[int], Tensor]
_ROWS = {kind.__name__: kind for kind in (tuple, list, dict)}
_DTYPE_AND_SIZE = operator.attrgetter("dtype", "nbytes")


class Budget(Protocol):
    """What `encode_column` asks of the budget of an encoding; see `EncodeBudget`."""

    registered: Mapping[int, str]
    known: Mapping[int, str]
    places: dict[int, str]

    def consume(self, size: int) -> None:
        """Subtract bytes from the budget."""


def encode_column(column: Sequence[Any], budget: Budget, places: dict[int, str], path: str) -> Any:
    """Return values of one kind as a list of numbers and strings, as blocks of tensors, or as columns of columns.

    Args:
        column: The values.
        budget: Counts the bytes, and knows which values are saved elsewhere.
        places: The paths of the tensors, lists and dicts among the values are added to it, by their ids.
        path: Path of the values; empty if none is referred to.

    Returns:
        What `decode_column` takes; `MISSING` if they are not alike, or hold anything else.
    """
    kinds = set(map(type, column))
    if are_plain(column, kinds):
        budget.consume(16 * len(column) + sum(len(part) for part in column if type(part) is str))
        return list(column)
    kind = type(column[0])
    if len(kinds) > 1 or len(column) < _MIN_ROWS or (kind is not Tensor and kind not in _ROWS.values()):
        return MISSING
    if kind is Tensor:
        return _encode_tensors(column, budget, places, path)
    if path and kind is not tuple:
        numbers = set(map(id, column))
        elsewhere: tuple[Collection[int], ...] = (budget.known, budget.registered, budget.places, places)
        if len(numbers) < len(column) or any(not numbers.isdisjoint(others) for others in elsewhere):
            return MISSING  # some of them are references to others
        places.update(zip(map(id, column), _inner(path, len(column)), strict=True))
    keys = list(column[0]) if kind is dict else []
    if len(set(map(len, column))) > 1 or not column[0] or not set(map(type, keys)) <= {str}:
        return MISSING
    if kind is dict and len(set(map(tuple, column))) > 1:
        return MISSING
    columns = zip(*map(dict.values, column) if kind is dict else column, strict=True)
    encoded = list[Any]()
    for part, inner in zip(columns, _inner(path and f"{path}.columns", len(column[0])), strict=True):
        encoded.append(encode_column(part, budget, places, inner))
        if encoded[-1] is MISSING:
            return MISSING
    return {"kind": "rows", "of": kind.__name__, "keys": keys, "columns": encoded}


def _inner(path: str, count: int) -> list[str]:
    return [f"{path}.{number}" if path else "" for number in range(count)]


def _encode_tensors(tensors: Sequence[Tensor], budget: Budget, places: dict[int, str], path: str) -> Any:
    """Return tensors as blocks, and the paths of those that were met before, as the next state of a transition is."""
    own, same = list[int](), dict[int, str]()
    for number, tensor in enumerate(tensors):
        key = id(tensor)
        elsewhere = (budget.known.get(key) or budget.places.get(key) or places.get(key)) if path else None
        if elsewhere is None:
            if key in budget.registered or tensor.layout is not torch.strided or not tensor.is_contiguous():
                return MISSING
            own.append(number)
            places.update({key: f"{path}.{number}"} if path else {})
        else:
            same[number] = elsewhere
    left = [tensors[number] for number in own]
    blocks, others = stacked(left)
    starts = np.fromiter(map(Tensor.data_ptr, left), np.int64)
    sizes = np.fromiter((tensor.nbytes for tensor in left), np.int64)
    order = starts.argsort(kind="stable")
    if others or ((starts + sizes)[order][:-1] > starts[order][1:]).any():
        return MISSING  # or they share memory
    budget.consume(int(sizes.sum()) + 16 * len(tensors))
    placed = [[torch.tensor([own[number] for number in numbers]), data] for numbers, data in blocks]
    return {"kind": "tensors", "blocks": placed, "same": torch.tensor(list(same)), "paths": list(same.values())}


def decode_column(encoded: Any, known: Callable[[str], Any], made: dict[str, Any], path: str) -> list[Any]:
    """Return what `encode_column` encoded.

    Args:
        encoded: What it returned.
        known: Returns the value at a path.
        made: The values are added to it, as one list with a path that ends in "*".
        path: Path of the values; empty if none is referred to.
    """
    if type(encoded) is list:
        return encoded
    column: list[Any]
    if encoded["kind"] == "tensors":
        column = [MISSING] * (len(encoded["paths"]) + sum(len(data) for _, data in encoded["blocks"]))
        with torch.no_grad():
            for numbers, data in encoded["blocks"]:
                for number, part in zip(numbers.tolist(), data.unbind(), strict=True):
                    column[number] = part.clone()
        if path:
            made[f"{path}.*"] = column
        for number, elsewhere in zip(encoded["same"].tolist(), encoded["paths"], strict=True):
            column[number] = known(elsewhere)
    else:
        inner = _inner(path and f"{path}.columns", len(encoded["columns"]))
        columns = [decode_column(part, known, made, at) for part, at in zip(encoded["columns"], inner, strict=True)]
        keys, kind = encoded["keys"], _ROWS[encoded["of"]]
        rows = zip(*columns, strict=True)
        column = [dict(zip(keys, row, strict=True)) if kind is dict else kind(row) for row in rows]
    if path:
        made[f"{path}.*"] = column
    return column


def are_plain(parts: Sequence[Any], kinds: set[type]) -> bool:
    """Whether values of some types are numbers and strings that JSON has."""
    return kinds <= SCALARS and (
        int not in kinds or all(part.bit_length() < 1000 for part in parts if type(part) is int)
    )


def stacked(tensors: Sequence[Tensor], max_bytes: float = math.inf) -> tuple[list[Block], list[int]]:
    """Return tensors as a few blocks: the numbers of those of one dtype and shape, and their data, stacked.

    Args:
        tensors: The tensors, which have to be dense.
        max_bytes: The size of the largest tensor to take.

    Returns:
        The blocks, and the numbers of all others: large ones, and what is no plain data on the CPU.
    """
    groups, blocks, others = dict[Any, list[int]](), list[Block](), list[int]()
    for number, traits in enumerate(map(_DTYPE_AND_SIZE, tensors)):
        groups.setdefault(traits, []).append(number)
    for (_, size), numbers in groups.items():
        if size > max_bytes or not tensors[numbers[0]].is_cpu:
            others += numbers
        elif (data := _stack([tensors[number] for number in numbers])) is not None:
            blocks.append((numbers, data))
        else:
            by_shape = dict[Any, list[int]]()
            for number in numbers:
                by_shape.setdefault(tensors[number].shape, []).append(number)
            for same in by_shape.values():
                data = _stack([tensors[number] for number in same])
                if data is None:
                    others += same
                else:
                    blocks.append((same, data))
    return blocks, others


def _stack(tensors: Sequence[Tensor]) -> Tensor | None:
    try:
        data = torch.stack(list(tensors))
    except (RuntimeError, NotImplementedError):  # of several shapes or devices, or without data
        return None
    return data if data.is_cpu and not (data.requires_grad or data.is_quantized) else None
