"""A member's part of a batch: tensors, lists, mappings, tuples with names, dataclasses, in any depth."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks.ensembles.training_data import batch_of_member
from tests.small import cases

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Graph:
    x: torch.Tensor
    names: list[str]


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
def test_rows_of_nested_batches(n, size, seed):
    rows = n * size
    x = torch.rand(rows, 3, generator=torch.Generator().manual_seed(seed))
    names = [str(index) for index in range(rows)]
    batch = [
        x, {"y": x.sum(1), "scale": 2.0, "of": None}, (x, x), names, x.numpy(),
        Pair(x, x), UserDict(x=x), Graph(x, names),
    ]  # fmt: skip
    for index in range(n):
        own = slice(index * size, (index + 1) * size)
        parts = batch_of_member(batch, index, n, rows)
        assert [type(part) for part in parts] == [type(part) for part in batch]
        first, second, third, fourth, array, pair, user, graph = parts
        assert second["scale"] == 2.0
        assert second["of"] is None
        assert torch.equal(second["y"], x[own].sum(1))
        assert fourth == graph.names == names[own]
        assert np.array_equal(array, x[own].numpy())
        assert all(torch.equal(part, x[own]) for part in (first, *third, *pair, user["x"], graph.x))
    assert torch.equal(batch[6]["x"], x)


def test_samples_that_are_not_stacked_are_shared_out_whole():
    images = [torch.full((3, 2, 2), float(index)) for index in range(6)]
    targets = tuple({"boxes": torch.zeros(index, 4)} for index in range(6))
    for batch in ((images, targets), [*zip(images, targets, strict=True)]):
        for index in range(3):
            part = batch_of_member(batch, index, 3, rows=6)
            own = part[0] if batch[0] is images else [image for image, _ in part]
            assert [int(image[0, 0, 0]) for image in own] == [2 * index, 2 * index + 1]
            assert all(image.shape == (3, 2, 2) for image in own)


def test_dictionaries_side_by_side_are_no_samples():
    x, y = torch.rand(6, 2), torch.arange(6)
    inputs, targets = batch_of_member(({"x": x}, {"y": y}), 1, 2, rows=6)
    assert torch.equal(inputs["x"], x[3:])
    assert torch.equal(targets["y"], y[3:])


@cases(
    "batch, error, words",
    ((torch.rand(4, 6), torch.rand(6)), ValueError, "a part of the batch has 4 rows, and 3 members have 6"),
    ({"x": np.zeros((1, 6))}, ValueError, "a part of the batch has 1 rows"),
    ([torch.rand(6), object()], TypeError, r"a batch contains a object, .*: pass shared_order=True, or let"),
)
def test_parts_of_which_nobody_knows_whose_they_are(batch, error, words):
    with pytest.raises(error, match=words):
        batch_of_member(batch, 0, 3, rows=6)
