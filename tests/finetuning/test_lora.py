"""LoRA: never ignored, the base keeps its bits, and merging gives the same outputs."""

import copy
import io
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_tricks import load_weights
from lightning_tricks.finetuning import AdapterSettings, LoRA, LoRASettings, add_adapters, add_lora, merge
from lightning_tricks.finetuning.core.injection import parts_of
from lightning_tricks.finetuning.core.lora_layers import LowRank
from tests.finetuning import models
from tests.small import cases, without_warnings


def _settings(**given):
    return LoRASettings(**{"rank": 2, "modules_to_save": (), **given})


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class _SelfAttention(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(16, 2)

    def forward(self, x):
        return super().forward(x, x, x)


def _weight_normed():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)))


# how a layer is made, its input, and what is changed of it
_LAYERS = {
    "Linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), _noise(3, 8), "linear"),
    "Linear in 3 dimensions": (lambda: nn.Sequential(nn.Linear(8, 4)), _noise(3, 5, 8), "linear"),
    "Linear of one vector": (lambda: nn.Sequential(nn.Linear(8, 4)), _noise(8), "linear"),
    "encoder layer": (models.encoder_layer, _noise(2, 5, 16), "linear"),
    "encoder": (lambda: nn.TransformerEncoder(models.encoder_layer(), 2), _noise(2, 5, 16), "linear"),
    "attention": (models.encoder_layer, _noise(2, 5, 16), "self_attn"),
    "LSTM": (lambda: nn.Sequential(nn.LSTM(8, 6, 2, bidirectional=True)), _noise(5, 3, 8), "0"),
    "GRU": (lambda: nn.Sequential(nn.GRU(8, 6)), _noise(5, 3, 8), "0"),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3, padding="same")), _noise(2, 4, 9), "0"),
    "Conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, dilation=2)), _noise(2, 4, 9, 9), "0"),
    "padded Conv2d": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect")),
        _noise(2, 4, 9, 9),
        "0",
    ),
    "Conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2)), _noise(2, 2, 4, 4, 4), "0"),
    "grouped Conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)), _noise(2, 4, 9, 9), "0"),
    "ConvTranspose2d": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 3, groups=2)), _noise(2, 4, 9, 9), "0"),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(12, 8, padding_idx=0)), models.TOKENS, "0"),
    "Embedding with max_norm": (lambda: nn.Sequential(nn.Embedding(12, 8, max_norm=2.0)), models.TOKENS, "0"),
    "sparse Embedding": (lambda: nn.Sequential(nn.Embedding(12, 8, sparse=True)), models.TOKENS, "0"),
    "sparse EmbeddingBag": (lambda: nn.Sequential(nn.EmbeddingBag(12, 8, sparse=True)), models.TOKENS, "0"),
    "EmbeddingBag": (lambda: nn.Sequential(nn.EmbeddingBag(12, 8)), models.TOKENS, "0"),
    "weight_norm": (_weight_normed, _noise(3, 8), "0"),
    "weights that are read": (models.ReadsWeights, _noise(3, 8), "linear"),
    "tied": (models.TiedText, models.TOKENS, "decoder"),
    "used twice": (models.Twice, _noise(3, 8), "linear"),
    "Swin": (models.swin, models.IMAGES, "linear"),
    "ViT of torchvision": (models.torchvision_vit, models.IMAGES, "linear"),
    "ViT of timm": (models.timm_vit, models.IMAGES, "linear"),
    "ResNet of timm": (models.timm_resnet, models.IMAGES, ["layer*.conv*", "fc"]),
    "BERT": (models.bert, models.TOKENS, ["*.query", "*.value", "*word_embeddings"]),
    "GPT-2": (models.gpt2, models.TOKENS, "linear"),
}


