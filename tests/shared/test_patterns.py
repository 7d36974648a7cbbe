"""Patterns over qualified names."""

from lightning_tricks._shared.patterns import Pattern
from tests.small import cases


@cases(
    "text, name, matches",
    ("head", "head", True),
    ("head", "model.head", False),  # a glob matches the whole name
    ("head", "header", False),
    ("head.*", "head.fc.weight", True),  # also across dots
    ("head.*", "overhead.fc.weight", False),
    ("*.head.*", "model.head.weight", True),
    ("layer?.weight", "layer4.weight", True),
    ("layer[12].*", "layer3.weight", False),
    ("re:head", "model.header", True),  # a regular expression matches anywhere
    ("re:^head$", "model.head", False),
)
def test_matches(text, name, matches):
    assert Pattern(text).matches(name) is matches
