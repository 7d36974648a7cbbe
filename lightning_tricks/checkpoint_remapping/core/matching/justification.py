"""Check matches of equal sizes: what says that two layers belong as they were matched, and not the other way round.

A match is evidence, or it is refused. For any two matches whose layers could be exchanged, because they have the same
sizes, something must tell them apart: words of one meaning, numbers that count the same way, the layers beside them,
or, for norms, the convolution that they belong to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from itertools import pairwise

from lightning_tricks.checkpoint_remapping.core.matching.layers import Layer, without_numbers
from lightning_tricks.checkpoint_remapping.core.matching.path_context import (
    NO_NUMBER,
    Fork,
    Parts,
    Side,
    common_start,
    is_vague,
    last_word,
    meanings_differ,
    number_below,
    numbers_go_together,
    words_in,
)
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import ORDINAL_ROLES

_MOST_NEIGHBORS = 200  # that a layer is compared with: a mixture of experts has thousands of one size


# Equal shapes prove nothing: of 38 pairs of models, matching the i-th tensor of each shape loaded 10 without an error
# and wrong.
class Evidence(IntEnum):
    """What tells two matches apart, from the weakest to the strongest."""

    NOTHING = 0
    CONVOLUTIONS = 1
    NEIGHBORS = 2
    NUMBERS = 3
    NAMES = 4


_DOUBTS = {
    Evidence.CONVOLUTIONS: "told from others of its size only by the convolution before it",
    Evidence.NEIGHBORS: "told from others of its size only by the layers beside it",
    Evidence.NUMBERS: "told from others of its size only by numbers behind different words",
}


class Justification:
    """What tells layers of equal sizes apart.

    Args:
        source: The layers of the file.
        target: The layers of the model.
        matched: The layers of the model by those of the file.
    """

    def __init__(self, source: Side, target: Side, matched: Mapping[Layer, Layer]) -> None:
        self.source, self.target, self.matched = source, target, matched
        self._convolutions = [{norm: conv for conv, norm in side.norms.items()} for side in (source, target)]
        self._sources = {target: source for source, target in matched.items()}
        self._weakest: dict[Layer, Evidence] = {}
        self._series: dict[tuple[str, str], list[tuple[Layer, Layer]]] = defaultdict(list)
        for pair in matched.items():
            self._series[without_numbers(pair[0]), without_numbers(pair[1])].append(pair)
        # Asked for many pairs of layers
        self._keeps_blocks = cache(self._find_whether_blocks_are_kept)
        self._numbers_of_block = cache(self._find_numbers_of_block)
        self._are_matched_apart = cache(self._find_whether_matched_apart)
        self._is_of_own_size = cache(self._find_whether_of_own_size)
        self._sizes_rise = cache(self._find_whether_sizes_rise)
        self._rise_together = cache(self._find_whether_numbers_rise)
        self._count_the_same_way = cache(self._find_whether_counted_the_same_way)
        self._numbers_go_together = cache(lambda source, target: numbers_go_together(self._series[source, target]))

    def indistinct(self) -> list[tuple[list[Layer], list[Layer]]]:
        """Return the groups of (layers of the file, layers of the model) that nothing tells apart.

        Also find the weakest evidence of each match.
        """
        alike: dict[tuple[object, object], list[Layer]] = defaultdict(list)
        for source, target in self.matched.items():
            alike[source.signature, target.signature].append(source)
        groups: dict[Layer, list[Layer]] = {}
        pairs = [pair for layers in alike.values() for pair in _pairs(layers)]
        # A file with (in, out) matrices has a wide layer of the size that the narrowing one has here: names or numbers
        # only.
        exchanged = [pair for layers in self._either_way_round() for pair in _pairs(layers)]
        for some, least in ((pairs, Evidence.CONVOLUTIONS), (exchanged, Evidence.NUMBERS)):
            for one, other in some:
                # Asked above, with all kinds of evidence.
                if least == Evidence.NUMBERS and one.signature == other.signature:
                    continue
                evidence = self.evidence(one, other)
                evidence = evidence if evidence >= least else Evidence.NOTHING  # their own sizes are no neighbors
                weakest = Evidence.NAMES if self._is_beyond_doubt(evidence, one, other) else evidence
                for layer in (one, other):
                    self._weakest[layer] = min(weakest, self._weakest.get(layer, weakest))
                if not evidence:
                    _join(groups, one, other)
        distinct = {id(group): group for group in groups.values()}
        return [(group, [self.matched[layer] for layer in group]) for group in distinct.values()]

    def _either_way_round(self) -> list[list[Layer]]:
        """Return the groups whose layers could be exchanged if the file kept its matrices the other way round.

        These are matrices without a bias of which there are as many of either size, and no bias says which way it is.
        """
        lone: dict[tuple[int, ...], list[Layer]] = defaultdict(list)
        for layer in self.matched:
            for size in layer.matrix_sizes:
                # It shows which way its matrix is, and the file keeps all in one way.
                if len({*size}) == 2 and "bias" in layer.tensors:
                    return []
                if [*layer.tensors] == ["weight"]:
                    lone[size].append(layer)
        pairs = ((layers, lone.get(size[::-1], [])) for size, layers in lone.items() if size < size[::-1])
        return [[*layers, *others] for layers, others in pairs if len(layers) == len(others)]

    def doubt(self, layer: Layer, in_context: bool) -> str:
        """Return why the match of a layer of the file is a weak one; empty for a strong one.

        Args:
            layer: The layer.
            in_context: Whether layers beside it were matched, and it was found by them.
        """
        match = self.matched[layer]
        # A norm is that of its convolution, which may be in doubt
        convolutions = self._convolutions[0].get(layer), self._sources.get(self._convolutions[1].get(match, match))
        weakest = min((self._weakest[one] for one in (layer, *convolutions) if one in self._weakest), default=None)
        in_context = in_context or (self.source.holds_in_trunk(layer) and self.target.holds_in_trunk(match))
        # The only one of a square size: it would fit whatever it is, as a layer of another kind that the model happens
        # to have.
        if weakest is None and not in_context and not layer.has_distinctive_size and not layer.words & match.words:
            return "nothing but its size says so"
        return _DOUBTS.get(weakest or Evidence.NAMES, "")

    def evidence(self, one: Layer, other: Layer) -> Evidence:
        """Return what says that two layers of the file belong as they were matched, and not the other way round."""
        # A norm cannot be in block 3 if the matrices of its block were matched with block 4.
        if not (self._keeps_blocks(one) and self._keeps_blocks(other)):
            return Evidence.NOTHING
        matches = self.matched[one], self.matched[other]
        forks = self.source.fork(one, other), self.target.fork(*matches)
        counted = all(fork.numbers for fork in forks)
        # Words come first: numbers in names may be in another order than that of what the words say.
        balance = self._words(one, other, *matches, counted) or _equal_names(*forks)
        if balance:
            return Evidence.NAMES if balance > 0 else Evidence.NOTHING
        # DeepLab's first and last branch have one size, and only the last pools before: a list that ends the other way
        # round.
        if counted and _are_equal_if_exchanged(*forks):
            return Evidence.NOTHING
        # Gemma 2 has four norms in a block, before and behind both parts: "first" and "second" then count something
        # else.
        many = _are_of_many_norms(self.source, one, other) or _are_of_many_norms(self.target, *matches)
        if many and forks[0].ends != forks[1].ends:
            return Evidence.NOTHING
        if counted and self._numbers_tell_apart(one, other, *forks):
            return Evidence.NUMBERS
        # Gate and input stand beside the same layers: their neighbors say nothing.
        if self._beside_others(*forks) and not self._are_halves(one, other):
            return Evidence.NEIGHBORS
        return Evidence.CONVOLUTIONS if not counted and self._norms(one, other) else Evidence.NOTHING

    def _is_beyond_doubt(self, evidence: Evidence, one: Layer, other: Layer) -> bool:
        """Whether what tells two matches apart cannot be otherwise."""
        if evidence in (Evidence.NOTHING, Evidence.NAMES):
            return evidence == Evidence.NAMES
        source = self.source.fork(one, other)
        target = self.target.fork(self.matched[one], self.matched[other])
        # Numbers and neighbors alone are how a project counts and groups: likely, and shown as suggestions.
        if evidence == Evidence.NUMBERS and self._is_order_known(one, other, source, target):
            return True
        if evidence == Evidence.NEIGHBORS and any(map(self._holds_a_size_of_its_own, source.branches)):
            return True
        beside = evidence == Evidence.NEIGHBORS or self._norms(one, other)
        return beside and self._are_at_trunk(source, target)

    def _is_order_known(self, one: Layer, other: Layer, source: Fork, target: Fork) -> bool:
        """Whether two lists are counted from the same end: names or sizes say so, or both are in the trunk."""
        containers = source.container, target.container
        have_one_name = containers[0] == containers[1] and source.numbers == target.numbers
        if have_one_name or self._sizes_rise(*containers):
            return True
        have_one_word = last_word(containers[0]) == last_word(containers[1])
        if not (self.source.is_in_trunk(containers[0]) and self.target.is_in_trunk(containers[1])):
            # `conv1` and `conv2` of one module are names
            return have_one_word and all(map(_are_layers, (source, target)))
        # A mean and a variance, or two classes of a head: either may be the first in a project. So may the last step of
        # a decoder, or the coarsest scale of a pyramid, though no other list is beside them.
        if meanings_differ(*containers):
            return False
        if not have_one_word and self._are_parallel(one, other, source):
            return False
        lengths = self.source.num_branches(containers[0]), self.target.num_branches(containers[1])
        # Lists of other lengths count something else, such as stages and blocks.
        return lengths[0] == lengths[1] or self._rise_together(*containers)

    def _are_at_trunk(self, source: Fork, target: Fork) -> bool:
        """Whether one of two branches is in the trunk, on both sides, and the other beside it or in it too."""
        sides = (self.source, source), (self.target, target)
        return all(any(map(side.is_around_trunk, fork.branches)) for side, fork in sides)

    def _find_whether_blocks_are_kept(self, layer: Layer) -> bool:
        """Whether a match has the numbers that the matrices of its block were matched with, seen from both sides."""
        match = self.matched[layer]
        for side, own, other in ((self.source, layer, match), (self.target, match, layer)):
            block = side.block(own)
            if not block:
                continue
            numbers, wanted = self._numbers_of_block(side, block)
            deeper = len(numbers) - len(common_start([numbers, own.list_numbers]))  # the matrices are in a list there
            expected = wanted[: max(0, len(wanted) - deeper)]
            if other.list_numbers[: len(expected)] != expected:
                return False
        return True

    def _find_numbers_of_block(self, side: Side, block: Parts) -> tuple[Sequence[str], Sequence[str]]:
        """Return the numbers that all matrices of a block have in common, and those of their matches."""
        matched = self.matched if side is self.source else self._sources
        matrices = [layer for layer in side.branches[block] if layer.has_matrix and layer in matched]
        return (
            common_start([layer.list_numbers for layer in matrices]),
            common_start([matched[layer].list_numbers for layer in matrices]),
        )

    def _words(self, one: Layer, other: Layer, first: Layer, second: Layer, counted: bool) -> int:
        """Return how many words speak for the matches, less those that speak for the exchange."""
        ignored = ORDINAL_ROLES if counted else frozenset()  # projects count from 0 or from 1
        words = self.source.words(one) - ignored, self.source.words(other) - ignored
        wanted = self.target.words(first) - ignored, self.target.words(second) - ignored
        own, others = words[0] - words[1], words[1] - words[0]
        theirs, those = wanted[0] - wanted[1], wanted[1] - wanted[0]
        return len(own & theirs) + len(others & those) - len(own & those) - len(others & theirs)

    def _beside_others(self, source: Fork, target: Fork) -> bool:
        """Whether the branches of the two hold layers of sizes that the other branch has not, matched likewise."""
        # One of the two holds the other: there is no branch beside it.
        if () in (source.first, source.second, target.first, target.second):
            return False
        return self._are_matched_apart(source.branches, target.branches)

    def _holds_a_size_of_its_own(self, branch: Parts) -> bool:
        """Whether a part of the file holds a layer of a size that occurs once in the file and in the model."""
        return any(self._is_of_own_size(layer) for layer in self.source.branches[branch])

    def _find_whether_of_own_size(self, layer: Layer) -> bool:
        match = self.matched.get(layer)
        return (
            match is not None
            and layer.has_distinctive_size
            and all(side.counts[own.signature] == 1 for side, own in ((self.source, layer), (self.target, match)))
        )

    def _find_whether_matched_apart(self, sources: tuple[Parts, Parts], targets: tuple[Parts, Parts]) -> bool:
        inside, sizes = zip(*map(self.source.inside, sources), strict=True)
        wanted, wanted_sizes = zip(*map(self.target.inside, targets), strict=True)
        matches = [{self.matched.get(layer) for layer in layers} for layers in inside]
        # Layers of one branch are matched with those of both: the branches are not each other's.
        if matches[0] & wanted[1] or matches[1] & wanted[0]:
            return False
        return any(
            self.matched.get(layer) in wanted[mine]
            for mine, others in ((0, 1), (1, 0))
            for layer in inside[mine]
            if layer.signature not in sizes[others] | wanted_sizes[others]
        )

    def _norms(self, one: Layer, other: Layer) -> bool:
        """Whether the two are the norms of convolutions that were matched likewise."""
        for layer in (one, other):
            convolution = self._convolutions[0].get(layer)
            wanted = self._convolutions[1].get(self.matched[layer])
            # A norm has the size of its convolution's outputs, so that those of a block are alike; their convolutions
            # differ.
            if convolution is None or wanted is None or self.matched.get(convolution) is not wanted:
                return False
        return True

    # what numbers say

    def _numbers_tell_apart(self, one: Layer, other: Layer, source: Fork, target: Fork) -> bool:
        """Whether the two differ in numbers on both sides, and all that is numbered there counts the same way."""
        # Gate and input are `w1` and `w3` in Meta's Llama, `fc_1` and `fc_2` in LitGPT: a number does not say which it
        # is.
        if source.numbers is None or target.numbers is None or self._are_gated(one, other, source, target):
            return False
        if _words_without_number(source) != _words_without_number(target):
            return False  # `norm_in` and `norm_out` beside `norm1`
        rising = (source.numbers[0] < source.numbers[1]) == (target.numbers[0] < target.numbers[1])
        alike = rising and self._count_the_same_way(source.container, target.container)
        return alike and all(
            self._numbers_go_together(without_numbers(layer), without_numbers(self.matched[layer]))
            for layer in (one, other)
        )

    def _are_gated(self, one: Layer, other: Layer, source: Fork, target: Fork) -> bool:
        """Whether the two are gate and input of a gated layer, which numbers call by either name; of w1 and w3 not."""
        lengths = self.source.num_branches(source.container), self.target.num_branches(target.container)
        is_chain = min(lengths) > 2 and any(len({*size}) == 1 for size in one.matrix_sizes)  # of square layers
        return not is_chain and not source.numbers == target.numbers == (1, 3) and self._are_halves(one, other)

    def _are_halves(self, one: Layer, other: Layer) -> bool:
        """Whether the two are gate and input of a gated layer in the file or in the model."""
        matches = self.matched[one], self.matched[other]
        return _are_halves(self.source, one, other) or _are_halves(self.target, *matches)

    def _are_parallel(self, one: Layer, other: Layer, fork: Fork) -> bool:
        """Whether two numbered parts hold one matrix each, the only two of their size, and none can follow the other.

        Such are the two halves of a split, or the mean and the variance: projects have either first.
        """
        alike = [layer for layer in self.source.branches[fork.container] if layer.signature == one.signature]
        # Layers that keep the width may follow each other, and then numbers are the order of computing.
        if fork.first[1:] != fork.second[1:] or len(alike) != 2 or not _changes_width(one):
            return False
        return [sum(layer.has_matrix for layer in self.source.branches[branch]) for branch in fork.branches] == [1, 1]

    def _find_whether_counted_the_same_way(self, source: Parts, target: Parts) -> bool:
        if self.target.counts_backwards(target):
            return False
        layers = self.source.branches[source]
        # A norm that was matched with a norm of another block says nothing about the blocks
        numbers = self._numbers_below(source, target, [layer for layer in layers if layer.has_matrix] or layers)
        return _never_falls(numbers) and not self._is_reversed_beside(source, target)

    def _is_reversed_beside(self, source: Parts, target: Parts) -> bool:
        """Whether sizes match the numbered parts beside two containers in reverse order.

        The outputs of a pyramid are counted as its lateral convolutions are, from the finest or from the coarsest.
        """
        beside = self.target.containers_beside(target)
        for container in self.source.containers_beside(source):
            for other in beside:
                numbers = sorted(self._numbers_below(container, other, self._distinct(container, other)))
                if len(numbers) > 1 and all(one[0] < two[0] and one[1] > two[1] for one, two in pairwise(numbers)):
                    return True
        return False

    def _find_whether_sizes_rise(self, source: Parts, target: Parts) -> bool:
        """Whether sizes that only one numbered part has are in the same places, and not in the same from the end."""
        places = [
            {number: place for place, number in enumerate(sorted(set(numbers)))}
            for numbers in zip(*self._numbers_below(source, target, self.source.branches[source]), strict=True)
        ]
        distinct = self._numbers_below(source, target, self._distinct(source, target))
        found = [(places[0][one], places[1][other]) for one, other in distinct]
        # A size in the very middle is at the same place from either end.
        is_lopsided = any(one != len(places[0]) - 1 - one for one, _ in found)
        return is_lopsided and all(one == other for one, other in found)

    def _find_whether_numbers_rise(self, source: Parts, target: Parts) -> bool:
        """Whether the numbers of sizes that only one numbered part has rise on both sides, from other starts."""
        numbers = self._numbers_below(source, target, self._distinct(source, target))
        first, last = min(numbers, default=(0, 0)), max(numbers, default=(0, 0))
        return _never_falls(numbers) and first[1] < last[1]

    def _numbers_below(self, source: Parts, target: Parts, layers: Iterable[Layer]) -> set[tuple[int, int]]:
        """Return the numbers below two containers that were matched with each other."""
        # Matches elsewhere say nothing of these numbers.
        inside = set(self.target.branches[target])
        numbers: set[tuple[int, int]] = set()
        for layer in layers:
            match = self.matched.get(layer)
            if match in inside:
                one, other = number_below(source, layer), number_below(target, match)
                if one is not None and other is not None:
                    numbers.add((one, other))
        return numbers

    def _distinct(self, source: Parts, target: Parts) -> list[Layer]:
        """Return the matrices in a container of the file that have a size of their own there and in the model's."""
        sides = self.source.branches[source], self.target.branches[target]
        counts = [Counter(layer.signature for layer in layers) for layers in sides]
        return [layer for layer in sides[0] if layer.has_matrix and max(n[layer.signature] for n in counts) == 1]


