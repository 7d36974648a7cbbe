"""Match the layers of two models whose names differ, from their names, their sizes, their order and their neighbors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from lightning_tricks.checkpoint_remapping.core.matching.justification import Justification
from lightning_tricks.checkpoint_remapping.core.matching.layers import (
    FUSED_PARTS,
    TEMPLATES,
    Layer,
    Pairs,
    Series,
    Template,
    are_numbered_in_order,
    equal_groups,
    is_ordered,
    joined_shape,
    layers_of_both,
    series_of,
)
from lightning_tricks.checkpoint_remapping.core.matching.matches import FUSED, Match, Matching, Shape
from lightning_tricks.checkpoint_remapping.core.matching.path_context import Side
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import words_of


def match_by_structure(source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]) -> Matching:
    """Match the layers of two models whose names differ.

    Layers of one kind whose names differ in numbers alone form a series, and a series is matched with the one that has
    the same sizes in the order of its numbers. Where several have, words decide; where words do not, it is ambiguous.
    """
    return _StructureMatcher(source_shapes, target_shapes).match()


class _StructureMatcher:
    """The layers that are not matched yet, and the matches found so far."""

    def __init__(self, source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]) -> None:
        self.ordered = is_ordered(target_shapes)
        self.source_layers, self.target_layers = layers_of_both(source_shapes, target_shapes, self.ordered)
        self.sides = Side(self.source_layers), Side(self.target_layers, self.ordered)
        self.containers = tuple(map(_layers_by_container, (self.source_layers, self.target_layers)))
        self.pairs: list[tuple[Layer, Layer, str]] = []
        self.matched: dict[Layer, Layer] = {}  # the layers of the model by those of the file
        self.in_context: set[Layer] = set()  # those that were found by layers beside them
        self.ambiguous_norms: set[Layer] = set()  # BatchNorms of a block that have one size and no order

    def match(self) -> Matching:
        """Return all matches, and what remains ambiguous."""
        # Matrices first: their sizes say more than those of the vectors of a norm or a bias, which then follow them
        self._pair_until_stable(_PAIRINGS, lambda layer: layer.has_matrix)
        by_context = (self._norms_of_convolutions, self._in_containers)
        self._pair_until_stable((*by_context, *_PAIRINGS), lambda _: True)
        self._pair(_pair_last, lambda _: True)
        justification = Justification(*self.sides, self.matched)
        # Asked before they are named: what is left on one side only may be a part that the other lacks.
        left = equal_groups(self.source_layers, self.target_layers, lambda layer: layer.signature)
        indistinct = justification.indistinct()
        refused = {layer for sources, _ in indistinct for layer in sources}
        matches = [
            match
            for source, target, reason in self.pairs
            if source not in refused
            for match in _matches_of_layers(
                source, target, reason, justification.doubt(source, source in self.in_context)
            )
        ]
        ambiguous = [
            ([layer.path for layer in sources], [layer.path for layer in targets])
            for sources, targets in [*left, *indistinct]
        ]
        return Matching(matches, ambiguous)

    def _pair_until_stable(self, pairings: tuple[_Pairing, ...], considered: Callable[[Layer], bool]) -> None:
        """Repeat all ways until none finds more: each match leaves fewer candidates for the others."""
        while any([self._pair(pairing, considered) for pairing in pairings]):  # noqa: C419  # all of them
            pass

    def _pair(self, pairing: _Pairing, considered: Callable[[Layer], bool]) -> bool:
        """Match the pairs that one way finds; return whether there were any."""
        # Ways that see single layers cannot tell norms without an order apart: only their neighbors may decide
        left_out = self.ambiguous_norms if pairing in _PAIRINGS else set()
        source_layers, target_layers = (
            [layer for layer in layers if considered(layer) and layer not in left_out]
            for layers in (self.source_layers, self.target_layers)
        )
        pairs = list(pairing(source_layers, target_layers))
        for source, target, _ in pairs:
            # At once, so that a way that comes later cannot match it again.
            self.source_layers.remove(source)
            self.target_layers.remove(target)
            self.matched[source] = target
            if pairing in (self._norms_of_convolutions, self._in_containers):
                self.in_context.add(source)
        self.pairs += pairs
        return bool(pairs)

    def _norms_of_convolutions(self, source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
        """Pair the norms of convolutions that were matched."""
        sources, targets = set(source_layers), set(target_layers)
        norms = self.sides[1].norms
        for convolution, source in self.sides[0].norms.items():
            target = norms.get(self.matched[convolution]) if convolution in self.matched else None
            # Norms of a block have one size: the convolution before each tells them apart.
            if target in targets and source in sources and source.signature == target.signature:
                targets.remove(target)
                yield source, target, "the norm of the same convolution"

    def _in_containers(self, source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
        """Pair the layers of one size that are left in containers whose other layers were matched with each other.

        That is one layer on each side, or the BatchNorms of a block, which follow each other as its convolutions do.
        """
        left_sources, left_targets = set(source_layers), set(target_layers)
        for layer in source_layers:
            container, partners = self._nearest_matched_container(layer)
            if not partners:
                continue
            sources = [
                other
                for other in self.containers[0][container]
                if other in left_sources and layer.signature == other.signature
            ]
            targets = self._left_in_container_of(partners, layer, left_targets)
            if not sources or len(sources) != len(targets):
                continue
            if len(sources) > 1:
                if "running_mean" not in layer.tensors:
                    continue  # words tell the norms of a transformer's block apart
                sources, targets = (sorted(group, key=lambda layer: layer.position) for group in (sources, targets))
                # A file's order says nothing (.safetensors are sorted): only numbers tell which of two norms of a size
                # is first.
                if not (are_numbered_in_order(sources) and (self.ordered or are_numbered_in_order(targets))):
                    self.ambiguous_norms |= {*sources, *targets}
                    continue
            left_sources -= set(sources)
            left_targets -= set(targets)
            for source, target in zip(sources, targets, strict=True):
                yield source, target, f"what is left beside the layers of {container}"

    def _nearest_matched_container(self, layer: Layer) -> tuple[str, list[Layer]]:
        """Return the smallest container of a layer with matched layers, and what these were matched with."""
        for container in _containers(layer):
            # The smallest one with a match: in a larger one there are more layers of the size.
            partners = [self.matched[other] for other in self.containers[0][container] if other in self.matched]
            if partners:
                return container, partners
        return "", []

    def _left_in_container_of(self, partners: list[Layer], layer: Layer, left: set[Layer]) -> list[Layer]:
        """Return the layers like `layer` in the smallest container that holds all partners and no other's partner."""
        for container in _containers(partners[0]):
            inside = self.containers[1][container]
            # A container with partners of others holds several blocks: its rest may be any of theirs.
            if set(partners) <= set(inside) <= left | set(partners):
                fitting = [other for other in inside if other in left and layer.signature == other.signature]
                if fitting:
                    return fitting
        return []


