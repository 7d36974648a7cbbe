"""Counting leaves twelve nets of many kinds unchanged, whether it succeeds or fails."""

import copy
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_tricks import count_flops
from tests.contract.lab import traces
from tests.small import same

IMAGES, ROWS, TOKENS = torch.randn(1, 3, 8, 8), torch.randn(2, 8), torch.randint(0, 10, (2, 5))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)), IMAGES


def frozen_batchnorm():
    net, images = convolutions()
    net[1].eval().requires_grad_(False)
    return net, images


def partly_evaluated():
    net = nn.Sequential(
        nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Sequential(nn.Dropout(), nn.Linear(8, 2))
    )
    net[3].eval()
    return net, ROWS


def batch_of_one():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), ROWS[:1]


def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 8)


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm, self.head = nn.Embedding(10, 4), nn.LSTM(4, 8, 2, dropout=0.1), nn.Linear(8, 2)

        def forward(self, tokens):
            return self.head(self.lstm(self.embedding(tokens))[0][:, -1])

    return Last(), TOKENS


def parametrized():
    return nn.Sequential(weight_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 2))), ROWS


def with_hooks_and_gradients():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    net.seen = []
    net[0].register_forward_hook(lambda module, inputs, output: net.seen.append(output))
    net[1].register_full_backward_hook(lambda module, inputs, outputs: net.seen.append(inputs))
    net[0].weight.register_hook(net.seen.append)
    net[1].weight.grad = torch.ones_like(net[1].weight)
    return net, ROWS


def counts_its_calls():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls, self.history = nn.Linear(8, 2), 0, {"outputs": [torch.zeros(2)]}
            self.register_buffer("running", torch.zeros(2))

        def forward(self, x):
            self.calls += 1
            out = self.linear(x + torch.randn_like(x))
            self.running += out.detach().mean(0)
            self.history["outputs"].append(out)
            random.random()
            np.random.rand()
            return out

    return Counts(), ROWS


def looks_at_values():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, x):
            return self.linear(self.norm(x)) * (2 if torch.rand(()) > 0.5 else 1)

    return Looks(), ROWS


def checkpointed():
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    return Saves(), ROWS


def tied_and_lazy():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LazyLinear(3))
    net[1].weight = net[0].weight
    return net, ROWS


NETS = (
    convolutions,
    frozen_batchnorm,
    partly_evaluated,
    batch_of_one,
    attention,
    recurrent,
    parametrized,
    with_hooks_and_gradients,
    counts_its_calls,
    looks_at_values,
    checkpointed,
    tied_and_lazy,
)


def state_of(model, inputs):
    """Everything that counting could change."""
    plain = {
        (name, key): copy.deepcopy(value)
        for name, part in model.named_modules()
        for key, value in vars(part).items()
        if key in ("training", "calls", "history")
    }
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not nn.parameter.is_lazy(t)]
    return {
        "values": [t.detach().clone() for t in tensors],
        "versions": [(t._version, id(t), t.requires_grad) for t in tensors],
        "gradients": [None if t.grad is None else t.grad.clone() for t in tensors],
        "hooks of tensors": [len(t._backward_hooks or ()) for t in tensors],
        "traces": traces(model),
        "plain": plain,
        "inputs": (inputs.clone(), inputs._version, inputs.requires_grad),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
        "process": (
            {name: len(hooks) for name, hooks in vars(torch_module).items() if isinstance(hooks, dict)},
            torch.is_grad_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.get_default_dtype(),
        ),
    }


COUNTING_OPTIONS = {"forward": {}, "compare": {"compare": True, "backward": True}}


@pytest.mark.trap("flops: thop leaves buffers, hooks and evaluation mode behind; torchinfo flips frozen BatchNorm")
@pytest.mark.parametrize("options", COUNTING_OPTIONS)
@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
def test_counting_changes_nothing(make, options):
    model, inputs = make()
    before = state_of(model, inputs)
    keys = list(model.state_dict())
    count_flops(model, inputs, **COUNTING_OPTIONS[options])
    assert same(state_of(model, inputs), before)
    assert list(model.state_dict()) == keys


class Breaks(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        self.net(x)
        raise ZeroDivisionError("in the middle of forward")


@pytest.mark.trap("flops: after a failure thop leaves 26 keys and 16 hooks, ModelSummary 13 hooks")
@pytest.mark.parametrize("options", COUNTING_OPTIONS)
@pytest.mark.parametrize("make", [frozen_batchnorm, attention, looks_at_values])
def test_a_failing_count_changes_nothing(make, options):
    net, inputs = make()
    model = Breaks(net)
    before = state_of(model, inputs)
    with pytest.raises(ZeroDivisionError, match="in the middle of forward"):
        count_flops(model, inputs, **COUNTING_OPTIONS[options])
    assert same(state_of(model, inputs), before)


def test_the_model_counts_the_same_afterwards_and_can_be_freed():
    model, inputs = attention()
    first = count_flops(model, inputs, backward=True)
    assert count_flops(model, inputs, backward=True) == first
    reference = weakref.ref(model)
    del model
    assert reference() is None


def test_fully_sharded_data_parallel_is_an_error():
    class FullyShardedDataParallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat = nn.Parameter(torch.zeros(3))

    with pytest.raises(NotImplementedError, match="count before you wrap the model"):
        count_flops(FullyShardedDataParallel(), ROWS)


def _by_default(layer):
    return lambda x, layer=layer: layer(x)


def _by_keyword(layer):
    return lambda x, *, layer=layer: layer(x)


def _by_closure(layer):
    return lambda x: layer(x)


@pytest.mark.parametrize("bind", [_by_default, _by_keyword, _by_closure])
def test_a_function_of_the_copy_calls_the_layers_of_the_copy(bind):
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 2)
            self.call = bind(self.layer)

        def forward(self, x):
            return self.call(x)

    rows = count_flops(Calls(), ROWS).rows
    assert [(row.name, row.macs) for row in rows] == [("", 32), ("layer", 32)]
