"""What names say: tensors of equal names, with the best prefix on either side, and matches that rules contradict.

Also which way round matrices are: (out, in) as a Linear keeps them, or (in, out) as Paddle, Keras and a Conv1D do.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from lightning_tricks._shared.patterns import LIST_NUMBER, MAX_REPEATS
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import AmbiguousAlignmentError
from lightning_tricks.checkpoint_remapping.core.matching.matches import SAME_NAME, Match, Matching, Prefixes, Shape
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed

_MOST_PLACES = 64
_MOST_KINDS = 4  # of matrices for which a message shows rules
Shapes = Mapping[str, Shape]


class NameMatching(NamedTuple):
    """A matching by names only.

    Attributes:
        matching: Tensors with equal names and shapes, or with the shape of a matrix that is another way round.
        prefixes: The prefixes without which names are compared.
        mismatched: (name in the file, name in the model) of equal names whose shapes differ.
    """

    matching: Matching
    prefixes: Prefixes
    mismatched: list[tuple[str, str]]


def match_by_name(
    source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape], search_prefixes: bool
) -> NameMatching:
    """Match tensors of equal names and shapes; several prefixes that fit equally well are ambiguous."""
    learned, wanted = map(_learned, (source_shapes, target_shapes))  # counters may be missing, and are not evidence
    # Where each name fits as it is, a prefix could only find a second copy, such as a teacher beside its student.
    complete = all(source_shapes.get(name) == shape for name, shape in wanted.items())
    prefixes, rivals = ("", ""), list[Prefixes]()
    if search_prefixes and not complete:
        # A matrix that is another way round has the sizes of the model's
        prefixes, rivals = _best_prefixes(*map(_with_sorted_sizes, (learned, wanted)))
    prefix = prefixes[0] or prefixes[1]
    reason = f"{SAME_NAME}, with {prefix!r} in front" if prefix else SAME_NAME
    used = ("", "") if rivals else prefixes
    pairs = [(name, new) for name in source_shapes if (new := replace_prefix(name, *used)) in target_shapes]
    if search_prefixes:
        # One project counts from 0 and another from 1: `layers.1` of both is not one layer, and structure has to
        # decide.
        shifted = _shifted((replace_prefix(name, *used) for name in source_shapes), target_shapes)
        pairs = [(name, new) for name, new in pairs if shifted.isdisjoint(series for series, _ in _numbers(new))]
    mismatched = [(name, new) for name, new in pairs if source_shapes[name] != target_shapes[new]]
    # Keras, Paddle and the Conv1D of transformers (pytorch_utils.py; transformers #311) keep (in, out).
    turned = [pair for pair in mismatched if search_prefixes and _is_turned(*pair, source_shapes, target_shapes)]
    mismatched = [pair for pair in mismatched if pair not in turned]
    equal = [(name, new) for name, new in pairs if source_shapes[name] == target_shapes[new]]
    if rivals:
        sides = [[f"{p}.*" if p else "*" for p in dict.fromkeys(side)] for side in zip(*rivals, strict=True)]
        return NameMatching(Matching(ambiguous=[(sides[0], sides[1])]), prefixes, mismatched)
    matches = [Match((name,), (new,), reason=reason, is_plain=not prefix) for name, new in equal]
    matches += [Match((name,), (new,), transpose=True, reason=reason, is_plain=not prefix) for name, new in turned]
    found = Matching(matches)
    return NameMatching(found, prefixes, mismatched)


def _learned(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if not is_computed(name, shape)}


def _with_sorted_sizes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: tuple(sorted(shape)) if len(shape) == 2 else shape for name, shape in shapes.items()}


def replace_prefix(name: str, source: str, target: str) -> str:
    """Return a name with one prefix instead of another; empty if it does not have the first."""
    if source and not name.startswith(f"{source}."):
        return ""
    rest = name[len(source) + 1 :] if source else name
    return f"{target}.{rest}" if target else rest


def _shifted(source_names: Iterable[str], target_names: Iterable[str]) -> set[str]:
    """Return the series of names that one side counts from elsewhere: equal names there are different parts."""
    counted: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for side, names in enumerate((source_names, target_names)):
        for name in names:
            # Some in common, and some on either side alone: 0 to 11 and 1 to 12. A list that is only longer is another
            # depth.
            for series, number in _numbers(name):
                counted[series][side].add(number)
    return {series for series, (ours, others) in counted.items() if ours - others and others - ours and ours & others}


def _numbers(name: str) -> Iterator[tuple[str, str]]:
    """Yield each number in a name, after the series that it counts: the name with this and further numbers open."""
    for found in re.finditer(r"\d+", name):
        yield name[: found.start()] + re.sub(r"\d+", "#", name[found.start() :]), found.group()


def _best_prefixes(
    source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]
) -> tuple[Prefixes, list[Prefixes]]:
    """Return the prefixes that fit most tensors; all of them if several fit as many."""
    counts = _count_prefixes(source_shapes, target_shapes)
    if not counts:
        return ("", ""), []
    most = max(counts.values())
    best = [pair for pair, count in counts.items() if count == most]
    if len(best) > 1 and 2 * most < min(len(source_shapes), len(target_shapes)):
        return ("", ""), []  # layers that are alike, not parts of the model that could be meant
    # Names that fit as they are need no other reading.
    if ("", "") in best or len(best) == 1:
        return (("", "") if ("", "") in best else best[0]), []
    shortest = min(len(source) + len(target) for source, target in best)
    return next(pair for pair in best if len(pair[0]) + len(pair[1]) == shortest), best


def _count_prefixes(source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]) -> Counter[Prefixes]:
    """Count, for each pair of prefixes, the tensors whose names are equal without them and whose shapes are equal.

    A list that has two names, and is not all of the file or the model, may be counted from either end.
    """
    target_prefixes: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in target_shapes.items():
        for prefix, rest in _splits(name):
            target_prefixes.setdefault((rest, shape), []).append(prefix)
    counts: Counter[Prefixes] = Counter()
    lists: set[Prefixes] = set()
    for name, shape in source_shapes.items():
        for source, rest in _splits(name):
            targets = target_prefixes.get((rest, shape), [])
            # Pairs would be as many as tensors of one side times those of the other, which a hostile file can make
            # large.
            if source and len(targets) > _MOST_PLACES:
                break  # what is left is the end of a name, such as weight, which fits anywhere
            # Prefixes that end alike have a shorter pair, which counts them already
            pairs = [
                (source, target)
                for target in targets
                # `a.b` instead of `c.b` says no more than `a` instead of `c`, and would tie with it.
                if not source or not target or source.rpartition(".")[2] != target.rpartition(".")[2]
            ]
            counts.update(pairs)
            # `blocks` instead of `layers`: another project may count its blocks from the other end, and half of them
            # would fit.
            if rest[0].isdecimal():
                lists.update(pair for pair in pairs if all(pair))
    all_tensors = min(len(source_shapes), len(target_shapes))
    return Counter({pair: n for pair, n in counts.items() if pair not in lists or n == all_tensors})


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield all (prefix, rest) of a name, from no prefix to the longest."""
    yield "", name
    for position, letter in enumerate(name):
        if letter == ".":
            yield name[:position], name[position + 1 :]


