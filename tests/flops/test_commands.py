"""`lightning-tricks flops`."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_tricks.cli import main
from tests.small import cases


class Small(nn.Sequential):
    """A net that the command finds by its name."""

    def __init__(self):
        super().__init__(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


class Two(nn.Module):
    example_input_array = (torch.zeros(2, 3), torch.zeros(3, 2))

    def forward(self, left, right):
        return left @ right


NET = f"{__name__}:Small"


def test_table(capsys):
    assert main(["flops", NET, "--input", "3,8", "--backward", "--depth", "0"]) == 0
    text = capsys.readouterr().out
    assert "forward 120 MAC = 240 FLOP" in text
    assert "training step 528 FLOP" in text
    assert "Linear" not in text


def test_json_and_csv(capsys):
    assert main(["flops", NET, "--input", "3,8", "--json", "--compare"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["macs"], plain["peer"]["macs"]) == (120, 120)
    assert main(["flops", NET, "--input", "3,8", "--csv", "--backend", "thop"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["macs"] for row in rows] == ["120", "96", "0", "24"]


def test_dtypes_several_inputs_and_example_inputs(capsys):
    assert main(["flops", NET, "--input", "3,8", "--dtype", "bfloat16", "--backend", "thop"]) == 0
    assert main(["flops", f"{__name__}:Two", "--input", "4,5", "--input", "5,6", "--json"]) == 0
    assert '"macs": 120' in capsys.readouterr().out
    assert main(["flops", f"{__name__}:Two", "--json"]) == 0
    assert '"macs": 12' in capsys.readouterr().out


def test_a_module_in_the_working_directory(capsys):
    Path("mynets.py").write_text("import torch\nnet = torch.nn.Linear(8, 4)\n")
    assert main(["flops", "mynets:net", "--input", "2,8", "--json"]) == 0
    assert '"macs": 64' in capsys.readouterr().out


@cases(
    "arguments, words",
    ([NET, "--input", "3,9"], "shapes cannot be multiplied"),
    ([NET], "--input is needed: Small has no example_input_array"),
    ([NET, "--input", "3,8", "--depth", "-1"], "--depth must be a whole number >= 0, got -1"),
    ([NET, "--input", "3xx8"], "whole numbers with commas"),
    ([NET, "--input", "3,8", "--dtype", "float23"], "must be a torch dtype"),
    (["Small", "--input", "3,8"], "must be MODULE:NAME"),
    ([f"{__name__}:Large", "--input", "3,8"], "has no attribute 'Large'"),
    (["no_such_module:Net", "--input", "3,8"], "No module named 'no_such_module'"),
    (["math:pi", "--input", "3,8"], "is not callable"),
    (["builtins:dict", "--input", "3,8"], "is neither a torch.nn.Module nor"),
    ([NET, "--input", "3,8", "--backend", "thop", "--backward"], "thop has no rules for a backward pass"),
)
def test_bad_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["flops", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == (2 if error.startswith("usage: ") else 1)
    assert words in error
    assert "Traceback" not in error
