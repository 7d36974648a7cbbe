"""The core of the moving average against its closed form, torch and timm."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from lightning_tricks._shared.tensors import named_tensors
from lightning_tricks.moving_average import MovingAverage, decay_at
from lightning_tricks.moving_average.functional import batch_statistics
from tests.moving_average.contract import average_of
from tests.small import cases, same

DECAYS = st.floats(0, 0.9999)


def walk(count, seed=0, dtype=torch.float64):
    """Values of a weight after each step of a random walk."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64).cumsum(0).to(dtype).unbind()


def run(values, average, found=()):
    """Let a weight take values one after another, and return its average; where `found` is 1, a step is skipped."""
    weight = nn.Parameter(torch.zeros_like(values[0]))
    average.follow(0, {"net.weight": weight})
    for number, value in enumerate(values):
        if not (found and found[number]):
            weight.data.copy_(value)
        average.update(0, torch.tensor([float(found[number])]) if found else None)
    return average.averages()["net.weight"]


@settings(max_examples=60)
@given(count=st.integers(1, 40), decay=DECAYS, warmup=st.booleans(), every=st.integers(1, 4))
def test_it_is_the_closed_form(count, decay, warmup, every):
    values = walk(count)
    average = run(values, MovingAverage(decay, warmup=warmup, every_n_steps=every))
    updates = values[every - 1 :: every]
    expected = average_of(updates, decay, warmup) if updates else values[-1]  # up to the first update it follows
    torch.testing.assert_close(average, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=60)
@given(found=st.lists(st.booleans(), min_size=1, max_size=30), warmup=st.booleans(), every=st.integers(1, 4))
def test_a_step_that_is_skipped_on_the_device_does_not_count(found, warmup, every):
    values = walk(len(found))
    arguments = {"decay": 0.9, "warmup": warmup, "every_n_steps": every}
    average = run(values, MovingAverage(**arguments), list(map(int, found)))
    made = [value for value, is_skipped in zip(values, found, strict=True) if not is_skipped]
    expected = run(made, MovingAverage(**arguments)) if made else torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(average, expected, rtol=1e-9, atol=1e-9)


