"""The layers of a model, told from the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from lightning_tricks.checkpoint_remapping.core.matching.synonyms import order_of_elements, words

Shape = tuple[int, ...]


@dataclass(eq=False)
class Layer:
    """The tensors of one layer: a convolution's weight and bias, a norm's statistics, or a lone parameter."""

    path: str
    position: int
    leaves: dict[str, tuple[tuple[str, ...], Shape]] = field(default_factory=dict)
    transposed: bool = False

    @cached_property
    def sizes(self) -> tuple[tuple[str, Shape], ...]:
        """What all layouts of a layer have in common: its tensors' sizes, without the ones."""
        sizes = {leaf: _without_ones(shape) for leaf, (_, shape) in self.leaves.items() if leaf != COUNTER}
        if self.transposed:
            sizes["weight"] = sizes["weight"][::-1]
        return tuple(sorted(sizes.items()))

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Which tensors it has, with how many dimensions, and in which order their elements are."""
        return (*((leaf, len(size)) for leaf, size in self.sizes), order_of_elements(self.path))

    @property
    def form(self) -> tuple[object, ...]:
        """What two layers that could be each other's have in common."""
        return self.kind, self.sizes

    @cached_property
    def has_matrix(self) -> bool:
        """Whether it is more than vectors."""
        return any(len(size) > 1 for _, size in self.sizes)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in its path."""
        return tuple(map(int, re.findall(r"\d+", self.path)))

    @cached_property
    def says(self) -> frozenset[str]:
        """The words in its path and the roles that they stand for, without numbers."""
        return frozenset(word for word in words(self.path) if not word.isdecimal())


COUNTER = "num_batches_tracked"
_LEAVES = ("weight", "bias", "running_mean", "running_var", COUNTER)
Pairs = Iterable[tuple[Layer, Layer, str]]  # a layer of the file, one of the model, and why


def layers_of(shapes: Mapping[str, Shape]) -> list[Layer]:
    """Return the layers in the order of their first tensors."""
    layers: dict[str, Layer] = {}
    for position, (name, shape) in enumerate(shapes.items()):
        parent, _, leaf = name.rpartition(".")
        if leaf in ("gamma", "beta") and {f"{parent}.gamma", f"{parent}.beta"} <= shapes.keys():
            leaf = {"gamma": "weight", "beta": "bias"}[leaf]
        elif leaf not in _LEAVES:
            stem, _, ending = name.rpartition("_")
            parent, leaf = (stem, ending) if ending in ("weight", "bias") else (name, "")
        layer = layers.setdefault(parent, Layer(parent, position))
        layer.leaves[leaf] = (name,), tuple(shape)
    return [layer for layer in layers.values() if list(layer.leaves) != [COUNTER]]


def is_ordered(shapes: Mapping[str, Shape]) -> bool:
    """Whether tensors come as their model registers them: module by module, and not sorted by name.

    A .safetensors is sorted within each dtype, which is a few steps back in the alphabet at most.
    """
    names = [name for name in shapes if not name.endswith(COUNTER)]
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


def number_naturally(layers: list[Layer]) -> None:
    """Sort by name, and 10 after 9."""
    layers.sort(
        key=lambda layer: [(part.isdecimal(), int(part) if part.isdecimal() else part) for part in _split(layer)]
    )
    for position, layer in enumerate(layers):
        layer.position = position


def _split(layer: Layer) -> list[str]:
    return re.findall(r"\d+|[^\d.]+|\.", layer.path)


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


_PARTS = ("query", "key", "value")
_FUSED = "fused query, key and value"


def fuse_triples(layers: list[Layer], others: list[Layer]) -> None:
    """Make one layer of the query, key and value of each attention, where the other model keeps them in one."""
    if not any(_FUSED in words(layer.path) for layer in others):
        return
    if any(_FUSED in words(layer.path) for layer in layers) or _triples(others):
        return
    for parent, parts in _triples(layers).items():
        first = parts[0]
        fused = Layer(f"{parent}.qkv", first.position)
        for leaf, (_, shape) in first.leaves.items():
            names = tuple(name for part in parts for name in part.leaves[leaf][0])
            fused.leaves[leaf] = names, (3 * shape[0], *shape[1:])
        layers[layers.index(first)] = fused
        for part in parts[1:]:
            layers.remove(part)


def _triples(layers: list[Layer]) -> dict[str, list[Layer]]:
    siblings: dict[str, dict[str, Layer]] = defaultdict(dict)
    for layer in layers:
        parent, _, name = layer.path.rpartition(".")
        said = [part for part in _PARTS if part in words(name)]
        if len(said) == 1:
            siblings[parent][said[0]] = layer
    return {
        parent: [parts[name] for name in _PARTS]
        for parent, parts in siblings.items()
        if len(parts) == 3 and len({part.sizes for part in parts.values()}) == 1
    }


def find_transposed(layers: list[Layer]) -> None:
    """Mark the layers that keep their weight as (in, out), as Hugging Face's Conv1D does; biases tell."""
    blocks: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        if [len(size) for _, size in layer.sizes] == [1, 2]:  # bias, weight
            blocks[re.split(r"(?<=\.)\d+\.(?!.*\.\d+\.)", layer.path)[0]].append(layer)
    for block in blocks.values():
        oblong = [layer for layer in block if len(set(layer.leaves["weight"][1])) == 2]
        if not oblong or not all(layer.leaves["weight"][1][1:] == layer.leaves["bias"][1] for layer in oblong):
            continue
        for layer in block:
            layer.transposed = True
            del layer.sizes


def rise_in_number(layers: list[Layer]) -> bool:
    """Whether the paths of layers say in which order they come."""
    return all(_are_counted(one, other) for one, other in pairwise(layers))


def _are_counted(first: Layer, second: Layer) -> bool:
    """Whether two paths first differ in two numbers, or letters from a to h, in rising order."""
    for one, other in zip(_split(first), _split(second), strict=False):
        if one != other:
            if one.isdecimal() and other.isdecimal():
                return int(one) < int(other)
            return bool(re.fullmatch("[a-h]", one) and re.fullmatch("[a-h]", other)) and one < other
    return False
