"""Which nets run at once: those that treat each row for itself stay stacked, and those that mix rows are found out."""

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import AutoResume
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks.ensembles import (
    FusionClassifier,
    GradientBoostingClassifier,
    SoftGradientBoostingClassifier,
    VotingClassifier,
)
from lightning_tricks.ensembles.core import comparison
from lightning_tricks.ensembles.core.members import SequentialMembers
from lightning_tricks.ensembles.core.stacked_members import StackedMembers, as_members
from tests.ensembles.nets import MLP, Stops, fit, same, seeded, values
from tests.small import real_fp16

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
N, ROWS, WIDTH = 3, 6, 16


class Between(nn.Module):
    """Two layers, and in training something between them."""

    def __init__(self, between, first=None, last=None):
        super().__init__()
        self.first, self.last = first or nn.Linear(WIDTH, WIDTH), last or nn.Linear(WIDTH, 4)
        self.between, self.center, self.seen, self.kept = between, torch.zeros(WIDTH), 0, []
        self.generator = None

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(self.between(self, h) if self.training else h)


class _OverRows(torch.autograd.Function):
    """Changes nothing but the gradient, which it centres over the rows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


def _hooked(net, h):
    h.register_hook(lambda gradient: gradient / gradient.norm())
    return h


def _centred_by_the_past(net, h):
    shifted = h - net.center
    net.center = 0.9 * net.center + 0.1 * h.detach().mean(0)
    return shifted


def _banked(net, h):
    net.kept.append(h.detach().mean(0))
    return h


def _banked_in_small_numbers(net, h):
    net.kept.append(1e-10 * h.detach().mean(0))
    return h


def _annealed(net, h):
    net.seen += len(h)
    return h


def _mixed_up(net, h):
    share, order = torch.rand(()), torch.randperm(len(h))
    return share * h + (1 - share) * h[order]


MIXING = {
    "centre": lambda net, h: h - h.mean(0),
    "mixup": _mixed_up,
    "permutation": lambda net, h: h + 0.1 * h[torch.randperm(len(h))],
    "branch on the largest": lambda net, h: 2 * h if h.max() > h.abs().mean() * 3 else h,
    "attention over rows": lambda net, h: (h @ h.T).softmax(-1) @ h,
    "number of rows": lambda net, h: h / len(h),
    "rows as columns": lambda net, h: h.reshape(WIDTH, -1).T.contiguous().reshape(-1, WIDTH),
    "noise for all rows": lambda net, h: h + torch.randn(1, WIDTH),
    "mask for all rows": lambda net, h: functional.dropout(torch.ones(WIDTH), 0.5, True) * h,
    "stochastic depth of the batch": lambda net, h: h if torch.rand(()) < 0.99 else h + 1,
    "random": lambda net, h: h if random.random() < 0.99 else h + 1,
    "numpy": lambda net, h: h if np.random.rand() < 0.99 else h + 1,
    "gradient alone": lambda net, h: h + h.mean(0) - h.mean(0).detach(),
    "hook of the gradient": _hooked,
    "backward": lambda net, h: _OverRows.apply(h),
    "statistics of the past": _centred_by_the_past,
    "memory bank": _banked,
    "memory bank of small numbers": _banked_in_small_numbers,
    "count of rows": _annealed,
}  # fmt: skip


def _rows(*shape, seed=0):
    return torch.rand(N * ROWS, *shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


class UsesWeights(nn.Module):
    """Takes its layer's weight instead of calling it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return functional.linear(x, self.first.weight)


@pytest.mark.parametrize("rows", [1, ROWS])
def test_rows_that_are_the_same_for_all_do_not_hide_that_they_are_mixed(rows):
    members = seeded(lambda: Between(MIXING["centre"]), N)
    loop, stack, x = SequentialMembers(members), as_members(copy.deepcopy(members)), _rows(WIDTH)[:rows]
    torch.testing.assert_close(stack.forward_shared(x), loop.forward_shared(x), atol=1e-6, rtol=1e-5)
    assert stack.reason.startswith("the model mixes rows of a batch outside its layers")


