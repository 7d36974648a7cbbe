"""The order of layers: as registered by the model, by name, and by the numbers in their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import BATCH_COUNTER, Layer, Shape


def is_ordered(shapes: Mapping[str, Shape]) -> bool:
    """Whether tensors are in the order in which their model registers them: module by module, not sorted by name.

    A .safetensors is sorted within each dtype, so that its names step back in the alphabet at most a few times.
    """
    names = [name for name in shapes if not name.endswith(BATCH_COUNTER)]
    if sum(one > other for one, other in pairwise(names)) <= 2:
        return False
    closed: set[str] = set()
    before: list[str] = []
    for name in names:
        containers = [name[: found.start()] for found in re.finditer(r"\.", name)]
        if not closed.isdisjoint(containers):
            return False
        closed.update(container for container in before if container not in containers)
        before = containers
    return True


def sort_naturally(layers: list[Layer]) -> None:
    """Sort layers by name, with 10 after 9, and renew their positions."""
    layers.sort(
        key=lambda layer: [(part.isdecimal(), int(part) if part.isdecimal() else part) for part in _split(layer)]
    )
    for position, layer in enumerate(layers):
        layer.position = position


def are_numbered_in_order(layers: list[Layer]) -> bool:
    """Whether each layer's path has a higher number, or a later letter, than the one before."""
    return all(_is_numbered_before(one, other) for one, other in pairwise(layers))


def _is_numbered_before(first: Layer, second: Layer) -> bool:
    """Whether two paths first differ in numbers, or in letters from a to h, in rising order."""
    for one, other in zip(_split(first), _split(second), strict=False):
        if one != other:
            if one.isdecimal() and other.isdecimal():
                return int(one) < int(other)
            return bool(re.fullmatch("[a-h]", one) and re.fullmatch("[a-h]", other)) and one < other
    return False


def _split(layer: Layer) -> list[str]:
    return re.findall(r"\d+|[^\d.]+|\.", layer.path)
