"""What contradicts a match: the caller's rules for other blocks, and another name that is spelled the same."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Shape
from lightning_tricks.checkpoint_remapping.core.matching.matches import CONVERSION, Matching

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a part of a list
_Numbers = tuple[int, ...]


def refuse_contradictions(found: Matching, ruled: Mapping[str, str], shapes: Mapping[str, Shape]) -> Matching:
    """Return the matches that contradict neither rules nor the spelling of names; the others are ambiguous.

    A rule that takes `blocks.0.norm1` as `layers.0.ln_2` says that `blocks.1.norm1` is not `layers.1.ln_1`, and one
    that takes `blocks.0` as `layers.3` says that the blocks are counted from the other end. A `branchpool` is no
    `branch1x1` where the model has a `branch_pool` of its shape.

    Args:
        found: The matches.
        ruled: The names of the model by those of the file to which rules lead.
        shapes: The shapes of the model's tensors.
    """
    rules, spelling = _Rules(ruled), _Spelling(shapes)
    against = [
        m
        for m in found.matches
        if len(m.sources) == len(m.targets) == 1
        and (
            rules.contradict(m.sources[0], m.targets[0])
            or (not m.reason.startswith(CONVERSION) and spelling.contradicts(m.sources[0], m.targets[0]))
        )
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
    """The kinds of names, with each number of a list left open, to which rules lead, and these numbers."""

    def __init__(self, ruled: Mapping[str, str]) -> None:
        self._kinds: tuple[dict[str, set[str]], ...] = (defaultdict(set), defaultdict(set))
        self._numbers: dict[tuple[str, str], list[tuple[_Numbers, _Numbers]]] = defaultdict(list)
        for names in ruled.items():
            (source, target), numbers = zip(*map(_kind_and_numbers, names), strict=True)
            self._kinds[0][source].add(target)
            self._kinds[1][target].add(source)
            self._numbers[source, target].append(numbers)

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
            for mine, theirs in self._numbers.get(kinds, ())
        )


class _Spelling:
    """The names of a model, as they are without separators."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes, self._names = shapes, defaultdict[tuple[str, Shape], set[str]](set)
        for name, shape in shapes.items():
            self._names[re.sub(r"[\W_]", "", name), shape].add(name)

    def contradicts(self, source: str, target: str) -> bool:
        """Whether a name of the file has other words than that of the model, where another one has them all.

        Where words are the same, numbers differ, which may be counted from elsewhere.
        """
        same = self._names.get((re.sub(r"[\W_]", "", source), self._shapes[target]), set()) - {source}
        letters = (re.sub(r"[\W\d_]", "", name) for name in (source, target))
        return bool(same) and target not in same and len({*letters}) > 1


def _kind_and_numbers(name: str) -> tuple[str, _Numbers]:
    return _NUMBER.sub("#", name), tuple(map(int, _NUMBER.findall(name)))
