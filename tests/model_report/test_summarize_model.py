"""`summarize_model`: numbers compared with torch, layers, graph, files, and no side effects."""

import csv
import json
import shutil
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_tricks._shared.extras import install_command
from lightning_tricks.model_report import summarize_model
from tests.shared.test_model_copy import NETS, ROWS, Breaks, state_of
from tests.shared.test_trainer_stub import BATCH, Adversaries, Classifier
from tests.small import cases, same


def trained(*sizes):
    model = nn.Sequential(*(nn.Linear(size, size) for size in sizes[:1]), nn.Linear(sizes[0], sizes[-1]))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, sizes[0])).square().sum().backward()
    optimizer.step()
    return model, optimizer


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9))
def test_numbers_are_torchs(size, out):
    model, optimizer = trained(size, out)
    model[0].bias.requires_grad_(False)
    summary = summarize_model(model, optimizers=optimizer)
    for row, (name, parameter) in zip(summary.parameters, model.named_parameters(), strict=True):
        assert (row.name, row.shape, row.dtype) == (name, tuple(parameter.shape), "float32")
        assert row.trainable == parameter.requires_grad
        assert row.mean == pytest.approx(parameter.double().mean().item())
        assert row.std == pytest.approx(parameter.double().std(correction=0).item())
        assert row.grad_norm == pytest.approx(parameter.grad.norm().item())
    elements = size * size + size + size * out + out
    assert summary.memory.weights == summary.memory.gradients == 4 * elements
    assert summary.memory.optimizer_state == 2 * 4 * elements + 4 * 4  # two moments, and a step for each tensor
    assert summary.memory.total == 16 * elements + 16


def test_kinds_of_parameters():
    model = nn.ModuleDict(
        {
            "lazy": nn.LazyLinear(3),
            "meta": nn.Linear(2, 2, device="meta"),
            "low": nn.Linear(2, 2, bias=False, dtype=torch.bfloat16),
            "sparse": nn.Embedding(5, 2, sparse=True),
            "norm": nn.BatchNorm1d(3),
        }
    )
    model["sparse"](torch.tensor([0, 0])).sum().backward()
    summary = summarize_model(model)
    rows = {row.name: row for row in summary.parameters}
    assert (rows["lazy.weight"].shape, rows["lazy.weight"].mean) == (None, None)
    assert (rows["meta.weight"].shape, rows["meta.weight"].mean) == ((2, 2), None)
    assert rows["low.weight"].dtype == "bfloat16"
    assert rows["sparse.weight"].grad_norm == pytest.approx(8**0.5)
    assert rows["norm.bias"].std == 0
    assert summary.memory.buffers == 3 * 4 + 3 * 4 + 8
    assert summary.notes == ("no layers and no graph: there are no inputs and no example_input_array",)
    assert "lazy" in str(summary)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*quantiz.*")
@cases(
    "make, stored",
    (lambda: torch.eye(50).to_sparse(), 50 * (2 * 8 + 4)),
    (lambda: torch.eye(50).to_sparse_csr(), 51 * 8 + 50 * (8 + 4)),
    (lambda: torch.eye(50).to_sparse_bsc((5, 5)), 11 * 8 + 10 * 8 + 10 * 25 * 4),
    (lambda: torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.qint8), 6),
    (lambda: torch.ones(6).to(torch.float8_e4m3fn), 6),
    (lambda: torch.ones(6, dtype=torch.int8), 6),
    (lambda: torch.ones(6, dtype=torch.bool), 6),
    (lambda: torch.ones(6, dtype=torch.complex64), 48),
    ids=range(8),
)
def test_memory_is_that_of_what_a_parameter_stores(make, stored):
    model = nn.Module()
    model.odd = nn.Parameter(make(), requires_grad=False)
    summary = summarize_model(model)
    assert summary.memory.weights == stored
    assert "odd" in str(summary)


def test_the_gradient_of_a_sparse_embedding_takes_what_its_rows_take():
    model = nn.Embedding(1000, 4, sparse=True)
    model(torch.tensor([3, 3, 7])).sum().backward()
    assert summarize_model(model).memory.gradients == 3 * (8 + 4 * 4)


def test_layers_and_graph():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    summary = summarize_model(model, torch.zeros(3, 8), depth=1)
    for words in ("Linear: 1-1", "[3, 8]", "[3, 2]", "Total params: 46"):
        assert words in summary.layers
    for words in ("digraph", "0.weight", "2.bias", "ReluBackward0"):
        assert words in summary.graph
    assert "ReluBackward0" in str(summarize_model(model, ROWS, graph={"show_attrs": True}).graph)
    assert summarize_model(model, ROWS, graph=False).graph is None
    model.example_input_array = torch.zeros(3, 8)
    assert summarize_model(model).layers is not None


@pytest.mark.parametrize("training", [True, False])
def test_layers_are_those_of_the_mode_that_the_model_is_in(training):
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.second = nn.Linear(8, 2), nn.Linear(8, 5)

        def forward(self, x):
            return self.head(x).sum() + (self.second(x).sum() if self.training else 0)

    summary = summarize_model(Auxiliary().train(training), torch.zeros(3, 8))
    assert ("[3, 5]" in summary.layers) == training
    assert "[3, 2]" in summary.layers