def _are_of_many_norms(side: Side, one: Layer, other: Layer) -> bool:
    """Whether the two are norms of one block of three or more: some number those before and behind, or in order."""
    # BatchNorms follow convolutions, whose sizes tell more.
    if one.has_matrix or "running_mean" in one.tensors:
        return False
    block = side.block(one)
    own = [layer for layer in side.branches[block] if layer.signature == one.signature and side.block(layer) == block]
    return bool(block) and other in own and len(own) > 2


def _are_halves(side: Side, one: Layer, other: Layer) -> bool:
    """Whether the two are gate and input of a gated layer: the layer that leads back stands beside both."""
    siblings, wide = side.siblings(one), one.matrix_sizes[:1]
    sizes = [size for layer in siblings for size in layer.matrix_sizes if wide and {*size} == {*wide[0]}]
    return other in siblings and sorted(sizes) == sorted([*wide, *wide, *(size[::-1] for size in wide)]) != []


def _pairs(layers: list[Layer]) -> Iterator[tuple[Layer, Layer]]:
    """Yield each layer with those that follow it."""
    for position, layer in enumerate(layers, 1):
        # Neighbors in the list are those that a wrong order would exchange; all pairs of thousands would take minutes.
        for other in layers[position : position + _MOST_NEIGHBORS]:
            yield layer, other


