"""Modules whose own code at loading returns nothing, raises or drops something: all is loaded, or nothing changes."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_tricks import load_weights
from lightning_tricks.checkpoint_remapping import CheckpointError


class Plain(nn.Module):
    """Layers, a buffer and attributes, of which loading may change any."""

    def __init__(self, last=nn.Linear) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), last(3, 3)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.calls, self.notes = 0, []


class Net(Plain):
    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class ReturnsNone(Net):
    def load_state_dict(self, state_dict, **kwargs):  # as in segmentation_models_pytorch
        state_dict.pop("fc.weight", None)
        super().load_state_dict(state_dict, **kwargs)


class WithoutArguments(Net):
    def load_state_dict(self, state_dict):
        raise AssertionError("torch's arguments are not taken")


class OwnLoop(Net):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        own = self.state_dict()
        for name, value in state_dict.items():
            if isinstance(value, torch.Tensor):
                own[name].copy_(value)
        self.calls = 9


class RaisesAfter(Net):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        super().load_state_dict(state_dict, strict=strict, assign=assign)
        self.hidden += 1
        self.notes.append("loaded")
        self.another = nn.Linear(1, 1)
        raise KeyError("too late")


class RaisesHalfWay(Net):
    def load_state_dict(self, state_dict, **kwargs):
        self.first.load_state_dict({"weight": state_dict["first.weight"], "bias": state_dict["first.bias"]})
        self.norm.running_mean.data = torch.full((5,), 7.0)
        raise RuntimeError("half-way")


class Interrupted(Net):
    def load_state_dict(self, state_dict, **kwargs):
        super().load_state_dict(state_dict, **kwargs)
        raise KeyboardInterrupt


class Renames(Net):
    def load_state_dict(self, state_dict, **kwargs):
        super().load_state_dict({name.removeprefix("last."): value for name, value in state_dict.items()}, **kwargs)


class IgnoresAll(Net):
    def load_state_dict(self, state_dict, **kwargs):
        return None


class _Stubborn(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        super()._load_from_state_dict(state_dict, prefix, *args)
        raise ValueError("this layer wants something else")


class _Forgetful(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict = {name: value for name, value in state_dict.items() if name != f"{prefix}bias"}
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Choosy(nn.Linear):
    def get_extra_state(self):
        return 0

    def set_extra_state(self, state):
        if state:
            raise ValueError("another state")


def _raises(*_):
    raise ValueError("a hook")


def _post_hook_raises():
    net = Plain()
    net.register_load_state_dict_post_hook(_raises)
    return net


def _state_dict_renames():
    net = Plain()
    net.last.register_state_dict_post_hook(lambda _, state, *__: state.update({"last.w": state.pop("last.weight")}))
    return net


def _forgets_and_says_all_is_well():
    net = Plain(_Forgetful)
    net.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
    return net


def _expanded():
    net = Plain()
    net.last.weight = nn.Parameter(torch.zeros(1).expand(3, 3), requires_grad=False)
    return net


def _tied():
    net = RaisesAfter()
    net.last = net.first
    return net


FINE = [Net, ReturnsNone, OwnLoop]
FAULTY = [
    WithoutArguments, RaisesAfter, RaisesHalfWay, Renames, IgnoresAll, partial(Plain, _Stubborn),
    partial(Plain, _Choosy), _post_hook_raises, _state_dict_renames, _forgets_and_says_all_is_well, _expanded, _tied,
]  # fmt: skip


def _file():
    source = Net()
    source.calls = 9
    for value in source.state_dict().values():
        if isinstance(value, torch.Tensor):
            value.copy_(torch.randn(value.shape) if value.is_floating_point() else torch.full((), 5))
    return source.state_dict()


def _everything(net):
    """Return the identity and the value of all that a module holds."""
    modules = [(name, id(part)) for name, part in net.named_modules()]
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    return modules, [(n, id(t), t.data_ptr(), t.tolist()) for n, t in tensors], net.calls, [*net.notes]


@pytest.mark.oldest
@pytest.mark.parametrize("assign", [None, True])
@pytest.mark.parametrize("make", FINE)
def test_all_is_loaded_whatever_the_method_takes_and_returns(make, assign):
    net, file = make(), _file()
    with torch.no_grad():
        net.last.weight.fill_(torch.nan)
    load_weights(net, file, assign=assign)
    assert all(torch.equal(value, file[name]) for name, value in net.state_dict().items() if name != "_extra_state")
    assert net.calls == 9


@pytest.mark.oldest
@pytest.mark.parametrize("assign", [None, True])
@pytest.mark.parametrize("make", FAULTY)
def test_nothing_changes_where_loading_fails(make, assign):
    net = make()
    file = {name: value for name, value in _file().items() if name in net.state_dict() or name == "last.weight"}
    file |= {"last.w": file.pop("last.weight")} if make is _state_dict_renames else {}
    file |= {"last._extra_state": 1} if "last._extra_state" in net.state_dict() else {}
    if make is _tied:
        file = {name: value for name, value in file.items() if not name.startswith("last")}
    if make is _expanded and assign:
        pytest.skip("what is assigned is not written into")
    before = deepcopy(_everything(net))
    with pytest.raises(CheckpointError, match="not modified"):
        load_weights(net, file, assign=assign)
    assert _everything(net) == before
    assert not hasattr(net, "another")


def test_an_interrupt_leaves_the_module_as_it_was():
    net = Interrupted()
    before = deepcopy(_everything(net))
    with pytest.raises(KeyboardInterrupt):
        load_weights(net, _file())
    assert _everything(net) == before