_Numbers = tuple[int, ...]


def refuse_against_rules(found: Matching, ruled: Mapping[str, str]) -> Matching:
    """Return the matches that do not contradict rules; the others are ambiguous.

    A rule that takes `blocks.0.norm1` as `layers.0.ln_2` says that `blocks.1.norm1` is not `layers.1.ln_1`, and one
    that takes `blocks.0` as `layers.3` says that the blocks are counted from the other end.

    Args:
        found: The matches.
        ruled: The names of the model by those of the file to which rules lead.
    """
    rules = _Rules(ruled)
    against = [
        m
        for m in found.matches
        if len(m.sources) == len(m.targets) == 1 and rules.contradict(m.sources[0], m.targets[0])
    ]
    groups: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = defaultdict(lambda: ({}, {}))
    for match in against:
        (source, target) = (name.rpartition(".")[0] or name for name in (match.sources[0], match.targets[0]))
        # One question for a block: each layer by itself would make a message of pages.
        group = groups[source.rpartition(".")[0], target.rpartition(".")[0]]
        group[0][source] = group[1][target] = None
    ambiguous = [([*sources], [*targets]) for sources, targets in groups.values()]
    kept = [match for match in found.matches if match not in against] if against else found.matches
    return Matching(kept, [*found.ambiguous, *ambiguous])


