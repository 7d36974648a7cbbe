"""What counts as a change between two configurations, without a Trainer."""

import argparse
import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.auto_resume.core.configuration import Change, Configuration, flatten, is_longer, numbered, plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3)
)


def changes(before: dict, now: dict, of: str = "arguments") -> list[str]:
    found, _ = Configuration(**{of: before}).changes_to(Configuration(**{of: now}))
    return [str(one) for one in found]


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


def test_what_only_one_start_has():
    assert changes({"hparams.a": 1}, {"hparams.a": 1, "hparams.b": 2}) == ["hparams.b: none -> 2"]
    assert changes({"Adam.lr": 1}, {"Adam.lr": 1, "Adam.fused": None}, of="values") == [], "a library added it"
    assert changes({"scheduler 0": "StepLR"}, {}, of="kinds") == ["scheduler 0: StepLR -> none"]


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("data_dir", "a", "b"),
        ("outputPath", "a", "b"),
        ("target", "/a/b", "c"),
        ("source", "a\\b", "a\\c"),
        ("name", "run 2026-11-24", "run 2026-11-25"),
        ("key", "3f2a9c1e77", "77aa01b2c3"),
        ("begun", 1.7956e9, 1.7957e9),
        ("begun_ns", 1795600000000000000, 1795700000000000000),
        ("num_workers", 2, 8),
        ("device", "cpu", "cuda"),
        ("random_seed", 1_234_567_890, 987_654_321),
        ("on_change", "raise", "new"),
    ],
)
def test_how_and_where_a_run_is_done_is_no_change(name, before, now):
    found, incidental = Configuration(arguments={f"hparams.{name}": before}).changes_to(
        Configuration(arguments={f"hparams.{name}": now})
    )
    assert (found, incidental) == ([], [Change(f"hparams.{name}", before, now)])


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("lr", 1e-3, 1e-4),
        ("loss", "focal", "cross_entropy"),
        ("seed", 1, 2),
        ("workload", 1, 2),  # no worker
        ("steps", 1_700, 1_800),
        ("flag", True, False),
        ("layers", [1, 2], [1, 3]),
        ("optional", None, 0.1),
        ("objective", "a Focal", "a Huber"),
    ],
)
def test_what_shapes_the_training_is_a_change(name, before, now):
    assert len(changes({name: before}, {name: now})) == 1


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
