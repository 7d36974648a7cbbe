"""Layers of two models, from the names and shapes of their tensors: in one layout, in their order, and in series."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from lightning_tricks._shared.patterns import LIST_NUMBER
from lightning_tricks.checkpoint_remapping.core.matching.matches import Shape
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import element_order, words_of


@dataclass(eq=False)
class Layer:
    """The tensors of one layer: a convolution's weight and bias, a norm's statistics, or a lone parameter."""

    path: str
    position: int
    tensors: dict[str, tuple[tuple[str, ...], Shape]] = field(default_factory=dict)
    transposed: bool = False
    said: frozenset[str] = frozenset()  # words that the layers beside it give to it
    parts: dict[str, list[Shape]] = field(default_factory=dict)  # the shapes of those that a tensor is made of
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
        # timm and torchvision keep one layer in two shapes: the head of MobileNetV3 as (1024, 576, 1, 1) and (1024,
        # 576), the scale of a ConvNeXt as (dim,) and (dim, 1, 1).
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
        # Norms of BERT as TensorFlow named them; alone, `gamma` is the scale of a ConvNeXt's block (timm).
        if leaf in ("gamma", "beta") and {f"{parent}.gamma", f"{parent}.beta"} <= shapes.keys():
            leaf = {"gamma": "weight", "beta": "bias"}[leaf]
        elif leaf not in _TENSOR_NAMES:
            # nn.MultiheadAttention: `in_proj_weight` and `in_proj_bias` are one layer without a module of its own.
            stem, _, ending = name.rpartition("_")
            parent, leaf = (stem, ending) if ending in ("weight", "bias") else (name, "")
        layer = layers.setdefault(parent, Layer(parent, position))
        layer.tensors[leaf] = (name,), tuple(shape)
    # A counter alone would be a layer that the other project, which does not save it, lacks.
    return [layer for layer in layers.values() if list(layer.tensors) != [BATCH_COUNTER]]


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
    # Sorted names would pass for an order, in which norms follow convolutions by the alphabet.
    if sum(one > other for one, other in pairwise(names)) <= 2:
        return False
    closed: set[str] = set()
    before: list[str] = []
    for name in names:
        containers = [name[: found.start()] for found in re.finditer(r"\.", name)]
        # A module's tensors come in one run in `state_dict`; a container that is entered again was made by sorting or
        # by hand.
        if not closed.isdisjoint(containers):
            return False
        closed.update(container for container in before if container not in containers)
        before = containers
    return True


def are_numbered_in_order(layers: list[Layer]) -> bool:
    """Whether each layer's path has a higher number, or a later letter, than the one before."""
    return all(_is_numbered_before(one, other) for one, other in pairwise(layers))


def _is_numbered_before(first: Layer, second: Layer) -> bool:
    """Whether two paths first differ in numbers, or in letters from a to h, in rising order."""
    for one, other in zip(_split(first), _split(second), strict=False):
        if one != other:
            if one.isdecimal() and other.isdecimal():
                return int(one) < int(other)
            # torchvision's RegNet calls the convolutions of a block `f.a`, `f.b` and `f.c`.
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
    # A kind that one side lacks, say a new head, has no counterpart: it must not count as an open question.
    return [(group, others) for group, others in groups.values() if group and others]


def series_of(layers: list[Layer], template: Template) -> list[Series]:
    """Return the series: layers of one kind whose names differ only in numbers, in the order of these numbers."""
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


# Layouts of weights that differ between projects: fused query, key and value, transposed matrices

_POSITIONS = re.compile(r"(^|[._])(pos(itions?|itional)?_?(emb|embed|embeds|embedding|embeddings)?|wpe)$")
# What projects keep in one layer, by the word for it: the parts, in their order
FUSED_PARTS = {"fused query, key and value": ("query", "key", "value"), "fused key and value": ("key", "value")}


