"""Which layers are looked at, and that nothing of the looking stays."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_tricks.run_fingerprint.core.record import RecordHeader, read_record
from lightning_tricks.run_fingerprint.core.step_recorder import LayerOutputs, ModelTensors, RowWriter, StepRecorder
from tests.contract.lab import traces
from tests.small import cases


def seen(model, run):
    outputs = []
    before = traces(model)
    hooks = LayerOutputs(model).hook(lambda name, output: outputs.append((name, output)))
    try:
        run(model)
    finally:
        for hook in hooks:
            hook.remove()
    assert traces(model) == before
    return [name for name, _ in outputs]


def test_hooks_leaves_and_modules_with_own_tensors_in_order_of_execution():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.second(self.first(x)).relu() * self.scale

    model = nn.ModuleDict({"blocks": nn.Sequential(Block(), Block())})
    names = seen(model, lambda m: m["blocks"](torch.ones(1, 4)))
    assert names == [f"blocks.{n}{part}" for n in (0, 1) for part in (".first", ".second", "")]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), copy.copy])
def test_copies_of_the_model_are_not_recorded(make):
    model = nn.Linear(4, 4)
    outer = nn.Sequential(model)
    assert seen(outer, lambda _: make(model)(torch.ones(1, 4))) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_trace_is_not_recorded():
    model = nn.Sequential(nn.Linear(4, 4))
    assert seen(model, lambda m: torch.jit.trace(m, torch.ones(1, 4), check_trace=False)) == []


@cases(
    "run",
    lambda net, rows: torch.func.vmap(net)(rows),
    lambda net, rows: torch.func.grad(lambda x: net(x).sum())(rows),
    lambda net, rows: torch.func.vmap(torch.func.jacrev(net))(rows),
    lambda net, rows: torch.func.jvp(net, (rows,), (rows,)),
    lambda net, rows: torch.func.functional_call(net, dict(net.named_parameters()), (rows,)),
    ids=["vmap", "grad", "per sample", "jvp", "functional_call"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, for jvp
def test_outputs_within_transforms_are_recorded(run, tmp_path):
    torch.manual_seed(0)
    net, rows = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(2, 4)
    recorder = StepRecorder(RowWriter(tmp_path / "run.jsonl", RecordHeader(detail="layer")), net)
    recorder.writer.start_file()
    for scale in (1, 1, 2):
        recorder.on_batch_start(0, 0, 0, rows)
        run(net, rows * scale)
        recorder.on_batch_end(None, may_have_stepped=False)
    recorder.writer.flush()
    recorder.writer.close()
    first, same, other = (
        {column.name: value for column, value in row.as_dict().items() if column.kind == "forward"}
        for row in read_record(tmp_path / "run.jsonl")
    )
    assert list(first) == ["0", "1"]
    assert first == same
    assert all(first[name] != other[name] for name in first)


@pytest.mark.parametrize("compiled", ["module", "in place", "method", "function"])
def test_compiled_parts_compile_as_they_would(compiled):
    """No graph breaks; it compiles at most once more, where nothing shows from outside that it is compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(list(graph.graph.nodes)))
        return graph

    def make():
        torch._dynamo.reset()
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        call = inner
        if compiled == "module":
            inner = call = torch.compile(inner, backend=backend)
        elif compiled == "in place":
            inner.compile(backend=backend)
        elif compiled == "method":
            inner.forward = torch.compile(inner.forward, backend=backend)
        else:
            call = torch.compile(lambda x: inner(x), backend=backend)
        return nn.Sequential(inner), call

    def calls(call):
        return [call(torch.ones(2, 4)).sum().item() for _ in range(2)]

    model, call = make()
    results = calls(call)
    bare, graphs[:] = list(graphs), []
    model, call = make()
    names = seen(model, lambda m: results.append(calls(call)))
    assert results[-1] == results[:2]
    assert graphs == bare
    assert names == {"module": ["0", "0"]}.get(compiled, [])
    assert calls(call) == results[:2]
    for _ in range(10):
        seen(model, lambda m: calls(call))
    assert graphs == bare * (1 if compiled in ("module", "in place") else 2)


def test_model_tensors_are_the_current_ones():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LazyLinear(3))
    model.add_module("tied", model[0])
    tensors = ModelTensors(model)
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(tensors()) == names
    model[1].running_mean = torch.ones(2)
    assert tensors()["1.running_mean"] is model[1].running_mean
    model[1].weight = None
    assert "1.weight" not in tensors()
    model[2](torch.ones(2, 2))
    assert "2.weight" in tensors()


def test_names_are_those_without_the_compiler():
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert list(ModelTensors(model)()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("first", [0, 1])
def test_an_optimizer_shows_the_gradients_of_its_own_parameters(tmp_path, first):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    net(torch.ones(1, 3)).sum().backward()
    net[first].bias.grad = None
    recorder = StepRecorder(RowWriter(tmp_path / "run.jsonl", RecordHeader(detail="layer")), net)
    recorder.writer.start_file()
    recorder.record_initial_weights(0, 0)
    recorder.on_batch_start(0, 0, 0, torch.ones(1, 3))
    recorder.on_optimizer_step(torch.optim.SGD(net[first].parameters(), lr=0.1))
    recorder.on_exception()
    recorder.writer.close()
    *_, row = read_record(tmp_path / "run.jsonl")
    assert [column.name for column in row.as_dict() if column.kind == "gradient"] == [f"{first}.weight"]
