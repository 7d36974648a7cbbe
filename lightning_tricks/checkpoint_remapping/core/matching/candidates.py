"""The search for candidates: layers, and series of layers, of a file and a model that could be each other's."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lightning_tricks._shared.patterns import LIST_NUMBER
from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Layer

T = TypeVar("T")
Template = Callable[[Layer], str]
Series = list[Layer]


def equal_groups(
    sources: Iterable[T], targets: Iterable[T], key: Callable[[T], object]
) -> list[tuple[list[T], list[T]]]:
    """Return the groups of (sources, targets) with equal keys, where both have some."""
    groups: dict[object, tuple[list[T], list[T]]] = defaultdict(lambda: ([], []))
    for side, values in enumerate((sources, targets)):
        for value in values:
            groups[key(value)][side].append(value)
    return [(group, others) for group, others in groups.values() if group and others]


def equal_series(sources: Sequence[Series], targets: Sequence[Series]) -> list[tuple[list[Series], list[Series]]]:
    """Return the groups of series whose layers have the same tensors of the same sizes in the same order."""
    return equal_groups(
        sources, targets, lambda series: (series[0].tensor_kinds, tuple(layer.sizes for layer in series))
    )


def series_of(layers: list[Layer], template: Template) -> list[Series]:
    """Return the series: layers of one kind whose names differ in numbers alone, in the order of these numbers."""
    series: dict[object, Series] = defaultdict(list)
    for layer in layers:
        series[template(layer), layer.tensor_kinds].append(layer)
    return [sorted(members, key=lambda layer: layer.numbers) for members in series.values()]


def without_numbers(layer: Layer) -> str:
    """Return the path of a layer with each number written as `#`."""
    return re.sub(r"\d+", "#", layer.path)


def _numbers_between_dots(layer: Layer) -> str:
    return LIST_NUMBER.sub("#", layer.path)


def _all_numbers_but_the_last(layer: Layer) -> str:
    return re.sub(r"\d+(?=.*\d)", "#", layer.path)


# Projects number blocks, layers in a block, or both; a series of one project may be that of another by any of these
TEMPLATES: tuple[Template, ...] = (without_numbers, _numbers_between_dots, _all_numbers_but_the_last)