@pytest.mark.oldest
@pytest.mark.trap("finetuning: adapters ignored in evaluation, or untrained, where weights are read")
@pytest.mark.trap("finetuning: MultiheadAttention's frozen weights drift, and are new objects after each forward")
@pytest.mark.parametrize("kind", _LAYERS)
def test_it_is_never_ignored(kind):
    """For each kind: no change at first; then gradients reach all, evaluation equals training, merging equals both."""
    build, inputs, targets = _LAYERS[kind]
    torch.manual_seed(0)
    model = build().eval()
    plain, names = copy.deepcopy(model), list(model.state_dict())
    before = models.output(model, inputs).detach()
    base = {name: value.clone() for name, value in model.state_dict().items()}  # after max_norm had its effect
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}

    report = add_lora(model, _settings(target_modules=targets))
    assert torch.equal(models.output(model, inputs), before)
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in model.named_parameters())

    models.disturb(model)
    model.train() if kind != "ResNet of timm" else model.eval()  # whose statistics would move
    trained = models.output(model, inputs)
    (trained * _noise(*trained.shape)).sum().backward()
    for name in report.layers:
        change = model.get_submodule(".lora_".join(name.rpartition(".")[::2]))
        for parameter in change.parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
    model.eval()
    with torch.inference_mode():
        evaluated = models.output(model, inputs).clone()
    torch.testing.assert_close(evaluated, trained.detach(), rtol=1e-5, atol=1e-5)
    assert (evaluated - before).abs().max() > 1e-3, "the change does nothing"

    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in base.items())
    assert {n: id(p) for n, p in model.named_parameters() if n in identities} == identities
    plain.load_state_dict({name: state[name] for name in names})  # back into the plain model
    assert LoRA(2, target_modules=targets, modules_to_save=()).adapt(model).layers == report.layers

    assert merge(model) is model
    assert list(model.state_dict()) == names
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    with torch.inference_mode():
        merged = models.output(model, inputs)
    assert (merged - evaluated).abs().max() <= 1e-5 * evaluated.abs().max()


@pytest.mark.parametrize("kind", [kind for kind in _LAYERS if kind != "weight_norm"])
def test_it_pickles_and_copies(kind):
    build, inputs, targets = _LAYERS[kind]
    model = build().eval()
    add_lora(model, _settings(target_modules=targets))
    models.disturb(model)
    wanted = models.output(model, inputs).detach()
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(models.output(twin, inputs), wanted)
        models.disturb(twin, seed=1)
        assert not torch.equal(models.output(twin, inputs), wanted)
    assert torch.equal(models.output(model, inputs), wanted), "a copy shares something with the original"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.floats(0.1, 50))
@settings(max_examples=25)
def test_a_side_branch_is_the_changed_weight(inputs, outputs, batch, rank, alpha):
    """What the layer computes is what a plain layer with the weight computes that is read from it."""
    rank = min(rank, inputs, outputs)
    layer = nn.Sequential(nn.Linear(inputs, outputs).double())
    add_lora(layer, _settings(rank=rank, alpha=alpha))
    models.disturb(layer)
    x = _noise(batch, inputs).double()
    change = layer[0].lora_weight
    weight = dict(layer.named_parameters())["0.weight"] + alpha / rank * change.B @ change.A
    torch.testing.assert_close(layer[0].weight, weight)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer[0].bias))


@cases(
    "kind, places",
    ("Linear", "Linear"),
    ("Conv1d", "Conv"),
    ("Conv2d", "Conv"),
    ("padded Conv2d", "Conv"),
    ("Conv3d", "Conv"),
    ("Embedding", "Embedding"),
    ("GPT-2", "TransposedLinear"),
)
def test_known_layers_have_a_side_branch(kind, places):
    """Their forward passes never compute the whole changed weight."""
    build, inputs, targets = _LAYERS[kind]
    model = build()
    add_lora(model, _settings(target_modules=targets))
    layers = [part for part in model.modules() if hasattr(part, "compute_weight")]
    assert layers
    assert any(type(part).__name__.startswith(f"{places}LoRA") for part in layers)
    for part in layers:
        vars(part)["compute_weight"] = None  # whoever calls it fails
    models.output(model, inputs)


def test_a_layer_with_a_forward_of_its_own_has_none():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Standardized(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight / weight.norm(), bias)

    for layer, inputs in ((Doubled(8, 8), _noise(3, 8)), (Standardized(4, 8, 3), _noise(2, 4, 5, 5))):
        model = nn.Sequential(layer)
        add_lora(model, _settings(target_modules="0"))
        models.disturb(model)
        merged = merge(copy.deepcopy(model))
        torch.testing.assert_close(model(inputs), merged(inputs))


