"""Which layers belong together by what was matched around them."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Layer, Pairs, rise_in_number


class NeighborMatching:
    """Ways to find pairs by what was matched around them."""

    def __init__(self, sides: tuple[list[Layer], list[Layer]], ordered: tuple[bool, bool]) -> None:
        self.ordered = ordered
        self.partner: dict[Layer, Layer] = {}
        self.unsettled: set[Layer] = set()  # BatchNorms of a block that have one size and no order
        self.norms = [_norms_of(layers, order) for layers, order in zip(sides, ordered, strict=True)]
        self.below: list[dict[str, list[Layer]]] = [defaultdict(list), defaultdict(list)]
        for layers, below in zip(sides, self.below, strict=True):
            for layer in layers:
                for ancestor in _ancestors(layer):
                    below[ancestor].append(layer)

    def after_convolution(self, ours: list[Layer], theirs: list[Layer]) -> Pairs:
        """Pair the norms of convolutions that belong together."""
        left, right = set(ours), set(theirs)
        for convolution, layer in self.norms[0].items():
            other = self.norms[1].get(self.partner[convolution]) if convolution in self.partner else None
            if other is not None and layer in left and other in right and layer.form == other.form:
                right.remove(other)
                yield layer, other, "the norm of the same convolution"

    def beside(self, ours: list[Layer], theirs: list[Layer]) -> Pairs:
        """Pair what is left of a size in containers whose other layers belong together.

        That is one layer on each side, or the BatchNorms of a block, which follow each other as its convolutions do.
        """
        left, right = set(ours), set(theirs)
        for layer in ours:
            for ancestor in _ancestors(layer):
                partners = [self.partner[other] for other in self.below[0][ancestor] if other in self.partner]
                if partners:
                    break
            else:
                continue
            mine = [other for other in self.below[0][ancestor] if other in left and layer.form == other.form]
            yours = self._left_in_container_of(partners, layer, right)
            if not mine or len(mine) != len(yours):
                continue
            if len(mine) > 1:
                if "running_mean" not in layer.leaves:
                    continue  # words tell the norms of a transformer's block
                if not all(map(self._comes_in_order, (mine, yours), self.ordered)):
                    self.unsettled |= {*mine, *yours}
                    continue
                mine, yours = (sorted(layers, key=lambda layer: layer.position) for layers in (mine, yours))
            left -= set(mine)
            right -= set(yours)
            for one, other in zip(mine, yours, strict=True):
                yield one, other, f"what is left beside the layers of {ancestor}"

    def _left_in_container_of(self, partners: list[Layer], layer: Layer, right: set[Layer]) -> list[Layer]:
        """Return the layers like `layer` in the smallest container that holds all partners and no other's partner."""
        for container in _ancestors(partners[0]):
            inside = self.below[1][container]
            if set(partners) <= set(inside) <= right | set(partners):
                fitting = [other for other in inside if other in right and layer.form == other.form]
                if fitting:
                    return fitting
        return []

    @staticmethod
    def _comes_in_order(layers: list[Layer], ordered: bool) -> bool:
        return ordered or rise_in_number(sorted(layers, key=lambda layer: layer.position))


def _norms_of(layers: list[Layer], ordered: bool) -> dict[Layer, Layer]:
    """Return the norm of each convolution: the next layer or, where the order is lost, the one beside it by name."""
    if ordered:
        return {one: other for one, other in pairwise(layers) if _is_norm_of(other, one)}
    siblings: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        siblings[layer.path.rpartition(".")[0]].append(layer)
    found: dict[Layer, Layer] = {}
    for family in siblings.values():
        convolutions = [layer for layer in family if len(layer.leaves.get("weight", ((), ()))[1]) > 2]
        norms = [layer for layer in family if "running_mean" in layer.leaves]
        for one in convolutions:
            named = [n for n in norms if n.path.rpartition(".")[2] == one.path.rpartition(".")[2].replace("conv", "bn")]
            fitting = named or (norms if len(norms) == len(convolutions) == 1 else [])
            if len(fitting) == 1 and _is_norm_of(fitting[0], one):
                found[one] = fitting[0]
    return found


def _ancestors(layer: Layer) -> list[str]:
    """Return the containers of a layer from the nearest, without the model itself."""
    parts = layer.path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _is_norm_of(layer: Layer, convolution: Layer) -> bool:
    weight = convolution.leaves.get("weight")
    channels = [size for _, size in layer.sizes]
    if weight is None or len(weight[1]) < 3 or not channels:
        return False
    stems, numbers = zip(*(_stem_and_number(layer) for layer in (layer, convolution)), strict=True)
    if all(stems) and all(numbers) and numbers[0] != numbers[1]:
        return False  # bn2 is not the norm of conv1
    return {"weight", "bias"} <= layer.leaves.keys() and all(size == weight[1][:1] for size in channels)


def _stem_and_number(layer: Layer) -> tuple[str, str]:
    name = layer.path.rpartition(".")[2]
    stem = name.rstrip("0123456789")
    return stem, name[len(stem) :]
