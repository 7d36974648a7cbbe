"""Tensors inside other values, in double precision, and gathered from all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, dataclasses and named tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


def to_double(numbers: Tensor) -> Tensor:
    """Return numbers in doubles; in floats on MPS, which has no doubles."""
    return numbers.float() if numbers.device.type == "mps" else numbers.double()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this rank may hold only a part."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor, so that each rank has the whole tensor; return any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole
