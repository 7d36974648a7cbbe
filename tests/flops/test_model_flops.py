"""Counts compared with closed formulas and with the operators of real runs, and the errors."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from lightning_tricks import count_flops
from lightning_tricks.flops.core.operator_counter import find_rule
from tests.small import cases, without_warnings

_SIZE = st.integers(1, 9)
_FEW = settings(max_examples=8)
_MEAN = torch.ones(8)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def tensor(*shape):
    return torch.empty(shape, requires_grad=True)


def backward_macs(count):
    return count.train_step_flops / 2 - count.macs


def assert_counts(model, inputs, macs, backward=None):
    """Forward MACs, in training and evaluation, with and without gradients, on the CPU and on meta; backward MACs."""
    for training in (True, False):
        model.train(training)
        assert count_flops(model, inputs).macs == macs
        with torch.no_grad():
            assert count_flops(model, inputs).macs == macs
        with torch.inference_mode():
            assert count_flops(model, inputs).macs == macs
    assert count_flops(copy.deepcopy(model).to("meta"), inputs).macs == macs
    count = count_flops(model, inputs, backward=True)
    assert not count.uncounted
    assert not count.notes
    if backward is not None:
        assert backward_macs(count) == backward


@_FEW
@given(_SIZE, _SIZE, _SIZE, _SIZE)
def test_matrix_products(b, n, k, m):
    left, right = tensor(b, n, k), tensor(b, k, m)
    macs = b * n * k * m
    for function in (torch.matmul, torch.bmm):
        assert_counts(Calls(function), (left, right), macs, 2 * macs)
    if k > 1:  # else it multiplies element by element
        assert_counts(Calls(lambda x, y: torch.einsum("bnk,bkm->bnm", x, y)), (left, right), macs)
    assert_counts(Calls(torch.mm), (tensor(n, k), tensor(k, m)), n * k * m, 2 * n * k * m)
    assert_counts(Calls(torch.addmm), (tensor(m), tensor(n, k), tensor(k, m)), n * k * m, 2 * n * k * m)
    assert_counts(Calls(torch.baddbmm), (tensor(b, n, m), left, right), macs, 2 * macs)
    assert_counts(Calls(torch.mv), (tensor(n, k), tensor(k)), n * k)
    assert_counts(Calls(torch.dot), (tensor(k), tensor(k)), k)


@pytest.mark.trap("flops: a bare parameter in F.linear counts 0 in thop")
@_FEW
@given(_SIZE, _SIZE, _SIZE, st.booleans())
def test_linear(n, k, m, bias):
    macs = n * k * m
    assert_counts(nn.Linear(k, m, bias=bias), tensor(n, k), macs, 2 * macs)
    assert_counts(nn.Linear(k, m, bias=bias), tensor(1, n, 1, k), macs, 2 * macs)
    assert_counts(nn.Linear(k, m, bias=bias), torch.empty(n, k), macs, macs)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(m, k))

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    assert_counts(Bare(), tensor(n, k), macs, 2 * macs)
    if k > 1 < m:  # else it multiplies element by element
        assert_counts(nn.Bilinear(k, m, 3), (tensor(n, k), tensor(n, m)), 3 * macs)


@pytest.mark.trap("flops: torch's counter charges grouped weight gradients for every group")
@_FEW
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(4, 7),
    st.booleans(),
)
def test_convolutions(d, n, groups, into, out, stride, kernel, size, transposed):
    kinds = ((nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d))
    conv = kinds[d - 1][transposed](into * groups, out * groups, kernel, stride=stride, groups=groups)
    x = tensor(n, into * groups, *[size] * d)
    written = ((size - 1) * stride + kernel) if transposed else (size - kernel) // stride + 1
    places = size if transposed else written  # a transposed convolution reads where a plain one writes
    macs = n * groups * into * out * kernel**d * places**d
    assert_counts(conv, x, macs, 2 * macs)
    frozen = conv.requires_grad_(False)
    assert backward_macs(count_flops(frozen, x, backward=True)) == macs
    depthwise = nn.Conv2d(groups, groups, kernel, groups=groups, padding="same", dilation=stride)
    assert_counts(depthwise, torch.empty(n, groups, size, size), n * groups * kernel**2 * size**2)


@pytest.mark.trap("flops: torch's counter reads 0 for an LSTM on the CPU")
@_FEW
@given(st.integers(1, 3), _SIZE, st.integers(1, 4), _SIZE, _SIZE, st.booleans(), st.booleans(), st.booleans())
def test_recurrent_layers(layers, steps, n, size, hidden, bidirectional, batch_first, bias):
    x = tensor(*((n, steps) if batch_first else (steps, n)), size)
    directions = 1 + bidirectional
    widths = [size] + [hidden * directions] * (layers - 1)
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
        macs = sum(steps * n * directions * gates * hidden * (width + hidden) for width in widths)
        layer = kind(size, hidden, layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias)
        assert_counts(layer, x, macs)
    for cell, gates in ((nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)):
        assert_counts(cell(size, hidden), tensor(n, size), n * gates * hidden * (size + hidden))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_lstm_projections_and_packed_sequences():
    projected = nn.LSTM(8, 16, proj_size=4)
    assert count_flops(projected, torch.empty(5, 3, 8)).macs == 15 * (4 * 16 * (8 + 4) + 16 * 4)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 8), torch.tensor([5, 3, 2]))
    count = count_flops(nn.LSTM(8, 16), packed, backward=True)
    assert count.macs == 10 * 4 * 16 * (8 + 16), "padding costs nothing"


@_FEW
@given(st.integers(1, 3), st.integers(1, 3), _SIZE, _SIZE, _SIZE, _SIZE)
def test_scaled_dot_product_attention(n, heads, target, source, width, value_width):
    query, key = tensor(n, heads, target, width), tensor(n, heads, source, width)
    value = tensor(n, heads, source, value_width)
    macs = n * heads * target * source * (width + value_width)
    mask = torch.zeros(target, source)
    attention = nn.functional.scaled_dot_product_attention
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel([backend, SDPBackend.MATH]):
            assert_counts(Calls(attention), (query, key, value), macs)
            assert_counts(Calls(lambda q, k, v: attention(q, k, v, attn_mask=mask)), (query, key, value), macs)
            assert_counts(Calls(lambda q, k, v: attention(q, k, v, dropout_p=0.5)), (query, key, value), macs)
            assert_counts(Calls(lambda q, k, v: attention(q, k, v, enable_gqa=True)), (query, key, value), macs)
            causal = Calls(lambda q, k: attention(q, k, k, is_causal=True))
            assert_counts(causal, (key, key), n * heads * source * source * 2 * width)


@pytest.mark.trap("flops: attention without gradients takes a fused path that other counters miss")
@_FEW
@given(st.integers(1, 3), st.integers(1, 2), _SIZE, st.integers(1, 4), st.booleans(), st.booleans())
def test_attention_modules(n, heads, length, head_width, batch_first, need_weights):
    width = heads * head_width
    x = tensor(*((n, length) if batch_first else (length, n)), width)
    attention = nn.MultiheadAttention(width, heads, batch_first=batch_first)
    macs = n * length * 4 * width**2 + 2 * n * length**2 * width

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)[0]

    assert_counts(Attends(), x, macs)
    layer = nn.TransformerEncoderLayer(width, heads, 7, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert_counts(encoder, x, 2 * (macs + n * length * 2 * 7 * width))
    for part in (encoder, attention):
        part.requires_grad_(False)
    assert count_flops(encoder.eval(), x.detach()).macs == 2 * (macs + n * length * 2 * 7 * width)


def test_embeddings_cost_no_macs():
    tokens = torch.zeros(3, 5, dtype=torch.long)
    for embedding in (nn.Embedding(10, 4), nn.EmbeddingBag(10, 4)):
        assert_counts(embedding, tokens, 0, 0)


def test_other_flops_are_kept_apart():
    x = torch.empty(2, 8, 6, 6)
    for module, flops in (
        (nn.ReLU(), 576),
        (nn.GELU(), 576),
        (nn.BatchNorm2d(8), 5 * 576),
        (nn.GroupNorm(2, 8), 5 * 576),
        (nn.Softmax(-1), 5 * 576),
        (nn.MaxPool2d(2), 4 * 144),
        (nn.AvgPool2d(3), 9 * 64),
        (nn.AdaptiveAvgPool2d(1), 576),
        (nn.Flatten(), 0),
        (nn.ZeroPad2d(1), 0),
    ):
        for training in (True, False):
            count = count_flops(module.train(training), x)
            assert (count.macs, count.other_flops, count.uncounted) == (0, flops, {}), module


def test_a_tensor_outside_of_the_model_needs_no_data():
    count = count_flops(nn.Sequential(Calls(lambda x: x - _MEAN), nn.Linear(8, 4)), torch.empty(2, 8))
    assert (count.macs, count.notes) == (64, ())


def test_quantized_and_sparse_weights():
    with without_warnings():
        quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)), {nn.Linear})
        for out in (1, 2):
            quantize = torch.ao.nn.quantized.Quantize(0.1, 0, torch.quint8)
            convolution = nn.Sequential(quantize, torch.ao.nn.quantized.Conv2d(3, out, 3))
            assert count_flops(convolution, torch.zeros(1, 3, 8, 8)).macs == 6 * 6 * out * 27
    assert count_flops(quantized, torch.empty(2, 8)).macs == 64

    with without_warnings():  # "in beta state"
        sparse = torch.eye(8).to_sparse_csr()
    assert count_flops(Calls(lambda x: sparse @ x), torch.empty(8, 3)).macs == 24


@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")
@pytest.mark.parametrize(("layout", "stored"), [("coo", 8), ("csr", 8), ("csc", 8), ("bsr", 16)])
def test_products_with_sparse_tensors_cost_what_they_store(layout, stored):
    to_sparse = {"coo": lambda x: x.to_sparse(), "csc": lambda x: x.to_sparse_csc()}
    to_sparse |= {"csr": lambda x: x.to_sparse_csr(), "bsr": lambda x: x.to_sparse_bsr((2, 2))}
    sparse = to_sparse[layout](torch.eye(8))
    assert count_flops(Calls(lambda x: torch.sparse.mm(sparse, x)), torch.empty(8, 3)).macs == stored * 3
    assert count_flops(Calls(lambda x: sparse @ x), torch.empty(8, 3)).macs == stored * 3
    if layout != "bsr":  # which torch multiplies from the left alone, and not by itself
        assert count_flops(Calls(lambda x: (sparse @ sparse).to_dense() + x), torch.empty(8, 8)).macs == 8
        assert count_flops(Calls(lambda x: x @ sparse), torch.empty(3, 8)).macs == stored * 3


def test_a_product_of_complex_numbers_takes_four_of_real_ones():
    left, right = (torch.empty(shape, dtype=torch.complex64, requires_grad=True) for shape in ((2, 3), (3, 4)))
    assert_counts(Calls(torch.mm), (left, right), 4 * 24, 4 * 48)
    images = torch.empty(1, 2, 8, 8, dtype=torch.complex64)
    conv = nn.Conv2d(2, 3, 3, dtype=torch.complex64)
    assert count_flops(conv, images).macs == 3 * (3 * 6 * 6 * 2 * 9)  # torch runs three real ones


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="since torch 2.8")
def test_products_for_each_expert():
    rows, experts = (torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in ((64, 16), (4, 16, 32)))
    model = Calls(lambda x, w, ends: torch._grouped_mm(x, w, offs=ends).square())
    assert_counts(
        model, (rows, experts, torch.tensor([16, 16, 32, 64], dtype=torch.int32)), 64 * 16 * 32, 2 * 64 * 16 * 32
    )


class Blocks(nn.Module):
    """Convolutions, normalizations and attention, with or without activation checkpointing."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, groups=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 2, groups=4)
        )
        self.block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.reentrant = reentrant

    def forward(self, images):
        x = self.stem(images).flatten(2).mT
        x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.attention(x, x, x)[0]


