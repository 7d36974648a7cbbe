"""Communication between the processes of one run."""

from __future__ import annotations

from typing import Any

import torch


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks in order, on each rank; the value of this process alone if there is no other.

    Every rank has to call it. Tensors should be on the CPU, because they are pickled.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
