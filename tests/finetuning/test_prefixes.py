"""Trained keys and values of attentions: equal to a slow attention, and read in training and in evaluation."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

from lightning_tricks.finetuning import (
    AdapterSettings,
    LoRASettings,
    PrefixSettings,
    PrefixTuning,
    add_adapters,
    add_lora,
    add_prefixes,
    merge,
)
from tests.finetuning.models import called, disturb, torchvision_vit
from tests.small import cases, same

HEADS, BATCH, QUERIES, KEYS = 2, 3, 4, 5
FORMS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False, "batch_first": True},
    "widths": {"kdim": 6, "vdim": 10, "batch_first": True},
    "bias_k": {"add_bias_kv": True, "batch_first": True},
    "zero": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6},
}
_CAUSAL = torch.ones(QUERIES, KEYS).triu(1).bool()
_NUMBERS = torch.linspace(-2, 2, BATCH * HEADS * QUERIES * KEYS).sin().view(BATCH * HEADS, QUERIES, KEYS)
_PADDING = torch.arange(KEYS).expand(BATCH, -1) >= torch.tensor([[5], [3], [4]])
MASKS = {
    "none": {},
    "bool": {"attn_mask": _CAUSAL},
    "causal": {"attn_mask": _CAUSAL, "is_causal": True},
    "numbers": {"attn_mask": _NUMBERS[0]},
    "of heads": {"attn_mask": _NUMBERS},
    "bool of heads": {"attn_mask": (_NUMBERS > 0.9) & (torch.arange(KEYS) > 0)},
    "padding": {"key_padding_mask": _PADDING},
    "padding numbers": {"key_padding_mask": torch.zeros(BATCH, KEYS).masked_fill(_PADDING, -math.inf)},
    "both": {"key_padding_mask": _PADDING, "attn_mask": _CAUSAL},
}


def _attention(form):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, HEADS, **FORMS[form])
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)  # torch's biases are zero at first
    return attention


def _inputs(attention):
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, QUERIES, 8), (BATCH, KEYS, attention.kdim), (BATCH, KEYS, attention.vdim)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    return inputs if attention.batch_first else [part.transpose(0, 1) for part in inputs]


def _with_prefix(attention, length=3):
    add_prefixes(attention, PrefixSettings(length))
    attention.prefix.keys.data.normal_(generator=torch.Generator().manual_seed(2))
    attention.prefix.values.data.normal_(generator=torch.Generator().manual_seed(3))
    return attention


def _slowly(attention, query, key, value, attn_mask=None, key_padding_mask=None, is_causal=False):
    """Each sample, head and query by itself; returns outputs and weights (batch, heads, queries, all keys)."""
    a = attention
    if not a.batch_first:
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    w = (
        a.in_proj_weight.chunk(3)
        if a.in_proj_weight is not None
        else (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
    )
    b = a.in_proj_bias.chunk(3) if a.in_proj_bias is not None else (0, 0, 0)
    size, outs, all_weights = 8 // HEADS, [], []
    for sample in range(BATCH):
        q, k, v = (part[sample] @ w[i].T + b[i] for i, part in enumerate((query, key, value)))
        k, v = torch.cat((a.prefix.keys, k)), torch.cat((a.prefix.values, v))
        if a.bias_k is not None:
            k, v = torch.cat((k, a.bias_k[0])), torch.cat((v, a.bias_v[0]))
        if a.add_zero_attn:
            k, v = torch.cat((k, torch.zeros(1, 8))), torch.cat((v, torch.zeros(1, 8)))
        out, weights = torch.zeros(QUERIES, 8), torch.zeros(HEADS, QUERIES, len(k))
        for head, row in itertools.product(range(HEADS), range(QUERIES)):
            part = slice(head * size, head * size + size)
            scores = k[:, part] @ q[row, part] / size**0.5
            for column in range(KEYS):
                masks = (
                    []
                    if attn_mask is None
                    else [attn_mask if attn_mask.ndim == 2 else attn_mask[sample * HEADS + head]]
                )
                entries = [mask[row, column] for mask in masks]
                entries += [] if key_padding_mask is None else [key_padding_mask[sample, column]]
                for entry in entries:
                    forbidden = -math.inf if entry.dtype == torch.bool and entry else float(entry)
                    scores[len(a.prefix.keys) + column] += forbidden
            weights[head, row] = scores.softmax(0)
            out[row, part] = weights[head, row] @ v[:, part]
        outs.append(out @ a.out_proj.weight.T + (0 if a.out_proj.bias is None else a.out_proj.bias))
        all_weights.append(weights)
    out = torch.stack(outs)
    return out if a.batch_first else out.transpose(0, 1), torch.stack(all_weights)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_an_attention_to_a_prefix_and_the_input(form, mask):
    attention = _with_prefix(_attention(form))
    inputs = _inputs(attention)
    expected, weights = _slowly(attention, *inputs, **MASKS[mask])
    weights = weights[..., 3:]
    for training in (True, False):
        attention.train(training)
        out, averaged = attention(*inputs, **MASKS[mask])
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(averaged, weights.mean(1))
        out, of_heads = attention(*inputs, **MASKS[mask], average_attn_weights=False)
        torch.testing.assert_close(of_heads, weights)
        out, none = attention(*inputs, **MASKS[mask], need_weights=False)
        torch.testing.assert_close(out, expected)
        assert none is None


@pytest.mark.parametrize("mask", ["none", "bool", "of heads"])
@pytest.mark.parametrize("form", ["plain", "batch first"])
def test_input_without_a_batch(form, mask):
    attention = _with_prefix(_attention(form))
    inputs = _inputs(attention)
    options = {name: value[:HEADS] if value.ndim == 3 else value for name, value in MASKS[mask].items()}
    out, weights = attention(*(part[0] if attention.batch_first else part[:, 0] for part in inputs), **options)
    whole, of_all = attention(*inputs, **MASKS[mask])
    torch.testing.assert_close(out, whole[0] if attention.batch_first else whole[:, 0])
    torch.testing.assert_close(weights, of_all[0])


def test_causal_needs_a_mask_as_in_torch():
    attention = _with_prefix(_attention("plain"))
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        attention(*_inputs(attention), is_causal=True)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_of_training_alone(need_weights):
    attention = _with_prefix(_attention("plain"))
    attention.dropout = 0.5
    inputs = _inputs(attention)
    expected, _ = _slowly(attention, *inputs)
    torch.testing.assert_close(attention.eval()(*inputs, need_weights=need_weights)[0], expected)
    outs = torch.stack([attention.train()(*inputs, need_weights=need_weights)[0] for _ in range(400)])
    assert (outs[0] - expected).abs().max() > 0.1
    error = (outs.mean(0) - expected).abs() / (outs.std(0) / 20)
    assert error.max() < 6, "not the expectation"


def test_fp16_and_bf16_autocast():
    attention = _with_prefix(_attention("both"))
    inputs = _inputs(attention)
    expected, _ = attention(*inputs, **MASKS["both"])
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            for need_weights in (True, False):
                out, _ = attention(*inputs, **MASKS["both"], need_weights=need_weights)
                assert out.dtype == dtype
                torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)


def _encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)


def _randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.trap("finetuning: a fused layer reads the weights of its attention in evaluation")
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("target", ["attention", "layers.1.self_attn"])
def test_an_encoder_reads_its_prefixes_in_evaluation_too(target, padded):
    torch.manual_seed(0)
    model = _encoder()
    x = _randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    base, names = model(x, src_key_padding_mask=padding).detach(), dict(model.state_dict())
    report = add_prefixes(model, PrefixSettings(3, target))
    disturb(model)
    with torch.inference_mode():
        evaluated = model.eval()(x, src_key_padding_mask=padding)
        assert called(model, report.layers, lambda: model(x, src_key_padding_mask=padding)) == list(report.layers)
    trained = model.train()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(evaluated, trained)
    assert not torch.allclose(trained, base, atol=1e-3)
    trained.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".prefix." in name)
        assert (parameter.grad is not None and bool(parameter.grad.any())) == parameter.requires_grad, name
    assert same({name: value for name, value in model.state_dict().items() if ".prefix." not in name}, names)


def test_decoders_and_torchvisions_vit():
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0), 1)
    vit = torchvision_vit()
    for model, inputs, count in ((decoder, (_randn(4, 2, 8), _randn(5, 2, 8)), 2), (vit, (_randn(2, 3, 16, 16),), 2)):
        base = model(*inputs)
        assert len(add_prefixes(model, PrefixSettings(3)).layers) == count
        disturb(model)
        trained = model.train()(*inputs)
        with torch.inference_mode():
            torch.testing.assert_close(model.eval()(*inputs), trained, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(trained, base, atol=1e-3)


def _parts(model, kind="prefix"):
    return [part for name, part in model.named_modules() if name.rpartition(".")[2] == kind]


def test_a_prefixed_model_pickles_copies_and_is_known():
    model, x = _encoder(), _randn(2, 5, 8)
    settings = PrefixSettings(3)
    report = add_prefixes(model, settings, generator=torch.Generator().manual_seed(5))
    other = _encoder()
    add_prefixes(other, settings, generator=torch.Generator().manual_seed(5))
    assert torch.equal(_parts(model)[1].keys, _parts(other)[1].keys)
    assert abs(_parts(model)[1].values.std() - 0.02) < 0.01
    out = model(x)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(x), out)
        assert PrefixTuning(3).adapt(twin) == report
    with pytest.raises(ValueError, match="has prefixes already"):
        add_prefixes(model, settings)
    for changed in ({"length": 4}, {"exclude": "layers.0"}):
        with pytest.raises(ValueError, match="in other attentions or of another length"):
            PrefixTuning(**{"length": 3} | changed).adapt(model)


class _Own(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return super().forward(query, key, value, **options)


@cases(
    "model, settings, words",
    (nn.Sequential(nn.Linear(2, 2)), {}, "none of the 2 modules is an nn.MultiheadAttention.*use Adapters"),
    (nn.Sequential(nn.Linear(2, 2)), {"target_modules": "0"}, "none of them are nn.MultiheadAttention"),
    (_encoder(), {"target_modules": "nothing"}, "matches none"),
    (_encoder(), {"target_modules": []}, "at least one pattern"),
    (nn.Sequential(_Own(8, 2)), {}, "0 is a _Own, which has a forward pass of its own"),
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(model, settings, words):
    with pytest.raises(ValueError, match=words):
        add_prefixes(model, PrefixSettings(**settings))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not _parts(model)


def test_the_length_is_checked():
    with pytest.raises(ValueError, match="length must be a whole number >= 1, got 0"):
        PrefixSettings(0)


@pytest.mark.parametrize("lora_first", [True, False])
def test_with_lora_on_the_same_attention(lora_first):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2)
    model = nn.Sequential(attention)
    steps = [lambda: add_lora(model, LoRASettings(2)), lambda: add_prefixes(model, PrefixSettings(3))]
    for step in steps if lora_first else reversed(steps):
        step()
    disturb(model)
    x = _randn(5, 2, 8)
    out = attention(x, x, x)[0]
    out.square().sum().backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert sum("prefix" in name for name in trained) == 2
    assert sum("lora" in name for name in trained) == 4
    merge(model)
    torch.testing.assert_close(attention(x, x, x)[0], out)
    assert len(_parts(model)) == 1
    with pytest.raises(ValueError, match=r"no LoRA to merge\. The layers added in 0\.prefix cannot be merged"):
        merge(model)


def test_with_adapters_on_the_same_attention():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.MultiheadAttention(8, 2)) for _ in range(2)]
    add_prefixes(models[0], PrefixSettings(3))
    add_adapters(models[0], AdapterSettings(3, "0"))
    disturb(models[0])
    x = _randn(5, 2, 8)
    names = ["0.prefix", "0.adapter"]
    assert called(models[0], names, lambda: models[0][0](x, x, x)) == names
    add_adapters(models[1], AdapterSettings(3, "0"))
    with pytest.raises(ValueError, match="add prefixes before adapters"):
        add_prefixes(models[1], PrefixSettings(3))
    assert len(_parts(models[1], "adapter")) == 1
