"""Which of the values that were saved are other ones after they were put back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_A_DAY = 86400.0
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # objects may not know when they are equal


def differing_paths(saved: Any, restored: Any, path: str = "") -> Iterator[str]:
    """Yield the places, such as `state_dict.net.weight`, at which nested plain values and tensors differ.

    Bits are compared: NaN equals itself. What only `restored` has is passed over, and so are readings of a clock.
    """
    if isinstance(saved, Tensor):
        if not (isinstance(restored, Tensor) and _same_tensor(saved, restored)):
            yield path
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            there = restored.get(key, _MISSING) if isinstance(restored, Mapping) else _MISSING
            yield from differing_paths(value, there, f"{path}.{key}" if path else str(key))
    elif isinstance(saved, list | tuple):
        if not isinstance(restored, list | tuple) or len(restored) != len(saved):
            yield path
        else:
            for number, (saved_value, restored_value) in enumerate(zip(saved, restored, strict=True)):
                yield from differing_paths(saved_value, restored_value, f"{path}.{number}" if path else str(number))
    elif not _same_value(saved, restored):
        yield path


class _Missing:
    """Equal to nothing."""


_MISSING = _Missing()


def _same_tensor(saved: Tensor, restored: Tensor) -> bool:
    here = restored.detach().to("cpu")
    if saved.shape != here.shape or saved.layout != here.layout:
        return False
    if saved.layout != torch.strided or saved.is_quantized:
        return True  # which have no plain bits
    if saved.dtype != here.dtype:
        here = here.to(saved.dtype)
    there = saved.detach().to("cpu")
    return torch.equal(there, here) or torch.equal(_bits(there), _bits(here))


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