class _Rules:
    """The kinds of names, with each number of a list left open, to which rules lead, and these numbers.

    What a rule says of the numbers of a layer, it says of the blocks that the layer is in.
    """

    def __init__(self, ruled: Mapping[str, str]) -> None:
        self._kinds: tuple[dict[str, set[str]], ...] = (defaultdict(set), defaultdict(set))
        self._numbers: dict[tuple[str, str], list[tuple[_Numbers, _Numbers]]] = defaultdict(list)
        for names in ruled.items():
            # Both ways: neither may another kind of the file lead to this one of the model, nor this kind of the file
            # elsewhere.
            (source, target), numbers = zip(*map(_kind_and_numbers, names), strict=True)
            self._kinds[0][source].add(target)
            self._kinds[1][target].add(source)
            self._numbers[source, target].append(numbers)
            for kinds, numbers_of_block in _blocks(*names):
                self._numbers[kinds].append(numbers_of_block)

    def contradict(self, source: str, target: str) -> bool:
        """Whether rules lead from names like one of the file to others than such of the model, or in another order."""
        kinds, (one, other) = zip(*map(_kind_and_numbers, (source, target)), strict=True)
        # Without numbers there is nothing else of their kind for which a rule could speak.
        if not (one or other):
            return False
        wanted = (self._kinds[0].get(kinds[0]), self._kinds[1].get(kinds[1]))
        # A rule for `blocks.0.norm1` leads all of this kind to one kind of the model: the same guess in other blocks is
        # wrong.
        if any(known is not None and kind not in known for known, kind in zip(wanted, reversed(kinds), strict=True)):
            return True
        return any(
            (mine > one) != (theirs > other) or (mine < one) != (theirs < other)
            for kinds, (one, other) in [(kinds, (one, other)), *_blocks(source, target)]
            for mine, theirs in self._numbers.get(kinds, ())
        )


def _blocks(source: str, target: str) -> list[tuple[tuple[str, str], tuple[_Numbers, _Numbers]]]:
    """Return the kinds and numbers of the blocks of lists that two names are in, if they are in as many."""
    ends = [[number.end() for number in LIST_NUMBER.finditer(name)] for name in (source, target)]
    # A flat list and one of lists have no blocks in common.
    if len(ends[0]) != len(ends[1]):
        return []
    pairs = ((source[:one], target[:other]) for one, other in zip(*ends, strict=True))
    blocks = (tuple(zip(*map(_kind_and_numbers, pair), strict=True)) for pair in pairs)
    return [((kinds[0], kinds[1]), (numbers[0], numbers[1])) for kinds, numbers in blocks]


def _kind_and_numbers(name: str) -> tuple[str, _Numbers]:
    return LIST_NUMBER.sub("#", name), tuple(map(int, LIST_NUMBER.findall(name)))


# Which way round matrices are


def _is_turned(source: str, target: str, sources: Shapes, targets: Shapes) -> bool:
    """Whether a matrix of the file is that of the model with rows and columns exchanged, if no bias denies it."""
    if not (source.endswith("weight") and target.endswith("weight")):
        return False  # a table of another size, not the matrix of a layer
    biases = _bias_of(source, sources), _bias_of(target, targets)
    # The length of a bias is that of the outputs, whichever way the matrix is.
    if None not in biases and biases[0] != biases[1]:
        return False
    shape = sources[source]
    return len(shape) == 2 and shape != targets[target] == shape[::-1]


def _bias_of(weight: str, shapes: Shapes) -> Shape | None:
    return shapes.get(f"{weight.removesuffix('weight')}bias")


def turn_squares(found: Matching, ruled: list[Match], sources: Shapes, targets: Shapes) -> Matching:
    """Return the matches, with square matrices transposed if all other matrices of their kind are.

    Of the same kind are the layers of the blocks of one list or, where none of these is oblong, of the whole model. A
    layer with a bias, which no embedding has, follows those with a bias. No square matrix is taken for a kernel of ones
    then, nor such a kernel for it.

    Args:
        found: The matches.
        ruled: What rules made, and transposed or not, which says the same of the others.
        sources: Shapes of the file's tensors.
        targets: Those of the model's.

    Raises:
        AmbiguousAlignmentError: If some matrices are transposed, and those of a square one's kind do not agree.
    """
    # Only these show the way: a square matrix loads either way round, without an error, and computes something else.
    oblong = [match for match in (*found.matches, *ruled) if _is_oblong(match, sources)]
    turned = [match.sources[0] for match in oblong if match.transpose]
    if not turned:
        return found
    known: _Known = defaultdict(list)
    for match in oblong:
        for block in _blocks_around(match.targets[0]):
            known[block].append((_bias_of(match.targets[0], targets) is not None, match.transpose))
    way_of = {
        match: _way_of_square(match.targets[0], known, targets)
        for match in found.matches
        if _is_square(match, sources, targets)
    }
    unclear = [match for match, way in way_of.items() if way is None]
    if unclear:
        raise AmbiguousAlignmentError(_ask_for_way(unclear, turned))
    # The matrix of a kernel of ones is not last, so that no rule could swap it, and a match as it is may be wrong.
    matches = [replace(match, transpose=True) if way_of.get(match) else match for match in found.matches]
    return Matching([match for match in matches if not _is_square_kernel(match, sources, targets)], found.ambiguous)