@pytest.mark.parametrize("kind", ["Linear", "grouped Conv2d", "LSTM", "Embedding"])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled(kind):
    build, inputs, targets = _LAYERS[kind]
    model = build()
    add_lora(model, _settings(target_modules=targets))
    models.disturb(model)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=kind != "LSTM")
    for training in (True, False):
        model.train(training)
        compiled.train(training)
        wanted, got = models.output(model, inputs), models.output(compiled, inputs)
        torch.testing.assert_close(got, wanted)
        wanted.sum().backward()
        got.sum().backward()
    for (name, one), other in zip(model.named_parameters(), compiled.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_other_ways_to_call_a_model():
    """functional_call replaces weights, checkpointing runs twice, vmap and export trace, a pruned weight is pruned."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    add_lora(model, _settings())
    models.disturb(model)
    x = _noise(3, 8)
    wanted = model(x)
    parameters = dict(model.named_parameters())
    assert torch.equal(torch.func.functional_call(model, parameters, (x,)), wanted)
    doubled = {**parameters, "2.weight": 2 * parameters["2.weight"]}
    assert not torch.allclose(torch.func.functional_call(model, doubled, (x,)), wanted)
    torch.testing.assert_close(torch.func.vmap(model)(x), wanted)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), wanted)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), wanted)
    again = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(
        torch.autograd.grad(again.sum(), model[0].lora_weight.A)[0],
        torch.autograd.grad(wanted.sum(), model[0].lora_weight.A)[0],
    )


def _pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("computed", [nn.utils.weight_norm, nn.utils.spectral_norm, _pruned])
def test_weights_that_hooks_compute(computed):
    model = nn.Sequential(computed(nn.Linear(8, 8))).eval()
    x = _noise(3, 8)
    before = model(x)
    report = add_lora(model, _settings(target_modules="0"))
    assert list(report.layers) == ["0.weight"]
    assert torch.equal(model(x), before)
    models.disturb(model)
    model(x).sum().backward()
    assert model[0].lora_weight.A.grad is not None
    assert not torch.allclose(model(x), before)
    with pytest.raises(ValueError, match=r"0\.weight is computed by a hook.*make it a plain weight first"):
        merge(model)
    assert not torch.allclose(model(x), before), "a failed merge changed something"


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_that_is_removed_from_a_changed_layer():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)))
    model(_noise(3, 8)).sum().backward()
    add_lora(model, _settings(target_modules="0"))
    models.disturb(model)
    before = model(_noise(3, 8))
    nn.utils.remove_weight_norm(model[0])
    torch.testing.assert_close(model(_noise(3, 8)), before)
    torch.testing.assert_close(merge(model)(_noise(3, 8)), before)
    assert list(model.state_dict()) == ["0.bias", "0.weight"]


class _Scaled(nn.Module):
    """A parametrization that gives back what is assigned, in the dtype of its weight alone."""

    def __init__(self):
        super().__init__()
        self.turn = torch.linalg.qr(_noise(8, 8))[0]  # no buffer, so that it keeps its dtype

    def forward(self, weight):
        return weight @ self.turn.to(torch.bfloat16) if weight.dtype == torch.bfloat16 else weight @ self.turn

    def right_inverse(self, weight):
        return weight @ self.turn.T.to(weight.dtype)


class _Clamped(nn.Module):
    def forward(self, weight):
        return weight.clamp(-0.01, 0.01) if self.training else weight

    def right_inverse(self, weight):
        return weight


def _by(parametrization):
    return lambda layer: parametrize.register_parametrization(layer, "weight", parametrization())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, _by(_Scaled)], ids=["weight_norm", "scaled"])
def test_a_parametrization_that_gives_back_what_is_assigned_is_merged(wrap, dtype):
    model = nn.Sequential(nn.Linear(8, 8), wrap(nn.Linear(8, 8))).to(dtype)
    add_lora(model, _settings())
    models.disturb(model)
    before = model(_noise(3, 8).to(dtype))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(merge(model)(_noise(3, 8).to(dtype)), before, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("training", [False, True])
@cases(
    "wrap, dtype",
    (parametrizations.spectral_norm, torch.float32),
    (parametrizations.spectral_norm, torch.bfloat16),
    (lambda layer: parametrizations.spectral_norm(parametrizations.weight_norm(layer)), torch.float32),
    (parametrizations.orthogonal, torch.float32),
    (_by(_Clamped), torch.float16),
    ids=["spectral_norm", "spectral_norm in bf16", "two", "orthogonal", "clamped in training"],
)
def test_a_parametrization_that_gives_back_another_weight_is_not_merged(wrap, dtype, training):
    model = nn.Sequential(nn.Linear(8, 8), wrap(nn.Linear(8, 8)), nn.Linear(8, 8)).to(dtype)
    add_lora(model, _settings())
    with torch.no_grad():
        for part in parts_of(model, LowRank):
            part.B.add_(1e-3 * _noise(*part.B.shape).to(dtype))  # so small that in bf16 it is hardly seen
    model.train(training)
    state, kinds = copy.deepcopy(model.state_dict()), [type(part) for part in model.modules()]
    words = r"1\.weight cannot take the change: its parametrization \(.*Keep the LoRA, or"
    with pytest.raises(ValueError, match=words):
        merge(model)
    assert kinds == [type(part) for part in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class _Aliased(nn.Module):
    """A module whose head was registered first under another name."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        self.head = self.net[1]


@pytest.mark.parametrize("name", ["head", "net.1"])
@pytest.mark.parametrize("argument", ["target_modules", "exclude", "modules_to_save", "rank_pattern"])
def test_a_module_is_found_by_each_of_its_names(argument, name):
    given = {"target_modules": "linear", argument: {name: 1} if argument == "rank_pattern" else name}
    report = add_lora(model := _Aliased(), _settings(**given))
    expected = {
        "target_modules": {"net.1.weight"},
        "exclude": {"net.0.weight"},
        "modules_to_save": {"net.0.weight"},
        "rank_pattern": {"net.0.weight", "net.1.weight"},
    }[argument]
    assert report.layers.keys() == expected
    assert report.saved == (("net.1 = head",) if argument == "modules_to_save" else ())
    assert model.head is model.net[1]
    assert model.head.bias.requires_grad == (argument == "modules_to_save")
    if argument == "rank_pattern":
        assert model.head.lora_weight.rank == 1
    words = r"exclude: pattern 'hea' matches none of the \d modules\. Did you mean 'head'"
    with pytest.raises(ValueError, match=words):
        add_lora(_Aliased(), _settings(exclude="hea"))


def test_a_head_is_trained_whole_by_default_unless_a_pattern_means_it_alone():
    assert add_lora(model := _Aliased(), LoRASettings(rank=2, target_modules="*")).saved == ("net.1 = head",)
    assert model.head.bias.requires_grad
    assert list(add_lora(_Aliased(), LoRASettings(rank=2, target_modules="head")).layers) == ["net.1.weight"]


def test_complex_weights_are_called_complex():
    def model():
        return nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8))

    words = r"1 layers hold complex weights.*: 0\. Train them whole by modules_to_save, or leave them out by exclude"
    for targets in ("linear", "*", "0"):
        with pytest.raises(ValueError, match=words):
            add_lora(model(), _settings(target_modules=targets))
    assert list(add_lora(model(), _settings(modules_to_save="0")).layers) == ["1.weight"]


