"""Clipping by value and unit by unit against torch and timm, and on shards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.utils.agc import adaptive_clip_grad as timm_agc
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from lightning_tricks.gradient_clipping import (
    AGC,
    ClipNorm,
    ClipValue,
    adaptive_clip_grad_,
    clip_grad_norm_,
    clip_grad_value_,
    gradient_norms,
)
from lightning_tricks.gradient_clipping.core.clip_state import ClipGroups, ClipState, norm_after
from lightning_tricks.gradient_clipping.core.clipping import _clip_units_foreach_, _clip_units_one_by_one_
from tests.small import HostReads, fork

_shapes = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6)


def _parameters(shapes, scale=1.0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(dtype)
    return parameters


@settings(derandomize=True)
@given(
    shapes=_shapes,
    scale=st.floats(1e-4, 1e2),
    factor=st.floats(1e-3, 1.0),
    eps=st.floats(1e-4, 1.0),
    seed=st.integers(0, 9),
)
def test_agc_equals_timm(shapes, scale, factor, eps, seed):
    ours, theirs = (_parameters(shapes, scale, seed) for _ in range(2))
    before = [p.grad.clone() for p in ours]
    done = adaptive_clip_grad_(ours, factor, eps)
    timm_agc(theirs, factor, eps)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(done.norm, gradient_norms(ours).total, rtol=1e-4, atol=1e-7)
    changed = sum(not torch.equal(old, p.grad) for old, p in zip(before, ours, strict=True))
    assert (done.num_clipped > 0) == (changed > 0)


@settings(derandomize=True)
@given(shapes=st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=4), min_size=1, max_size=6))
def test_the_kernels_of_an_accelerator_clip_units_as_those_of_a_cpu(shapes):
    weights = [p.detach() for p in _parameters(shapes)]
    together, alone = ([p.grad for p in _parameters(shapes)] for _ in range(2))
    after, is_clipped = _clip_units_foreach_(together, weights, 0.1, 1e-3)
    after_alone, is_clipped_alone = _clip_units_one_by_one_(alone, weights, 0.1, 1e-3)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(torch.linalg.vector_norm(after), torch.linalg.vector_norm(after_alone))
    assert is_clipped.sum() == is_clipped_alone.sum() > 0


@pytest.mark.trap("gradient_clipping: AGC without eps gives zero weights zero gradients for ever")
def test_weights_of_zero_can_start_to_learn():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    weight.grad = torch.ones(2, 3)
    adaptive_clip_grad_(weight, 0.01, eps=1e-3)
    torch.testing.assert_close(weight.grad.norm(dim=1), torch.full((2,), 1e-5))


def test_agc_spoils_only_the_unit_that_is_not_finite():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [1.0, 1.0]])
    adaptive_clip_grad_(weight, 0.01)
    assert weight.grad[0].isnan().all()
    assert weight.grad[1, 0].isnan()
    assert weight.grad[1, 1] == 0
    assert weight.grad[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_agc_takes_norms_in_a_precision_that_holds_them(dtype):
    value = 3e4 if dtype == torch.float16 else 1e100  # norms overflow where they are taken in fewer bits
    weight = torch.nn.Parameter(torch.ones(2, 100, dtype=dtype))
    weight.grad = torch.full((2, 100), value, dtype=dtype)
    adaptive_clip_grad_(weight, 0.5)
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 0.5))


def test_agc_keeps_the_memory_format():
    weight = torch.nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    weight.grad = torch.randn_like(weight)
    other = torch.nn.Parameter(weight.detach().contiguous())
    other.grad = weight.grad.contiguous()
    adaptive_clip_grad_(weight)
    adaptive_clip_grad_(other)
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(weight.grad, other.grad, rtol=1e-5, atol=0)


@settings(derandomize=True)
@given(shapes=_shapes, scale=st.floats(1e-3, 1e3), value=st.floats(1e-3, 1e3))
def test_value_equals_torch(shapes, scale, value):
    ours, theirs = (_parameters(shapes, scale) for _ in range(2))
    clip_grad_value_(ours, value)
    torch.nn.utils.clip_grad_value_(theirs, value)
    assert all(torch.equal(our.grad, their.grad) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("clip", [adaptive_clip_grad_, lambda p: clip_grad_value_(p, 0.1)], ids=["agc", "value"])
def test_reads_nothing_and_takes_anything(clip):
    parameters = _parameters([(3, 4), (5,), ()])
    with HostReads() as reads:
        clip(parameters)
    assert reads.count == 0
    clip([])
    clip(torch.zeros(3, requires_grad=True))
    clip(p for p in parameters)


@pytest.mark.parametrize("clip", [adaptive_clip_grad_, lambda p: clip_grad_value_(p, 0.1)], ids=["agc", "value"])
def test_refuses_sparse_gradients(clip):
    table = torch.nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"takes dense gradients, got a sparse one \(Embedding"):
        clip(table.parameters())


def test_value_refuses_complex_gradients():
    with pytest.raises(TypeError, match="takes real gradients, got a complex one: clip its parameter by norm"):
        clip_grad_value_(_parameters([(2,)], dtype=torch.complex64), 0.1)


@pytest.mark.parametrize("method", [ClipValue(0.1), AGC(0.01), ClipNorm(0.1)], ids=lambda method: type(method).__name__)
def test_parameters_without_elements_are_clipped_to_nothing(method):
    with_empty, alone = _parameters([(3,), (0,), (0, 4)]), _parameters([(3,)])
    for parameters in (with_empty, alone):
        norms = gradient_norms(parameters, math.inf)
        method.clip_(parameters, norms.total, math.inf, method.new_threshold())
    assert torch.equal(with_empty[0].grad, alone[0].grad)
    assert gradient_norms(with_empty, math.inf).per_parameter.tolist() == [alone[0].grad.abs().max().item(), 0, 0]


@pytest.mark.parametrize("arguments", [{"clip_factor": 0}, {"clip_factor": math.nan}, {"eps": 0}, {"eps": -1.0}])
def test_refuses_bad_values(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name} must be a number > 0.*got {value}"):
        adaptive_clip_grad_([], **arguments)


_WAYS = {
    "agc": lambda parameters: adaptive_clip_grad_(parameters, 0.1),
    "value": lambda parameters: clip_grad_value_(parameters, 0.5),
    "norm": lambda parameters: [clip_grad_norm_(parameters, 1.0)],
    "largest": lambda parameters: [clip_grad_norm_(parameters, 0.1, math.inf)],
}


@pytest.mark.trap("gradient_clipping: the norm is a DTensor; mixed DTensor and plain or two meshes: group by mesh")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_two_meshes_and_plain_tensors_are_clipped_as_the_whole(dtype, tmp_path):
    whole = _parameters([(5, 3), (1,), (6, 2), (7,), (3,), (3, 2)], 10.0, dtype=dtype)

    def run(rank):
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
        shard = (line, [Shard(0)])  # of the second tensor the second rank has nothing
        places = [shard, shard, (square, [Shard(1), Replicate()]), shard, (line, [Replicate()]), None]
        for kind, clip in _WAYS.items():
            parameters = []
            for parameter, place in zip(whole, places, strict=True):
                tensors = [parameter.detach().clone(), parameter.grad.clone()]
                if place:
                    tensors = [distribute_tensor(tensor, *place) for tensor in tensors]
                parameters.append(torch.nn.Parameter(tensors[0]))
                parameters[-1].grad = tensors[1]
            done = clip(parameters)
            clipped = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters]
            torch.save({"done": done and tuple(done), "clipped": clipped}, tmp_path / f"{kind}{rank}.pt")

    fork(run, 2)
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    for kind, clip in _WAYS.items():
        copies = [torch.nn.Parameter(p.detach()) for p in whole]
        for copy, parameter in zip(copies, whole, strict=True):
            copy.grad = parameter.grad.clone()
        done = clip(copies)
        for rank in range(2):
            seen = torch.load(tmp_path / f"{kind}{rank}.pt")
            torch.testing.assert_close(seen["clipped"], [p.grad for p in copies], rtol=rounding, atol=0)
            if done:
                torch.testing.assert_close(seen["done"], tuple(done), rtol=1e-5, atol=0)


def test_the_norm_after_clipping_counts_what_is_excluded():
    body, head = (torch.ones(3, 2, requires_grad=True) for _ in range(2))
    body.grad, head.grad = torch.full((3, 2), 5.0), torch.full((3, 2), 7.0)
    parameters, groups = [body, head], ClipGroups({}, AGC(0.1, exclude="head"))
    norms = gradient_norms(parameters)
    clipped = ClipState().clip_(groups, parameters, norms, 2.0, lambda _: ["body", "head"])
    after = norm_after(clipped, norms, 2.0)
    assert [result and result.measured > result.bound for _, result in clipped] == [True, None]
    assert torch.equal(head.grad, torch.full((3, 2), 7.0))
    assert after == pytest.approx(torch.cat([body.grad, head.grad]).norm().item())
    assert body.grad.norm() < 1
