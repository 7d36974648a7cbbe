"""Bottleneck adapters: reached in training and in evaluation, in models as people have them."""

import copy
import pickle
from abc import ABC

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from lightning_tricks.finetuning import Adapters, AdapterSettings, LoRASettings, add_adapters, add_lora, merge
from tests.finetuning.models import IMAGES, TOKENS, bert, called, gpt2, output, swin, timm_vit, torchvision_vit
from tests.small import cases, same, without_warnings

KINDS = ["houlsby", "pfeiffer", "parallel"]


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), lambda model: model(_randn(2, 5, 8))


def encoder_decoder():
    with without_warnings():
        model = nn.Transformer(8, 2, 1, 1, 16, 0.0)
    return model, lambda model: model(_randn(5, 2, 8), _randn(3, 2, 8))


def timm_swin():
    from timm.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        16, 2, embed_dim=8, depths=(2,), num_heads=(2,), window_size=4, num_classes=3, drop_path_rate=0.0
    )
    return model, lambda model: model(_randn(2, 3, 16, 16))


def llama():
    from transformers import LlamaConfig, LlamaModel

    model = LlamaModel(
        LlamaConfig(vocab_size=30, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    return model, lambda model: model(torch.arange(6).view(2, 3)).last_hidden_state


def _called_with(build, inputs):
    def make():
        return build(), lambda model: output(model, inputs)

    return make


torchvision_swin = _called_with(swin, torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
gpt2_of_transformers = _called_with(gpt2, TOKENS)
MODELS = {  # how a model is made, and the sublayers with an adapter: (attentions, feed-forward networks)
    "encoder": (encoder, (2, 2)),
    "encoder and decoder": (encoder_decoder, (3, 2)),
    "ViT of torchvision": (_called_with(torchvision_vit, IMAGES), (2, 2)),
    "Swin of torchvision": (torchvision_swin, (2, 2)),
    "ViT of timm": (_called_with(timm_vit, IMAGES), (2, 2)),
    "Swin of timm": (timm_swin, (2, 2)),
    "BERT": (_called_with(bert, TOKENS), (2, 2)),
    "GPT-2": (gpt2_of_transformers, (2, 2)),
    "Llama": (llama, (2, 2)),
}


def _randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _wake(model, seed=2):
    """Give adapters an effect, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "adapter." in name:
            parameter.data.normal_(0, 0.3, generator=generator)


@pytest.mark.trap("finetuning: Swin's proj is never called, TransformerEncoderLayer's linear2 not in evaluation")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_is_reached_and_evaluation_equals_training(kind, name):
    torch.manual_seed(0)
    make, (attentions, feed_forwards) = MODELS[name]
    model, run = make()
    model.requires_grad_(False)  # torch chooses other kernels for weights that are trained
    names = dict(model.state_dict())
    with torch.no_grad():
        before = run(model.train())
    report = add_adapters(model, AdapterSettings(8, kind=kind, modules_to_save=[]))
    with torch.no_grad():
        assert torch.equal(run(model), before), "a new adapter changes the output"
    assert len(report.layers) == feed_forwards + (attentions if kind == "houlsby" else 0)
    assert same({name: value for name, value in model.state_dict().items() if ".adapter." not in name}, names)

    _wake(model)
    for training in (True, False):
        with torch.no_grad():
            names = called(model.train(training), report.layers, lambda: run(model))
        assert names == list(report.layers)
    with torch.inference_mode():
        evaluated = run(model.eval())
    trained = run(model.train())
    torch.testing.assert_close(evaluated, trained, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(trained, before, atol=1e-3)
    trained.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".adapter." in name)
        assert (parameter.grad is not None and bool(parameter.grad.any())) == parameter.requires_grad, name


@pytest.mark.trap("finetuning: nested tensors of padded input leave out all but the fused path")
@pytest.mark.parametrize("target", ["layers.1.linear2", "layers.0.linear1", "*.self_attn"])
def test_padded_evaluation_equals_training(target):
    torch.manual_seed(0)
    model, _ = encoder()
    assert model.use_nested_tensor
    x, padding = _randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    base = model(x, src_key_padding_mask=padding).detach()
    add_adapters(model, AdapterSettings(4, target))
    with torch.inference_mode():
        unchanged = model.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(unchanged, base)
    _wake(model)
    trained = model.train()(x, src_key_padding_mask=padding)
    with torch.inference_mode():
        evaluated = model.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(evaluated, trained)
    assert not torch.allclose(evaluated[~padding], base[~padding], atol=1e-3)


def _reference(x, adapter):
    thin = x @ adapter.down_weight.T + adapter.down_bias
    thin = {"relu": F.relu, "gelu": F.gelu}[adapter.nonlinearity](thin)
    return adapter.scale * (thin @ adapter.up_weight.T + adapter.up_bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_the_formula(kind):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=True)
    plain = copy.deepcopy(layer)
    add_adapters(model := nn.Sequential(layer), AdapterSettings(4, kind=kind))
    _wake(model)
    x, adapter = _randn(5, 2, 8), layer.linear2.adapter
    inner = plain.norm1(x)
    attended = plain.self_attn(inner, inner, inner)[0]
    if kind == "houlsby":
        attended = attended + _reference(attended, layer.self_attn.adapter)
    h = x + attended
    fed = plain.linear2(F.relu(plain.linear1(plain.norm2(h))))
    fed = fed + _reference(plain.norm2(h) if kind == "parallel" else fed, adapter)
    torch.testing.assert_close(model(x), h + fed)
    assert (adapter.nonlinearity, adapter.scale) == {"houlsby": ("gelu", 1.0), "parallel": ("relu", 4.0)}.get(
        kind, ("relu", 1.0)
    )


def test_a_network_for_a_bias_of_positions_is_no_feed_forward_network():
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    with without_warnings():
        model = VisionTransformerRelPos(8, 4, embed_dim=8, depth=2, num_heads=2, num_classes=3, rel_pos_type="mlp")
    assert list(add_adapters(model, AdapterSettings(2)).layers) == ["blocks.0.mlp.fc2", "blocks.1.mlp.fc2"]


@pytest.mark.parametrize("kind", ["pfeiffer", "parallel"])
def test_any_layer_by_pattern(kind):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.MultiheadAttention(8, 2)})
    plain = copy.deepcopy(model)
    add_adapters(model, AdapterSettings(3, "[ab]", kind=kind))
    _wake(model)
    x = _randn(5, 2, 6)
    out = plain["a"](x)
    torch.testing.assert_close(model["a"](x), out + _reference(x if kind == "parallel" else out, model["a"].adapter))
    y = _randn(5, 2, 8)
    (attended, weights), (adapted, same_weights) = plain["b"](y, y, y), model["b"](y, y, y)
    added = _reference(y if kind == "parallel" else attended, model["b"].adapter)
    torch.testing.assert_close(adapted, attended + added)
    torch.testing.assert_close(weights, same_weights)


def test_the_input_may_be_given_by_name():
    attention, linear = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)
    model = nn.ModuleDict({"attention": attention, "linear": linear})
    add_adapters(model, AdapterSettings(3, ["attention", "linear"], kind="parallel"))
    for part in (attention, linear):
        nn.init.ones_(part.adapter.up_weight)
    query, key = torch.randn(2, 4, 5, 8)
    by_name, _ = attention(value=key, key=key, query=query)
    assert torch.equal(by_name, attention(query, key, key)[0])
    assert torch.equal(linear(input=query), linear(query))


@cases(
    "make, settings, words",
    (torchvision_swin, {"target_modules": "*.attn.proj"}, "never calls it.*give 'features.1.0.attn'"),
    (encoder, {"target_modules": "*.out_proj"}, "MultiheadAttention.*give 'layers.0.self_attn'"),
    (encoder, {"target_modules": "*.norm1"}, "none of them are linear layers or attentions"),
    (encoder, {"target_modules": "nothing"}, "matches none"),
    (encoder, {"target_modules": []}, "at least one pattern"),
    (encoder, {"exclude": "nothing"}, "exclude.*matches none"),
    (encoder, {"exclude": "layers"}, "leave none of the blocks"),
    (encoder, {"modules_to_save": "nothing"}, "modules_to_save.*matches none"),
    (lambda: (nn.Sequential(nn.Linear(2, 2)), None), {}, "none of the 1 modules is a transformer block"),
    (lambda: (nn.Sequential(nn.LazyLinear(2)), None), {"target_modules": "0"}, "no shape yet"),
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(make, settings, words):
    model, _ = make()
    trained = [parameter.requires_grad for parameter in model.parameters()]
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(ValueError, match=words):
        add_adapters(model, AdapterSettings(**settings))
    assert kinds == [type(part) for part in model.modules()]
    assert trained == [parameter.requires_grad for parameter in model.parameters()]


@cases(
    "settings, words",
    ({"bottleneck": 0}, "bottleneck must be a whole number >= 1, got 0"),
    ({"kind": "paralel"}, "Did you mean 'parallel'"),
    ({"nonlinearity": "rely"}, "Did you mean 'relu'"),
    ({"scale": 0}, "scale must be a number > 0"),
    ({"dropout": 1.0}, "dropout must be a number >= 0 and < 1"),
)
def test_arguments_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        Adapters(**settings)


def test_a_second_injection_is_refused_and_known_by_its_settings():
    model, _ = encoder()
    settings = AdapterSettings(4, kind="parallel")
    report = add_adapters(model, settings)
    assert Adapters(4, kind="parallel").adapt(model) == report
    words = "has adapters already, which a second call would reset: build the model again"
    with pytest.raises(ValueError, match=words):
        add_adapters(model, settings)
    for other in ({"bottleneck": 5}, {"kind": "pfeiffer", "scale": 4.0}, {"scale": 1.0}, {"exclude": "layers.0"}):
        with pytest.raises(ValueError, match="other layers or of another kind"):
            Adapters(**{"bottleneck": 4, "kind": "parallel"} | other).adapt(model)


def test_the_report_counts():
    model = nn.ModuleDict({"encoder": encoder()[0], "head": nn.Linear(8, 3)})
    report = add_adapters(model, AdapterSettings(9))
    added = 2 * (9 * 8 + 9 + 8 * 9 + 8)
    assert (report.added, report.trainable, report.saved) == (added, added + 27, ("head",))
    assert report.total == sum(parameter.numel() for parameter in model.parameters())
    assert str(report).startswith(f"Adapters (pfeiffer, bottleneck 9) in 2 Linear add {added} values")
    assert str(report).endswith(
        "with all of head. The bottleneck is wider than encoder.layers.0.linear2, encoder.layers.1.linear2."
    )


@pytest.mark.parametrize("kind", KINDS)
def test_adapted_models_pickle_copy_and_save(kind, tmp_path):
    model, run = encoder()
    add_adapters(model, AdapterSettings(4, kind=kind))
    _wake(model)
    out = run(model.eval())
    torch.save(model, tmp_path / "model.pt")
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    copies.append(torch.load(tmp_path / "model.pt", weights_only=False))
    run(model)
    for twin in copies:
        assert torch.equal(run(twin), out)
        _wake(twin, seed=3)
        assert not torch.equal(run(twin), out)
    assert torch.equal(run(model), out)


def test_initial_values_come_from_the_generator():
    state = torch.get_rng_state()
    models = [encoder()[0] for _ in range(3)]
    torch.set_rng_state(state)
    for model, seed in zip(models, (1, 1, 2), strict=True):
        add_adapters(model, AdapterSettings(4), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(state, torch.get_rng_state())
    first, second, other = (model.layers[1].linear2.adapter.down_weight for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_a_compiled_model_has_its_adapters():
    torch._dynamo.reset()
    model, run = gpt2_of_transformers()
    add_adapters(model, AdapterSettings(4, kind="parallel"))
    _wake(model)
    with torch.no_grad():  # or tracing starts the threads of autograd, and later tests fork
        torch.testing.assert_close(run(torch.compile(model, backend="aot_eager")), run(model))


def test_a_layer_that_is_computed_again_in_the_backward_pass():
    torch.manual_seed(0)
    model, _ = encoder()
    add_adapters(model, AdapterSettings(4, kind="parallel"))
    _wake(model)
    x = _randn(2, 5, 8)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = []
    for again in (False, True):
        model.zero_grad()
        out = x
        for layer in model.layers:
            out = checkpoint(layer, out, use_reentrant=False) if again else layer(out)
        out.square().sum().backward()
        gradients.append({name: model.get_parameter(name).grad.clone() for name in names})
        assert all(layer.linear2.handover.value is None for layer in model.layers)
    for name in names:
        torch.testing.assert_close(gradients[1][name], gradients[0][name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora_first", [True, False])
def test_lora_and_adapters_work_together(lora_first, kind):
    torch.manual_seed(0)
    model, run = encoder()
    plain = run(model).detach()
    steps = [lambda: add_lora(model, LoRASettings(2)), lambda: add_adapters(model, AdapterSettings(4, kind=kind))]
    for step in steps if lora_first else reversed(steps):
        step()
    torch.testing.assert_close(run(model), plain)
    run(model).square().sum().backward()
    added = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any(".adapter." in name for name in added)
    assert any(".lora_" in name for name in added)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in added), name
    generator = torch.Generator().manual_seed(0)
    for name in added:
        model.get_parameter(name).data.normal_(0, 0.3, generator=generator)
    out = run(model)
    torch.testing.assert_close(run(model.eval()), out, rtol=1e-4, atol=1e-5)
    merge(model)
    assert {name for name, _ in model.named_parameters() if ".lora_" in name} == set()
    torch.testing.assert_close(run(model), out, rtol=1e-4, atol=1e-4)
    _wake(model, seed=3)
    assert not torch.allclose(run(model), out, atol=1e-3), "the adapters went with LoRA"


def test_initial_values_are_those_of_a_linear_layer():
    model = nn.Sequential(nn.Linear(8, 64))
    add_adapters(model, AdapterSettings(bottleneck=16, target_modules="0"))
    down = model[0].adapter.down_weight
    assert 0.5 / 8 < down.abs().max() <= 1 / 8  # the width is 64
    assert not model[0].adapter.up_weight.any()


class _Abstract(ABC, nn.Linear):
    """A linear layer with a class that Python does not let a subclass replace, as quanto's are."""


def _block(first, last):
    return nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc1": first(8, 16), "fc2": last(16, 8)})


@pytest.mark.parametrize("name", ["last", "attention.out_proj"])
def test_a_layer_whose_weight_is_read_is_refused_by_each_of_its_names(name):
    attention = nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"last": attention.out_proj, "attention": attention})
    with pytest.raises(ValueError, match=r"last lies in a MultiheadAttention, .* give 'attention', whose output"):
        add_adapters(model, AdapterSettings(4, target_modules=name))


@pytest.mark.parametrize("add", [add_adapters, add_lora])
def test_a_class_that_cannot_be_extended_is_named_before_anything_changes(add):
    model = nn.Sequential(nn.Linear(8, 8), _Abstract(8, 8))
    settings = (AdapterSettings if add is add_adapters else LoRASettings)(4, target_modules="*")
    with pytest.raises(ValueError, match=r"the classes of 1 layers cannot be extended, .*: 1 \(_Abstract\)\. Leave"):
        add(model, settings)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*torch.ao.quantization")
def test_quantized_layers_of_blocks_are_not_left_out_silently():
    quantized = torch.ao.nn.quantized.dynamic.Linear
    model = nn.ModuleList([_block(nn.Linear, nn.Linear), _block(quantized, nn.Linear), _block(nn.Linear, quantized)])
    words = r"2 layers hold quantized weights, .*: 1\.fc1, 2\.fc2\. Use inject_adapter_in_model"
    with pytest.raises(ValueError, match=words):
        add_adapters(model)
    assert list(add_adapters(model, AdapterSettings(exclude=["1", "2"])).layers) == ["0.fc2"]
