"""Layers and parameter groups on real models; timm is the oracle of the layers."""

import pytest
import timm
import torch
import torchvision
from timm.optim import param_groups_layer_decay
from torch import nn

from lightning_tricks import OptimizerSpec
from lightning_tricks.lr_schedules import build_optimizer, layer_of_parameters, parameter_groups
from tests.small import Net, cases


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "deit_tiny_patch16_224", "mixer_s32_224"])
def test_layers_are_timms(name):
    net = timm.create_model(name, pretrained=False)
    theirs = {id(p): g["lr_scale"] for g in param_groups_layer_decay(net, layer_decay=0.75) for p in g["params"]}
    layers = layer_of_parameters(net)
    for name, parameter in net.named_parameters():
        assert 0.75 ** (max(layers.values()) - layers[name]) == pytest.approx(theirs[id(parameter)]), name


class _Flat(nn.Module):
    """Two layers, and a norm between them, that no container holds."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)


@cases(
    "make, count",
    (torchvision.models.resnet18, 10),  # stem, 8 blocks, head
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 2),
    (_Flat, 2),
    ids=["resnet18", "sequential", "flat"],
)
def test_counts_layers(make, count):
    layers = layer_of_parameters(make())
    assert sorted(set(layers.values())) == list(range(count))
    assert list(layers.values()) == sorted(layers.values()), "layers rise from stem to head"


def test_one_layer_is_refused():
    with pytest.raises(ValueError, match="Linear has only one layer"):
        layer_of_parameters(nn.Linear(2, 2))


def test_norms_by_their_class_and_biases_get_no_weight_decay():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))  # "1.weight" does not say that it is a norm
    decayed, spared = parameter_groups(net, OptimizerSpec())
    assert [p.shape for p in decayed["params"]] == [(4, 4), (2, 4)]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    assert len(spared["params"]) == 4


class NormalizedLinear(nn.Linear):
    """A linear layer with a word in its class that norms have."""


class T5LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def test_what_only_begins_like_a_norm_or_lies_in_what_is_called_a_bias_decays():
    names = ["normalizing_flow", "normal_head", "attn_norm", "ln_1", "norms", "cosine", "layernorm_embedding"]
    names += ["preNorm", "bias_net"]
    net = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
    net["ln_1"], net["cosine"] = T5LayerNorm(), NormalizedLinear(4, 4, bias=False)
    decayed, spared = parameter_groups(net, OptimizerSpec())
    owners = {id(parameter): name.partition(".")[0] for name, parameter in net.named_parameters()}
    found = [owners[id(parameter)] for parameter in decayed["params"]]
    assert found == ["normalizing_flow", "normal_head", "cosine", "bias_net"]
    assert len(spared["params"]) == 5


def test_biases_of_recurrent_and_attention_layers():
    net = nn.ModuleDict({"rnn": nn.LSTM(3, 3), "attention": nn.MultiheadAttention(4, 2)})
    spared = parameter_groups(net, OptimizerSpec())[1]
    names = {id(p): n for n, p in net.named_parameters()}
    assert sorted(names[id(p)] for p in spared["params"]) == [
        "attention.in_proj_bias",
        "attention.out_proj.bias",
        "rnn.bias_hh_l0",
        "rnn.bias_ih_l0",
    ]


def test_groups_layers_and_decay_together():
    net = torchvision.models.resnet18()
    net.conv1.requires_grad_(False)
    spec = OptimizerSpec(lr=1.0, groups={"fc.*": {"lr": 10.0}, "re:^layer4": {"weight_decay": 0.5}}, layer_decay=0.5)
    optimizer = build_optimizer(net, spec)
    found = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    assert len(found) == len(list(net.parameters())) - 1
    assert len({g["name"] for g in optimizer.param_groups}) == len(optimizer.param_groups)
    assert found[id(net.fc.weight)]["lr"] == 10.0
    assert found[id(net.layer4[1].conv2.weight)]["lr"] == 0.5
    assert found[id(net.layer4[1].conv2.weight)]["weight_decay"] == 0.5
    assert found[id(net.layer4[1].bn2.weight)]["weight_decay"] == 0.0
    assert found[id(net.bn1.weight)]["lr"] == pytest.approx(0.5**9)


@pytest.mark.parametrize("pattern", ["net.4.*", "tied.*"])
def test_tied_weights_come_once_under_each_name_and_compiled_names_are_plain(pattern):
    net = Net(compiled=True)
    net.tied = net.net._orig_mod[4]
    optimizer = build_optimizer(net, OptimizerSpec(groups={pattern: {"lr": 0.5}}))
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(net.parameters()))
    assert {g["lr"] for g in optimizer.param_groups} == {1e-3, 0.5}
    groups = parameter_groups(net, OptimizerSpec(no_decay=[pattern]))
    assert [len(group["params"]) for group in groups if not group["weight_decay"]] == [2]


@cases("spec", OptimizerSpec(groups={"bakbone.*": {"lr": 1}}), OptimizerSpec(no_decay=["bakbone.*"]))
def test_patterns_that_match_nothing_are_refused(spec):
    with pytest.raises(ValueError, match=r"pattern 'bakbone.\*' matches none of the 6 parameters: net.0.weight"):
        build_optimizer(Net(), spec)


def test_patterns_may_match_what_is_frozen():
    net = Net()
    net.net[0].requires_grad_(False)
    optimizer = build_optimizer(net, OptimizerSpec(groups={"net.0.*": {"lr": 0.5}}))
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


def test_nothing_trainable_is_refused():
    with pytest.raises(ValueError, match="Net has no trainable parameters"):
        build_optimizer(Net().requires_grad_(False), OptimizerSpec())


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "Adafactor", "LBFGS", "Rprop"])
def test_every_optimizer_of_torch(name):
    spec = OptimizerSpec(name, no_decay=())
    optimizer = build_optimizer(nn.Linear(2, 2), spec)
    assert type(optimizer) is getattr(torch.optim, name)
    own = type(optimizer)([nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    assert all(group.get("weight_decay") == own.get("weight_decay") for group in optimizer.param_groups)
