"""What the caller's rules say about the layers that they do not name: those of other blocks go together likewise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from lightning_tricks._shared.patterns import LIST_NUMBER
from lightning_tricks.checkpoint_remapping.core.matching.matches import Matching

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


def _kind_and_numbers(name: str) -> tuple[str, _Numbers]:
    return LIST_NUMBER.sub("#", name), tuple(map(int, LIST_NUMBER.findall(name)))
