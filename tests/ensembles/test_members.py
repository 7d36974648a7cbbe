"""Members at once and one after another: the same outputs, gradients and state dicts; and what cannot run at once."""

import copy
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_tricks.ensembles.core.members import SequentialMembers
from lightning_tricks.ensembles.core.stacked_members import StackedMembers, as_members, as_sequential
from tests.ensembles.nets import CNN, MLP, LitMLP, Recurrent, seeded
from tests.small import cases


class Branched(nn.Module):
    """Control flow, embeddings, residuals, attention written out; depends on the mode."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(17, 12)
        self.norm = nn.LayerNorm(12)
        self.query, self.value = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.head = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.5), nn.Linear(12, 10))

    def forward(self, x):
        x = self.table((x * 16).long())
        attention = (self.query(x) @ x.mT).softmax(-1)
        x = self.norm(x + attention @ self.value(x))
        if x.mean() > 1e9:
            raise AssertionError
        return self.head(x.mean(1)) * (1.0 if self.training else 0.5)


def _rows(n=4, seed=0):
    return torch.rand(n * 6, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", [MLP, CNN, Branched, lambda: nn.Linear(64, 10)])
@pytest.mark.parametrize("training", [False, True])
def test_a_stack_is_a_loop(make, training):
    members = seeded(make, 4)
    if training:
        for member in members:
            for part in member.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
    loop, stack = (
        SequentialMembers(copy.deepcopy(members)).train(training),
        as_members(members, vectorize=True).train(training),
    )
    assert isinstance(stack, StackedMembers)
    torch.testing.assert_close(stack(_rows()), loop(_rows()), atol=1e-5, rtol=1e-4)
    assert not stack.reason
    weights = torch.randn(4, 6, 10)
    for container in (loop, stack):
        (container(_rows(seed=1)) * weights).sum().backward()
    for index in range(4):
        own = dict(loop.member(index).named_parameters())
        for key, layer, name, tensor in stack.stacked_tensors():
            if isinstance(tensor, nn.Parameter):
                gradient = layer.to_stored(name, tensor.grad[index])
                torch.testing.assert_close(gradient, own[key].grad, atol=1e-4, rtol=1e-3)
    for (name, ours), theirs in zip(stack.state_dict().items(), loop.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)  # buffers


@pytest.mark.parametrize("rows", [0, 1, 64, 5000])
def test_the_same_rows_for_all(rows):
    loop, stack = SequentialMembers(seeded(MLP, 4)).eval(), as_members(seeded(MLP, 4)).eval()
    x = torch.rand(rows, 64)
    with torch.no_grad():
        torch.testing.assert_close(stack.forward_shared(x), loop.forward_shared(x), atol=1e-5, rtol=1e-4)
    stack.double()  # moves the memory that views share
    with torch.inference_mode():
        torch.testing.assert_close(
            stack.forward_shared(x.double()).float(), loop.forward_shared(x), atol=1e-5, rtol=1e-4
        )
    with torch.no_grad():
        stack.copy_member_(1, nn.Module.double(MLP()).state_dict())
        before = stack.forward_shared(x.double())
        torch.testing.assert_close(before[1], stack.member(1)(x.double()))


@pytest.mark.parametrize("make", [MLP, CNN])
def test_either_reads_what_the_other_has_saved(make):
    loop, stack = SequentialMembers(seeded(make, 4)), as_members(seeded(make, 4), vectorize=True)
    assert list(stack.state_dict()) == list(loop.state_dict())
    other = as_members([make() for _ in range(4)], vectorize=True)
    other.load_state_dict(loop.state_dict())
    again = SequentialMembers([make() for _ in range(4)])
    again.load_state_dict(other.state_dict())
    for (name, value), read in zip(loop.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(value, read), name
    parent = nn.Module()
    parent.estimators_ = other
    assert next(iter(parent.state_dict())) == f"estimators_.{next(iter(loop.state_dict()))}"
    parent.load_state_dict({f"estimators_.{name}": value for name, value in stack.state_dict().items()})


def test_a_state_dict_that_does_not_fit_is_refused_by_name():
    stack = as_members(seeded(MLP, 4))
    state = stack.state_dict()
    del state["2.first.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*first.weight"):
        stack.load_state_dict(state)


def test_members_come_out_of_a_stack_as_they_went_in():
    members = seeded(CNN, 4)
    stack = as_members(members, vectorize=True)
    for index, member in enumerate(members):
        out = stack.member(index)
        assert type(out) is CNN
        for (name, value), same in zip(member.state_dict().items(), out.state_dict().values(), strict=True):
            assert torch.equal(value, same), name
    out.head.weight.data.zero_()
    assert stack.member(3).head.weight.any()
    assert all(parameter.requires_grad and parameter.is_contiguous() for parameter in out.parameters())
    assert [type(member) for member in stack] == [CNN] * 4
    assert torch.equal(stack[-1].head.weight, members[3].head.weight)
    with pytest.raises(IndexError):
        stack[4]
    loop = as_sequential(stack, "because")
    assert loop[1] is loop.member(1)
    assert (type(loop), len(loop), loop.reason) == (SequentialMembers, 4, "because")


def test_a_stack_can_be_copied_and_pickled():
    stack = as_members(seeded(MLP, 4)).eval()
    x = torch.rand(5000, 64)
    with torch.no_grad():
        expected = stack.forward_shared(x)
        for copied in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
            assert torch.equal(copied.forward_shared(x), expected)
            copied.net.last.bias.add_(1)
            assert not torch.equal(copied.forward_shared(x), expected)
        assert torch.equal(stack.forward_shared(x), expected)


def _tied():
    member = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    member[1].weight = member[0].weight
    return member


def _hooked():
    member = MLP()
    member.first.register_forward_hook(lambda module, args, output: output * 2)
    return member


class _Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.net = nn.Linear(64, 10)

    def forward(self, x):
        return self.net(x) * self.scale


class _Acts(nn.Module):
    """Computes with more than its layers: a function, constants, an object."""

    def __init__(self, activation=torch.relu, shift=0.0, scale=1.0):
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.activation, self.shift = activation, torch.full((10,), shift)
        self.config = SimpleNamespace(scales=[scale])
        self.last, self.layers = self._last, [self.net]

    def _last(self, x):
        return self.activation(x + self.shift) * self.config.scales[0]

    def forward(self, x):
        return self.last(self.net(x))


@pytest.mark.parametrize("name", ["activation", "shift", "scale"])
def test_members_that_compute_with_other_values_are_not_taken_for_one_another(name):
    other = {"activation": torch.tanh, "shift": 1.0, "scale": 2.0}[name]
    members = [_Acts(), _Acts(**{name: other})]
    stack, x = as_members(members), torch.rand(5, 64)
    assert torch.equal(stack.forward_shared(x), torch.stack([member(x) for member in members]))
    named = "config" if name == "scale" else name
    assert stack.reason == f"member 1 has another structure than member 0 ({named})"


@cases(
    "make",
    lambda: torch.relu,
    lambda: lambda x: x.relu(),
    lambda: partial(nn.functional.leaky_relu, negative_slope=0.2),
)
def test_members_that_compute_with_equal_values_run_at_once(make):
    members = [_Acts(make(), 1.0, 2.0) for _ in range(3)]
    stack, x = as_members(members), torch.rand(5, 64)
    assert isinstance(stack, StackedMembers)
    torch.testing.assert_close(stack.forward_shared(x), torch.stack([member(x) for member in members]))
    assert isinstance(as_members([_Acts(lambda x, by=by: x * by) for by in (1, 2)]), SequentialMembers)


def test_members_that_share_a_layer_go_on_sharing_it():
    shared = nn.Linear(64, 8)
    members = [nn.Sequential(shared, nn.Linear(8, 10)) for _ in range(2)]
    stack = as_members(members)
    assert stack.reason == "members share a parameter"
    assert stack.member(0)[0] is stack.member(1)[0]


@cases(
    "members, reason",
    (seeded(Recurrent, 4), "LSTM has no stacked form (lstm)"),
    ([MLP(), MLP(hidden=16)], "member 1 has another structure than member 0"),
    ([MLP(), CNN()], "member 1 has another structure than member 0"),
    ([MLP(), nn.DataParallel(MLP())], "member 1 has another structure than member 0"),
    ([nn.Sequential(MLP(), nn.Dropout(p)) for p in (0.1, 0.2)], "member 1 has another structure than member 0"),
    (seeded(_tied, 4), "layers share a parameter"),
    (seeded(_hooked, 4), "Linear has hooks (first)"),
    (seeded(_Bare, 4), "_Bare has no stacked form"),
    ([nn.utils.parametrizations.weight_norm(nn.Linear(64, 10)) for _ in range(2)], "ParametrizedLinear has no"),
    ([nn.LazyLinear(10) for _ in range(2)], "LazyLinear has hooks"),
    ([nn.Flatten(), nn.Flatten()], "the members have no parameters"),
)
@pytest.mark.trap("ensembles: vmap fails for LSTM, .item(), parametrizations, differing shapes")
def test_what_cannot_be_stacked_is_a_loop_with_the_reason(members, reason):
    for vectorize in (True, "auto"):
        found = as_members(members, vectorize)
        assert isinstance(found, SequentialMembers)
        assert found.reason.startswith(reason)


def test_convolutions_are_stacked_only_when_asked():
    assert isinstance(as_members(seeded(CNN, 4)), SequentialMembers)
    assert as_members(seeded(CNN, 4)).reason == "separate convolutions are faster than one for all members"
    assert isinstance(as_members(seeded(CNN, 4), vectorize=True), StackedMembers)
    assert isinstance(as_members(seeded(LitMLP, 4)), StackedMembers), "a step of their own is the ensemble's matter"


def test_one_row_of_whole_numbers_tells_nothing():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 4)

        def forward(self, x):
            return self.table(x).mean(1) - self.table(x[:1]).mean(1)

    loop, stack = SequentialMembers(seeded(Mixed, 4)), as_members(seeded(Mixed, 4))
    stack.forward_shared(torch.tensor([[1, 2, 3]]))
    assert not stack.reason
    rows = torch.randint(20, (24, 3), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stack(rows), loop(rows))
    assert stack.reason


def test_inputs_that_are_not_finite_do_not_look_like_mixed_rows():
    stack = as_members(seeded(MLP, 4))
    rows = _rows()
    rows[3] = torch.nan
    assert stack(rows).isnan().any()
    assert not stack.reason


@cases(
    "members, error, words",
    ([nn.Linear(64, 3), nn.Linear(64, 4)], ValueError, r"outputs of one shape, got \(6, 3\), \(6, 4\)"),
    ([nn.LSTM(64, 3), nn.LSTM(64, 3)], TypeError, "members must return a tensor, got tuple"),
)
def test_outputs_that_cannot_be_combined(members, error, words):
    with pytest.raises(error, match=words):
        as_members(members)(_rows(2))


@pytest.mark.parametrize("vectorize", [True, False])
def test_members_are_exported_for_batches_of_any_size(vectorize):
    members = as_members(seeded(MLP, 4), vectorize).eval()

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.members = members

        def forward(self, x):
            return self.members.forward_shared(x)

    exported = torch.export.export(Shared(), (torch.rand(8, 64),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    x = torch.rand(5, 64)
    torch.testing.assert_close(exported.module()(x), members.forward_shared(x))
