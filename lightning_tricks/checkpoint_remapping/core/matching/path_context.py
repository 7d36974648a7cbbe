"""What the paths and the order of layers say: where two paths part, and what stands beside a layer."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise, permutations, starmap

from lightning_tricks.checkpoint_remapping.core.matching.layers import Layer, layers_by_parent
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import (
    NAMES_OF_LISTS,
    ORDINAL_ROLES,
    VAGUE_WORDS,
    same_word,
)

Parts = tuple[str, ...]
NO_NUMBER = -1
_MOST_IN_A_ROW = 5  # convolutions of which all orders are tried
_CROSS_ATTENTION = frozenset({"attention", "cross"})


@lru_cache(maxsize=65536)
def parts_of(path: str) -> Parts:
    """Split a path at dots, underscores and numbers.

    Examples:
        >>> parts_of("layer1.0.conv_2")
        ('layer', '1', '.0', '.conv', '2')
    """
    return tuple(re.findall(r"\.?(?:\d+|[^\d._]+)", path))


@dataclass(frozen=True)
class Fork:
    """Where the paths of two layers part: their common container, and what follows in each."""

    container: Parts
    first: Parts
    second: Parts
    by_letters: bool  # whether letters count the parts of the container

    @cached_property
    def numbers(self) -> tuple[int, int] | None:
        """The numbers in which the two differ; None if they differ in words."""
        found = [
            _number(rest[0].removeprefix("."), self.by_letters) if rest else None for rest in (self.first, self.second)
        ]
        if None in found and any(rest and rest[0].isdecimal() for rest in (self.first, self.second)):
            found = [NO_NUMBER if number is None else number for number in found]  # `conv` and `conv2`
        return (found[0], found[1]) if found[0] is not None and found[1] is not None else None

    @cached_property
    def names(self) -> tuple[Parts, Parts]:
        """The words in which the two differ, with those before them in the same component of the path."""
        begun = _component(self.container)
        first, second = (
            (*(() if rest and rest[0].startswith(".") else begun), *rest) for rest in (self.first, self.second)
        )
        return words_in(first), words_in(second)

    @property
    def ends(self) -> tuple[Parts, Parts]:
        """What of their names differs, whole: `norm1` and `norm2`."""
        start = tuple(part.removeprefix(".") for part in _component(self.container))
        return (*start, *self.first), (*start, *self.second)

    @property
    def branches(self) -> tuple[Parts, Parts]:
        """The parts of the model that hold the first and the second layer."""
        return (*self.container, *self.first[:1]), (*self.container, *self.second[:1])


def common_start(sequences: Sequence[Sequence[str]]) -> Sequence[str]:
    """Return what all sequences start with."""
    first = min(sequences, key=len, default=())
    different = (i for i, part in enumerate(first) if any(other[i] != part for other in sequences))
    return first[: next(different, len(first))]


def _number(part: str, by_letters: bool = False) -> int | None:
    if part.isdecimal():
        return int(part)
    return ord(part) if by_letters and re.fullmatch("[a-h]", part) else None


class Side:
    """The layers of the file or of the model, and what their names and their order say about them.

    Args:
        layers: The layers.
        ordered: Whether they come in the order in which the model registers them; None for a file, whose order says
            nothing.
    """

    def __init__(self, layers: list[Layer], ordered: bool | None = None) -> None:
        self.ordered = ordered
        self.branches: dict[Parts, list[Layer]] = defaultdict(list)
        self._in_block: Counter[tuple[Parts, object]] = Counter()
        self._ordinal_siblings: Counter[tuple[str, object]] = Counter()
        self.counts = Counter(layer.signature for layer in layers)
        self._siblings = layers_by_parent(layers)
        self.norms = norms_as_registered(layers) if ordered else norms_by_name(layers)  # by their convolutions
        for layer in layers:
            parts = parts_of(layer.path)
            for depth in range(len(parts) + 1):
                self.branches[parts[:depth]].append(layer)
        counted = [layer for layer in layers if layer.words & ORDINAL_ROLES]
        self._in_block.update((self.block(layer), layer.signature) for layer in counted)
        # A second norm is that of the feed-forward, or of the cross-attention unless another norm is
        self._beside_other_norms = {
            (self.block(layer) or layer.parent, layer.signature)
            for layer in layers
            if not layer.has_matrix and not layer.words & (ORDINAL_ROLES | _CROSS_ATTENTION)
        }
        self._ordinal_siblings.update((layer.parent, layer.signature) for layer in counted)
        # Asked for each pair of layers
        self.words = cache(self._find_words)
        self.inside = cache(self._find_inside)
        self._beside = cache(self._find_beside)
        self.num_branches = cache(self._count_branches)

    def fork(self, one: Layer, other: Layer) -> Fork:
        """Return the fork of two layers; letters count if a, b and c are there."""
        first, second = parts_of(one.path), parts_of(other.path)
        depth = 0
        for part, other_part in zip(first, second, strict=False):
            if part != other_part:
                break
            depth += 1
        container = first[:depth]
        is_letter = len(first) > depth and len(first[depth]) == 2
        # RegNet of torchvision: `f.a`, `f.b`, `f.c`. A single letter alone is a word, such as the `q` of an attention.
        by_letters = is_letter and all((*container, f".{letter}") in self.branches for letter in "abc")
        return Fork(container, first[depth:], second[depth:], by_letters)

    def _find_words(self, layer: Layer) -> set[str]:
        """Return the words that say what a layer is; first and second mean something where there are two."""
        in_block = self._in_block[self.block(layer), layer.signature]
        # Of a decoder's three norms the second is that of the cross-attention or of the feed-forward, by project.
        is_one_of_two = 2 in (in_block, self._ordinal_siblings[layer.parent, layer.signature])
        if not layer.has_matrix and (self.block(layer) or layer.parent, layer.signature) in self._beside_other_norms:
            is_one_of_two = False
        words = {word.rstrip("0123456789") for word in layer.words} - VAGUE_WORDS
        return words if is_one_of_two else words - ORDINAL_ROLES

    def block(self, layer: Layer) -> Parts:
        """Return the innermost numbered part that holds a layer and several matrices: a block of a transformer."""
        parts = parts_of(layer.path)
        for depth in range(len(parts) - 1, 0, -1):
            numbered = parts[depth - 1].removeprefix(".").isdecimal() and parts[depth].startswith(".")
            # A number with one matrix is a layer of an nn.Sequential, not a block.
            if numbered and sum(other.has_matrix for other in self.branches[parts[:depth]]) > 1:
                return parts[:depth]
        return ()

    def siblings(self, layer: Layer) -> list[Layer]:
        """Return the layers that one module holds directly, of which this is one."""
        return self._siblings[layer.parent]

    def _find_inside(self, branch: Parts) -> tuple[frozenset[Layer], frozenset[object]]:
        """Return the layers in a part of the model, and their sizes."""
        layers = self.branches[branch]
        return frozenset(layers), frozenset(layer.signature for layer in layers)

    def counts_backwards(self, container: Parts) -> bool:
        """Whether the numbered parts of a container are registered from the last to the first, if that is known."""
        # By names alone, 0 comes before 1 in any model.
        if not self.ordered:
            return False
        numbers = list(dict.fromkeys(int(part.removeprefix(".")) for part in self._numbered(container)))
        return len(numbers) > 1 and numbers == sorted(numbers, reverse=True)

    def containers_beside(self, container: Parts) -> list[Parts]:
        """Return the containers of numbered parts in the module of a container."""
        return self._beside(_module_of(container))

    def _find_beside(self, module: Parts) -> list[Parts]:
        found: dict[Parts, set[str]] = defaultdict(set)
        for layer in self.branches[module]:
            parts = parts_of(layer.path)
            numbered = (i for i in range(len(module) + 1, len(parts)) if parts[i].removeprefix(".").isdecimal())
            # The outermost: lists within its parts are those of one part.
            first = next(numbered, None)
            if first is not None:
                found[parts[:first]].add(parts[first])
        return [container for container, numbers in found.items() if len(numbers) > 1]

    def _count_branches(self, container: Parts) -> int:
        """Return how many parts a container numbers."""
        return len(set(self._numbered(container)))

    def _numbered(self, container: Parts) -> Iterator[str]:
        """Yield, for each layer in a numbered part of a container, the number as it stands in the path."""
        for layer in self.branches[container]:
            part = "".join(parts_of(layer.path)[len(container) :][:1])
            if part.removeprefix(".").isdecimal():
                yield part

    def is_in_trunk(self, container: Parts) -> bool:
        """Whether the numbered parts of a container are those of the trunk, or inside of these."""
        return self.trunk is not None and container[: len(self.trunk)] == self.trunk

    def holds_in_trunk(self, layer: Layer) -> bool:
        """Whether a layer is in a block of the trunk."""
        return self.is_in_trunk(parts_of(layer.path))

    def is_around_trunk(self, branch: Parts) -> bool:
        """Whether a part of the model is in the trunk, or holds it."""
        return (self.trunk is not None and branch == self.trunk[: len(branch)]) or self.is_in_trunk(branch)

    @cached_property
    def trunk(self) -> Parts | None:
        """The path of the list with the most elements; None if there is none, or another has a block of its shapes.

        The two may be each other's then.
        """
        lists: dict[Parts, list[Layer]] = defaultdict(list)
        for layer in self.branches[()]:
            parts = parts_of(layer.path)
            numbered = (parts[:i] for i, part in enumerate(parts) if part.removeprefix(".").isdecimal())
            outermost = next((path for path in numbered if self.num_branches(path) > 1), None)
            if outermost is not None:
                lists[outermost].append(layer)
        if not lists:
            return None
        trunk = max(lists, key=lambda path: sum(math.prod(size) for layer in lists[path] for _, size in layer.sizes))
        return trunk if all(self._blocks(trunk).isdisjoint(self._blocks(path)) for path in {*lists} - {trunk}) else None

    def _blocks(self, container: Parts) -> set[object]:
        """Return the sizes in each numbered part of a container."""
        parts = {(*container, number) for number in self._numbered(container)}
        return {frozenset(Counter(layer.signature for layer in self.branches[part]).items()) for part in parts}


def _component(container: Parts) -> Parts:
    """Return the parts of the last component of a path: `up` and `blocks` of `decoder.up_blocks`."""
    return container[len(_module_of(container)) :]


def _module_of(container: Parts) -> Parts:
    """Return the path without its last component."""
    starts = [i for i, part in enumerate(container) if part.startswith(".")]
    return container[: starts[-1]] if starts else ()


def number_below(container: Parts, layer: Layer) -> int | None:
    """Return the number of the part of a container that holds a layer."""
    rest = parts_of(layer.path)[len(container) :]
    return _number(rest[0].removeprefix("."), by_letters=True) if rest else None


def last_word(container: Parts) -> str:
    """Return the last word of a path, as all projects spell it."""
    return "".join(map(same_word, words_in(container)[-1:]))


def meanings_differ(one: Parts, other: Parts) -> bool:
    """Whether two lists are called by words that may count from either end; `encoder.layer` has the meaning of `h`.

    `decoder.blocks` and `ups.layers` differ as `decoder` and `ups` do.
    """
    own = [_meaning(path) for path in (one, other)]
    around = [_meaning(_module_of(path)) for path in (one, other)]
    return own[0] != own[1] or (not own[0] and all(around) and around[0] != around[1])


def _meaning(container: Parts) -> frozenset[str]:
    return frozenset(same_word(word.lower()) for word in words_in(_component(container))) - NAMES_OF_LISTS


def is_vague(words: Parts) -> bool:
    """Whether a name is one word that stands for any part."""
    return len(words) == 1 and words[0].lower() in VAGUE_WORDS


def words_in(parts: Parts) -> tuple[str, ...]:
    """Return the parts that are not numbers."""
    return tuple(word for part in parts if not (word := part.removeprefix(".")).isdecimal())


def numbers_go_together(pairs: list[tuple[Layer, Layer]]) -> bool:
    """Whether the numbers of a series depend on those of the other side or these on them, from the outermost inward.

    Three blocks of two layers and two lists of three layers are not blocks of one order, wherever they are.
    """
    columns = [[*zip(*(layer.numbers for layer in side), strict=True)] for side in zip(*pairs, strict=True)]
    varying = [[column for column in side if len({*column}) > 1] for side in columns]
    for depth in range(1, min(map(len, varying))):
        one, other = ([*zip(*side[:depth], strict=True)] for side in varying)
        if len({*zip(one, other, strict=True)}) not in (len({*one}), len({*other})):
            return False
    return True


# Norms and their convolutions


def norms_as_registered(layers: list[Layer]) -> dict[Layer, Layer]:
    """Return the norm of each convolution: the next layer, unless names or the other layers beside it say otherwise."""
    following = {
        layer: norm for layer, norm in pairwise(layers) if _is_norm_of(norm, layer) and _in_one_block(layer, norm)
    }
    for family in layers_by_parent(layers).values():
        norms, convolutions = set(_norms(family)), set(_convolutions(family))
        # Norms that stand before their convolutions, or apart from them
        # DenseNet: `norm1` stands before `conv1`, so that the next layer is the norm of the convolution after it.
        if norms.difference(following.values()) and convolutions - following.keys():
            for convolution in convolutions:
                following.pop(convolution, None)
    by_name = norms_by_name(layers)
    # Registered next is not computed next: `conv1, conv2, bn1, bn2` come in this order too.
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
        # Where names tell of none of the module's convolutions, in turn what its order, channels and sizes allow.
        if found.keys().isdisjoint(convolutions):
            found |= (
                _norms_in_sequence(family)
                or _norms_along_channels(convolutions, norms)
                or _norms_by_size(convolutions, norms)
            )
    return found


def _norms_by_size(convolutions: list[Layer], norms: list[Layer]) -> dict[Layer, Layer]:
    """Return the norms of convolutions if each has a different number of channels."""
    fitting = {layer: [norm for norm in norms if _is_norm_of(norm, layer)] for layer in convolutions}
    alone = [found[0] for found in fitting.values() if len(found) == 1]
    return dict(zip(fitting, alone, strict=True)) if len({*alone}) == len(fitting) == len(norms) else {}


def _norms_in_sequence(family: list[Layer]) -> dict[Layer, Layer]:
    """Return the norm behind each convolution of a sequence, whose numbers are the order in which it computes."""
    # Only an nn.Sequential computes in the order of its numbers.
    if not all(layer.name.isdecimal() for layer in family):
        return {}
    ordered = sorted(family, key=lambda layer: int(layer.name))
    return {layer: norm for layer, norm in pairwise(ordered) if _is_norm_of(norm, layer)}


def _norms_along_channels(convolutions: list[Layer], norms: list[Layer]) -> dict[Layer, Layer]:
    """Return the norms by number, if the channels and norms of the convolutions allow only one order."""
    (stems, numbers) = zip(*map(_stem_and_number, norms), strict=True) if norms else ((), ())
    # All orders are tried: more would be too many, and without numbers norms have none.
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
    # A depthwise kernel has 1 where others have their inputs, and takes as many channels as it returns.
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
    # A norm has a number for each channel that the convolution returns.
    return {"weight", "bias"} <= layer.tensors.keys() and all(size == weight[1][:1] for size in channels)


def _stem_and_number(layer: Layer) -> tuple[str, str]:
    stem = layer.name.rstrip("0123456789")
    return stem, layer.name[len(stem) :]