@pytest.mark.trap("flops: three times the forward pass is a guess")
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("training", [True, False])
def test_step_flops_are_those_of_real_tensors(reentrant, training):
    model = Blocks(reentrant).train(training)
    images = torch.randn(2, 3, 8, 8)
    count = count_flops(model, images, backward=True)
    with FlopCounterMode(display=False) as real:  # it counts grouped weight gradients too high
        model(images).sum().backward()
    grouped = model.stem[3]
    weight_gradient = 2 * grouped.weight.numel() * 2 * 5 * 5
    assert count.train_step_flops == real.get_total_flops() - weight_gradient * (grouped.groups - 1)


def test_frozen_parts_need_no_backward():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    count = count_flops(model, torch.empty(3, 8), backward=True)
    assert backward_macs(count) == 3 * 16 * 4
    assert (count.params, count.trainable_params) == (8 * 16 + 16 + 16 * 4 + 4, 16 * 4 + 4)


def test_rows_hold_the_cost_of_each_module():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.again = nn.ModuleDict({"linear": self.linear, "last": nn.Linear(8, 2)})

        def forward(self, x):
            return self.again["last"](self.linear(self.again["linear"](x)))

    count = count_flops(Shares(), torch.empty(3, 8))
    rows = {row.name: row for row in count.rows}
    assert list(rows) == ["", "linear", "again", "again.last"]
    assert (rows["linear"].calls, rows["linear"].macs, rows["linear"].params) == (2, 2 * 3 * 64, 72)
    assert rows["linear"].input_shapes == rows["linear"].output_shapes == ((3, 8),)
    assert rows["again.last"].share == pytest.approx(48 / (384 + 48))
    assert rows[""].macs == count.macs == 384 + 48
    assert rows["again"].calls == 0


