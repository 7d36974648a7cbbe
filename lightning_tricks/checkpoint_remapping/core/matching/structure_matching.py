"""Match the layers of two models whose names differ, from their names, their sizes, their order and their neighbors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_tricks.checkpoint_remapping.core.matching.candidates import equal_groups
from lightning_tricks.checkpoint_remapping.core.matching.justification import Justification
from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Layer, Shape, group_layers, keep_layouts
from lightning_tricks.checkpoint_remapping.core.matching.layer_order import is_ordered, sort_naturally
from lightning_tricks.checkpoint_remapping.core.matching.layer_pairing import (
    PAIRINGS,
    Pairing,
    pair_flattened,
    pair_last,
)
from lightning_tricks.checkpoint_remapping.core.matching.matches import Matching, matches_of_layers
from lightning_tricks.checkpoint_remapping.core.matching.neighbor_matching import NeighborMatching
from lightning_tricks.checkpoint_remapping.core.matching.sides import Side
from lightning_tricks.checkpoint_remapping.core.matching.weight_layouts import (
    fuse_query_key_value,
    mark_transposed,
    name_gates,
    stack_experts,
    unify_positions,
)


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
        source_ordered, target_ordered = False, is_ordered(target_shapes)
        # The layouts of one side depend on those of the other: the file comes first
        self._prepare(self.source_layers, self.target_layers, source_ordered)
        self._prepare(self.target_layers, self.source_layers, target_ordered)
        keep_layouts(self.source_layers, self.target_layers)
        self.neighbors = NeighborMatching((self.source_layers, self.target_layers), (source_ordered, target_ordered))
        self.sides = Side(self.source_layers, source_ordered), Side(self.target_layers, target_ordered)
        self.pairs: list[tuple[Layer, Layer, str]] = []

    @staticmethod
    def _prepare(layers: list[Layer], others: list[Layer], ordered: bool) -> None:
        if not ordered:
            sort_naturally(layers)
        unify_positions(layers, others)
        stack_experts(layers, others)
        fuse_query_key_value(layers, others)
        mark_transposed(layers)
        name_gates(layers)

    def match(self) -> Matching:
        """Return all matches, and what remains ambiguous."""
        # Matrices first: their sizes say more than those of the vectors of a norm or a bias, which then follow them
        self._pair_until_stable(PAIRINGS, lambda layer: layer.has_matrix)
        by_neighbors = (self.neighbors.pair_norms_of_convolutions, self.neighbors.pair_in_containers)
        self._pair_until_stable((*by_neighbors, *PAIRINGS, pair_flattened), lambda _: True)
        self._pair(pair_last, lambda _: True)
        justification = Justification(*self.sides, self.neighbors.matched, self.neighbors.norms)
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
        """Match what one way pairs; return whether there was something."""
        # Norms without an order look alike to what sees layers alone: only their neighbors may decide
        left_out = self.neighbors.ambiguous_norms if pairing in PAIRINGS else set()
        source_layers, target_layers = (
            [layer for layer in layers if considered(layer) and layer not in left_out]
            for layers in (self.source_layers, self.target_layers)
        )
        pairs = list(pairing(source_layers, target_layers))
        for source, target, _ in pairs:
            self.source_layers.remove(source)
            self.target_layers.remove(target)
            self.neighbors.matched[source] = target
        self.pairs += pairs
        return bool(pairs)