def test_a_net_that_stacked_layers_do_not_fit_runs_one_by_one():
    loop, stack = SequentialMembers(seeded(UsesWeights, N)), as_members(seeded(UsesWeights, N))
    torch.testing.assert_close(stack(_rows(WIDTH)), loop(_rows(WIDTH)), atol=1e-6, rtol=1e-5)
    assert stack.reason.startswith("with stacked layers the model raises RuntimeError")


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.trap("ensembles: a net that mixes rows in training alone passes a check in evaluation")
def test_nets_that_mix_rows_in_training_run_one_by_one(name):
    make = lambda: Between(MIXING[name])  # noqa: E731
    stack, loop = as_members(seeded(make, N)), SequentialMembers(seeded(make, N))
    assert isinstance(stack, StackedMembers)
    x, first = _rows(WIDTH), None
    with torch.no_grad():
        stack.eval()(x)
    assert not stack.reason
    for container in (stack.train(), loop):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        outputs = container(x), container(_rows(WIDTH, seed=1))  # what is kept of one batch counts in the next
        sum(output.square().sum() for output in outputs).backward()
        first = first or outputs
    assert stack.reason
    for ours, theirs in zip(first, outputs, strict=True):
        torch.testing.assert_close(ours, theirs)
    for index in range(N):
        theirs = loop.member(index).first.weight
        torch.testing.assert_close(stack.member(index).first.weight, theirs)
        torch.testing.assert_close(stack.net.first.weight.grad[index].mT, theirs.grad, atol=1e-6, rtol=1e-4)


def test_members_that_change_their_weights_are_refused():
    def constrained(net, h):
        with torch.no_grad():
            net.last.weight.div_(net.last.weight.norm())
        return h

    stack = as_members(seeded(lambda: Between(constrained), N))
    with pytest.raises(ValueError, match=r"the members change last\.weight in their forward pass.*vectorize=False"):
        stack(_rows(WIDTH))


class Block(nn.Module):
    """A block of a transformer, with dropout in all its places, and an embedding."""

    def __init__(self, p=0.2, recompute=False):
        super().__init__()
        self.table, self.norm, self.second_norm = nn.Embedding(20, 16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, 16))
        self.head, self.p, self.recompute = nn.Linear(16, 4), p, recompute

    def attend(self, h):
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        dropped = self.p if self.training else 0.0
        h = h + self.out(functional.scaled_dot_product_attention(q, k, v, dropout_p=dropped).transpose(1, 2).flatten(2))
        return h + self.mlp(self.second_norm(h))

    def forward(self, x):
        h = self.table((x * 9).long().abs())
        h = checkpoint(self.attend, h, use_reentrant=False) if self.recompute else self.attend(h)
        return self.head(h.mean(1))


def _own_noise(net, h):
    net.generator = net.generator or torch.Generator().manual_seed(0)
    return h + torch.randn(h.shape, generator=net.generator).to(h)


def _observed(net, h):
    net.seen += 1
    net.kept = [h.detach(), {"rows": h[:, :2].detach()}]
    return h


