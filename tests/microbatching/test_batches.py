"""How batches are cut, against what a person would do; and what is joined again."""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from lightning_tricks.microbatching.core.batches import LoggedValues, count_rows, cut_batch, join_rows
from tests.small import cases

Pair = namedtuple("Pair", "x y")
X, Y = torch.arange(24.0).reshape(6, 4), torch.arange(6)
COLUMNS = {
    "tensor": X,
    "tuple": (X, Y),
    "list": [X, Y],
    "two alike": [X, X],
    "named tuple": Pair(X, Y),
    "dict": OrderedDict(x=X, y=Y, temperature=torch.tensor(2.0), sizes=(224, 224), names=list("abcdef"), flag=True),
    "nested": (X, {"targets": [Y, (Y, X)], "note": "all"}),
    "options beside": (X, {"temperature": 0.5, "mask": X > 3}),
    "array": (X.numpy(), Y),
    "sparse": (X.to_sparse(), Y),
    "images as lists": ([torch.ones(3, 2 + n, 5) for n in range(6)], [{"boxes": torch.ones(n, 4)} for n in range(6)]),
    "equal images as lists": ([torch.ones(3, 8, 8)] * 6, [{"label": torch.tensor(n)} for n in range(6)]),
    "samples": [(X[n], n) for n in range(6)],
    "samples of dicts": [{"x": X[n], "y": Y[n]} for n in range(6)],
    "point clouds": [torch.ones(n + 1, 3) for n in range(6)],
    "numbers of rows": [torch.tensor(float(n)) for n in range(6)],
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_rows_of_structures(kind):
    batch = COLUMNS[kind]
    assert count_rows(batch) == 6
    parts, sizes = cut_batch(batch, 4)
    assert sorted(sizes) == [1, 1, 2, 2]
    assert all(count_rows(part) == size for part, size in zip(parts, sizes, strict=True) if size > 1)
    assert all(type(part) is type(batch) for part in parts)


def test_values_of_parts():
    (first, second), _ = cut_batch(COLUMNS["dict"], 2)
    assert first["x"].tolist() == X[:3].tolist()
    assert first["x"].data_ptr() == X.data_ptr()  # nothing is copied
    assert second["names"] == list("def")
    assert (second["temperature"], second["sizes"], second["flag"]) == (2.0, (224, 224), True)
    assert list(COLUMNS["dict"]) == list(first)
    samples, _ = cut_batch(COLUMNS["equal images as lists"], 3)
    assert [len(images) for images, _ in samples] == [2, 2, 2]
    assert [target["label"].item() for _, targets in samples for target in targets] == list(range(6))


def test_lists_of_tokens_are_cut_at_once():
    batch = {"x": X, "tokens": [[1] * 10_000 for _ in X]}
    events = itertools.count()
    sys.setprofile(lambda *_: next(events))
    try:
        parts, _ = cut_batch(batch, 3)
    finally:
        sys.setprofile(None)
    assert next(events) < 5 * 60_000, "each token is looked at once"
    assert [len(part["tokens"]) for part in parts] == [2, 2, 2]


class Graph:
    def __init__(self):
        self.nodes = X


@cases(
    "batch, words",
    ((X, torch.ones(10)), r"batch\[0\] has 6, batch\[1\] has 10"),
    ({"x": X, "edges": torch.ones(2, 9)}, r"batch\['x'\] has 6, batch\['edges'\] has 2"),
    (Graph(), "it holds a Graph"),
    (pack_sequence([X, X[:3]]), "it holds a PackedSequence"),
    (torch.tensor(1.0), "holds no tensor with rows"),
    (["a", "b"], "holds no tensor with rows"),
    ((X, X[:3], Y), r"batch\[1\] has 3"),
    ({"x": X, "anchors": [[1, 2], [3, 4]]}, r"batch\['x'\] has 6, batch\['anchors'\] has 2"),
    ((torch.nested.as_nested_tensor([*X], layout=torch.jagged), Y), r"of the layout torch\.jagged"),
)
def test_what_cannot_be_cut(batch, words):
    with pytest.raises(ValueError, match=words):
        count_rows(batch)


@given(rows=st.integers(1, 50), parts=st.integers(1, 50))
def test_parts_are_even_and_complete(rows, parts):
    parts = min(rows, parts)
    batch = (torch.arange(rows), np.arange(rows))
    cut, sizes = cut_batch(batch, parts)
    assert len(cut) == parts
    assert max(sizes) - min(sizes) <= 1
    assert torch.cat([part[0] for part in cut]).tolist() == list(range(rows))
    joined = join_rows([{"rows": part[0], "mean": part[0].double().mean()} for part in cut], sizes)
    assert joined["rows"].tolist() == list(range(rows))
    assert joined["mean"].item() == pytest.approx(batch[0].double().mean().item())


def test_join_of_other_values():
    parts = [
        {"count": torch.tensor(2), "share": 0.5, "names": ["a", "b"], "pair": (torch.zeros(2, 3), None), "text": "x"},
        {"count": torch.tensor(1), "share": 0.2, "names": ["c"], "pair": (torch.ones(1, 3), None), "text": "y"},
    ]
    for part, width in zip(parts, (4, 2), strict=True):
        part["padded"] = torch.ones(part["pair"][0].shape[0], width)
    joined = join_rows(parts, [2, 1])
    assert joined["count"] == 3
    assert joined["share"] == pytest.approx(0.4)
    assert joined["names"] == ["a", "b", "c"]
    assert joined["pair"][0].shape == (3, 3)
    assert joined["text"] == "y"
    assert joined["padded"].shape == (1, 2)


@given(
    rows=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    values=st.lists(st.floats(-100, 100), min_size=5, max_size=5),
)
def test_logged_values_are_merged_as_numpy_does(rows, values):
    values = values[: len(rows)]
    tensors = [torch.tensor(value, dtype=torch.float64) for value in values]
    expected = np.average(values, weights=rows)
    none, logged = [None] * len(rows), LoggedValues()
    logged.without_rows = ["constant"]
    assert logged.merge("key", tensors, rows, none, "mean") == (pytest.approx(expected), None)
    assert logged.merge("key", tensors, rows, rows, "mean")[0] == pytest.approx(expected)
    assert logged.merge("constant", tensors, rows, [sum(rows)] * len(rows), "mean") == (
        pytest.approx(expected),
        sum(rows),
    )
    for how in ("sum", "max", "min"):
        assert logged.merge("key", tensors, rows, none, how)[0] == pytest.approx(getattr(np, how)(values))


def test_batch_sizes_that_are_logged():
    logged, value = LoggedValues(), torch.tensor(1.0)
    logged.without_rows = ["constant"]
    for key, known, whole in (("tokens", [256, 128], 384), ("rows", [4, 3], 7), ("constant", [10, 10], 10)):
        assert logged.merge(key, [value] * 2, [4, 3], known, "mean")[1] == whole