def _layers_by_container(layers: list[Layer]) -> dict[str, list[Layer]]:
    containers: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        for container in _containers(layer):
            containers[container].append(layer)
    return containers


def _containers(layer: Layer) -> list[str]:
    """Return the containers of a layer from the smallest to the largest, without the model itself."""
    parts = layer.path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _matches_of_layers(source: Layer, target: Layer, reason: str, doubt: str = "") -> list[Match]:
    """Return the matches of the tensors of two layers, with the transposition and the shape that each needs.

    Args:
        source: The layer of the file.
        target: The layer of the model.
        reason: Why they belong together.
        doubt: What makes the match a weak one.
    """
    matches = []
    if not doubt and _order_of_parts(source) != _order_of_parts(target):
        doubt = FUSED
    is_fused = not doubt and bool(source.parts or target.parts)
    why = FUSED if is_fused else doubt
    for tensor, (sources, shape) in source.tensors.items():
        if tensor not in target.tensors:
            continue
        targets, wanted = target.tensors[tensor]
        transpose = tensor == "weight" and source.transposed != target.transposed
        if transpose and (len(sources) > 1 or 1 in shape[-2:]):
            continue  # the parts are joined along their outputs, and the matrix of a convolution is not last
        got = shape[:-2] + shape[:-3:-1] if transpose else shape
        got = joined_shape(source.parts[tensor]) if len(sources) > 1 else got
        parts = target.parts.get(tensor, [])
        wanted = joined_shape(parts) if len(targets) > 1 else wanted
        new = None if got == wanted else wanted
        # Grouped queries: keys and values have fewer heads than queries, so that thirds would cut through them.
        sizes = tuple(part[0] for part in parts) if len({part[0] for part in parts}) > 1 else None
        matches.append(
            Match(
                sources,
                targets,
                transpose,
                new,
                f"{reason}; {why}" if why else reason,
                "weak" if doubt else "strong",
                sizes,
                is_fused=is_fused,
            )
        )
    return matches


def _order_of_parts(layer: Layer) -> str:
    """Return what says in which order a layer has query, key and value; empty if it has no such parts.

    `qkv` and the `in_proj_weight` of nn.MultiheadAttention have them one after another. Other names say nothing:
    projects have them head by head, or in groups, in their `c_attn`, `qkv_proj` or `in_proj`.
    """
    names = [name for names, _ in layer.tensors.values() for name in names]
    if layer.parts or layer.name in ("qkv", "kv") or all("in_proj_" in name for name in names):
        return "one after another"
    return layer.name if FUSED_PARTS.keys() & words_of(layer.path) else ""


_Pairing = Callable[[list[Layer], list[Layer]], Pairs]


def _by_series(source_template: Template, target_template: Template) -> _Pairing:
    """Return the way that pairs series of layers, numbered by these templates."""

    def pair(source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
        sides = series_of(source_layers, source_template), series_of(target_layers, target_template)
        return [
            (source, target, reason)
            for sources, targets in equal_groups(
                *sides, lambda series: (series[0].tensor_kinds, tuple(layer.sizes for layer in series))
            )
            for source_series, target_series, reason in _pair_by_evidence(
                sources, targets, "the only layers of these sizes in this order"
            )
            for source, target in zip(source_series, target_series, strict=True)
        ]

    return pair


def _by_size(source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
    """Pair single layers that are the only ones of their size, or that words tell from others of their size."""
    for group in equal_groups(source_layers, target_layers, lambda layer: layer.signature):
        # As series of one, so that the same evidence decides.
        sources, targets = ([[layer] for layer in layers] for layers in group)
        for (source,), (target,), reason in _pair_by_evidence(sources, targets, "the only layer of this size"):
            yield source, target, reason


# Series come first: they are longer, so that two are less often equal by chance
_PAIRINGS: tuple[_Pairing, ...] = (*(_by_series(*templates) for templates in product(TEMPLATES, repeat=2)), _by_size)


def _pair_last(source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
    """Pair the last layers left where no two are alike, unless they are square matrices, which fit by chance."""
    groups = equal_groups(source_layers, target_layers, lambda layer: layer.signature)
    # Something is left on one side alone: a pair may then be of layers that the other model lacks.
    if len(groups) != len(source_layers) or len(groups) != len(target_layers):
        return []
    return [
        (sources[0], targets[0], "the last layer left")
        for sources, targets in groups
        if all(len(set(size)) == len(size) for _, size in sources[0].sizes)
    ]


def _pair_by_evidence(
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
        # One square layer on each side may be two things: it waits for layers beside it.
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
