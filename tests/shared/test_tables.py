"""Tables in narrow terminals: what is left out, and that nothing else is lost."""

import html
import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.text import Text
from torch import nn

import lightning_tricks
from lightning_tricks._shared.console import make_console
from lightning_tricks._shared.fitting_table import FittingTable, FoldedName
from lightning_tricks.checkpoint_remapping import align
from lightning_tricks.flops.core.flops_count import FlopsCount, FlopsRow
from lightning_tricks.model_report.functional import ModelMemory, ModelReportSummary, ParameterRow
from tests.small import cases

_MIB = 2**20
# As transformers' BertForSequenceClassification names its parameters, and how large they are
_LAYER = "bert.encoder.layer.11"
NAMES = {
    "bert.embeddings.word_embeddings.weight": (30522, 768),
    "bert.embeddings.token_type_embeddings.weight": (2, 768),
    "bert.embeddings.LayerNorm.weight": (768,),
    f"{_LAYER}.attention.self.query.weight": (768, 768),
    f"{_LAYER}.attention.self.query.bias": (768,),
    f"{_LAYER}.attention.output.LayerNorm.weight": (768,),
    f"{_LAYER}.intermediate.dense.weight": (3072, 768),
    f"{_LAYER}.output.dense.bias": (768,),
    "bert.pooler.dense.weight": (768, 768),
    "classifier.weight": (2, 768),
}


def _size(name: str) -> int:
    return torch.Size(NAMES[name]).numel()


def flops(peer: bool = False) -> FlopsCount:
    """Return the counts of the modules, not those of a real call."""
    kinds = {
        "": "BertForSequenceClassification",
        "bert": "BertModel",
        "bert.embeddings": "BertEmbeddings",
        "bert.embeddings.token_type_embeddings": "Embedding",
        "bert.encoder": "BertEncoder",
        f"{_LAYER}.attention.self": "BertSdpaSelfAttention",
        f"{_LAYER}.attention.self.query": "Linear",
        f"{_LAYER}.intermediate.intermediate_act_fn": "GELUActivation",
        "classifier": "Linear",
    }
    rows = []
    for name, kind in kinds.items():
        params = sum(_size(each) for each in NAMES if each.startswith(name))
        cost = {"macs": 32 * params, "flops": 64 * params, "other_flops": 5 * params, "share": params / 27_425_280}
        shapes = {"input_shapes": ((32, 128, 768),), "output_shapes": ((32, 128, 768), (32, 768), (32, 2))}
        trains = 0 if "embeddings" in name else params
        rows.append(FlopsRow(name, kind, params, trains, calls=1, **cost, **shapes))
    totals = {"macs": rows[0].macs, "flops": rows[0].flops, "other_flops": rows[0].other_flops}
    params = {"params": rows[0].params, "trainable_params": rows[0].trainable_params}
    other = replace(flops(), backend="thop") if peer else None
    return FlopsCount(**totals, **params, train_step_flops=None, uncounted={}, rows=tuple(rows), peer=other)


def parameters() -> ModelReportSummary:
    rows = [
        ParameterRow(name, shape, "bfloat16", "embeddings" not in name, -4.06e-05 * index, 0.0199, 0.000123 * index)
        for index, (name, shape) in enumerate(NAMES.items())
    ]
    memory = ModelMemory(438 * _MIB, 4096, 438 * _MIB, 876 * _MIB)
    return ModelReportSummary("BertForSequenceClassification", tuple(rows), memory, None, None, ())


def alignment() -> Any:
    """Return the report of a file of another project."""
    shapes = {name: torch.empty(*shape, device="meta") for name, shape in NAMES.items()}
    model = {f"text_encoder.{name.replace('self.query', 'self_attn.q_proj')}": value for name, value in shapes.items()}
    module = nn.Module()
    for name, value in model.items():
        *path, leaf = name.split(".")
        parent = module
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(leaf, nn.Parameter(value))
    del shapes["bert.pooler.dense.weight"]
    shapes["classifier.weight"] = torch.empty(1000, 768, device="meta")
    return align(module, shapes | {"cls.predictions.transform.LayerNorm.weight": torch.empty(768, 3)}).report()


TABLES: dict[str, Callable[[], Any]] = {
    "alignment": alignment,
    "flops": flops,
    "flops_compared": lambda: flops(peer=True).table(depth=None),
    "parameters": parameters,
}


_GUIDES = str.maketrans("", "", "│├└─ \n")
table_of = cache(lambda name: TABLES[name]())