class Convolutions(nn.Module):
    """Convolutions with groups and statistics of batches, dropout of channels and stochastic depth of rows."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.depth, self.group_norm = nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8)
        self.drop, self.head = nn.Dropout1d(0.3), nn.Linear(8, 4)

    def forward(self, x):
        h = functional.max_pool1d(functional.rrelu(self.norm(self.stem(x.unsqueeze(1))), training=self.training), 2)
        kept = torch.rand(len(h), 1, 1) < 0.8
        return self.head((h + kept * self.drop(self.group_norm(self.depth(h)))).mean(-1))


def _sequential(*middle):
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *[make() for make in middle], nn.Linear(WIDTH, 4))


def _frozen():
    net = MLP(WIDTH, 4)
    net.first.requires_grad_(False)
    return net


HEALTHY = {
    "MLP": lambda: MLP(WIDTH, 4),
    "dropout": _sequential(nn.ReLU, nn.Dropout),
    "dropout in place": _sequential(lambda: nn.Dropout(0.3, inplace=True)),
    "RReLU": _sequential(nn.RReLU, lambda: nn.RReLU(inplace=True)),
    "BatchNorm without statistics": _sequential(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), nn.ReLU),
    "frozen": _frozen,
    "convolutions": Convolutions,
    "transformer": Block,
    "recomputed transformer": lambda: Block(recompute=True),
    "noise": lambda: Between(lambda net, h: h + 0.1 * torch.randn_like(h)),
    "noise of its own generator": lambda: Between(_own_noise),
    "noise of each row": lambda: Between(lambda net, h: h * h.new_empty(len(h), 1).uniform_(0.5, 1.5)),
    "noise that lies by columns": lambda: Between(lambda net, h: h + h.new_empty(WIDTH, len(h)).t().normal_()),
    "variational": lambda: Between(lambda net, h: torch.normal(h, h.exp())),
    "stochastic depth": lambda: Between(lambda net, h: h * (torch.rand(len(h), 1) < 0.5)),
    "large sums": lambda: Between(lambda net, h: (1e4 * h.repeat(1, 512)).cumsum(1)[:, -WIDTH:]),
    "differences of nearly the same": lambda: Between(lambda net, h: functional.layer_norm(1000 + 1e-3 * h, (WIDTH,))),
    "ties": lambda: Between(lambda net, h: h.sign().topk(WIDTH, 1).values * h),
    "what it has seen": lambda: Between(_observed),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "one row"])
def test_nets_that_treat_each_row_for_itself_run_at_once(name, kind):
    if kind == "one row" and "BatchNorm" in name:
        pytest.skip("torch's BatchNorm refuses one row in training")
    stack, x = as_members(seeded(HEALTHY[name], N), vectorize=True), _rows(WIDTH)[: N if kind == "one row" else None]
    for training in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"), torch.set_grad_enabled(training):
            stack.train(training)(x)
    assert stack.compared == {(False, False), (True, True)}
    assert not stack.reason


# --- in a Trainer


def _samples(count=48, batch_size=16, **options):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(count, WIDTH, generator=generator), torch.arange(count) % 4)
    return DataLoader(data, batch_size, **{"shuffle": True, **options})


def _trained(between, vectorize="auto", kind=VotingClassifier, loader=None, wrap=lambda ensemble: ensemble, **options):
    ensemble = kind(lambda: Between(between), N, optimizer=("SGD", {"lr": 0.1}), vectorize=vectorize, seed=0)
    torch.manual_seed(0)
    fit(wrap(ensemble), loader or _samples(), **options)
    return ensemble


SETTINGS = {
    "plain": {},
    "validated first": {"val": _samples(shuffle=False), "num_sanity_val_steps": 1},
    "shared batches": {"kind": FusionClassifier},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"plugins": lambda: [real_fp16()]},
    "accumulated": {"accumulate_grad_batches": 2},
    "batches of one": {"loader": _samples(batch_size=1, count=8)},
    "compiled": {"wrap": lambda ensemble: torch.compile(ensemble, backend="eager"), "loader": _samples(count=16)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_members_that_mix_rows_are_trained_as_one_by_one(name, lightning_log):
    def trained(vectorize):
        options = {key: value() if key == "plugins" else value for key, value in SETTINGS[name].items()}
        return _trained(MIXING["centre"], vectorize, **options)

    ours, theirs = trained("auto"), trained(False)
    assert isinstance(ours.estimators_, StackedMembers)
    same(values(ours), values(theirs), atol=1e-7, rtol=1e-5)
    said = [line for _, line in lightning_log if "one after another" in line]
    assert len(said) == 1
    assert "the model mixes rows of a batch outside its layers" in said[0]


class _Watches(Callback):
    """Counts the calls of a layer and of a parameter's gradient, and keeps what a batch is after its step."""

    def __init__(self):
        self.calls, self.gradients, self.batches, self.grads = 0, 0, [], []

    def on_fit_start(self, trainer, pl_module):
        def count(*_):
            self.calls += 1

        def count_gradients(gradient):
            self.gradients += 1

        layer = pl_module.estimators_.net.first
        layer.register_forward_hook(count)
        layer.weight.register_hook(count_gradients)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.grads.append([parameter.grad is None for parameter in pl_module.parameters()])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append([tensor.clone() for tensor in batch])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_comparison_leaves_no_trace(precision, monkeypatch):
    def between(net, h):
        net.seen += 1
        net.kept.append(net.seen)
        net.generator = net.generator or torch.Generator().manual_seed(0)
        noise = torch.randn(h.shape, generator=net.generator).to(h)
        return functional.dropout(functional.rrelu(h, training=True) + noise, 0.2)

    class Net(Between):
        def __init__(self):
            super().__init__(between)
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x.mul_(0.5)))  # which changes what it is given

    def trained():
        ensemble, watches = VotingClassifier(Net, N, optimizer=("SGD", {"lr": 0.1}), vectorize=True, seed=0), _Watches()
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        fit(ensemble, _samples(), _samples(shuffle=False), precision=precision, callbacks=[watches])
        assert not ensemble.estimators_.reason
        net = ensemble.estimators_.net
        drawn = torch.rand(3), torch.rand(3, generator=net.generator), np.random.rand(3), random.random()
        parts = [(part.training, sorted(vars(part))) for part in ensemble.modules()]
        counted = watches.calls, watches.gradients, watches.grads, net.seen, net.kept
        return [values(ensemble), watches.batches, drawn], [counted, parts]

    def as_if_it_were_done(members, *inputs, shared=False):
        members.compared.add((members.training, torch.is_grad_enabled()))
        members.reason = ""

    compared = trained()
    with monkeypatch.context() as patch:
        patch.setattr(StackedMembers, "compare", as_if_it_were_done)
        expected = trained()
    torch.testing.assert_close(compared[0], expected[0], atol=0, rtol=0)
    assert compared[1] == expected[1]
    assert compared[1][0][3] == 3  # steps