@pytest.mark.parametrize("kind", ["attention", "LSTM"])
def test_threads_share_a_layer(kind):
    build = {"attention": _SelfAttention, "LSTM": lambda: nn.LSTM(16, 16)}[kind]
    model = nn.Sequential(build())
    add_lora(model, _settings(target_modules="0*"))
    models.disturb(model)
    inputs = _noise(2, 5, 16)
    with torch.no_grad():
        expected = model(inputs)[0]

    def run(_):
        with torch.no_grad():
            return all(torch.allclose(model(inputs)[0], expected, atol=1e-6) for _ in range(30))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, range(4)))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.trap("finetuning: tied parameters are adapted twice")
@pytest.mark.trap("finetuning: a module used in two places is adapted in one")
@pytest.mark.parametrize("targets", ["decoder", "embedding", ["embedding", "decoder"]])
def test_tied_weights_have_one_change(targets):
    model = models.TiedText()
    report = add_lora(model, _settings(target_modules=targets))
    assert len(report.layers) == 1
    other = "decoder" if targets == "embedding" or isinstance(targets, list) else "embedding"
    assert report.remark == f"The same weights, with the same change, are in {other}.weight."
    assert report.added == 2 * 12 + 2 * 8 == sum(p.numel() for p in model.parameters() if p.requires_grad)
    models.disturb(model)
    assert torch.equal(model.embedding.weight, model.decoder.weight)
    after = model(models.TOKENS)
    doubled = {name: 2 * value for name, value in model.named_parameters()}
    torch.func.functional_call(model, doubled, (models.TOKENS,))
    assert all(parameter.is_leaf for parameter in model.parameters())
    assert sum("lora_" in name for name in model.state_dict()) == 3  # A, B and their scale
    assert torch.equal(copy.deepcopy(model)(models.TOKENS), after)
    merge(model)
    assert model.embedding.weight is model.decoder.weight
    assert not any("lora_" in name for part in model.modules() for name in vars(part))
    torch.testing.assert_close(model(models.TOKENS), after)
    report = add_lora(twice := models.Twice(), _settings())
    assert list(report.layers) == ["first.weight"]
    assert report.remark == "The same weights, with the same change, are in second.weight."
    assert twice.first.lora_weight is twice.second.lora_weight


