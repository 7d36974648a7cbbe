"""Pair layers by what was matched around them: norms by their convolution, layers by those in the same container."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, permutations, starmap

from lightning_tricks.checkpoint_remapping.core.matching.layers import (
    Layer,
    Pairs,
    are_numbered_in_order,
    layers_by_parent,
)

_MOST_IN_A_ROW = 5  # convolutions of which all orders are tried


class ContextMatching:
    """Ways to pair layers by the matches around them.

    Args:
        source: The layers of the file.
        target: The layers of the model.
        ordered: Whether those of the model come in the order in which it registers them.

    Attributes:
        matched: The layers of the model by those of the file that they were matched with; the caller fills it.
        ambiguous_norms: BatchNorms of a block that have one size and no order.
    """

    def __init__(self, source: list[Layer], target: list[Layer], ordered: bool) -> None:
        self.ordered = ordered
        self.matched: dict[Layer, Layer] = {}
        self.ambiguous_norms: set[Layer] = set()
        self.norms = norms_by_name(source), norms_as_registered(target) if ordered else norms_by_name(target)
        self._source_containers, self._target_containers = map(_layers_by_container, (source, target))

    def pair_norms_of_convolutions(self, source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
        """Pair the norms of convolutions that were matched."""
        sources, targets = set(source_layers), set(target_layers)
        for convolution, source in self.norms[0].items():
            target = self.norms[1].get(self.matched[convolution]) if convolution in self.matched else None
            if target in targets and source in sources and source.signature == target.signature:
                targets.remove(target)
                yield source, target, "the norm of the same convolution"

    def pair_in_containers(self, source_layers: list[Layer], target_layers: list[Layer]) -> Pairs:
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
                for other in self._source_containers[container]
                if other in left_sources and layer.signature == other.signature
            ]
            targets = self._left_in_container_of(partners, layer, left_targets)
            if not sources or len(sources) != len(targets):
                continue
            if len(sources) > 1:
                if "running_mean" not in layer.tensors:
                    continue  # words tell the norms of a transformer's block apart
                sources, targets = (sorted(group, key=lambda layer: layer.position) for group in (sources, targets))
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
            partners = [self.matched[other] for other in self._source_containers[container] if other in self.matched]
            if partners:
                return container, partners
        return "", []

    def _left_in_container_of(self, partners: list[Layer], layer: Layer, left: set[Layer]) -> list[Layer]:
        """Return the layers like `layer` in the smallest container that holds all partners and no other's partner."""
        for container in _containers(partners[0]):
            inside = self._target_containers[container]
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


def norms_as_registered(layers: list[Layer]) -> dict[Layer, Layer]:
    """Return the norm of each convolution: the next layer, unless names or the other layers beside it say otherwise."""
    following = {
        layer: norm for layer, norm in pairwise(layers) if _is_norm_of(norm, layer) and _in_one_block(layer, norm)
    }
    for family in layers_by_parent(layers).values():
        norms, convolutions = set(_norms(family)), set(_convolutions(family))
        # Norms that stand before their convolutions, or apart from them
        if norms.difference(following.values()) and convolutions - following.keys():
            for convolution in convolutions:
                following.pop(convolution, None)
    by_name = norms_by_name(layers)
    return {layer: norm for layer, norm in following.items() if by_name.get(layer, norm) is norm}


def norms_by_name(layers: list[Layer]) -> dict[Layer, Layer]:
    """Return the norms with the number of a convolution beside them, and those that are alone with one."""
    found: dict[Layer, Layer] = {}
    for family in layers_by_parent(layers).values():
        convolutions, norms = _convolutions(family), _norms(family)
        have_one_name = all(len({_stem_and_number(layer)[0] for layer in side}) == 1 for side in (convolutions, norms))
        for convolution in convolutions:
            number = _stem_and_number(convolution)[1]
            named = [norm for norm in norms if have_one_name and number and _stem_and_number(norm)[1] == number]
            fitting = named or (norms if len(norms) == len(convolutions) == 1 else [])
            if len(fitting) == 1 and _is_norm_of(fitting[0], convolution):
                found[convolution] = fitting[0]
        if found.keys().isdisjoint(convolutions):
            found |= (
                _norms_in_sequence(family)
                or _norms_along_channels(convolutions, norms)
                or _norms_by_size(convolutions, norms)
            )
    return found


def _norms_by_size(convolutions: list[Layer], norms: list[Layer]) -> dict[Layer, Layer]:
    """Return the norms of convolutions where each has channels of its own."""
    fitting = {layer: [norm for norm in norms if _is_norm_of(norm, layer)] for layer in convolutions}
    alone = [found[0] for found in fitting.values() if len(found) == 1]
    return dict(zip(fitting, alone, strict=True)) if len({*alone}) == len(fitting) == len(norms) else {}


def _norms_in_sequence(family: list[Layer]) -> dict[Layer, Layer]:
    """Return the norm behind each convolution of a sequence, whose numbers are the order in which it computes."""
    if not all(layer.name.isdecimal() for layer in family):
        return {}
    ordered = sorted(family, key=lambda layer: int(layer.name))
    return {layer: norm for layer, norm in pairwise(ordered) if _is_norm_of(norm, layer)}


def _norms_along_channels(convolutions: list[Layer], norms: list[Layer]) -> dict[Layer, Layer]:
    """Return the norms by number, if convolutions follow each other in one order alone by their channels and norms."""
    (stems, numbers) = zip(*map(_stem_and_number, norms), strict=True) if norms else ((), ())
    if len(norms) != len(convolutions) or len({*stems}) > 1 or not all(numbers) or not 1 < len(norms) <= _MOST_IN_A_ROW:
        return {}
    norms = sorted(norms, key=lambda norm: int(_stem_and_number(norm)[1]))
    orders = [
        order
        for order in permutations(convolutions)
        if all(map(_is_norm_of, norms, order)) and all(starmap(_takes_channels, pairwise(order)))
    ]
    return dict(zip(orders[0], norms, strict=True)) if len(orders) == 1 else {}


def _takes_channels(before: Layer, layer: Layer) -> bool:
    """Whether a convolution takes the channels that another one returns, all at once or each by itself."""
    (returned, *_), (own, taken, *_) = (side.tensors["weight"][1] for side in (before, layer))
    return returned in ((taken,) if taken > 1 else (taken, own))


def _convolutions(family: list[Layer]) -> list[Layer]:
    return [layer for layer in family if len(layer.tensors.get("weight", ((), ()))[1]) > 2]


def _norms(family: list[Layer]) -> list[Layer]:
    return [layer for layer in family if "running_mean" in layer.tensors]


def _in_one_block(layer: Layer, other: Layer) -> bool:
    """Whether two layers are parts of the same blocks of lists, one of them perhaps of further ones."""
    return all(one == two for one, two in zip(layer.list_numbers, other.list_numbers, strict=False))


def _is_norm_of(layer: Layer, convolution: Layer) -> bool:
    weight = convolution.tensors.get("weight")
    channels = [size for _, size in layer.sizes]
    if weight is None or len(weight[1]) < 3 or not channels:
        return False
    stems, numbers = zip(*(_stem_and_number(layer) for layer in (layer, convolution)), strict=True)
    if all(stems) and all(numbers) and numbers[0] != numbers[1]:
        return False  # bn2 is not the norm of conv1
    return {"weight", "bias"} <= layer.tensors.keys() and all(size == weight[1][:1] for size in channels)


def _stem_and_number(layer: Layer) -> tuple[str, str]:
    stem = layer.name.rstrip("0123456789")
    return stem, layer.name[len(stem) :]
