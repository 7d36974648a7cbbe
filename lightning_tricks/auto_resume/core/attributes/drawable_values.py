"""What attributes are, of the kinds that random numbers make: tensors, numbers and generators.

Values that a fit changes are saved and restored. One that it does not change is expected to be made again, which fails
without a word where it was drawn without a seed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.attributes.generators import generator_state
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk, SkippedNames, nothing_skipped
from lightning_tricks.auto_resume.core.attributes.value_types import container_base, container_items, is_subclass

CLOCK_NAME = re.compile(r"time|clock|start|begin|began|since|stamp|tick|tic\b|\bt0|last|prev|_at\b", re.IGNORECASE)
_DAY = 86_400.0
_MAX_DEPTH = 3
_MAX_ENTRIES = 1_000  # of a container, for its kind


def drawable_values(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> dict[str, int]:
    """Return a digest of each attribute that random numbers may have made, the same in every process.

    These are tensors, arrays and floats, random generators with their states, buffers that no state dict holds, and
    containers of nothing but numbers and these. Readings of clocks are left out.

    Args:
        roots: Objects by name.
        skipped: Returns the names of attributes to leave out of an object.

    Returns:
        Path -> digest of 64 bits.

    Examples:
        >>> class Sampler:
        ...     def __init__(self, offset):
        ...         self.offset, self.name = offset, "uniform"
        >>> one, other = (drawable_values({"sampler": Sampler(offset)}) for offset in (0.25, 0.5))
        >>> one.keys(), one == other
        (dict_keys(['sampler.offset']), False)
    """
    walk = ObjectWalk.from_roots(roots, skipped)
    found = {
        path: _digest(slot.value)
        for path, slot in walk.slots.items()
        if not slot.target and _may_be_drawn(slot.value, slot.name)
    }
    for path, owner in walk.owners.items():
        if is_subclass(type(owner), nn.Module):
            saved = owner._non_persistent_buffers_set
            buffers = {name: value for name, value in owner._buffers.items() if name in saved and value is not None}
            found |= {f"{path}.{name}": _digest(value) for name, value in buffers.items()}
    return found


def _may_be_drawn(value: Any, name: str, depth: int = 0) -> bool:
    kind = type(value)
    if kind is float or is_subclass(kind, np.floating):
        return not _is_clock(float(value), name)
    if is_subclass(kind, Tensor, np.ndarray) or generator_state(value) is not None:
        return True
    base = container_base(kind)
    if base is None or depth == _MAX_DEPTH or not 0 < base.__len__(value) <= _MAX_ENTRIES:  # type: ignore[attr-defined]
        return False
    parts = [part for _, part in container_items(value, base)]
    return all(type(part) is int or _may_be_drawn(part, name, depth + 1) for part in parts)


def _is_clock(value: float, name: str) -> bool:
    return abs(value - time.time()) < _DAY or bool(CLOCK_NAME.search(name))


def _digest(value: Any) -> int:
    digest = ValueDigest(same_process=False)
    digest.feed(value if generator_state(value) is None else generator_state(value))
    return int(digest)