def test_other_flops_of_bags_and_transforms():
    bag = nn.EmbeddingBag(10, 4)
    assert count_flops(bag, torch.zeros(3, 5, dtype=torch.long)).other_flops == 3 * 5 * 4
    for transform, flops in ((torch.fft.fft, 5 * 3 * 16 * 4), (torch.fft.rfft, 2.5 * 3 * 16 * 4)):
        x = torch.empty(3, 16, dtype=torch.complex64 if transform is torch.fft.fft else torch.float32)
        assert count_flops(Calls(transform), x).other_flops == flops  # 5 n log2 n, half of it for real numbers


def test_distances_cost_three_flops_for_each_coordinate():
    a, b = torch.empty(2, 5, 3), torch.empty(2, 4, 3)
    assert count_flops(Calls(lambda a, b: torch.cdist(a, b, p=1.0)), (a, b)).other_flops == 3 * (2 * 5 * 4) * 3
    assert count_flops(Calls(nn.functional.pdist), torch.empty(7, 2)).other_flops == 3 * 21 * 2


def test_operators_of_other_devices():
    x, weight = torch.empty(2, 6, 5, 5, device="meta"), torch.empty(6, 4, 3, 3, device="meta")
    transposed = find_rule(torch.ops.aten.cudnn_convolution_transpose.default, {})
    assert transposed.cost(torch.empty(2, 4, 7, 7, device="meta"), x, weight) == 2 * 6 * 25 * 4 * 9
    plain = find_rule(torch.ops.aten.cudnn_convolution.default, {})
    assert plain.cost(torch.empty(2, 6, 3, 3, device="meta"), x[:, :4], weight) == 2 * 6 * 9 * 4 * 9
    sequence, weights = torch.empty(7, 2, 8), [torch.empty(64, 8), torch.empty(64, 16), torch.empty(64)]
    recurrent = find_rule(torch.ops.aten._cudnn_rnn.default, {})
    assert recurrent.cost(None, sequence, weights) == 7 * 2 * 64 * (8 + 16)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_module_that_calls_itself_counts_once(depth):
    class Descends(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, depth):
            x = self.linear(x).relu()
            return self(x, depth - 1) if depth > 1 else x

    model = nn.Sequential()
    model.inner = Descends()
    model.forward = lambda x, depth: model.inner(x, depth)
    count = count_flops(model, (torch.empty(3, 8), depth))
    rows = {row.name: row for row in count.rows}
    assert [rows[name].macs for name in ("", "inner", "inner.linear")] == [depth * 3 * 64] * 3
    assert [rows[name].other_flops for name in ("", "inner", "inner.linear")] == [depth * 24, depth * 24, 0]
    assert (rows["inner"].calls, rows["inner.linear"].calls) == (depth, depth)
    assert rows["inner"].share == pytest.approx(1)
    assert count_flops(model.inner, (torch.empty(3, 8), depth)).rows[0].calls == depth


