"""Networks under the names of two projects: right, or refused, and never wrong."""

import itertools
from collections import Counter

import pytest

from tests.checkpoint_remapping.pairs import PAIRS, REFUSED, RIGHT, WRONG, outcome

AT_LEAST_RIGHT = {1: 237, 3: 74}  # of 906, and of each third, when this was written


@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.filterwarnings("ignore")  # of transformers, where a layer is built alone
def test_each_pair_is_right_or_refused(each):
    """Each file comes in one of two orders; `make sweep` takes every pair in all containers."""
    orders = itertools.cycle(("as registered", "shuffled", "shuffled", "as registered"))
    ends = {(str(pair), order): outcome(pair, order)[0] for pair, order in zip(PAIRS[::each], orders, strict=False)}
    assert [pair for pair, end in ends.items() if end == WRONG] == []
    counts = Counter(ends.values())
    assert counts[RIGHT] >= AT_LEAST_RIGHT[each], counts
    assert counts[REFUSED]
