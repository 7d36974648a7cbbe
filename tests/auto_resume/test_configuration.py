"""What counts as a change between two configurations, without a Trainer."""

import argparse
import enum
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.auto_resume.core.configuration import (
    Change,
    changes_between,
    class_code,
    describe,
    flatten,
    is_longer,
    numbered,
    plain,
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3)
)


def changes(before: dict, now: dict) -> list[str]:
    return [str(one) for one in changes_between(before, now)]


@given(VALUES)
def test_a_value_that_was_saved_is_no_change(value):
    saved = json.loads(json.dumps(plain(value)))
    assert changes(dict(flatten("x", saved)), dict(flatten("x", value))) == []


@given(st.floats(1e-6, 1e6), st.floats(1.001, 10.0))
def test_another_number_is_a_change(number, factor):
    assert changes({"lr": number}, {"lr": number * factor}) == [f"lr: {number!r} -> {number * factor!r}"]


@pytest.mark.parametrize(("before", "now"), [({"units": 8}, 8), (8, {"units": 8}), ({"units": 8}, None)])
def test_another_kind_of_value_is_a_change(before, now):
    assert changes({"layers": [before]}, {"layers": [now]}) == [f"layers: [{before}] -> [{now}]"]


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: float = 1.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (torch.tensor(2), 2),
        (math.nan, "nan"),
        (Colour.RED, "RED"),
        (torch.float16, "torch.float16"),
        (torch.nn.ReLU, "ReLU"),
        (plain, "plain"),
        ((1, {"a": (2,)}), [1, {"a": [2]}]),
        ({3, 1}, [1, 3]),
        (argparse.Namespace(a=Point()), {"a": {"x": 1.0}}),
        (torch.zeros(3), "a Tensor"),
        (list(range(2000)), "a list"),
        (object(), "a object"),
        (b"bytes", "a bytes"),
    ],
)
def test_values_are_plain(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value))


def of_a(factor: float):
    offset = [0.5, 1.0]

    def scaled(step: int, power: int = 2) -> float:
        raise AssertionError("it is called")

    def with_closure(step: int) -> float:
        return scaled(step) * factor + sum(offset) + LIMIT

    return with_closure


LIMIT = 3


class Called:
    """An object that is called, with state."""

    def __init__(self) -> None:
        self.rate, self.table = 0.5, object()

    def __call__(self, step: int) -> float:
        raise AssertionError("it is called")


class CalledToo(Called):
    """The same code under another name."""


class CalledOtherwise(Called):
    def __call__(self, step: int) -> float:
        return 2 * super().__call__(step)


def test_functions_are_described_by_their_code_and_what_they_use():
    found = dict(describe("f", of_a(0.1)))
    assert {name: value for name, value in found.items() if not name.endswith("code")} == {
        "f": "function",
        "f.LIMIT": 3,
        "f.factor": 0.1,
        "f.offset": [0.5, 1.0],
        "f.scaled": "function",
        "f.scaled.power": 2,
    }
    assert changes(found, dict(describe("f", of_a(0.2)))) == ["f.factor: 0.1 -> 0.2"]
    assert dict(describe("f", functools.partial(of_a, 0.1)))["f.0"] == 0.1
    assert dict(describe("f", Called())) == {"f": "Called", "f.code": class_code(Called), "f.rate": 0.5}
    assert dict(describe("f", Called().__call__))["f"] == "function"
    assert dict(describe("f", torch.nn.functional.relu)) == {"f": "relu", "f.inplace": False}
    assert class_code(Called) == class_code(CalledToo) != class_code(CalledOtherwise)
    assert class_code(torch.nn.Linear) == ""


def test_code_of_another_python_is_not_compared():
    assert changes({"f.code": "bytecode cpython-27 0a"}, {"f.code": class_code(Called)}) == []
    assert len(changes({"f.code": class_code(CalledOtherwise)}, {"f.code": class_code(Called)})) == 1
    assert len(changes({"f.code": "bytecode cpython-27 0a"}, {"f.code": 3})) == 1


def test_limits():
    assert is_longer(3, 10)
    assert is_longer(3, -1)
    assert is_longer(3, None)
    assert not is_longer(-1, 3)
    assert not is_longer(None, -1)
    assert not is_longer(3, 3)


def test_a_path_is_text():
    assert plain(Path("a")) == "a PosixPath"
    assert numbered([1, "a", 2]) == ["int", "str", "int[1]"]


def test_configs_that_contain_themselves_and_tensors_without_data_have_an_end():
    config: dict = {"lr": 0.1, "meta": torch.empty(1, device="meta")}
    config["parent"] = config
    assert changes(dict(flatten("x", config)), dict(flatten("x", config))) == []
    point = Point()
    point.x = point
    assert dict(flatten("x", point))


def test_a_long_value_is_shown_where_it_changed():
    before, now = ([0.5 + number / 1000 for number in range(50)] for _ in range(2))
    now[40] = 0.25
    assert "0.25" in str(Change("x", before, now))
