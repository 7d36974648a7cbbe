"""Compares saved values with those that were restored from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_A_DAY = 86400.0
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # other objects may not define equality


def differing_paths(saved: Any, restored: Any, path: str = "") -> Iterator[str]:
    """Yield the paths, such as `state_dict.net.weight`, at which nested plain values and tensors differ.

    Tensors are compared bit by bit: NaN equals itself. What only `restored` has is ignored, and so are clock readings.
    """
    if isinstance(saved, Tensor):
        if not (isinstance(restored, Tensor) and _same_tensor(saved, restored)):
            yield path
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            counterpart = restored.get(key, _MISSING) if isinstance(restored, Mapping) else _MISSING
            yield from differing_paths(value, counterpart, f"{path}.{key}" if path else str(key))
    elif isinstance(saved, list | tuple):
        if not isinstance(restored, list | tuple) or len(restored) != len(saved):
            yield path
        else:
            for number, (saved_value, restored_value) in enumerate(zip(saved, restored, strict=True)):
                yield from differing_paths(saved_value, restored_value, f"{path}.{number}" if path else str(number))
    elif not _same_value(saved, restored):
        yield path


class _Missing:
    """The type of a placeholder that equals no value."""


_MISSING = _Missing()


def _same_tensor(saved: Tensor, restored: Tensor) -> bool:
    restored = restored.detach().to("cpu")
    if saved.shape != restored.shape or saved.layout != restored.layout:
        return False
    if saved.layout != torch.strided or saved.is_quantized:
        return True  # these have no plain bits to compare
    if saved.dtype != restored.dtype:
        restored = restored.to(saved.dtype)
    saved = saved.detach().to("cpu")
    return torch.equal(saved, restored) or torch.equal(_bits(saved), _bits(restored))


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _same_value(saved: Any, restored: Any) -> bool:
    if isinstance(restored, Tensor):
        return restored.numel() == 1 and bool(restored == saved)
    if isinstance(saved, float) and isinstance(restored, int | float):
        same = saved == restored or (math.isnan(saved) and math.isnan(restored))
        return same or (_is_recent_time(saved) and _is_recent_time(restored))
    return not isinstance(saved, _PLAIN) or saved == restored


def _is_recent_time(value: float) -> bool:
    """Whether a number looks like a reading of the clock in the last day."""
    return 0 <= time.time() - value < _A_DAY
