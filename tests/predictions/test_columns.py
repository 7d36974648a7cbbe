"""The core: values as columns, parts in any order, and batches that are left out."""

import json
from contextlib import ExitStack

import numpy as np
import pandas
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.predictions.core.columns import to_columns
from lightning_tricks.predictions.core.formats import write_predictions
from lightning_tricks.predictions.core.parts import KnownBatches, MergedParts, PartWriter, weights_digest
from tests.emulated_cuda.device import EmulatedCuda

_BATCHES = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 30), min_size=1, max_size=5)), max_size=8)


@given(parts=st.lists(_BATCHES, min_size=1, max_size=3))
def test_parts_are_read_by_loader_and_index_and_each_sample_once(parts, tmp_path_factory):
    """A dict of rows, sorted in memory, is the reference implementation."""
    folder = tmp_path_factory.mktemp("parts")
    expected, repeated = {}, 0
    for number, batches in enumerate(parts):
        with ExitStack() as stack:
            writer = PartWriter(folder / f"{number}", stack, {}, lambda kinds: None)
            for place, (loader, indices) in enumerate(batches):
                value = torch.tensor([[number, place, index] for index in indices])
                ragged = [torch.arange(index % 3) for index in indices]
                writer.append(loader, indices, to_columns({"value": value, "ragged": ragged}))
                for row, index in zip(value.tolist(), indices, strict=True):
                    repeated += (loader, index) in expected
                    expected.setdefault((loader, index), row)
    merged = MergedParts(folder)
    assert merged.repeated == repeated
    assert [*zip(merged.loader.tolist(), merged.index.tolist(), strict=True)] == sorted(expected)
    write_predictions(folder / "out.jsonl", "jsonl", merged, ["a", "b", "c"])
    lines = (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"loader": "abc"[loader], "index": index, "value": row, "ragged": [*range(index % 3)]}
        for (loader, index), row in sorted(expected.items())
    ]


@given(
    batches=st.lists(st.lists(st.sampled_from([*range(20), 10**15]), min_size=1, max_size=4), max_size=6),
    done=st.sets(st.sampled_from([*range(15), 10**15])),
    limit=st.one_of(st.integers(0, 6), st.just(float("inf"))),
)
def test_a_batch_is_left_out_if_all_its_samples_are_done_unless_it_is_the_first(batches, done, limit):
    known = KnownBatches(batches, limit)
    known.done = np.array(sorted(done), int)
    within = batches[: int(min(limit, len(batches)))]
    expected = [batch for place, batch in enumerate(within) if place == 0 or not set(batch) <= done]
    assert [*known] == expected
    assert [known.take(place) for place in range(len(expected))] == expected
    assert len(known) == len(batches)


def test_unusual_tensors_become_plain_ones():
    dense = torch.eye(3)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=torch.jagged)
    assert torch.equal(to_columns(dense.to_sparse())["prediction"], dense)
    assert torch.equal(to_columns(torch.ones(2, dtype=torch.complex64).conj())["prediction"].imag, torch.zeros(2))
    assert [row.tolist() for row in to_columns(nested)["prediction"]] == [[0, 0], [1, 1, 1]]


def test_numbers_become_tensors_of_their_own_kind():
    texts = {"text": np.array(["a", "b"]), "series": pandas.Series(["a", "b"])}
    columns = to_columns(
        {"int": [1, 2], "float": (0.1, np.float32(2)), "bool": [True, False], "lists": [[1, 2], []], **texts}
    )
    kinds = {name: column.dtype for name, column in columns.items() if isinstance(column, torch.Tensor)}
    assert kinds == {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
    assert [row.dtype for row in columns["lists"]] == [torch.int64] * 2
    assert columns["text"] == columns["series"] == ["a", "b"]


def test_a_digest_is_that_of_the_values():
    layers = [torch.nn.Linear(3, 2) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    assert weights_digest(layers[0]) == weights_digest(layers[1]) == weights_digest(torch.nn.Sequential(layers[1]))
    with torch.no_grad():
        layers[1].weight[0, 0] += 1e-6
    assert weights_digest(layers[0]) != weights_digest(layers[1])
    assert weights_digest(torch.nn.LazyLinear(2)) == weights_digest(torch.nn.Identity())
    with EmulatedCuda():
        assert len({weights_digest(layers[0].to(device)) for device in ("cpu", "cuda:0", "cuda:1")}) == 1
