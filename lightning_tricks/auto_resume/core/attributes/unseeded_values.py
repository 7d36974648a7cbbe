"""Digests of attributes that are the same in every process: of all, and of those that random numbers may have made.

Values that a fit changes are saved and restored. One that it does not change is expected to be made again, which fails
without a word where it was drawn without a seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_tricks.auto_resume.core.attributes.attribute_access import is_subclass
from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.attributes.encoding import is_clock_reading
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk, SkippedNames, nothing_skipped
from lightning_tricks.auto_resume.core.attributes.value_kinds import container_kind, is_generator, kind_of

_MAX_DEPTH = 3
_MAX_ENTRIES = 1_000  # of a container, for its kind


def fingerprints(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> dict[str, int]:
    """Return a digest of each attribute that is the same in every process.

    What is not plain data, and random generators, count by their types; of values over 1 MiB, and of containers with
    more than 10,000 entries, a sample counts.

    Args:
        roots: Objects by name.
        skipped: Returns the names of attributes to leave out of an object.

    Returns:
        Path -> digest of 64 bits.
    """
    walk = ObjectWalk.from_roots(roots, skipped)
    return {path: int(walk.digest(slot.value, same_process=False)) for path, slot in walk.slots.items()}


def unseeded_values(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> dict[str, int]:
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
        >>> first, second = (unseeded_values({"sampler": Sampler(offset)}) for offset in (0.25, 0.5))
        >>> first.keys(), first == second
        (dict_keys(['sampler.offset']), False)
    """
    walk = ObjectWalk.from_roots(roots, skipped)
    found = {path: slot.value for path, slot in walk.slots.items() if not slot.target and _may_be_drawn(slot.value)}
    for path, owner in walk.owners.items():
        if is_subclass(type(owner), nn.Module):
            unsaved = owner._non_persistent_buffers_set
            buffers = {name: value for name, value in owner._buffers.items() if name in unsaved and value is not None}
            found |= {f"{path}.{name}": value for name, value in buffers.items()}
    return {path: _digest(value) for path, value in found.items()}


def _may_be_drawn(value: Any, depth: int = 0) -> bool:
    kind = type(value)
    if kind is float or is_subclass(kind, np.floating):
        return not is_clock_reading(float(value))
    if is_subclass(kind, Tensor, np.ndarray) or is_generator(value):
        return True
    container = container_kind(kind)
    if container is None or depth == _MAX_DEPTH or not 0 < container.container.__len__(value) <= _MAX_ENTRIES:
        return False
    return all(type(part) is int or _may_be_drawn(part, depth + 1) for _, part in container.entries(value))


def _digest(value: Any) -> int:
    kind = kind_of(value)
    state = tuple(kind.parts(value).values()) if kind is not None and is_generator(value) else value
    return int(ValueDigest.of(state, same_process=False))
