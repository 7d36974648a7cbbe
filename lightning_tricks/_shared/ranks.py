"""What processes of one run tell each other."""

from __future__ import annotations

from typing import Any

import torch


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order, on each of them; of this process alone where it is the only one.

    Every rank has to call it. Tensors should be on the CPU: they are pickled.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