def _join(groups: dict[Layer, list[Layer]], one: Layer, other: Layer) -> None:
    """Make one group of those of two layers."""
    group, added = groups.setdefault(one, [one]), groups.setdefault(other, [other])
    # "Alike" passes on: of three that are alike in pairs, one question is asked.
    if group is not added:
        group += added
        groups |= dict.fromkeys(added, group)


def _equal_names(source: Fork, target: Fork) -> int:
    """Return how many names are equal as they are matched, less those that are equal the other way round.

    One vague word alone says nothing, unless both names are equal.
    """
    (one, other), (first, second) = source.names, target.names
    if (one, other) == (first, second) and () not in (one, other):
        return int(one != other)
    pairs = ((one, first, second), (other, second, first))
    said = [(name, own, others) for name, own, others in pairs if name and not is_vague(name)]
    return sum((name == own) - (name == others) for name, own, others in said)


def _are_equal_if_exchanged(source: Fork, target: Fork) -> bool:
    """Whether names are equal after the differing numbers only in reverse order: the list counts backwards."""
    (one, other), (first, second) = ((fork.first[1:], fork.second[1:]) for fork in (source, target))
    return one != other and (one, other) == (second, first)


def _are_layers(fork: Fork) -> bool:
    """Whether the numbers are those of layers, not of modules that hold several."""
    return len(fork.first) == len(fork.second) == 1


def _words_without_number(fork: Fork) -> tuple[str, ...] | None:
    """Return the words of the one of two parts that has no number; None if both have one."""
    rests = zip(fork.numbers or (), (fork.first, fork.second), strict=False)
    return next((words_in(rest) for number, rest in rests if number == NO_NUMBER), None)


def _never_falls(numbers: set[tuple[int, int]]) -> bool:
    return all(one[1] <= other[1] for one, other in pairwise(sorted(numbers)) if one[0] < other[0])


def _changes_width(layer: Layer) -> bool:
    """Whether a layer has different numbers of inputs and outputs, and is not a convolution of groups."""
    shapes = [shape for _, shape in layer.tensors.values() if len(shape) > 1]
    # A kernel of groups has the inputs of one group only: (64, 1, 3, 3) may keep 64 channels.
    if len(shapes) != 1 or (len(shapes[0]) > 2 and shapes[0][0] % shapes[0][1] == 0):
        return False
    return shapes[0][0] != shapes[0][1]