@cases("kind", "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
def test_fused_attention_whose_values_have_another_size(kind):
    """Values wider than queries, more keys than queries: against torch's formulas, of which a MAC is two."""
    query, key, value = (torch.empty(2, 3, *size, device="meta") for size in ((4, 8), (7, 8), (7, 16)))
    out = torch.empty(2, 3, 4, 16, device="meta")
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_backward")
    assert find_rule(forward.default, {}).cost((out,), query, key, value) == 2 * 3 * 4 * 7 * (8 + 16)
    found = find_rule(backward.default, {}).cost((query, key, value), out, query, key, value)
    assert found == sdpa_backward_flop_count(out.shape, query.shape, key.shape, value.shape) / 2


def test_an_exception_that_the_model_handles():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.fits, self.fails = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 8), nn.Linear(5, 4))

        def forward(self, x):
            try:
                return self.fails(x)
            except RuntimeError:
                return self.fits(x)

    count = count_flops(Tries(), torch.empty(3, 8))
    assert count.macs == 3 * 64 + 3 * 32, "what ran before the failure ran, too"
    assert not count.notes


class TestInputs:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x, mask=None, *, scale=1.0):
            return {"out": self.linear(x if mask is None else x * mask) * scale}

    def test_forms(self):
        x = torch.empty(2, 8)
        for inputs in (x, (x,), (x, x), {"x": x}, {"x": x, "scale": 2.0}, (x, None)):
            assert count_flops(self.Net(), inputs, backward=True).macs == 64

    def test_a_list_or_an_unfitting_mapping_is_one_argument(self):
        total = Calls(lambda tensors: sum(tensors[key] @ tensors[key] for key in tensors))
        assert count_flops(total, {"a": torch.empty(2, 2), "b": torch.empty(2, 2)}).macs == 16
        total = Calls(lambda tensors: sum(t @ t for t in tensors))
        assert count_flops(total, [torch.empty(2, 2), torch.empty(2, 2)]).macs == 16

    def test_inputs_on_another_device(self):
        assert count_flops(self.Net(), torch.empty(2, 8, device="meta")).macs == 64
        assert count_flops(self.Net().to("meta"), torch.empty(2, 8)).macs == 64

    def test_no_inputs(self):
        net = self.Net()
        for example in (torch.empty(2, 8), [torch.empty(2, 8), None], {"x": torch.empty(2, 8)}):
            net.example_input_array = example
            assert count_flops(net, None).macs == 64

    @pytest.mark.parametrize("backend", ["torch", "thop"])
    def test_wrong_shape_is_the_models_own_error(self, backend, caplog):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied(.|\n)*forward\(tensor \(2, 9\) float32\)"):
            count_flops(self.Net(), torch.empty(2, 9), backend=backend)
        assert not caplog.records

    def test_wrong_shape_on_meta(self):
        with pytest.raises(RuntimeError, match=r"must have same reduction dim(.|\n)*on the meta device"):
            count_flops(self.Net().to("meta"), torch.empty(2, 9))
        with pytest.raises(NotImplementedError, match="on the meta device"):
            count_flops(self.Net().to("meta"), torch.empty(2, 8), backend="thop")

    def test_wrong_arguments(self):
        with pytest.raises(TypeError, match=r"got an unexpected keyword argument|positional argument"):
            count_flops(self.Net(), (torch.empty(2, 8), None, None, None))


