"""Which layer of one model is which of another, told from names and shapes; ambiguous where it could be two ways."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import (
    Layer,
    Pairs,
    Shape,
    find_transposed,
    fuse_triples,
    is_ordered,
    layers_of,
    number_naturally,
    rise_in_number,
)
from lightning_tricks.checkpoint_remapping.core.matching.neighbor_matching import NeighborMatching


@dataclass(frozen=True)
class Match:
    """Which tensors of a file become which of a model.

    Attributes:
        sources: Names in the file; several are fused.
        targets: Names in the model; several are made by a split.
        transpose: Whether the last two dimensions change places.
        shape: The new shape, None where it stays.
        reason: Why these belong together.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    transpose: bool = False
    shape: Shape | None = None
    reason: str = ""


@dataclass
class Matching:
    """What was matched; `ambiguous` holds (names in the file, names in the model) that could go several ways."""

    matches: list[Match] = field(default_factory=list)
    ambiguous: list[tuple[list[str], list[str]]] = field(default_factory=list)


def match_by_structure(source: Mapping[str, Shape], target: Mapping[str, Shape]) -> Matching:
    """Match the layers of two models whose names differ.

    Layers of one kind whose names differ in numbers alone form a series, and a series belongs to the one that has the
    same sizes in the order of its numbers. Where several have, words decide; where those don't, nothing does.
    """
    (ours, theirs), orders = (layers_of(source), layers_of(target)), (is_ordered(source), is_ordered(target))
    for layers, others, ordered in ((ours, theirs, orders[0]), (theirs, ours, orders[1])):
        if not ordered:
            number_naturally(layers)
        fuse_triples(layers, others)
        find_transposed(layers)
    neighbors = NeighborMatching((ours, theirs), orders)
    found = Matching()
    by_themselves = (*(_by_series(*templates) for templates in product(_TEMPLATES, repeat=2)), _by_words, _by_order)
    for kinds, ways in (
        (lambda layer: layer.has_matrix, by_themselves),  # they say more than the vectors of a norm or a bias
        (lambda _: True, (neighbors.after_convolution, neighbors.beside, *by_themselves, _by_flattening)),
    ):
        again = True
        while again:
            again = False
            for find in ways:
                sides = ([layer for layer in layers if kinds(layer)] for layers in (ours, theirs))
                if find in by_themselves:
                    sides = ([layer for layer in layers if layer not in neighbors.unsettled] for layers in sides)
                for one, other, reason in list(find(*sides)):
                    found.matches += _matches_of(one, other, reason)
                    ours.remove(one)
                    theirs.remove(other)
                    neighbors.partner[one] = other
                    again = True
    for one, other, reason in _by_exclusion(ours, theirs):
        found.matches += _matches_of(one, other, reason)
        ours.remove(one)
        theirs.remove(other)
    found.ambiguous = [
        ([layer.path for layer in mine], [layer.path for layer in yours])
        for mine, yours in _classes(ours, theirs, lambda layer: layer.form)
    ]
    return found


# Ways to find pairs


def _template(layer: Layer) -> str:
    return re.sub(r"\d+", "#", layer.path)


def _template_of_numbers(layer: Layer) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", layer.path)


def _template_but_last(layer: Layer) -> str:
    return re.sub(r"\d+(?=.*\d)", "#", layer.path)


_TEMPLATES = (_template, _template_of_numbers, _template_but_last)


def _by_series(
    our_template: Callable[[Layer], str], their_template: Callable[[Layer], str]
) -> Callable[[list[Layer], list[Layer]], Pairs]:
    def find(ours: list[Layer], theirs: list[Layer]) -> Pairs:
        return [
            (one, other, reason)
            for mine, yours in _classes(_series(ours, our_template), _series(theirs, their_template), _sizes_of_series)
            for series, match, reason in _decide(mine, yours, "the only layers of these sizes in this order")
            for one, other in zip(series, match, strict=True)
        ]

    return find


def _series(layers: list[Layer], template: Callable[[Layer], str]) -> list[list[Layer]]:
    series: dict[object, list[Layer]] = defaultdict(list)
    for layer in layers:
        series[template(layer), layer.kind].append(layer)
    return [sorted(members, key=lambda layer: layer.numbers) for members in series.values()]


def _sizes_of_series(series: list[Layer]) -> object:
    return series[0].kind, tuple(layer.sizes for layer in series)


def _by_words(ours: list[Layer], theirs: list[Layer]) -> Pairs:
    alone = [[layer] for layer in ours], [[layer] for layer in theirs]
    for mine, yours in _classes(*alone, _sizes_of_series):
        for (one,), (other,), reason in _decide(mine, yours, "the only layer of this size"):
            yield one, other, reason


def _by_exclusion(ours: list[Layer], theirs: list[Layer]) -> Pairs:
    """Pair the last layers left where no two are alike, unless they are square matrices, which fit easily."""
    classes = _classes(ours, theirs, lambda layer: layer.form)
    if len(classes) != len(ours) or len(classes) != len(theirs):
        return []
    left = [(mine[0], yours[0]) for mine, yours in classes]
    return [
        (one, other, "the last layer left")
        for one, other in left
        if all(len(set(size)) == len(size) for _, size in one.sizes)
    ]


def _classes(ours: list, theirs: list, key: Callable) -> list[tuple[list, list]]:  # type: ignore[type-arg]
    """Return what is equal by a key: (of ours, of theirs), where both have some."""
    classes: dict[object, tuple[list, list]] = defaultdict(lambda: ([], []))  # type: ignore[type-arg]
    for side, values in enumerate((ours, theirs)):
        for value in values:
            classes[key(value)][side].append(value)
    return [(mine, yours) for mine, yours in classes.values() if mine and yours]


