"""Evidence: which of several candidates belong together, by sizes that are unique and by words in common."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_tricks.checkpoint_remapping.core.matching.candidates import Series


def pair_by_evidence(
    sources: list[Series], targets: list[Series], reason_if_unique: str
) -> Iterator[tuple[Series, Series, str]]:
    """Pair series of equal sizes: the only two, or those with more words in common than either has with a third.

    Args:
        sources: Series of the file.
        targets: Series of the model, all of the same sizes.
        reason_if_unique: The reason of the match where there is one series on each side.

    Yields:
        A series of the file, one of the model, and why they belong together.
    """
    if len(sources) == len(targets) == 1:
        if len(sources[0]) > 1 or sources[0][0].has_distinctive_size or _words_in_common(sources[0], targets[0]):
            yield sources[0], targets[0], reason_if_unique
        return
    # A word that all series of a side have tells them apart no better than none
    several = [side for side in (sources, targets) if len(side) > 1]
    ignored = frozenset().union(*(frozenset.intersection(*(series[0].words for series in side)) for side in several))
    while sources and targets:
        best = _mutually_best(sources, targets, ignored)
        if not best:
            return
        for i, j in best:
            words = (sources[i][0].words & targets[j][0].words) - ignored
            yield sources[i], targets[j], f"the same words: {', '.join(sorted(words))}"
        sources = [series for i, series in enumerate(sources) if i not in {i for i, _ in best}]
        targets = [series for j, series in enumerate(targets) if j not in {j for _, j in best}]
        if len(sources) == len(targets) == 1:
            yield sources[0], targets[0], "the last of their size"
            return


def _mutually_best(sources: list[Series], targets: list[Series], ignored: frozenset[str]) -> list[tuple[int, int]]:
    """Return the pairs of positions that have more words in common than either has with any other."""
    scores = {
        (i, j): _words_in_common(source, target, ignored)
        for i, source in enumerate(sources)
        for j, target in enumerate(targets)
    }
    return [
        (i, j)
        for (i, j), score in scores.items()
        if score > 0
        and all(score > scores[k, j] for k in range(len(sources)) if k != i)
        and all(score > scores[i, k] for k in range(len(targets)) if k != j)
    ]


def _words_in_common(source: Series, target: Series, ignored: frozenset[str] = frozenset()) -> int:
    return len((source[0].words & target[0].words) - ignored)