_Known = dict[str, list[tuple[bool, bool]]]  # of the oblong matrices in a block: whether with a bias, and transposed


def _is_oblong(match: Match, sources: Shapes) -> bool:
    shape = sources[match.sources[0]]
    return match.targets[0].endswith("weight") and len(shape) == 2 and len({*shape}) == 2


def _is_square(match: Match, sources: Shapes, targets: Shapes) -> bool:
    name, shape = match.targets[0], sources[match.sources[0]]
    # Query, key and value of one size, which are fused as they are: each may be either way round.
    is_matrix = len(shape) == 2 and targets[name] == (len(match.sources) * shape[0], *shape[1:]) and shape[0] > 1
    return is_matrix and shape[0] == shape[1] and not is_computed(name, shape)


def _is_square_kernel(match: Match, sources: Shapes, targets: Shapes) -> bool:
    """Whether a square matrix becomes a kernel of ones, or is made of one."""
    matrix, kernel = sorted((sources[match.sources[0]], targets[match.targets[0]]), key=len)
    return len(kernel) > len(matrix) == 2 and len({*matrix}) == 1 and kernel == (*matrix, *[1] * (len(kernel) - 2))


def _way_of_square(name: str, known: _Known, targets: Shapes) -> bool | None:
    """Whether a square matrix is transposed, as all of its kind; None if nothing says so."""
    has_bias = _bias_of(name, targets) is not None
    # The narrowest block first: attention may be kept one way, as by a Conv1D, and the head, a Linear, the other way.
    for block in _blocks_around(name) if name.endswith("weight") else ():
        if not block and not has_bias:
            break  # it may be an embedding
        of_block = known.get(block, [])
        biased = [pair for pair in of_block if pair[0]]
        ways = {is_turned for _, is_turned in (biased if has_bias and biased else of_block)}
        if len(ways) > 1:
            break
        if ways == {True} or (ways and biased):
            return True in ways
    return None


def _ask_for_way(unclear: list[Match], turned: list[str]) -> str:
    """Return the sentence that asks which of these matrices are transposed, with the rules for either answer."""
    # One rule for the blocks of a list: a transformer has dozens of these matrices.
    names = list(dict.fromkeys(tuple(_glob(name, match.targets[0]) for name in match.sources) for match in unclear))
    rules = [
        {"from": pairs[0][0] if len(pairs) == 1 else [name for name, _ in pairs], "to": pairs[0][1], "transpose": True}
        for pairs in names[:_MOST_KINDS]
    ]
    more = f" (and so on for {len(names) - _MOST_KINDS} more)" if len(names) > _MOST_KINDS else ""
    return (
        f"it is ambiguous whether the square {list_names(name for pairs in names for name, _ in pairs)} are "
        f"transposed, as other matrices of the file are ({list_names(turned)}): their shapes do not show it, and "
        f"similar layers differ or are missing. If they are, give rules={rules}{more}; for one that is not, give its "
        "rule without 'transpose' instead, which takes it as it is."
    )


def _blocks_around(name: str) -> Iterator[str]:
    """Yield the blocks that a tensor is in, without their numbers, from the innermost; the model is an empty one."""
    layer = name.rpartition(".")[0]
    ends = [found.end() for found in LIST_NUMBER.finditer(layer) if found.end() < len(layer)]
    yield from (LIST_NUMBER.sub("#", name[:end]) for end in reversed(ends))
    yield ""


def _glob(source: str, target: str) -> tuple[str, str]:
    """Return the names with a star for each number of a list, where one rule does for all blocks."""
    # A star stands for equal numbers on both sides.
    numbers = LIST_NUMBER.findall(source)
    if numbers != LIST_NUMBER.findall(target) or len(numbers) > MAX_REPEATS:
        return source, target
    return LIST_NUMBER.sub("*", source), LIST_NUMBER.sub("*", target)