def layers_of_both(
    source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape], ordered: bool
) -> tuple[list[Layer], list[Layer]]:
    """Return the layers of a file and of a model, those of each side in the layouts that the other side has.

    Args:
        source_shapes: Shapes of the file's tensors, whose order says nothing.
        target_shapes: Shapes of the model's tensors.
        ordered: Whether those of the model are in the order in which it registers them.
    """
    sides = group_layers(source_shapes), group_layers(target_shapes)
    # The order of a file is by chance or by name: it must not decide, and a sorted copy has to be matched as the file
    # is.
    for side in sides[: 1 if ordered else 2]:
        _sort_naturally(side)
    # The layouts of one side depend on those of the other: the file comes first
    for layers, others in (sides, sides[::-1]):
        _unify_positions(layers, others)
        _fuse_query_key_value(layers, others)
        _mark_transposed(layers)
        _name_gates(layers)
    # Last, as it compares sizes that the steps above change.
    _keep_layouts(*sides)
    return sides


def _sort_naturally(layers: list[Layer]) -> None:
    """Sort layers by name, with 10 after 9, and renew their positions."""
    layers.sort(
        key=lambda layer: [(part.isdecimal(), int(part) if part.isdecimal() else part) for part in _split(layer)]
    )
    for position, layer in enumerate(layers):
        layer.position = position


def _keep_layouts(layers: list[Layer], others: list[Layer]) -> None:
    """Tell layers of one size apart by where their sizes are one, if both models have as many of each layout."""
    for group in equal_groups(layers, others, lambda layer: layer.signature):
        ours, theirs = (Counter(map(_ones, side)) for side in group)
        # As `logit_scale` of a Swin V2, (heads, 1, 1), and a vector of as many numbers beside it.
        if ours == theirs and len(ours) > 1:
            for layer in (*group[0], *group[1]):
                layer.layout = _ones(layer)
                # Cached, without the layout.
                del layer.signature, layer.tensor_kinds


def _ones(layer: Layer) -> tuple[object, ...]:
    return tuple(sorted((leaf, tuple(size == 1 for size in shape)) for leaf, (_, shape) in layer.tensors.items()))


def joined_shape(parts: Sequence[Shape]) -> Shape:
    """Return the shape of tensors one after another."""
    return (sum(shape[0] for shape in parts), *parts[0][1:])


def _fuse_query_key_value(layers: list[Layer], others: list[Layer]) -> None:
    """Replace the query, key and value of each attention by one layer, or two of them, if the other model has one.

    The parts may differ in their number of heads. What not all of them have, such as biases, remains as it is. A fused
    convolution is left alone: some networks for diffusion have query, key and value of each head side by side in it.
    """
    for word, parts in FUSED_PARTS.items():
        own, wanted = (
            {layer.sizes for layer in side if word in words_of(layer.path) and _is_matrix(layer)}
            for side in (layers, others)
        )
        separate = {fused.sizes for fused, _ in _fusible(others, parts)}
        for fused, members in _fusible(layers, parts):
            # Only where the other model has the fused layer and nothing of that size by parts: it may be any other
            # layer.
            if fused.sizes in wanted - own - separate:
                rests = [
                    Layer(part.path, part.position, {leaf: part.tensors[leaf] for leaf in part.tensors if leaf in rest})
                    for part in members
                    if (rest := part.tensors.keys() - fused.tensors.keys())
                ]
                _replace(layers, members, [fused, *rests])


def _is_matrix(layer: Layer) -> bool:
    return all(len(shape) <= 2 for _, shape in layer.tensors.values())


def _replace(layers: list[Layer], members: list[Layer], made: list[Layer]) -> None:
    # At the place of the first part: the order of a model's layers is evidence.
    position = layers.index(members[0])
    layers[position:position] = made
    for member in members:
        layers.remove(member)


