"""Members from classes, factories, modules, lists and files."""

import subprocess
import sys

import pytest
import torch
import torchvision
from torch import nn

from lightning_tricks import save_weights
from lightning_tricks.ensembles.core.factory import build_members, class_name, imported_class, reset_parameters
from tests.ensembles.nets import CNN, MLP
from tests.small import cases


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("estimator", [MLP, lambda: MLP(), MLP()], ids=["class", "factory", "module"])
@pytest.mark.trap("ensembles: estimator=object gives every member the same initial weights")
def test_members_begin_with_weights_of_their_own_that_the_seed_decides(estimator):
    rng = torch.get_rng_state()
    members, _ = build_members(estimator, 3, None, seed=1)
    assert torch.equal(torch.get_rng_state(), rng)
    again, _ = build_members(estimator, 4, None, seed=1)
    other, _ = build_members(estimator, 3, None, seed=2)
    assert all(_equal(a, b) for a, b in zip(members, again[:3], strict=True))  # whatever their number
    assert not any(_equal(a, b) for a in members for b in [*other, *members] if a is not b)


def test_a_module_is_copied_with_new_weights_and_that_is_logged():
    given = CNN()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    members, messages = build_members(given, 2, None, seed=0)
    assert messages == ["the members are copies of the given CNN with new initial weights, not with its own"]
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert not any(_equal(given, member) for member in members)
    bound = 1 / (8 * 4 * 4) ** 0.5
    assert all(member.head.weight.abs().max() <= bound for member in members)


def test_layers_of_real_models_are_made_anew():
    torch.manual_seed(0)
    for model in (torchvision.models.resnet18(num_classes=10), nn.TransformerEncoderLayer(8, 2)):
        before = {name: value.clone() for name, value in model.named_parameters()}
        assert reset_parameters(model) == []
        changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
        assert {name for name in before if "weight" in name and "norm" not in name and "bn" not in name} - changed == {
            name for name in before if ".downsample.1." in name and "weight" in name
        }


def test_parameters_without_a_reset_are_named():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.net = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)

    _, messages = build_members(Scaled(), 2, None, seed=0)
    assert messages[1] == "1 parameters have no reset_parameters and begin alike in all members: scale"
    nothing = nn.ParameterList([torch.ones(2)])
    with pytest.raises(ValueError, match="no layer of ParameterList has reset_parameters, so that all members would"):
        build_members(nothing, 2, None, seed=0)


def test_what_is_frozen_keeps_its_values():
    given = CNN()
    given.norm.running_mean.fill_(3.0)
    for part in (given.conv, given.norm):
        part.requires_grad_(False)
    members, messages = build_members(given, 2, None, seed=0)
    for member in members:
        assert _equal(member.conv, given.conv)
        assert _equal(member.norm, given.norm)
        assert not member.conv.weight.requires_grad
    assert not _equal(members[0].head, members[1].head)
    assert messages[1] == "7 frozen parameters and buffers keep the values of the given CNN"
    frozen = nn.TransformerEncoderLayer(8, 2).requires_grad_(False)  # whose attention resets what is below it
    assert all(_equal(member, frozen) for member in build_members(frozen, 2, None, seed=0)[0])


def test_a_list_is_the_members_themselves():
    given = [MLP(), CNN()]
    members, messages = build_members(given, 10, None, seed=0)
    assert members == given
    assert messages == []


def test_weights_of_files_are_read_safely(tmp_path):
    nets = [MLP(hidden=7), MLP(hidden=7)]
    torch.save({"state_dict": {f"module.{k}": v for k, v in nets[0].state_dict().items()}}, tmp_path / "a.ckpt")
    save_weights(nets[1], tmp_path / "b.safetensors")
    paths = [tmp_path / "a.ckpt", str(tmp_path / "b.safetensors")]
    members, messages = build_members(paths, 2, {"estimator": MLP, "hidden": 7}, seed=0)
    assert all(_equal(net, member) for net, member in zip(nets, members, strict=True))
    assert messages[0].startswith("member 0: 4/4 tensors, 535/535 parameters")

    class Evil:
        def __reduce__(self):
            return subprocess.getoutput, (f"touch {tmp_path / 'ran'}",)

    torch.save({"state_dict": nets[0].state_dict(), "evil": Evil()}, tmp_path / "evil.pt")
    (member,), _ = build_members([tmp_path / "evil.pt"], 1, {"estimator": MLP, "hidden": 7}, seed=0)
    assert _equal(member, nets[0])
    assert not (tmp_path / "ran").exists()


def test_a_class_is_found_by_name_where_it_is_imported_and_nothing_is_imported():
    assert class_name(MLP) == "tests.ensembles.nets:MLP"
    assert imported_class("tests.ensembles.nets:MLP") is MLP
    assert class_name(type("Local", (MLP,), {"__qualname__": "f.<locals>.Local"})) is None
    assert class_name(lambda: MLP()) is None
    for name in ("os:system", "subprocess:Popen", "this:s", "nowhere:Net", "torch"):
        with pytest.raises(ValueError, match=f"estimator='{name}' does not name an imported class of modules"):
            imported_class(name)
    assert "this" not in sys.modules


@cases(
    "estimator, arguments, error, words",
    (3, None, TypeError, "estimator must be a class or factory, a torch.nn.Module, or a list .*, got 3 \\(int\\)"),
    (dict, None, TypeError, "estimator must make a torch.nn.Module, <class 'dict'> made {}"),
    (MLP(), {"hidden": 3}, ValueError, "estimator_args={'hidden': 3} are not used: estimator is a module already"),
    ([], None, ValueError, "estimator must not be an empty list"),
    ([MLP(), 3], None, TypeError, r"estimator\[1\] must be a torch.nn.Module or a path, got 3"),
    ([MLP()] * 2, None, ValueError, r"estimator\[1\] is the same module as one before it: give a copy"),
    ([MLP()], {"hidden": 3}, ValueError, "are not used: estimator is a list of modules"),
    (["a.ckpt"], None, ValueError, r"paths of weights \('a.ckpt'\): give the class that they are weights of"),
)
def test_what_makes_no_members(estimator, arguments, error, words):
    with pytest.raises(error, match=words):
        build_members(estimator, 2, arguments, seed=0)
