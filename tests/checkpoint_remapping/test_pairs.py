"""Networks under the names of two projects: right, or refused, and never wrong."""

import itertools
from collections import Counter

from tests.checkpoint_remapping.other_projects import PAIRS, REFUSED, RIGHT, WRONG, outcome


def test_each_pair_is_right_or_refused():
    """Each file comes in one of four containers, in turns."""
    containers = itertools.cycle(("as registered", "shuffled", "model.", "sorted", "shuffled"))
    ends = {(str(pair), name): outcome(pair, name) for pair, name in zip(PAIRS, containers, strict=False)}
    assert [pair for pair, end in ends.items() if end == WRONG] == []
    counts = Counter(ends.values())
    assert counts[RIGHT] >= 41, counts  # of 192, when this was written
    assert counts[REFUSED]