def test_bad_arguments():
    model, x = nn.Linear(8, 4), torch.empty(2, 8)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got 'resnet50' \(str\)"):
        count_flops("resnet50", x)
    with pytest.raises(ValueError, match=r"backend must be one of torch, thop, got 'tohp'\. Did you mean 'thop'"):
        count_flops(model, x, backend="tohp")
    with pytest.raises(ValueError, match='backward=True needs backend="torch"'):
        count_flops(model, x, backend="thop", backward=True)
    with pytest.raises(ValueError, match=r"what forward returned \(Tensor\) contains no tensor that requires a"):
        count_flops(model.requires_grad_(False), x, backward=True)
    with pytest.raises(TypeError, match="a key must be a module class or an operator"):
        count_flops(model, x, custom_ops={"Linear": print})
    with pytest.raises(TypeError, match="must be callable, got 3"):
        count_flops(model, x, custom_ops={nn.Linear: 3})


class TestCustomOps:
    def test_by_operator(self):
        with torch.library._scoped_library("tricks_test", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CPU")
            library.impl("twice", lambda x: torch.empty_like(x), "Meta")
            model, operator = Calls(lambda x: torch.ops.tricks_test.twice(x)), torch.ops.tricks_test.twice
            count = count_flops(model, torch.empty(2, 3))
            assert (count.macs, count.uncounted) == (0, {"tricks_test.twice.default": 1})
            for key in (operator, operator.default):
                rule = {key: lambda shape, out_shape: 10 * math.prod(shape) + math.prod(out_shape)}
                count = count_flops(model, torch.empty(2, 3), custom_ops=rule)
                assert (count.flops, count.uncounted) == (66, {})

    def test_a_rule_for_a_module_replaces_what_it_calls(self):
        def rule(module, inputs, output):
            module.total_ops += torch.DoubleTensor([inputs[0].numel() * output.shape[1]])

        model = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), nn.Linear(4, 2))
        for backend in ("torch", "thop"):
            count = count_flops(model, torch.empty(3, 8), backend=backend, custom_ops={nn.Linear: rule})
            assert count.macs == 3 * 8 * 4 + 3 * 4 * 4 + 3 * 4 * 2
        assert count_flops(model[1], torch.empty(3, 4), custom_ops={nn.Linear: lambda m, i, o: None}).macs == 0

    def test_fractions_of_operations_are_kept(self):
        def rule(module, inputs, output):
            module.total_ops += torch.DoubleTensor([2.25])

        count = count_flops(nn.Linear(8, 4), torch.empty(3, 8), custom_ops={nn.Linear: rule})
        assert (count.macs, count.flops) == (2.25, 4.5)

    @pytest.mark.parametrize("backend", ["torch", "thop"])
    def test_for_a_module_that_the_model_does_not_have(self, backend):
        with pytest.warns(UserWarning, match="no module of Linear is Conv2d"):
            count_flops(nn.Linear(8, 4), torch.empty(2, 8), backend=backend, custom_ops={nn.Conv2d: print})

    def test_for_an_operator_that_does_not_run(self):
        with pytest.warns(UserWarning, match=r"no operator of Linear is aten\.bmm"):
            count_flops(nn.Linear(8, 4), torch.empty(2, 8), custom_ops={torch.ops.aten.bmm: lambda *a, **k: 1})