class _Shares(nn.Module):
    """Two layers with one weight, and a part that is called alone and within the whole."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))

    def forward(self, x):
        return self.parts(self.parts[1](self.parts[0](self.other(self.one(x)))))


class _Freezes(_Shares):
    """Freezes a part for a moment, as `toggle_optimizer` does."""

    def forward(self, x):
        self.one.requires_grad_(False)
        out = super().forward(x)
        self.one.requires_grad_(True)
        return out


@pytest.mark.trap("flops: torchinfo counts what a parameter was at each call of a layer")
@pytest.mark.parametrize("make", [_Shares, _Freezes, lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))])
def test_totals_are_those_of_the_parameters_each_counted_once(make):
    model = make()
    layers = summarize_model(model, torch.zeros(1, 4), graph=False).layers
    model(torch.zeros(1, 4))  # makes what is lazy
    total = sum(parameter.numel() for parameter in model.parameters())
    trains = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    said = f"Total params: {total}\nTrainable params: {trains}\nNon-trainable params: {total - trains}"
    assert said in layers
    assert layers.count("(20)") == (total - trains) // 20, "only what is frozen is shown as frozen"


def test_a_frozen_model_has_no_graph():
    summary = summarize_model(nn.Linear(8, 4).requires_grad_(False), ROWS)
    assert summary.graph is None
    assert summary.notes == ("no graph: no output of the model requires a gradient",)


def test_a_training_step_and_manual_optimization():
    for module in (Classifier(), Adversaries()):
        summary = summarize_model(module, BATCH)
        assert "Sequential" in summary.layers
        assert "net.0.weight" in summary.graph
        assert not summary.notes


@pytest.mark.trap(
    "flops: torchinfo flips frozen BatchNorms and draws random numbers, torchviz moves running statistics"
)
@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
def test_summarizing_changes_nothing(make):
    model, inputs = make()
    before = state_of(model, inputs)
    summary = summarize_model(model, inputs)
    assert same(state_of(model, inputs), before)
    assert summary.layers
    assert summary.graph
    with pytest.raises(ZeroDivisionError, match="in the middle of forward"):
        summarize_model(Breaks(model), inputs)
    assert same(state_of(model, inputs), before)


def test_wrong_inputs_are_the_models_own_error():
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied(.|\n)*forward\(tensor \(2, 9\) float32\)"):
        summarize_model(nn.Linear(8, 4), torch.zeros(2, 9))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got 'net'"):
        summarize_model("net")
    with pytest.raises(TypeError, match="show_colors"):
        summarize_model(nn.Linear(8, 4), ROWS, graph={"show_colors": True})


def test_a_model_that_torchinfo_cannot_take_is_a_note():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            self.out = self.linear(x)
            return object()

    summary = summarize_model(nn.Sequential(Odd()), ROWS, graph=False)
    assert summary.layers is None
    assert summary.notes[0].startswith("no summary of the layers: torchinfo cannot take this model")


@pytest.mark.parametrize(("package", "what"), [("torchinfo", "no summary of the layers"), ("torchviz", "no graph")])
def test_without_the_extra(package, what, monkeypatch):
    monkeypatch.setattr(
        "lightning_tricks.model_report.functional.find_spec", lambda name: None if name == package else sys
    )
    summary = summarize_model(nn.Linear(8, 4), ROWS)
    assert summary.notes == (f"{what}: {package} is not installed ({install_command('reports')})",)


class TestFiles:
    def test_all_but_pictures(self, tmp_path, monkeypatch, lightning_log):
        monkeypatch.setattr(shutil, "which", lambda program: None)
        model, optimizer = trained(8, 4)
        summary = summarize_model(model, ROWS, optimizers=[optimizer])
        written = summary.write(tmp_path / "deep" / "report")
        assert [path.name for path in written] == ["parameters.csv", "report.json", "layers.txt", "graph.dot"]
        with written[0].open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["name"], row["shape"]) for row in rows][:2] == [("0.weight", "8x8"), ("0.bias", "8")]
        report = json.loads(written[1].read_text())
        assert report == summary.to_dict()
        assert report["memory"]["weights"] == summary.memory.weights
        assert written[3].read_text() == summary.graph
        assert any("apt install graphviz" in message for _, message in lightning_log)

    def test_pictures(self, tmp_path, monkeypatch):
        program = tmp_path / "bin" / "dot"
        program.parent.mkdir()
        # a mock of graphviz's program, which may not be installed: it writes what it is asked to draw
        script = (
            "import pathlib, sys\n"
            "place = sys.argv.index('-o')\n"
            "pathlib.Path(sys.argv[place + 1]).write_text(pathlib.Path(sys.argv[-1]).read_text())\n"
        )
        program.write_text(f"#!{sys.executable}\n{script}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        summary = summarize_model(nn.Linear(8, 4), ROWS)
        pictures = summary.write(tmp_path / "report")[-2:]
        assert [path.name for path in pictures] == ["graph.svg", "graph.png"]
        assert pictures[0].read_text() == summary.graph

    @pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz's program dot")
    def test_real_pictures(self, tmp_path):
        written = summarize_model(nn.Linear(8, 4), ROWS).write(tmp_path)
        assert "<svg" in written[-2].read_text()
        assert written[-1].read_bytes().startswith(b"\x89PNG")
