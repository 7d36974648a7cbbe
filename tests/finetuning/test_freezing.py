"""Freezing by pattern, frozen normalisation, the summary, and parameters without a gradient."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_tricks.finetuning import freeze_, parameters_without_gradient, trainable_summary, unfreeze_
from lightning_tricks.finetuning.core.freezing import ParameterCount, frozen_norms, held_norms


def model(*, affine=True):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=affine), nn.ReLU())
    return nn.ModuleDict({"body": body, "head": nn.Linear(3, 2)})


def forward(net, x):
    return net["head"](net["body"](x))


def test_counts_and_gradients():
    net = model()
    forward(net, torch.randn(5, 4)).sum().backward()
    assert freeze_(net, "body.0.*", "*.bias") == ParameterCount(4, 4 * 3 + 3 + 3 + 2)
    frozen = {name for name, one in net.named_parameters() if not one.requires_grad}
    assert frozen == {"body.0.weight", "body.0.bias", "body.1.bias", "head.bias"}
    assert all((one.grad is None) == (name in frozen) for name, one in net.named_parameters())
    assert unfreeze_(net, "re:^body") == ParameterCount(4, 4 * 3 + 3 + 6)
    assert str(freeze_(net)) == "29 values in 6 tensors"


def test_a_pattern_without_a_match():
    net = model()
    with pytest.raises(ValueError, match=r"'haed.\*' matches none of the 6 parameters.*Did you mean 'head.\*'"):
        freeze_(net, "body.*", "haed.*")
    assert all(one.requires_grad for one in net.parameters()), "nothing was changed"
    with pytest.raises(ValueError, match=r"Did you mean 'head.\*'"):
        unfreeze_(net, "head")


def test_tied_parameters_count_once():
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    net["b"].weight = net["a"].weight
    assert freeze_(net, "b.*") == ParameterCount(1, 4)
    assert not net["a"].weight.requires_grad


def test_names_without_the_parts_of_wrappers():
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    net = nn.ModuleDict({"body": torch.compile(nn.Linear(2, 2), backend="eager"), "head": wrapped})
    assert freeze_(net, "body.weight", "head.bias").tensors == 2


def test_whole_numbers_are_left_alone():
    net = nn.Linear(2, 2)
    net.quantized = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    assert unfreeze_(net) == ParameterCount(2, 6)
    assert not net.quantized.requires_grad


def _timm_norm():
    timm_layers = pytest.importorskip("timm.layers")
    return timm_layers.BatchNormAct2d(3, drop_layer=lambda: nn.Dropout(0.5))


NORMS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (6, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (6, 3, 4, 4)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), None),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (6, 3, 4)),
    "BatchNormAct2d": (_timm_norm, (6, 3, 4, 4)),
}


@pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=NORMS)
@pytest.mark.trap("finetuning: with train_bn=False frozen BN uses batch statistics in train mode")
@pytest.mark.trap("finetuning: BackboneFinetuning leaves the affine parameters of BatchNorm trainable")
def test_frozen_norm_gives_in_train_mode_what_it_gives_in_eval_mode(make, shape):
    torch.manual_seed(0)
    net = nn.Sequential(make(), nn.Identity())
    if shape is None:
        freeze_(net)
        assert held_norms(net) == ["0"]
        return
    net(torch.randn(shape))
    freeze_(net)
    assert not any(one.requires_grad for one in net.parameters())
    before = copy.deepcopy(net.state_dict())
    x = 5 + torch.randn(shape)
    expected = net.eval()(x)
    net.train()
    assert torch.equal(net(x), expected)
    net[0].training = True  # as Lightning sets modes
    assert torch.equal(net(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    unfreeze_(net)
    assert not held_norms(net)
    assert net[0].training
    net(x)
    assert not torch.equal(net.state_dict()["0.running_mean"], before["0.running_mean"])


def test_norm_without_parameters_follows_the_nearest_module_that_has_some():
    net = model(affine=False)
    assert not frozen_norms(net)
    freeze_(net, "body.0.weight")
    assert not held_norms(net), "the bias of the layer before it trains"
    freeze_(net, "body.*")
    assert held_norms(net) == ["body.1"]
    unfreeze_(net, "head.*")
    assert held_norms(net) == ["body.1"]
    unfreeze_(net, "body.0.bias")
    assert not held_norms(net)


def test_norm_may_be_left_alone():
    net = model()
    freeze_(net, norm=False)
    assert not held_norms(net)
    assert net["body"][1].training


def test_released_norm_takes_on_the_mode_around_it():
    net = model()
    freeze_(net)
    net.eval()
    unfreeze_(net)
    assert not net["body"][1].training


def test_copies_and_files_are_held_and_released():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    freeze_(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        other.train()(torch.randn(4, 2))
        assert not other[1].training
        unfreeze_(other)
        assert not held_norms(other)
    assert held_norms(net) == ["1"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_norm_stays_in_eval_mode(backend):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    compiled = torch.compile(net, backend=backend)
    x = 3 + torch.randn(6, 4)
    compiled(x)
    freeze_(compiled)
    before = copy.deepcopy(net.state_dict())
    for _ in range(3):
        compiled.train()
        assert torch.allclose(compiled(x), copy.deepcopy(net).eval()(x))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    unfreeze_(compiled)
    compiled(x)
    assert not torch.equal(net[1].running_mean, before["1.running_mean"])


def test_summary():
    net = model()
    freeze_(net, "body.*")
    summary = trainable_summary(net)
    assert summary.trainable == ParameterCount(2, 8)
    assert summary.total == ParameterCount(6, 29)
    assert {name: child.trainable.values for name, child in summary.children.items()} == {"body": 0, "head": 8}
    assert str(summary).splitlines() == [
        "trainable: 8 of 29 values (27.59 %) in 2 of 6 tensors",
        "  body: trainable: 0 of 21 values (0.00 %) in 0 of 4 tensors",
        "  head: trainable: 8 of 8 values (100.00 %) in 2 of 2 tensors",
    ]
    assert str(trainable_summary(nn.ReLU())) == "trainable: 0 of 0 values (0.00 %) in 0 of 0 tensors"
    assert trainable_summary(nn.Sequential(nn.LazyLinear(2))).trainable == ParameterCount(2, 0)


def test_parameters_without_gradient():
    net = model()
    net["unused"] = torch.compile(nn.Linear(2, 2), backend="eager")
    net["frozen"] = nn.Linear(2, 2).requires_grad_(False)
    forward(net, torch.randn(5, 4)).sum().backward()
    assert parameters_without_gradient(net) == ["unused.weight", "unused.bias"]
