"""Layers that belong together although their sizes differ, such as a head for another number of classes."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_tricks.checkpoint_remapping.core.matching.candidates import equal_groups
from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Layer, Shape, group_layers


def find_resized(source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return pairs of names whose tensors differ in one size alone, where there is one candidate on each side."""
    found: list[tuple[Layer, Layer]] = []
    for sources, targets in equal_groups(group_layers(source_shapes), group_layers(target_shapes), _kinds):
        for source in sources:
            fitting = [target for target in targets if _is_resized(source, target)]
            if len(fitting) == 1 and sum(_is_resized(other, fitting[0]) for other in sources) == 1:
                found.append((source, fitting[0]))
    return [
        (names[0], target.tensors[tensor][0][0])
        for source, target in sorted(found, key=lambda pair: pair[0].position)
        for tensor, (names, _) in source.tensors.items()
    ]


def _kinds(layer: Layer) -> frozenset[tuple[str, int]]:
    """Return the names of a layer's tensors and their numbers of dimensions."""
    return frozenset((tensor, len(shape)) for tensor, (_, shape) in layer.tensors.items())


def _is_resized(source: Layer, target: Layer) -> bool:
    """Whether every tensor of a layer differs in its first size, or a lone one in any one size."""
    differ = [
        [i for i, sizes in enumerate(zip(shape, target.tensors[tensor][1], strict=True)) if sizes[0] != sizes[1]]
        for tensor, (_, shape) in source.tensors.items()
    ]
    return all(dims == [0] for dims in differ) or (len(differ) == 1 and len(differ[0]) == 1)
