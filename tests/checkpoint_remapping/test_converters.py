"""A sample of what `make sweep` loads in the formats that other projects convert."""

import pytest

from tests.checkpoint_remapping.converters.cases import DIRECTIONS, RIGHT, WRONG, Case
from tests.checkpoint_remapping.converters.of_timm import CONVERTERS

# Without a rule; another rank, fused and separate, blocks in lists and apart
SAMPLE = ("convnextv2_atto", "xcit_nano_12_p16_224", "poolformerv2_s12")


@pytest.mark.parametrize("name", SAMPLE)
def test_files_are_loaded_as_their_own_project_converts_them(name):
    case = Case(next(which for which in CONVERTERS if which.name == f"timm {name}"))
    assert not case.lacking
    ends = {(way, seed): case.outcome(way, seed, accept="*") for way in DIRECTIONS for seed in (None, 0)}
    assert {end for end, _ in ends.values()} == {RIGHT}, ends


@pytest.mark.parametrize("which", [which.name for which in CONVERTERS if which.name.startswith("timm")][::9])
def test_a_rule_that_is_taken_as_it_stands_is_right_or_was_doubted(which):
    case = Case(next(each for each in CONVERTERS if each.name == which))
    ends = {way: case.outcome(way, None, blindly=True) for way in DIRECTIONS}
    assert WRONG not in {end for end, _ in ends.values()}, ends
