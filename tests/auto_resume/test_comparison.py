"""Values that differ after a resume are named by their paths, and equal ones are not."""

import copy
import time

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.auto_resume.core.attributes.encoding import differing_paths
from tests.small import cases

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
_VALUES = st.recursive(
    _LEAVES | st.floats(width=32).map(torch.tensor),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3),
    max_leaves=8,
)


@given(_VALUES)
def test_a_value_equals_its_copy(value):
    assert list(differing_paths(value, copy.deepcopy(value))) == []


@cases(
    "restored, places",
    ({"a": [1, torch.ones(2)], "b": {"c": 0.5}}, []),
    ({"a": [1, torch.ones(2)], "b": {"c": 0.5}, "more": 1}, []),
    ({"a": [2, torch.ones(2)], "b": {"c": 0.5}}, ["a.0"]),
    ({"a": [1, torch.tensor([1.0, 1.0 + 2**-23])], "b": {"c": 0.5}}, ["a.1"]),
    ({"a": [1, torch.ones(1, 2)], "b": {"c": 0.5}}, ["a.1"]),
    ({"a": [1], "b": {"c": 0.5}}, ["a"]),
    ({"a": [1, torch.ones(2)], "b": {}}, ["b.c"]),
    ({"a": [1, torch.ones(2)]}, ["b.c"]),
    ({"a": [1, torch.ones(2)], "b": {"c": float("nan")}}, ["b.c"]),
)
def test_paths_are_named(restored, places):
    assert list(differing_paths({"a": [1, torch.ones(2)], "b": {"c": 0.5}}, restored)) == places


def test_tensors_are_compared_bit_by_bit():
    nan = torch.tensor([float("nan")])
    assert list(differing_paths({"x": nan}, {"x": nan.clone()})) == []
    half = torch.tensor([0.1], dtype=torch.bfloat16)
    assert list(differing_paths({"x": half}, {"x": half.float()})) == [], "loaded in more precision, and the same"


def test_clock_readings_are_equal():
    now = time.time()
    assert list(differing_paths({"t": now - 60}, {"t": now})) == []
    assert list(differing_paths({"t": 0.25}, {"t": now})) == ["t"]


def test_objects_without_equality_are_ignored():
    assert list(differing_paths({"x": np.zeros(2)}, {"x": np.zeros(2)})) == []


def test_the_order_in_which_a_set_gives_its_entries_is_no_difference():
    first, second = ({"kind": "set", "items": items} for items in ([3, 1], [1, 3]))
    assert list(differing_paths({"x": first}, {"x": second})) == []
    assert list(differing_paths({"x": first}, {"x": {"kind": "set", "items": [1, 4]}})) == ["x.items.1"]