class _SaysTheSame(Callback):
    def on_train_end(self, trainer, pl_module):
        assert gather_objects(bool(pl_module.estimators_.reason)) == [True, True]


def test_all_ranks_run_members_in_the_same_way():
    def centred_where_one_is_large(net, h):
        return h - h.mean(0) if h.max() > 0.999 else h

    loader = _samples(batch_size=24)
    loader.dataset.tensors[0][5] = 99  # of one rank's only batch
    _trained(centred_where_one_is_large, loader=loader, kind=FusionClassifier, strategy="ddp_fork", devices=2,
             callbacks=[_SaysTheSame()])  # fmt: skip


@pytest.mark.parametrize("mixes_first", [True, False])
def test_a_resumed_run_goes_on_as_its_first_batch_has_shown(mixes_first, tmp_path):
    """What mixes rows can be seen in the first batch alone, or in later ones alone."""

    def between(net, h):
        return h - h.mean(0) if (h.detach().abs().max() > 0.99) == mixes_first else h

    def loader():
        made = _samples(shuffle=False)
        made.dataset.tensors[0][:16] *= 30
        return made

    whole = _trained(between, loader=loader(), max_epochs=2)
    assert bool(whole.estimators_.reason) == mixes_first
    with pytest.raises(RuntimeError, match="stopped"):
        _trained(
            between, loader=loader(), max_epochs=2, callbacks=[AutoResume(tmp_path, every_n_train_steps=1), Stops(2)]
        )
    resumed = _trained(between, loader=loader(), max_epochs=2, callbacks=[AutoResume(tmp_path)])
    same(values(resumed), values(whole), rtol=0, atol=0)


