"""A member's part of a batch that holds the rows of all members, whatever form the batch has."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def batch_of_member(batch: Any, index: int, n_members: int, rows: int) -> Any:
    """Return one member's part of a batch that holds the rows of all.

    Args:
        batch: Tensors, arrays and lists of `rows` entries, in tuples, lists, mappings and dataclasses of any depth;
            numbers, strings and None belong to each member.
        index: Number of the member.
        n_members: Number of members.
        rows: Number of rows of all members together.

    Raises:
        ValueError: If a part has another number of rows.
        TypeError: If a part is of a type whose rows are not known.
    """
    if batch is None or isinstance(batch, str | bytes | bool | int | float | complex | torch.device | torch.dtype):
        return batch
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim and len(batch) != rows:
            raise ValueError(
                f"a part of the batch has {len(batch)} rows, and {n_members} members have {rows} together: collate_fn "
                "mixes samples. Give shared_order=True."
            )
        return _own_rows(batch, index, n_members, rows) if batch.ndim else batch
    if isinstance(batch, list | tuple):
        if len(batch) == rows and not any(_has_rows(part, rows) for part in batch):
            return _own_rows(batch, index, n_members, rows)  # a list of samples
        parts = [batch_of_member(part, index, n_members, rows) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, MutableMapping):
        own = copy.copy(batch)
        own.update({name: batch_of_member(part, index, n_members, rows) for name, part in batch.items()})
        return own
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
        return replace(batch, **batch_of_member(values, index, n_members, rows))
    raise TypeError(
        f"a batch holds a {type(batch).__name__}, of which it is not known what belongs to which of {n_members} "
        "members: give shared_order=True, or let collate_fn return tensors in tuples, lists or dicts."
    )


def _own_rows(part: Any, index: int, n_members: int, rows: int) -> Any:
    size = rows // n_members
    return part[index * size : (index + 1) * size]


def _has_rows(part: Any, rows: int) -> bool:
    if isinstance(part, Mapping):
        return any(_has_rows(value, rows) for value in part.values())
    return isinstance(part, Tensor | np.ndarray | list | tuple) and getattr(part, "ndim", 1) > 0 and len(part) == rows