@pytest.mark.trap("finetuning: injecting again resets the trained adapter")
def test_a_second_one_is_refused():
    model = nn.Sequential(nn.Linear(8, 8))
    add_lora(model, _settings())
    models.disturb(model)
    trained = model[0].lora_weight.B.clone()
    with pytest.raises(ValueError, match=r"has LoRA already, which a second call would reset: merge\(model\) first"):
        add_lora(model, _settings())
    with pytest.raises(ValueError, match="has LoRA already, with other layers, ranks, scales or dropout"):
        LoRA(3, modules_to_save=()).adapt(model)
    with pytest.raises(ValueError, match="has LoRA already, with other layers, ranks, scales or dropout"):
        LoRA(2, modules_to_save=(), dropout=0.1).adapt(model)
    assert torch.equal(model[0].lora_weight.B, trained)
    merge(model)
    add_lora(model, _settings())


@pytest.mark.trap("finetuning: a model in evaluation mode gets adapters in training mode")
def test_the_mode_is_that_of_the_layer():
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    add_lora(model, _settings(dropout=0.5))
    assert not any(part.training for part in model.modules())
    model.train()
    assert all(part.training for part in model.modules())


def test_dropout_is_in_the_side_branch_alone_and_a_warning_says_where_there_is_none():
    model = models.ReadsWeights()
    add_lora(model, _settings(dropout=0.5))
    models.disturb(model)
    with pytest.warns(UserWarning, match="the weight of a LinearLoRALinear is read by another .* If that computes"):
        model(_noise(3, 8))
    model = nn.Sequential(nn.Linear(8, 8))
    add_lora(model, _settings(dropout=0.5))
    models.disturb(model)
    torch.manual_seed(0)
    assert not torch.equal(model(_noise(3, 8)), model(_noise(3, 8)))
    model.eval()
    assert torch.equal(model(_noise(3, 8)), model(_noise(3, 8)))


