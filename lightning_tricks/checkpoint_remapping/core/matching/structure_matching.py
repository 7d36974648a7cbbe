"""Match the layers of two models whose names differ, from their names, their sizes, their order and their neighbors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from lightning_tricks.checkpoint_remapping.core.matching.context_matching import ContextMatching
from lightning_tricks.checkpoint_remapping.core.matching.justification import Justification
from lightning_tricks.checkpoint_remapping.core.matching.layers import (
    TEMPLATES,
    Layer,
    Pairs,
    Series,
    Shape,
    Template,
    are_numbered_in_order,
    equal_groups,
    equal_series,
    group_layers,
    is_ordered,
    keep_layouts,
    series_of,
    sort_naturally,
)
from lightning_tricks.checkpoint_remapping.core.matching.matches import Matching, matches_of_layers
from lightning_tricks.checkpoint_remapping.core.matching.path_context import Side
from lightning_tricks.checkpoint_remapping.core.matching.weight_layouts import unify_layouts


def match_by_structure(source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]) -> Matching:
    """Match the layers of two models whose names differ.

    Layers of one kind whose names differ in numbers alone form a series, and a series is matched with the one that has
    the same sizes in the order of its numbers. Where several have, words decide; where words do not, it is ambiguous.
    """
    return _StructureMatcher(source_shapes, target_shapes).match()


class _StructureMatcher:
    """The layers that are not matched yet, and the matches found so far."""

    def __init__(self, source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]) -> None:
        self.source_layers, self.target_layers = group_layers(source_shapes), group_layers(target_shapes)
        ordered = is_ordered(target_shapes)
        sort_naturally(self.source_layers)
        if not ordered:
            sort_naturally(self.target_layers)
        # The layouts of one side depend on those of the other: the file comes first
        unify_layouts(self.source_layers, self.target_layers)
        unify_layouts(self.target_layers, self.source_layers)
        keep_layouts(self.source_layers, self.target_layers)
        self.context = ContextMatching(self.source_layers, self.target_layers, ordered)
        self.sides = Side(self.source_layers), Side(self.target_layers, ordered)
        self.pairs: list[tuple[Layer, Layer, str]] = []

    def match(self) -> Matching:
        """Return all matches, and what remains ambiguous."""
        # Matrices first: their sizes say more than those of the vectors of a norm or a bias, which then follow them
        self._pair_until_stable(PAIRINGS, lambda layer: layer.has_matrix)
        by_context = (self.context.pair_norms_of_convolutions, self.context.pair_in_containers)
        self._pair_until_stable((*by_context, *PAIRINGS, pair_flattened), lambda _: True)
        self._pair(pair_last, lambda _: True)
        justification = Justification(*self.sides, self.context.matched, self.context.norms)
        left = equal_groups(self.source_layers, self.target_layers, lambda layer: layer.signature)
        indistinct = justification.indistinct()
        refused = {layer for sources, _ in indistinct for layer in sources}
        matches = [
            match
            for source, target, reason in self.pairs
            if source not in refused
            for match in matches_of_layers(source, target, reason, justification.doubt(source))
        ]
        ambiguous = [
            ([layer.path for layer in sources], [layer.path for layer in targets])
            for sources, targets in [*left, *indistinct]
        ]
        return Matching(matches, ambiguous)

    def _pair_until_stable(self, pairings: tuple[Pairing, ...], considered: Callable[[Layer], bool]) -> None:
        """Repeat all ways until none finds more: each match leaves fewer candidates for the others."""
        while any([self._pair(pairing, considered) for pairing in pairings]):  # noqa: C419  # all of them
            pass

    def _pair(self, pairing: Pairing, considered: Callable[[Layer], bool]) -> bool:
        """Match the pairs that one way finds; return whether there were any."""
        # Ways that see single layers cannot tell norms without an order apart: only their neighbors may decide
        left_out = self.context.ambiguous_norms if pairing in PAIRINGS else set()
        source_layers, target_layers = (
            [layer for layer in layers if considered(layer) and layer not in left_out]
            for layers in (self.source_layers, self.target_layers)
        )
        pairs = list(pairing(source_layers, target_layers))
        for source, target, _ in pairs:
            self.source_layers.remove(source)
            self.target_layers.remove(target)
            self.context.matched[source] = target
        self.pairs += pairs
        return bool(pairs)


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


def pair_by_evidence(
    sources: list[Series], targets: list[Series], reason_if_unique: str
) -> Iterator[tuple[Series, Series, str]]:
    """Pair series of equal sizes: the only two, or those with more words in common than either has with a third.

    Args:
        sources: Series of the file.
        targets: Series of the model, all of the same sizes.
        reason_if_unique: The reason of the match where there is one series on each side.

    Yields:
        A series of the file, one of the model, and why they belong together.
    """
    if len(sources) == len(targets) == 1:
        if len(sources[0]) > 1 or sources[0][0].has_distinctive_size or _words_in_common(sources[0], targets[0]):
            yield sources[0], targets[0], reason_if_unique
        return
    # A word that all series of a side have tells them apart no better than none
    several = [side for side in (sources, targets) if len(side) > 1]
    ignored = frozenset().union(*(frozenset.intersection(*(series[0].words for series in side)) for side in several))
    while sources and targets:
        best = _mutually_best(sources, targets, ignored)
        if not best:
            return
        for i, j in best:
            words = (sources[i][0].words & targets[j][0].words) - ignored
            yield sources[i], targets[j], f"the same words: {', '.join(sorted(words))}"
        sources = [series for i, series in enumerate(sources) if i not in {i for i, _ in best}]
        targets = [series for j, series in enumerate(targets) if j not in {j for _, j in best}]
        if len(sources) == len(targets) == 1:
            yield sources[0], targets[0], "the last of their size"
            return


def _mutually_best(sources: list[Series], targets: list[Series], ignored: frozenset[str]) -> list[tuple[int, int]]:
    """Return the pairs of positions that have more words in common than either has with any other."""
    scores = {
        (i, j): _words_in_common(source, target, ignored)
        for i, source in enumerate(sources)
        for j, target in enumerate(targets)
    }
    return [
        (i, j)
        for (i, j), score in scores.items()
        if score > 0
        and all(score > scores[k, j] for k in range(len(sources)) if k != i)
        and all(score > scores[i, k] for k in range(len(targets)) if k != j)
    ]


def _words_in_common(source: Series, target: Series, ignored: frozenset[str] = frozenset()) -> int:
    return len((source[0].words & target[0].words) - ignored)


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