def _decide(
    ours: list[list[Layer]], theirs: list[list[Layer]], only: str
) -> Iterable[tuple[list[Layer], list[Layer], str]]:
    """Pair series of equal sizes: the only two, or those whose words are nearest to each other and to no third."""
    if len(ours) == len(theirs) == 1:
        if len(ours[0]) > 1 or _is_telling(ours[0][0]) or _common(ours[0], theirs[0], frozenset()):
            yield ours[0], theirs[0], only
        return
    several = [side for side in (ours, theirs) if len(side) > 1]
    everywhere = frozenset().union(*(frozenset.intersection(*map(_says, side)) for side in several))
    while ours and theirs:
        scores = {
            (i, j): _common(one, other, everywhere) for i, one in enumerate(ours) for j, other in enumerate(theirs)
        }
        best = [
            (i, j)
            for (i, j), score in scores.items()
            if score > 0
            and all(score > scores[k, j] for k in range(len(ours)) if k != i)
            and all(score > scores[i, k] for k in range(len(theirs)) if k != j)
        ]
        if not best:
            return
        for i, j in best:
            yield (
                ours[i],
                theirs[j],
                f"the same words: {', '.join(sorted(_says(ours[i]) & _says(theirs[j]) - everywhere))}",
            )
        ours = [one for i, one in enumerate(ours) if i not in {i for i, _ in best}]
        theirs = [other for j, other in enumerate(theirs) if j not in {j for _, j in best}]
        if len(ours) == len(theirs) == 1:
            yield ours[0], theirs[0], "the last of their size"
            return


def _says(series: list[Layer]) -> frozenset[str]:
    return series[0].says


def _common(one: list[Layer], other: list[Layer], known: frozenset[str]) -> int:
    return len((_says(one) & _says(other)) - known)


def _is_telling(layer: Layer) -> bool:
    """Whether a layer's sizes alone say what it is; a square matrix's and a vector's don't."""
    return any(len(size) > 2 or (len(size) == 2 and len(set(size)) == 2) for _, size in layer.sizes)


def _by_order(ours: list[Layer], theirs: list[Layer]) -> Pairs:
    """Pair layers of one size in order, where numbers say on both sides which comes first."""
    for mine, yours in _classes(ours, theirs, lambda layer: layer.form):
        if len(mine) != len(yours) or len(mine) == 1:
            continue
        mine, yours = (sorted(layers, key=lambda layer: layer.position) for layers in (mine, yours))
        if rise_in_number(mine) and rise_in_number(yours):
            for one, other in zip(mine, yours, strict=True):
                yield one, other, "numbered in the same order"


def _by_flattening(ours: list[Layer], theirs: list[Layer]) -> Pairs:
    """Pair a Linear on flattened features with the convolution that does the same, as in VGG's classifier."""

    def key(layer: Layer) -> object:
        if "weight" not in layer.leaves:
            return layer
        shape = layer.leaves["weight"][1]
        return tuple(sorted(layer.leaves)), shape[:1], math.prod(shape)

    for mine, yours in _classes(ours, theirs, key):
        if len(mine) == len(yours) == 1:
            shapes = sorted((layer[0].leaves["weight"][1] for layer in (mine, yours)), key=len)
            # an image's own channels, of which there are few, are ordered variously
            if list(map(len, shapes)) == [2, 4] and shapes[1][1] > 4:
                yield mine[0], yours[0], "a linear layer on flattened features is this convolution"


def resized(source: Mapping[str, Shape], target: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return pairs of names whose tensors differ in one size alone, such as a head for another number of classes."""
    pairs: list[tuple[str, str]] = []
    ours, theirs = layers_of(source), layers_of(target)
    for layer in ours:
        fitting = [other for other in theirs if _is_resized(layer, other)]
        rivals = [other for other in ours for match in fitting[:1] if _is_resized(other, match)]
        if len(fitting) == len(rivals) == 1:
            pairs += [(names[0], fitting[0].leaves[leaf][0][0]) for leaf, (names, _) in layer.leaves.items()]
    return pairs


def _is_resized(one: Layer, other: Layer) -> bool:
    """Whether every tensor of a layer differs in its first size, or a lone one in any one size."""
    if one.leaves.keys() != other.leaves.keys():
        return False
    shapes = [(one.leaves[leaf][1], other.leaves[leaf][1]) for leaf in one.leaves]
    if any(len(mine) != len(yours) for mine, yours in shapes):
        return False
    differ = [[i for i, (a, b) in enumerate(zip(mine, yours, strict=True)) if a != b] for mine, yours in shapes]
    return all(places == [0] for places in differ) or (len(differ) == 1 and len(differ[0]) == 1)


def _matches_of(one: Layer, other: Layer, reason: str) -> list[Match]:
    matches = []
    for leaf, (sources, shape) in one.leaves.items():
        if leaf not in other.leaves:
            continue
        targets, wanted = other.leaves[leaf]
        transpose = leaf == "weight" and one.transposed != other.transposed
        got = shape[:-2] + shape[:-3:-1] if transpose else shape
        parts = len(targets)
        new = None if got == wanted else (wanted[0] // parts, *wanted[1:]) if parts > 1 else wanted
        matches.append(Match(sources, targets, transpose, new, reason))
    return matches
