"""Few combinations in which any two levels of any two factors occur together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """The pairs of levels that occur in a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_rows(factors: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    """Every combination of the levels."""
    return (dict(zip(factors, levels, strict=True)) for levels in product(*factors.values()))


def pairwise_cover(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Take, again and again, the row with most pairs that no row before it has."""
    rows, cover = list(all_rows(factors)), []
    missing = set().union(*map(pairs_of, rows))
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        cover.append(best)
        missing -= pairs_of(best)
    return cover
