"""What names say: tensors of equal names, with the best prefix on either side, and matches that rules contradict."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from lightning_tricks._shared.patterns import LIST_NUMBER
from lightning_tricks.checkpoint_remapping.core.matching.matches import SAME_NAME, Match, Matching, Prefixes, Shape
from lightning_tricks.checkpoint_remapping.core.matching.orientation import is_turned
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed

_MOST_PLACES = 64


class NameMatching(NamedTuple):
    """What names alone say.

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
        shifted = _shifted((replace_prefix(name, *used) for name in source_shapes), target_shapes)
        pairs = [(name, new) for name, new in pairs if shifted.isdisjoint(series for series, _ in _numbers(new))]
    mismatched = [(name, new) for name, new in pairs if source_shapes[name] != target_shapes[new]]
    turned = [pair for pair in mismatched if search_prefixes and is_turned(*pair, source_shapes, target_shapes)]
    mismatched = [pair for pair in mismatched if pair not in turned]
    equal = [(name, new) for name, new in pairs if source_shapes[name] == target_shapes[new]]
    if rivals:
        sides = [[f"{p}.*" if p else "*" for p in dict.fromkeys(side)] for side in zip(*rivals, strict=True)]
        return NameMatching(Matching(ambiguous=[(sides[0], sides[1])]), prefixes, mismatched)
    matches = [Match((name,), (new,), reason=reason) for name, new in equal]
    matches += [Match((name,), (new,), transpose=True, reason=reason) for name, new in turned]
    found = Matching(matches)
    return NameMatching(found, prefixes, mismatched)


def _learned(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if not is_computed(name, shape)}


def _with_sorted_sizes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: tuple(sorted(shape)) if len(shape) == 2 else shape for name, shape in shapes.items()}


def replace_prefix(name: str, source: str, target: str) -> str:
    """Return a name with one prefix instead of another; empty where it does not have the first."""
    if source and not name.startswith(f"{source}."):
        return ""
    rest = name[len(source) + 1 :] if source else name
    return f"{target}.{rest}" if target else rest


def _shifted(source_names: Iterable[str], target_names: Iterable[str]) -> set[str]:
    """Return the series of names that one side counts from elsewhere: equal names there are different parts."""
    counted: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for side, names in enumerate((source_names, target_names)):
        for name in names:
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
    """Return the prefixes that fit most tensors and, where others fit as many, all of these."""
    counts = _count_prefixes(source_shapes, target_shapes)
    if not counts:
        return ("", ""), []
    most = max(counts.values())
    best = [pair for pair, count in counts.items() if count == most]
    if len(best) > 1 and 2 * most < min(len(source_shapes), len(target_shapes)):
        return ("", ""), []  # layers that are alike, not parts of the model that could be meant
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
            if source and len(targets) > _MOST_PLACES:
                break  # what is left is the end of a name, such as weight, which fits anywhere
            # Prefixes that end alike have a shorter pair, which counts them already
            pairs = [
                (source, target)
                for target in targets
                if not source or not target or source.rpartition(".")[2] != target.rpartition(".")[2]
            ]
            counts.update(pairs)
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
            (source, target), numbers = zip(*map(_kind_and_numbers, names), strict=True)
            self._kinds[0][source].add(target)
            self._kinds[1][target].add(source)
            self._numbers[source, target].append(numbers)
            for kinds, numbers_of_block in _blocks(*names):
                self._numbers[kinds].append(numbers_of_block)

    def contradict(self, source: str, target: str) -> bool:
        """Whether rules lead from names like one of the file to others than such of the model, or in another order."""
        kinds, (one, other) = zip(*map(_kind_and_numbers, (source, target)), strict=True)
        if not (one or other):
            return False
        wanted = (self._kinds[0].get(kinds[0]), self._kinds[1].get(kinds[1]))
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
    if len(ends[0]) != len(ends[1]):
        return []
    pairs = ((source[:one], target[:other]) for one, other in zip(*ends, strict=True))
    blocks = (tuple(zip(*map(_kind_and_numbers, pair), strict=True)) for pair in pairs)
    return [((kinds[0], kinds[1]), (numbers[0], numbers[1])) for kinds, numbers in blocks]


def _kind_and_numbers(name: str) -> tuple[str, _Numbers]:
    return LIST_NUMBER.sub("#", name), tuple(map(int, LIST_NUMBER.findall(name)))