def test_precision_of_the_base_under_autocast():
    """The rows of a base embedding are not rounded to bf16 because something is added to them."""
    model = nn.Sequential(nn.Embedding(12, 8))
    rows = model(models.TOKENS).detach()
    add_lora(model, _settings(target_modules="0"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(models.TOKENS), rows)


@pytest.mark.trap("finetuning: a pattern of several that matches nothing, or a rank larger than the layer, is accepted")
@cases(
    "given, words",
    ({"target_modules": ["0", "query"]}, "target_modules: pattern 'query' matches none of the 3 modules"),
    ({"target_modules": "proj"}, r"Did you mean '\*\.proj'\?"),
    ({"target_modules": "1"}, r"pattern '1' matches 1 modules, such as '1' \(ReLU\), but none of them are layers"),
    ({"target_modules": []}, "target_modules must name at least one pattern"),
    ({"exclude": "stem"}, "exclude: pattern 'stem' matches none"),
    ({"modules_to_save": "classifier"}, "modules_to_save: pattern 'classifier' matches none"),
    ({"rank_pattern": {"key": 3}}, "rank_pattern: pattern 'key' matches none"),
    ({"rank": 9}, r"rank=9 exceeds the largest possible rank of 0\.weight, 8 \(shape \(8, 8\)\): give a smaller rank"),
    ({"rank_pattern": {"0": 64}}, "rank=64 exceeds"),
    ({"exclude": ["0", "2*"]}, "none of the 1 modules is a linear layer"),
)
def test_what_does_not_fit_is_an_error_and_changes_nothing(given, words):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ModuleDict({"proj": nn.Linear(8, 8)}))
    if "proj" not in str(given):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=words):
        add_lora(model, _settings(**given))
    assert list(model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_all_layers_that_a_rank_exceeds_are_named():
    model = nn.Sequential(*[nn.Linear(8, 1) for _ in range(3)], nn.Linear(8, 8))
    words = (
        r"rank=2 exceeds .* of 0\.weight, 1 .* train it whole\. It exceeds that of 2 more, too: 1\.weight, 2\.weight\.$"
    )
    with pytest.raises(ValueError, match=words):
        add_lora(model, _settings())
    add_lora(model, _settings(rank_pattern={"[012]": 1}))


class _Packed(nn.Module):
    """A linear layer as GPTQ has it."""

    def __init__(self, name="qweight"):
        super().__init__()
        self.register_buffer(name, torch.zeros(1, 8, dtype=torch.int32))


class _PackedLinear(_Packed):
    pass


def _with_weight(weight):
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _wrapped():
    from torch.testing._internal.two_tensor import TwoTensor  # a subclass that computes with several tensors

    return _with_weight(TwoTensor(torch.zeros(8, 8), torch.zeros(8, 8)))


def _by_torch(make):
    with without_warnings():  # torch is to remove it some day
        return make()


QUANTIZED = {  # -> the layer, whether it is a linear one
    "int8": (lambda: _with_weight(torch.zeros(8, 8, dtype=torch.int8)), True),
    "float8": (lambda: _with_weight(torch.zeros(8, 8).to(torch.float8_e4m3fn)), True),
    "subclass": (_wrapped, True),
    "packed": (_PackedLinear, True),
    "HQQ": (lambda: _PackedLinear("W_q"), True),
    "dynamic": (lambda: _by_torch(lambda: torch.ao.nn.quantized.dynamic.Linear(8, 8)), True),
    "static": (lambda: _by_torch(lambda: torch.ao.nn.quantized.Linear(8, 8)), True),
    "convolution": (lambda: _by_torch(lambda: torch.ao.nn.quantized.Conv2d(8, 8, 1)), False),
    "embedding": (lambda: _by_torch(lambda: torch.ao.nn.quantized.Embedding(8, 8)), False),
    "packed layer": (_Packed, False),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_layers_are_not_left_out_silently(kind):
    make, is_linear = QUANTIZED[kind]
    model = nn.Sequential(make(), nn.Linear(8, 8), make())
    words = r"target_modules: 2 layers hold quantized weights, .*: 0, 2\. Use inject_adapter_in_model of peft, or leave"
    for target in ("*", ["0", "1", "2"], *(["linear"] if is_linear else [])):
        with pytest.raises(ValueError, match=words):
            add_lora(model, _settings(target_modules=target))
    assert list(add_lora(model, _settings(target_modules="1")).layers) == ["1.weight"]
    model = nn.Sequential(make(), nn.Linear(8, 8), make())
    assert list(add_lora(model, _settings(exclude=["0", "2"])).layers) == ["1.weight"]
    if not isinstance(model[0], nn.Linear):
        model = nn.Sequential(make(), nn.Linear(8, 8), make())
        with pytest.raises(ValueError, match=words):
            add_adapters(model, AdapterSettings(4, target_modules="*"))


@cases(
    "given, error, words",
    ({"rank": 0}, ValueError, "rank must be a whole number >= 1, got 0"),
    ({"rank": 2.0}, TypeError, "rank must be a whole number"),
    ({"alpha": 0}, ValueError, "alpha must be a number > 0"),
    ({"dropout": 1.0}, ValueError, "dropout must be a number >= 0 and < 1, got 1.0"),
    ({"target_modules": 3}, TypeError, "target_modules must be a pattern or a list of patterns, got 3"),
    ({"exclude": "re:("}, ValueError, "is not a regular expression"),
    ({"rank_pattern": {"a": 0}}, ValueError, r"rank_pattern\['a'\] must be a whole number >= 1"),
)
def test_bad_settings(given, error, words):
    with pytest.raises(error, match=words):
        LoRASettings(**given)


def test_lazy_layers_are_refused():
    model = nn.Sequential(nn.LazyLinear(8))
    words = "weight of a LazyLinear has no shape yet: run a batch through the model first"
    with pytest.raises(ValueError, match=words):
        add_lora(model, _settings())


def test_modules_to_save_are_trained_whole_and_a_head_by_default():
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 2)})
    report = add_lora(model, LoRASettings(rank=2))
    assert report.saved == ("head",)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "body.lora_weight.A",
        "body.lora_weight.B",
        "head.weight",
        "head.bias",
    }
    assert str(report) == (
        "Low-rank changes (rank 2) in 1 Linear add 32 values; 50 of 138 values (36.23%) are trained, with all of head."
    )