def _fusible(layers: list[Layer], parts: tuple[str, ...]) -> list[tuple[Layer, list[Layer]]]:
    """Return the layer that would hold these parts of each attention, with the layers of the parts."""
    siblings: dict[str, dict[str, Layer]] = defaultdict(dict)
    for layer in layers:
        parent, _, name = layer.path.rpartition(".")
        # Both a query's word and a key's: it is fused already. A norm of the query bears its word, too.
        said = words_of(name) & {"query", "key", "value", "norm"}
        if len(said - {"norm"}) == len(said) == 1 and "weight" in layer.tensors and layer.has_matrix:
            siblings[parent][min(said)] = layer
    return [
        (fused, members)
        for parent, named in siblings.items()
        if named.keys() >= {*parts} and named["key"].tensors["weight"][1] == named["value"].tensors["weight"][1]
        for members in [[named[part] for part in parts]]
        for fused in [_one_after_another(f"{parent}.qkv", members)]
        if "weight" in fused.tensors
    ]


def _one_after_another(path: str, members: list[Layer]) -> Layer:
    """Return the layer that holds the tensors that all members have, along their first dimension."""
    fused = Layer(path, members[0].position)
    for leaf in members[0].tensors:
        tensors = [part.tensors[leaf] for part in members if leaf in part.tensors]
        # The key of a Swin V2 (transformers) has no bias: what not all have stays as it is.
        if len(tensors) == len(members) and len({shape[1:] for _, shape in tensors}) == 1:
            fused.parts[leaf] = [shape for _, shape in tensors]
            names = tuple(name for names, _ in tensors for name in names)
            fused.tensors[leaf] = names, joined_shape(fused.parts[leaf])
    return fused


def _unify_positions(layers: list[Layer], others: list[Layer]) -> None:
    """Treat an nn.Embedding of positions as a parameter, if the other model has a parameter."""
    # CLIP: OpenAI's `positional_embedding` is a parameter, that of transformers an nn.Embedding with a `weight`.
    if not any(list(layer.tensors) == [""] and _POSITIONS.search(layer.path) for layer in others):
        return
    for layer in layers:
        if list(layer.tensors) == ["weight"] and _POSITIONS.search(layer.path):
            layer.tensors[""] = layer.tensors.pop("weight")


def _name_gates(layers: list[Layer]) -> None:
    """Call w1 a gate where w2 leads back: w1 and w3 are then gate and input of a gated layer, as in Meta's Llama."""
    for family in layers_by_parent(layers).values():
        named = {layer.name: layer for layer in family}
        w1, w2, w3 = map(named.get, ("w1", "w2", "w3"))
        if w1 and w2 and w3:
            wide, back, other = ([size for tensor, size in layer.sizes if tensor == "weight"] for layer in (w1, w2, w3))
            # Numbers 1 to 3 alone may be any three layers; only the second of Meta's leads back to the width.
            if wide == other != back and back == [size[::-1] for size in wide]:
                w1.said, w3.said = frozenset({"gate"}), frozenset({"up"})


def _says_its_layout(layer: Layer) -> bool:
    weight, bias = layer.tensors["weight"][1], layer.tensors.get("bias", ((), ()))[1]
    return bias in (weight[:1], weight[1:])


def _mark_transposed(layers: list[Layer]) -> None:
    """Mark the oblong matrices that are (in, out), as those of Hugging Face's Conv1D.

    The length of the bias shows it; those without one follow the others of their block.
    """
    blocks: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        weight = layer.tensors.get("weight", ((), ()))[1]
        if len(weight) == 2 and len(set(weight)) == 2 and 1 not in weight:  # a convolution's may end with ones
            blocks[re.split(r"(?<=\d)\.(?!.*\d\.)", layer.path)[0]].append(layer)
    for block in blocks.values():
        known = [
            layer.tensors["weight"][1][1:] == layer.tensors["bias"][1] for layer in block if _says_its_layout(layer)
        ]
        # One that denies it, and the whole block stays as it is: shapes alone do not show which of them is meant.
        for layer in block if known and all(known) else ():
            layer.transposed = True
            # Cached, of the other way round.
            vars(layer).pop("sizes", None)
