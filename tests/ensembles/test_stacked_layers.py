"""Stacked layers give what the layers give one after another: outputs, gradients and buffers."""

import copy

import pytest
import torch
from torch import nn

from lightning_tricks.ensembles.core.stacked_layers import stacked_type
from tests.ensembles.nets import seeded
from tests.small import cases

_N, _ROWS = 3, 5
_CASES = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear without bias, sequences": (lambda: nn.Linear(6, 4, bias=False), (2, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2, bias=False), (4, 7, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 3, 4, 5)),
    "batch norm of rows": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch norm of sequences": (lambda: nn.BatchNorm1d(4, affine=False), (4, 6)),
    "batch norm of images": (lambda: nn.BatchNorm2d(4, momentum=0.3), (4, 5, 6)),
    "batch norm without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 5, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (6,)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((2, 6)), (3, 2, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    "layer norm without weight": (lambda: nn.LayerNorm(6, elementwise_affine=False), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5, 6)),
    "embedding": (lambda: nn.Embedding(7, 3), None),
    "embedding of sequences": (lambda: nn.Embedding(7, 3), (4,)),
}


def _vary_rows(make):
    layers = seeded(make, _N)
    with torch.no_grad():
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            parameter.normal_()
    return layers


def _rows(layer, shape):
    if isinstance(layer, nn.Embedding):
        return torch.randint(7, (_N * _ROWS, *(shape or ())))
    return torch.randn(_N * _ROWS, *shape)


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("training", [True, False])
def test_a_stacked_layer_is_its_layers(name, training):
    make, shape = _CASES[name]
    layers = _vary_rows(make)
    alone = copy.deepcopy(layers)
    stacked = stacked_type(layers[0])(layers)
    for _ in range(2):
        rows = _rows(layers[0], shape)
        for layer in (stacked, *alone):
            layer.train(training)
        given = stacked(rows)
        expected = torch.cat([layer(own) for layer, own in zip(alone, rows.chunk(_N), strict=True)])
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)
        if given.requires_grad:
            weights = torch.randn_like(given)
            (given * weights).sum().backward()
            (expected * weights).sum().backward()
    for index, layer in enumerate(alone):
        for parameter_name, parameter in layer.named_parameters():
            gradient = getattr(stacked, parameter_name).grad[index]
            own = stacked.to_stored(parameter_name, gradient)
            torch.testing.assert_close(own, parameter.grad, atol=1e-4, rtol=1e-4)
        for buffer_name, buffer in layer.named_buffers():
            torch.testing.assert_close(getattr(stacked, buffer_name)[index], buffer)


@cases(
    "layer, reason",
    (nn.LSTM(2, 2), "LSTM has no stacked form"),
    (nn.Conv2d(1, 1, 3, padding_mode="circular"), "Conv2d: its padding_mode is 'circular'"),
    (nn.BatchNorm1d(2, momentum=None), "BatchNorm1d: its momentum is None, a cumulative average"),
    (nn.Embedding(3, 2, padding_idx=0), "Embedding: it has padding_idx"),
    (nn.Embedding(3, 2, max_norm=1.0, sparse=True), "Embedding: it has max_norm, it has sparse"),
    (type("Own", (nn.Linear,), {})(2, 2), "Own has no stacked form"),
)
def test_what_has_no_stacked_form_says_why(layer, reason):
    assert stacked_type(layer) == reason


def test_a_stacked_layer_holds_the_memory_once_and_says_what_it_is():
    stacked = stacked_type(nn.Linear(2, 3))([nn.Linear(2, 3), nn.Linear(2, 3)])
    assert repr(stacked) == "StackedLinear(2 x Linear(in_features=2, out_features=3, bias=True))"
    assert stacked.layer[0].weight.is_meta
    assert stacked.weight.shape == (2, 2, 3)