def net_and_steps(count=12):
    """Yield a net with batch normalization after each of its steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        yield net


def followed(net):
    return dict(net.named_parameters()) | {n: dict(net.named_buffers())[n] for n in batch_statistics(net, owners(net))}


def owners(net, number=0):
    return {id(parameter): number for parameter in net.parameters()}


def test_it_is_that_of_torch():
    for number, net in enumerate(net_and_steps()):
        if not number:
            average = MovingAverage(0.9, warmup=False)
            average.follow(0, dict(net.named_parameters()))
            theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        theirs.update_parameters(net)
        average.update(0)
    with average.swapped_in(net):
        for name, value in named_tensors(net).items():
            torch.testing.assert_close(value, named_tensors(theirs.module)[name])


def test_it_is_that_of_timm():
    utils = pytest.importorskip("timm.utils")
    for number, net in enumerate(net_and_steps()):
        if not number:
            average = MovingAverage(0.9, warmup=False)
            average.follow(0, followed(net))
            theirs = utils.ModelEmaV3(net, decay=0.9)  # a copy after the first step
        else:
            theirs.update(net)
        average.update(0)
    with average.swapped_in(net):
        for name, value in named_tensors(net).items():
            torch.testing.assert_close(value, named_tensors(theirs.module)[name], msg=name)


def test_the_warmup_is_that_of_tensorflow_and_begins_with_a_copy():
    assert [decay_at(update, 0.5) for update in range(4)] == [0, 2 / 11, 3 / 12, 4 / 13]
    assert decay_at(100, 0.5) == decay_at(1, 0.5, warmup=False) == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_half_precision_moves(dtype):
    values = [torch.ones(3, dtype=dtype), *[torch.full((3,), 1.25, dtype=dtype)] * 200]
    average = run(values, MovingAverage(0.9999, warmup=False))
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((3,), 1.25 - 0.25 * 0.9999**200), rtol=1e-5, atol=0)
    plain = torch.ones(3, dtype=dtype)
    for value in values:
        plain.lerp_(value, 1e-4)
    assert torch.equal(plain, torch.ones(3, dtype=dtype))  # or float32 would not be needed


@settings(max_examples=30)
@given(decay=DECAYS, warmup=st.booleans(), value=st.floats(-1e9, 1e9, width=32))
def test_what_does_not_change_keeps_its_bits(decay, warmup, value):
    weight = torch.full((3,), value)
    assert torch.equal(run([weight] * 20, MovingAverage(decay, warmup=warmup)), weight)


def test_complex_weights():
    values = [torch.complex(*walk(2, seed)) for seed in range(5)]
    torch.testing.assert_close(
        run(values, MovingAverage(0.5, warmup=False)).real, average_of([v.real for v in values], 0.5, False)
    )


def test_averages_that_begin_later_have_a_warmup_of_their_own():
    early, late = nn.Parameter(torch.zeros(3, dtype=torch.float64)), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    average, values = MovingAverage(0.99, every_n_steps=2), walk(20)
    average.follow(0, {"early": early})
    for number, value in enumerate(values):
        early.data.copy_(value)
        if number == 9:
            average.follow(0, {"early": early, "late": late})
        late.data.copy_(value)
        average.update(0)
    torch.testing.assert_close(average.averages()["early"], average_of(values[1::2], 0.99))
    torch.testing.assert_close(average.averages()["late"], average_of(values[9::2], 0.99))


def test_a_copy_of_its_counts_and_averages_continues_alike():
    values, whole = walk(21), MovingAverage(0.9)
    expected = run(values, whole)
    first, second = MovingAverage(0.9), MovingAverage(0.9)
    run(values[:8], first)
    second.load_averages(first.averages())
    second.load_counts(copy.deepcopy(first.counts()))
    assert same(run(values[8:], second), expected)
    assert second.counts() == whole.counts()


def test_going_back_drops_averages_that_began_since():
    average, weight = MovingAverage(0.9), nn.Parameter(torch.ones(2))
    average.follow(0, {"a.b": weight})
    before = average.counts()
    average.follow(0, {"a.b": weight, "c": weight})
    average.load_counts(before)
    assert average.averages().keys() == {"a.b"}
    assert [name for name, _ in average.named_parameters()] == ["/a/b"]


def test_swapped_out_after_an_error_and_never_twice():
    net = nn.Linear(2, 2)
    average = MovingAverage(0.5)
    average.follow(0, dict(net.named_parameters()))
    average.update(0)
    nn.init.zeros_(net.weight)
    expected = average.averages()["weight"].clone()

    def breaks():
        with average.swapped_in(net):
            average.swap_in(net)
            assert torch.equal(net.weight, expected)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breaks()
    assert not net.weight.any()
    assert torch.equal(average.averages()["weight"], expected)
    with torch.inference_mode(), average.swapped_in(net):
        pass
    net(torch.ones(1, 2)).sum().backward()  # no tensor of inference mode is left


def test_statistics_belong_to_the_optimizer_of_their_layer():
    """A generator and a discriminator, whose statistics change with the weights of their own."""

    def block(affine=True):
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=affine))

    gan = nn.ModuleDict({"g": block(), "d": nn.Sequential(block(affine=False), block()), "other": nn.BatchNorm1d(2)})
    numbers = {id(p): number for number, part in ((1, "g"), (0, "d")) for p in gan[part].parameters()}
    found = batch_statistics(gan, numbers)
    kinds = "running_mean", "running_var"
    assert found == {
        **{f"g.1.{kind}": 1 for kind in kinds},
        **{f"d.{part}.1.{kind}": 0 for part in (0, 1) for kind in kinds},
        **{f"other.{kind}": 0 for kind in kinds},  # nobody steps this layer: of the whole, the first
    }


def distances(seed, momentum):
    """How far the statistics of training, and their averages, are from those that `update_bn` computes."""
    torch.manual_seed(seed)
    norms = [nn.BatchNorm1d(32, momentum=momentum) for _ in range(2)]
    net = nn.Sequential(nn.Linear(8, 32), norms[0], nn.ReLU(), nn.Linear(32, 32), norms[1], nn.ReLU(), nn.Linear(32, 1))
    data, optimizer = torch.randn(512, 8), torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
    target, average = data[:, :1] * data[:, 1:2], MovingAverage(0.98)
    average.follow(0, followed(net))
    for _ in range(200):
        rows = torch.randint(512, (32,))
        optimizer.zero_grad()
        (net(data[rows]) - target[rows]).square().mean().backward()
        optimizer.step()
        average.update(0)
    found, names = [], batch_statistics(net, owners(net))
    found.append({name: dict(net.named_buffers())[name].clone() for name in names})
    with average.swapped_in(net):
        found.append({name: dict(net.named_buffers())[name].clone() for name in names})
        update_bn(data.split(32), net)
        exact = dict(net.named_buffers())
        return [sum(((one[n] - exact[n]).norm() / exact[n].norm()).item() for n in names) for one in found]


@pytest.mark.parametrize(("momentum", "is_closer"), [(0.1, True), (0.01, False)])
def test_averaged_statistics_are_closer_to_those_of_the_average_at_torchs_momentum(momentum, is_closer):
    """The reason for the default, and for the other rule where the statistics are of many steps already."""
    copied, averaged = (sum(pair) for pair in zip(*(distances(seed, momentum) for seed in range(3)), strict=True))
    assert (averaged < copied) is is_closer


@cases(
    "arguments, error, words",
    ({"decay": 1.0}, ValueError, r"decay must be a number >= 0 and < 1, got 1\.0"),
    ({"decay": "high"}, TypeError, "decay must be a number"),
    ({"decay": 0.9, "every_n_steps": 0}, ValueError, "every_n_steps must be a whole number >= 1, got 0"),
)
def test_errors(arguments, error, words):
    with pytest.raises(error, match=words):
        MovingAverage(**arguments)