def test_compiled_and_wrapped_models_are_named_as_the_plain_ones():
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    inside = copy.deepcopy(plain)
    inside[0] = torch.compile(inside[0], backend="eager")
    inside[2].compile(backend="eager")
    expected = count_flops(plain, torch.empty(2, 8), backward=True)
    for model in (torch.compile(plain, backend="eager"), inside, nn.DataParallel(plain)):
        assert count_flops(model, torch.empty(2, 8), backward=True) == expected
    function = torch.compile(plain.forward, backend="eager")
    assert count_flops(Calls(function), torch.empty(2, 8)).macs == expected.macs


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_models():
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for model in (torch.jit.script(plain), torch.jit.trace(plain, torch.randn(2, 8))):
        assert count_flops(model, torch.randn(2, 8), backward=True).macs == 2 * (64 + 32)


def test_lazy_modules_stay_lazy():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    count = count_flops(model, torch.empty(3, 8))
    assert (count.macs, count.params) == (3 * 8 * 4 + 3 * 4 * 2, 8 * 4 + 4 + 4 * 2 + 2)
    assert model[0].has_uninitialized_params()


@pytest.mark.skipif(
    torch.__version__.startswith("2.6.") and not torch.cuda.is_available(),
    reason="torch 2.6 asks the CUDA driver even for fake tensors",
)
def test_models_without_data():
    """Fake tensors stand for CUDA tensors here: attention and products take the paths that they take there."""
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.float16)):
        with FakeTensorMode():
            layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, device=device, dtype=dtype).eval()
            models = (nn.Conv2d(8, 16, 3, groups=4, device=device, dtype=dtype), layer)
        inputs = (torch.empty(1, 8, 6, 6, dtype=dtype), torch.empty(2, 5, 128, dtype=dtype))
        macs = (16 * 16 * 2 * 9, 10 * (4 * 128**2 + 2 * 128 * 256) + 2 * 2 * 25 * 128)
        for model, x, expected in zip(models, inputs, macs, strict=True):
            count = count_flops(model, x)
            assert (count.macs, count.notes) == (expected, ())
    with pytest.raises(NotImplementedError, match="there is no data to copy: some tensors are fake"):
        count_flops(model, x, backend="thop")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_precisions(dtype):
    model = Blocks()
    expected = count_flops(model, torch.empty(2, 3, 8, 8), backward=True)
    low = count_flops(copy.deepcopy(model).to(dtype), torch.empty(2, 3, 8, 8, dtype=dtype), backward=True)
    assert (low.macs, low.train_step_flops) == (expected.macs, expected.train_step_flops)
    if dtype is not torch.float64:
        with torch.autocast("cpu", dtype=dtype):
            mixed = count_flops(model, torch.empty(2, 3, 8, 8), backward=True)
        assert (mixed.macs, mixed.train_step_flops) == (expected.macs, expected.train_step_flops)


class Looks(nn.Module):
    """Looks at values, so that it cannot run without data."""

    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(8, 8), 0

    def forward(self, x):
        self.runs += 1
        return self.linear(x) if x.sum() > 0 else self.linear(self.linear(x))


def test_control_flow_that_looks_at_values(lightning_log):
    model = Looks()
    for x, calls in ((torch.ones(2, 8), 1), (-torch.ones(2, 8), 2)):
        count = count_flops(model, x, backward=True)
        assert count.macs == calls * 2 * 64
        assert "real run on a copy" in count.notes[0]
        assert count.notes[0] in str(count).replace("\n", " ") or "real run" in str(count)
    assert model.runs == 0
    assert any("real run on a copy" in message for _, message in lightning_log)


@pytest.mark.trap("flops: counters give the first backward pass to fake tensors, and forked ranks cannot train")
def test_forked_processes_can_still_train(tmp_path):
    code = """
import os, torch
from lightning_tricks import count_flops
count_flops(torch.nn.Linear(3, 4), torch.empty(2, 3), backward=True)
child = os.fork()
if child == 0:
    torch.nn.Linear(3, 4)(torch.randn(2, 3)).sum().backward()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