# --- members that run one after another over stacked parameters


class Recomputed(Between):
    """Mixes rows in a part that is computed again in the backward pass."""

    def __init__(self, reentrant=False):
        super().__init__(MIXING["centre"])
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(self.reentrant), use_reentrant=self.reentrant)


class Reads(LightningModule):
    """Mixes rows, reads its Trainer and logs."""

    def __init__(self):
        super().__init__()
        self.net = Between(MIXING["centre"])

    def forward(self, x):
        if self.training:
            self.log("scale", x.mean())
        return self.net(x) * (1 + self.trainer.current_epoch)


@pytest.mark.parametrize("make", [Recomputed, lambda: Recomputed(reentrant=True), Reads], ids=["new", "old", "trainer"])
def test_one_by_one_a_net_is_what_it_is_alone(make):
    def trained(vectorize):
        ensemble = FusionClassifier(make, N, optimizer=("SGD", {"lr": 0.1}), vectorize=vectorize, seed=0)
        torch.manual_seed(0)
        fit(ensemble, _samples(), _samples(shuffle=False), max_epochs=2)
        return ensemble

    ours, theirs = trained("auto"), trained(False)
    assert "mixes rows" in ours.estimators_.reason
    same(values(ours), values(theirs), atol=1e-7, rtol=1e-5)
    copied = copy.deepcopy(ours)  # also while a graph is there
    assert {tensor.device.type for tensor in copied.estimators_.skeletons[0].parameters()} == {"meta"}


@pytest.mark.parametrize("frozen", [range(N), range(1)], ids=["all", "one"])
def test_a_fit_leaves_alone_what_is_frozen_in_a_member(frozen):
    ensemble = VotingClassifier(lambda: MLP(WIDTH, 4), N, seed=0)
    for index in frozen:
        ensemble.estimators_[index].first.requires_grad_(False)
    before = values(ensemble)
    fit(ensemble, _samples())
    assert isinstance(ensemble.estimators_, StackedMembers) == (len(frozen) == N)
    for name, value in values(ensemble).items():
        _, index, layer, _ = name.split(".")
        assert torch.equal(value, before[name]) == (int(index) in frozen and layer == "first"), name
    ensemble.estimators_[0].first.requires_grad_(True)
    fit(ensemble, _samples())
    assert not torch.equal(values(ensemble)["estimators_.0.first.weight"], before["estimators_.0.first.weight"])


@pytest.mark.parametrize("kind", [FusionClassifier, SoftGradientBoostingClassifier, GradientBoostingClassifier])
def test_each_member_gets_the_samples_as_they_are(kind):
    class InPlace(MLP):
        def forward(self, x):
            return super().forward(x.mul_(2))

    class Copies(MLP):
        def forward(self, x):
            return super().forward(x * 2)

    def trained(make):
        options = {} if kind is GradientBoostingClassifier else {"vectorize": False}
        ensemble = kind(make, N, {"inputs": WIDTH, "outputs": 4}, **options, seed=0)
        torch.manual_seed(0)
        fit(ensemble, _samples(), _samples(shuffle=False), max_epochs=N)
        return values(ensemble)

    same(trained(InPlace), trained(Copies), rtol=0, atol=0)


def test_copies_of_weights_do_not_outlive_the_comparison_under_autocast(monkeypatch):
    """Autocast keeps what it has made of a weight until it ends, and with it the weight."""
    copies, place = [], comparison.place_tensors

    def watched(module, tensors):
        copies.extend(map(weakref.ref, tensors.values()))
        place(module, tensors)

    monkeypatch.setattr(comparison, "place_tensors", watched)
    stack = as_members(seeded(HEALTHY["MLP"], N), vectorize=True)
    with torch.autocast("cpu", torch.bfloat16):
        stack.train()(_rows(WIDTH))
        assert torch.is_autocast_cache_enabled()
        gc.collect()
        assert copies
        assert not [copy for copy in copies if copy() is not None]
