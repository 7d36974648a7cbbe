"""The core against torch, against float64, and against itself on shards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks.gradient_clipping import clip_grad_norm_, clip_grads_with_norm_, gradient_norms
from tests.small import HostReads, cases

_NORM_TYPES = [1.0, 2.0, 3.0, 0.5, math.inf]


def _parameters(*gradients):
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def _random_gradients(shapes, scale=1.0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]


_shapes = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6)


@settings(derandomize=True)
@given(
    shapes=_shapes,
    scale=st.floats(1e-3, 1e3),
    max_norm=st.floats(1e-3, 1e3),
    norm_type=st.sampled_from(_NORM_TYPES),
    seed=st.integers(0, 99),
)
def test_equals_torch_bit_for_bit(shapes, scale, max_norm, norm_type, seed):
    gradients = _random_gradients(shapes, scale, seed=seed)
    ours, theirs = _parameters(*gradients), _parameters(*gradients)
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our.grad, their.grad)


@pytest.mark.parametrize("norm_type", _NORM_TYPES)
def test_norms_of_mixed_dtypes_are_in_the_order_of_the_parameters(norm_type):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    gradients = [g.to(d) for g, d in zip(_random_gradients([(3,), (4, 2), (5,), (), (7,)]), dtypes, strict=True)]
    parameters = _parameters(*gradients)
    parameters.insert(2, torch.nn.Parameter(torch.zeros(3)))  # has no gradient
    norms = gradient_norms(parameters, norm_type)
    exact = torch.stack([torch.linalg.vector_norm(g.double(), norm_type) for g in gradients])
    torch.testing.assert_close(norms.per_parameter.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(norms.total.double(), torch.linalg.vector_norm(exact, norm_type), rtol=1e-6, atol=0)
    clip_grads_with_norm_(parameters, 0.5, norms.total)
    assert [p.grad.dtype for p in parameters if p.grad is not None] == dtypes
    torch.testing.assert_close(gradient_norms(parameters, norm_type).total.item(), 0.5, rtol=5e-3, atol=0)


@pytest.mark.trap("gradient_clipping: norms of fp16 gradients need fp32 accumulation")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_norms_do_not_overflow(dtype):
    (parameter,) = _parameters(torch.full((1_000_000,), 300.0, dtype=dtype))
    true = parameter.grad.double().norm().item()
    if dtype is torch.float16:
        assert torch.nn.utils.get_total_norm([parameter.grad]).isinf()
    assert gradient_norms(parameter).total.item() == pytest.approx(true, rel=1e-2)
    clip_grad_norm_(parameter, 1.0)
    assert parameter.grad.double().norm().item() == pytest.approx(1.0, rel=2e-2)


@pytest.mark.trap("gradient_clipping: one NaN makes every gradient NaN, one Inf zeroes the others")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_are_treated_as_torch_does(bad):
    gradients = _random_gradients([(3,), (2,)])
    gradients[1][0] = bad
    ours, theirs = _parameters(*gradients), _parameters(*gradients)
    norm = clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0), equal_nan=True)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=0, atol=0, equal_nan=True)


def test_infinite_max_norm_touches_nothing():
    gradients = [torch.tensor([math.inf, -0.0, math.nan]), torch.tensor([1e-45])]
    parameters = _parameters(*gradients)
    clip_grad_norm_(parameters, math.inf)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter.grad.view(torch.int32), gradient.view(torch.int32))


@cases("parameters", [], iter(()), [torch.zeros(3, requires_grad=True)], ids=["list", "iterator", "parameter"])
def test_nothing_to_clip(parameters):
    assert clip_grad_norm_(parameters, 1.0).item() == 0.0


def test_takes_a_tensor_and_a_generator():
    one = _parameters(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(one[0], 1.0).item() == 5.0
    two = _parameters(torch.tensor([3.0]), torch.tensor([4.0]))
    assert clip_grad_norm_((p for p in two), 1.0).item() == 5.0
    assert two[1].grad.item() == pytest.approx(0.8)


def test_sparse_gradients():
    tables = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        table = torch.nn.Embedding(10, 3, sparse=True)
        table(torch.tensor([1, 1, 2])).sum().backward()
        tables.append((clip(table.parameters(), 0.1), table.weight.grad.to_dense()))
    assert torch.equal(tables[0][0], tables[1][0])
    assert torch.equal(tables[0][1], tables[1][1])


def test_reads_nothing_back_to_the_host():
    parameters = _parameters(*_random_gradients([(3,), (2, 2)]), torch.ones(4, dtype=torch.float16))
    with HostReads() as reads:
        clip_grad_norm_(parameters, 1.0)
    assert reads.count == 0


@pytest.mark.parametrize("value", [0, -1.0, math.nan, -math.inf])
@pytest.mark.parametrize("name", ["max_norm", "norm_type"])
def test_refuses_what_is_not_positive(name, value):
    parameters = _parameters(torch.ones(2))
    with pytest.raises(ValueError, match=f"{name} must be a number > 0 .*got {value}"):
        clip_grad_norm_(parameters, **{"max_norm": 1.0, name: value})
    assert torch.equal(parameters[0].grad, torch.ones(2))


@pytest.mark.parametrize("value", [True, "1.0", None])
def test_refuses_what_is_no_number(value):
    with pytest.raises(TypeError, match=f"max_norm must be a number > 0 .*{value!r}"):
        clip_grad_norm_([], value)
