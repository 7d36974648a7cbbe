"""Networks under the names of two projects: right, or refused, and never wrong."""

from collections import Counter

import pytest

from tests.checkpoint_remapping.pairs import PAIRS, REFUSED, RIGHT, WRONG, outcome

AT_LEAST_RIGHT = 517  # of 1,644, when this was written


@pytest.mark.filterwarnings("ignore")  # of transformers, where a layer is built alone
def test_each_pair_is_right_or_refused():
    ends = {(str(pair), where): outcome(pair, where)[0] for pair in PAIRS for where in ("as registered", "sorted")}
    assert [pair for pair, end in ends.items() if end == WRONG] == []
    counts = Counter(ends.values())
    assert counts[RIGHT] >= AT_LEAST_RIGHT, counts
    assert counts[REFUSED]
