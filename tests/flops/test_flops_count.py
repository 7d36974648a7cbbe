"""A count as a table on the screen and in files."""

import csv
import io
import json

import pytest
import torch
from torch import nn

from lightning_tricks import count_flops


@pytest.fixture(scope="module")
def count():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU()), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    return count_flops(model, torch.empty(3, 8), backward=True, compare=True)


def test_prints_as_a_table(count):
    text = str(count)
    for words in ("FLOPs of Sequential", "(model)", "BatchNorm1d", "120", "100.0%", "10 (frozen)", "3x4"):
        assert words in text
    for words in (
        "forward 120 MAC = 240 FLOP",
        "72 FLOP in all else",
        "training step 480 FLOP (2.00x forward)",
        "parameters 54, trainable 44",
        "thop counts 168 MAC, +40.0%",
    ):
        assert words in text
    assert "ReLU" not in text, "a row without parameters and MACs"


def test_the_counts_of_the_peer_are_left_out_last(count):
    """Where a terminal is narrow."""
    import rich.console

    console = rich.console.Console(width=26, record=True, file=io.StringIO())
    console.print(count.table())
    text = " ".join(console.export_text().split())
    assert "left out to fit the width: output, other FLOPs, class, share, params, thop's MACs" in text


def test_table_depth(count):
    assert [count.table(depth).row_count for depth in (0, 1, 2, None)] == [1, 3, 5, 5]


def test_to_dict_is_json(count):
    plain = count.to_dict()
    assert plain == json.loads(json.dumps(plain))
    assert plain["macs"] == 3 * (32 + 8)
    assert plain["rows"][1]["name"] == "0"
    assert plain["peer"]["backend"] == "thop"


def test_writes_files(count, tmp_path):
    paths = {kind: count.write(tmp_path / "deep" / f"flops.{kind}") for kind in ("csv", "json", "md", "html")}
    assert json.loads(paths["json"].read_text()) == count.to_dict()
    with paths["csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["", "0", "0.0", "0.1", "0.2", "1"]
    assert (rows[0]["macs"], rows[2]["input_shapes"], rows[0]["thop_macs"]) == ("120", "3x8", "168")
    assert "| 0.1 | BatchNorm1d | 8 | 0 | 48 | 0.0% | 60 | 3x4 |" in paths["md"].read_text()
    assert "BatchNorm1d" in paths["html"].read_text()
    assert paths["html"].read_text().startswith("<!DOCTYPE html>")


def test_unknown_suffix(count, tmp_path):
    with pytest.raises(ValueError, match=r"the suffix of path must be one of .csv, .json, .md, .html, got '.jsn'"):
        count.write(tmp_path / "deep" / "flops.jsn")
    assert not list(tmp_path.iterdir())


def test_operators_without_a_rule_are_shown():
    with torch.library._scoped_library("tricks_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CPU")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")

        class Net(nn.Module):
            def forward(self, x):
                return torch.ops.tricks_test.twice(torch.ops.tricks_test.twice(x))

        assert "torch has no rule for: tricks_test.twice.default (2)" in str(count_flops(Net(), torch.empty(3)))