def test_a_state_dict_of_another_scale_is_refused():
    trained, others = nn.Sequential(nn.Linear(8, 8)), []
    add_lora(trained, _settings(alpha=4.0))
    for scale in ({"alpha": 4.0}, {"alpha": 8.0}, {"alpha": 4.0, "use_rslora": True}):
        others.append(nn.Sequential(nn.Linear(8, 8)))
        add_lora(others[-1], _settings(**scale))
    saved = io.BytesIO()
    torch.save(pickle.loads(pickle.dumps(copy.deepcopy(trained))).state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    others[0].load_state_dict(state)
    for other in others[1:]:
        with pytest.raises(RuntimeError, match=r"0\.lora_weight was trained with a scale of 2 .*, and has one of"):
            other.load_state_dict(state, strict=False)


def test_weights_of_the_plain_model_load_beside_the_change():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    plain = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    add_lora(model, _settings())
    models.disturb(model)
    change = model[0].lora_weight.B.clone()
    report = load_weights(model, {f"module.{name}": value for name, value in plain.items()})
    assert report.loaded == report.total == 4
    assert "6 tensors of adapters keep their values" in str(report)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in plain.items())
    assert torch.equal(model[0].lora_weight.B, change)
    twin = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    add_lora(twin, _settings())
    assert load_weights(twin, model.state_dict()).loaded == 10
    del (incomplete := model.state_dict())["0.lora_weight.B"]
    with pytest.raises(Exception, match=r"0\.lora_weight\.B"):
        load_weights(twin, incomplete)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    model = nn.Sequential(nn.Linear(8, 4))
    add_lora(model, _settings())
    models.disturb(model)
    rows = [_noise(3, 8), _noise(5, 8)]
    got = model(torch.nested.nested_tensor(rows, layout=torch.jagged))
    for own, row in zip(got.unbind(), rows, strict=True):
        torch.testing.assert_close(own, model(row))


def test_a_class_that_was_changed_since_is_not_restored():
    model = nn.Sequential(nn.Linear(8, 8))
    add_lora(model, _settings())
    models.disturb(model)
    before = model(_noise(3, 8))
    model[0].__class__ = type("Sharded", (type(model[0]),), {})
    with pytest.raises(ValueError, match="a module became a Sharded after it was changed: undo that first"):
        merge(model)
    assert torch.equal(model(_noise(3, 8)), before)


def test_the_report_names_the_class_of_a_layer():
    class Own(nn.Linear):
        """A layer of a user."""

    net = nn.Sequential(Own(4, 4), nn.Linear(4, 4), nn.MultiheadAttention(4, 2).out_proj)
    assert [*add_lora(net, _settings(target_modules="*")).layers.values()] == ["Own", "Linear", "Linear"]