def render(renderable, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def test_every_table_of_the_package_is_one_that_fits():
    package = Path(lightning_tricks.__file__).parent
    assert not [path for path in package.rglob("*.py") if re.search(r"\bTable\(", path.read_text(encoding="utf-8"))]


def text_of(cell):
    if isinstance(cell, Group):
        return "".join(map(text_of, cell.renderables))
    return cell.text if isinstance(cell, FoldedName) else str(cell)


def check(table, text, width, whole_numbers):
    """See that a printed table with lines has all of each column that it does not say is left out."""
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    said, left_out, kept = " ".join(text.split()), "left out to fit the width: ", list(table.columns)
    for column in sorted(table.columns, key=lambda column: [*table.drop, column.header].index(column.header)):
        if column.header in table.drop and f"{left_out}{column.header}" in said:
            left_out += f"{column.header}, "
            kept.remove(column)
    border = next(line for line in lines if line.strip().startswith("┏"))
    ends = [match.start() for match in re.finditer("[┏┳┓]", border)]
    assert len(kept) == len(ends) - 1
    body = [line for line in lines if line.startswith(" " * ends[0] + "│")]
    for column, (start, end) in zip(kept, pairwise(ends), strict=True):
        parts, cells = [line[start + 1 : end].strip() for line in body], [*map(text_of, column.cells)]
        assert "".join(parts).translate(_GUIDES) == "".join(cells).translate(_GUIDES)
        if column.justify == "right" and whole_numbers:
            assert {*filter(None, parts)} == {*filter(None, cells)}


@pytest.mark.parametrize("name", TABLES)
@given(width=st.integers(20, 200))
@example(20)
@example(40)
def test_nothing_is_lost_but_the_columns_that_are_named(name, width):
    table = table_of(name)
    text, table = render(table, width), table if isinstance(table, FittingTable) else table.table()
    check(table, text, width, whole_numbers=width >= 40)


words = st.text("abcXYZ._/0123", min_size=1, max_size=60)
numbers = st.floats(-1e4, 1e4).map("{:.3g}".format)


@given(
    rows=st.lists(st.tuples(words, words, numbers, numbers, words), min_size=1, max_size=5),
    indent=st.integers(0, 30),
    width=st.integers(20, 150),
)
def test_any_names_and_numbers(rows, indent, width):
    table = FittingTable("name", "class", drop=["class", "std", "shape"])
    for heading in ("mean", "std"):
        table.add_column(heading, justify="right")
    table.add_column("shape")
    for name, kind, mean, std, shape in rows:
        table.add_row(FoldedName(name, indent=" " * indent), FoldedName(kind), mean, std, Text(shape))
    check(table, render(table, width), width, whole_numbers=True)


@cases(
    "name, width, lines",
    ("a.b", 80, ["a.b"]),
    ("encoder.layer.11.output", 10, ["encoder.", "layer.11.", "output"]),
    ("checkpoint_remapping", 12, ["checkpoint_", "remapping"]),
    ("net.token_type_embeddings.weight", 16, ["net.token_type_", "embeddings.", "weight"]),
    ("exp_avg_sq of classifier.bias", 15, ["exp_avg_sq of", "classifier.bias"]),
    ("BertForSequenceClassification", 15, ["BertForSequence", "Classification"]),
    ("abcdefgh", 3, ["abc", "def", "gh"]),
    ("net[0] [bold]", 80, ["net[0] [bold]"]),
    ("weight  2x3  44.63 MiB", 15, ["weight  2x3", "44.63 MiB"]),
)
def test_where_a_name_is_folded(name, width, lines):
    assert [line.rstrip() for line in render(FoldedName(name), width).splitlines()] == lines


def test_a_page_has_all_columns_and_whole_names():
    text = html.unescape(flops(peer=True).write("flops.html").read_text(encoding="utf-8"))
    assert "left out" not in text
    assert text.count("BertForSequenceClassification") == 2, "in the title and in the row"
    for column in ("class", "thop's MACs", "other FLOPs", "output"):
        assert column in text


def test_a_file_has_all_columns_unless_its_width_is_given(monkeypatch, capsys):
    """A pipe is no terminal either, and both are read by programs."""
    monkeypatch.delenv("COLUMNS", raising=False)
    make_console().print(parameters())
    whole = capsys.readouterr().out
    assert all(name in whole for name in NAMES)
    assert "dtype" in whole
    assert "left out" not in whole
    monkeypatch.setenv("COLUMNS", "80")
    make_console().print(parameters())
    assert "left out to fit the width: dtype\n" in capsys.readouterr().out
