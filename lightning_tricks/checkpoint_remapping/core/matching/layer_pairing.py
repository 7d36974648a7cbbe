"""Ways to pair the layers of a file and a model, each from what the layers themselves say."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

from lightning_tricks.checkpoint_remapping.core.matching.candidates import (
    TEMPLATES,
    Template,
    equal_groups,
    equal_series,
    series_of,
)
from lightning_tricks.checkpoint_remapping.core.matching.evidence import pair_by_evidence
from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Layer, Pairs
from lightning_tricks.checkpoint_remapping.core.matching.layer_order import are_numbered_in_order

Pairing = Callable[[list[Layer], list[Layer]], Pairs]


def _by_series(source_template: Template, target_template: Template) -> Pairing:
    """Return the way that pairs series of layers, numbered by these templates."""

    def pair(source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
        sides = series_of(source_layers, source_template), series_of(target_layers, target_template)
        return [
            (source, target, reason)
            for sources, targets in equal_series(*sides)
            for source_series, target_series, reason in pair_by_evidence(
                sources, targets, "the only layers of these sizes in this order"
            )
            for source, target in zip(source_series, target_series, strict=True)
        ]

    return pair


def _by_size(source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
    """Pair single layers that are the only ones of their size, or that words tell from others of their size."""
    for sources, targets in equal_series([[layer] for layer in source_layers], [[layer] for layer in target_layers]):
        for (source,), (target,), reason in pair_by_evidence(sources, targets, "the only layer of this size"):
            yield source, target, reason


def _by_number(source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
    """Pair layers of one size in order, where numbers say on both sides which comes first."""
    for sources, targets in equal_groups(source_layers, target_layers, lambda layer: layer.signature):
        if len(sources) != len(targets) or len(sources) == 1:
            continue
        sources, targets = (sorted(layers, key=lambda layer: layer.position) for layers in (sources, targets))
        if are_numbered_in_order(sources) and are_numbered_in_order(targets):
            for source, target in zip(sources, targets, strict=True):
                yield source, target, "numbered in the same order"


# Series come first: they are longer, so that two are less often equal by chance
PAIRINGS: tuple[Pairing, ...] = (
    *(_by_series(*templates) for templates in product(TEMPLATES, repeat=2)),
    _by_size,
    _by_number,
)


def pair_flattened(source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
    """Pair a Linear on flattened features with the convolution that computes the same, as in VGG's classifier."""

    def key(layer: Layer) -> object:
        if "weight" not in layer.tensors:
            return layer
        shape = layer.tensors["weight"][1]
        return tuple(sorted(layer.tensors)), shape[:1], math.prod(shape)

    for sources, targets in equal_groups(source_layers, target_layers, key):
        if len(sources) == len(targets) == 1:
            shapes = sorted((layer[0].tensors["weight"][1] for layer in (sources, targets)), key=len)
            # the channels of an image, of which there are few, are in different orders
            if list(map(len, shapes)) == [2, 4] and shapes[1][1] > 4:
                yield sources[0], targets[0], "a linear layer on flattened features is this convolution"


def pair_last(source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
    """Pair the last layers left where no two are alike, unless they are square matrices, which fit by chance."""
    groups = equal_groups(source_layers, target_layers, lambda layer: layer.signature)
    if len(groups) != len(source_layers) or len(groups) != len(target_layers):
        return []
    return [
        (sources[0], targets[0], "the last layer left")
        for sources, targets in groups
        if all(len(set(size)) == len(size) for _, size in sources[0].sizes)
    ]
