"""Layers of a model, grouped from the names and shapes of its tensors, in their order and in series."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from lightning_tricks._shared.patterns import LIST_NUMBER
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import element_order, words_of

Shape = tuple[int, ...]


@dataclass(eq=False)
class Layer:
    """The tensors of one layer: a convolution's weight and bias, a norm's statistics, or a lone parameter."""

    path: str
    position: int
    tensors: dict[str, tuple[tuple[str, ...], Shape]] = field(default_factory=dict)
    transposed: bool = False
    said: frozenset[str] = frozenset()  # words that the layers beside it give to it
    parts: dict[str, list[Shape]] = field(default_factory=dict)  # the shapes of those that a tensor is made of
    taken_for: str = ""  # the order of its parts that is taken for granted, in words
    layout: tuple[object, ...] = ()  # where its sizes are one, if that tells it from others

    @property
    def name(self) -> str:
        """The last component of its path."""
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """The path of the module that holds it."""
        return self.path.rpartition(".")[0]

    @cached_property
    def sizes(self) -> tuple[tuple[str, Shape], ...]:
        """The sizes of its tensors without ones, which are the same in all layouts of a layer."""
        sizes = {leaf: _without_ones(leaf, shape) for leaf, (_, shape) in self.tensors.items() if leaf != BATCH_COUNTER}
        if self.transposed:
            sizes["weight"] = sizes["weight"][::-1]
        return tuple(sorted(sizes.items()))

    @cached_property
    def tensor_kinds(self) -> tuple[object, ...]:
        """The names of its tensors, their numbers of dimensions, and the order of their elements."""
        return (*((leaf, len(size)) for leaf, size in self.sizes), element_order(self.path), self.layout)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """What two layers must have in common to be matched."""
        return self.tensor_kinds, self.sizes

    @property
    def matrix_sizes(self) -> list[Shape]:
        """The sizes of its matrices."""
        return [size for _, size in self.sizes if len(size) == 2]

    @cached_property
    def has_matrix(self) -> bool:
        """Whether one of its tensors is more than a vector."""
        return any(len(size) > 1 for _, size in self.sizes)

    @cached_property
    def has_distinctive_size(self) -> bool:
        """Whether its sizes alone identify it; those of a square matrix or of a vector do not."""
        return any(len(size) > 2 or (len(size) == 2 and len(set(size)) == 2) for _, size in self.sizes)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in its path."""
        return tuple(map(int, re.findall(r"\d+", self.path)))

    @cached_property
    def list_numbers(self) -> tuple[str, ...]:
        """The numbers that are components of the path of its container: 1 of `layers.1.conv2.0`."""
        return tuple(part for part in self.path.split(".")[:-1] if part.isdecimal())

    @cached_property
    def words(self) -> frozenset[str]:
        """The words in its path and the roles that they stand for, without numbers."""
        words = frozenset(word for word in words_of(self.path) if not word.isdecimal())
        if not self.has_matrix and words & {"post", "pre"}:
            words -= {"attention", "attn"}  # Llama's norm of the feed-forward is post_attention_layernorm
        return words | self.said


BATCH_COUNTER = "num_batches_tracked"
_TENSOR_NAMES = ("weight", "bias", "running_mean", "running_var", BATCH_COUNTER)
Pairs = Iterable[tuple[Layer, Layer, str]]  # a layer of the file, one of the model, and why


def group_layers(shapes: Mapping[str, Shape]) -> list[Layer]:
    """Return the layers in the order of their first tensors."""
    layers: dict[str, Layer] = {}
    for position, (name, shape) in enumerate(shapes.items()):
        parent, _, leaf = name.rpartition(".")
        if leaf == "position_ids":
            continue  # which a model computes for itself
        if leaf in ("gamma", "beta") and {f"{parent}.gamma", f"{parent}.beta"} <= shapes.keys():
            leaf = {"gamma": "weight", "beta": "bias"}[leaf]
        elif leaf not in _TENSOR_NAMES:
            stem, _, ending = name.rpartition("_")
            parent, leaf = (stem, ending) if ending in ("weight", "bias") else (name, "")
        layer = layers.setdefault(parent, Layer(parent, position))
        layer.tensors[leaf] = (name,), tuple(shape)
    return [layer for layer in layers.values() if list(layer.tensors) != [BATCH_COUNTER]]


def keep_layouts(layers: list[Layer], others: list[Layer]) -> None:
    """Tell layers of one size apart by where their sizes are one, if both models have as many of each layout."""
    groups: dict[object, tuple[list[Layer], list[Layer]]] = defaultdict(lambda: ([], []))
    for side, some in enumerate((layers, others)):
        for layer in some:
            groups[layer.signature][side].append(layer)
    for group in groups.values():
        ours, theirs = (Counter(map(_ones, side)) for side in group)
        if ours == theirs and len(ours) > 1:
            for layer in (*group[0], *group[1]):
                layer.layout = _ones(layer)
                del layer.signature, layer.tensor_kinds


def _ones(layer: Layer) -> tuple[object, ...]:
    return tuple(sorted((leaf, tuple(size == 1 for size in shape)) for leaf, (_, shape) in layer.tensors.items()))


def layers_by_parent(layers: Iterable[Layer]) -> dict[str, list[Layer]]:
    """Return the layers that each module holds directly."""
    families: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        families[layer.parent].append(layer)
    return families


def _without_ones(leaf: str, shape: Shape) -> Shape:
    # Kernels of 1x7 and 7x1 are two sizes; those of 1x1 are that of a linear layer, and 1x1x1xC is a vector
    is_kernel = leaf == "weight" and len(shape) > 3 and {1} not in ({*shape[2:]}, {*shape[:-1]})
    kernel = shape[2:] if is_kernel else ()
    return (*(size for size in shape[: len(shape) - len(kernel)] if size != 1), *kernel)


def is_ordered(shapes: Mapping[str, Shape]) -> bool:
    """Whether tensors are in the order in which their model registers them: module by module, not sorted by name.

    A .safetensors is sorted within each dtype, so that its names step back in the alphabet at most a few times.
    """
    names = [name for name in shapes if not name.endswith(BATCH_COUNTER)]
    if sum(one > other for one, other in pairwise(names)) <= 2:
        return False
    closed: set[str] = set()
    before: list[str] = []
    for name in names:
        containers = [name[: found.start()] for found in re.finditer(r"\.", name)]
        if not closed.isdisjoint(containers):
            return False
        closed.update(container for container in before if container not in containers)
        before = containers
    return True


def sort_naturally(layers: list[Layer]) -> None:
    """Sort layers by name, with 10 after 9, and renew their positions."""
    layers.sort(
        key=lambda layer: [(part.isdecimal(), int(part) if part.isdecimal() else part) for part in _split(layer)]
    )
    for position, layer in enumerate(layers):
        layer.position = position


def are_numbered_in_order(layers: list[Layer]) -> bool:
    """Whether each layer's path has a higher number, or a later letter, than the one before."""
    return all(_is_numbered_before(one, other) for one, other in pairwise(layers))


def _is_numbered_before(first: Layer, second: Layer) -> bool:
    """Whether two paths first differ in numbers, or in letters from a to h, in rising order."""
    for one, other in zip(_split(first), _split(second), strict=False):
        if one != other:
            if one.isdecimal() and other.isdecimal():
                return int(one) < int(other)
            return bool(re.fullmatch("[a-h]", one) and re.fullmatch("[a-h]", other)) and one < other
    return False


def _split(layer: Layer) -> list[str]:
    return re.findall(r"\d+|[^\d.]+|\.", layer.path)


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
