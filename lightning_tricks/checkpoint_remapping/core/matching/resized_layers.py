"""Layers that belong together although their sizes differ, such as a head for another number of classes."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Layer, Shape, group_layers


def find_resized(source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return pairs of names whose tensors differ in one size alone, where there is one candidate on each side."""
    pairs: list[tuple[str, str]] = []
    sources, targets = group_layers(source_shapes), group_layers(target_shapes)
    for source in sources:
        fitting = [target for target in targets if _is_resized(source, target)]
        rivals = [other for other in sources for match in fitting[:1] if _is_resized(other, match)]
        if len(fitting) == len(rivals) == 1:
            pairs += [(names[0], fitting[0].tensors[tensor][0][0]) for tensor, (names, _) in source.tensors.items()]
    return pairs


def _is_resized(source: Layer, target: Layer) -> bool:
    """Whether every tensor of a layer differs in its first size, or a lone one in any one size."""
    if source.tensors.keys() != target.tensors.keys():
        return False
    shapes = [(source.tensors[tensor][1], target.tensors[tensor][1]) for tensor in source.tensors]
    if any(len(old) != len(new) for old, new in shapes):
        return False
    differ = [[i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b] for old, new in shapes]
    return all(dims == [0] for dims in differ) or (len(differ) == 1 and len(differ[0]) == 1)
