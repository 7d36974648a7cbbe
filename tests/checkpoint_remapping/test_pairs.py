"""Networks under the names of two projects: right, or refused, and never wrong."""

import itertools
from collections import Counter

import pytest

from tests.checkpoint_remapping.pairs import PAIRS, REFUSED, RIGHT, WRONG, outcome


@pytest.mark.filterwarnings("ignore")  # of transformers, where a layer is built alone
def test_each_pair_is_right_or_refused():
    """Each file comes in one of two orders; `make sweep` takes every pair in all containers."""
    orders = itertools.cycle(("as registered", "shuffled", "shuffled", "as registered"))
    ends = {(str(pair), order): outcome(pair, order)[0] for pair, order in zip(PAIRS, orders, strict=False)}
    assert [pair for pair, end in ends.items() if end == WRONG] == []
    counts = Counter(ends.values())
    assert counts[RIGHT] >= 142, counts  # of 432, when this was written
    assert counts[REFUSED]
