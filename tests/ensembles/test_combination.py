"""Combining, measuring and splitting, against torchensemble, closed formulas and members one by one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torchensemble.utils import operator

from lightning_tricks.ensembles.core.combination import (
    classification_uncertainty,
    log_mean_probabilities,
    majority,
    mean_probabilities,
    mean_with_gradient_of_sum,
    member_losses,
    normalized_weights,
    regression_uncertainty,
    votes,
    weighted_mean,
)
from lightning_tricks.ensembles.core.sampling import purpose_seed
from tests.small import cases


def _scores(n=5, rows=7, classes=4, seed=0):
    return torch.randn(n, rows, classes, generator=torch.Generator().manual_seed(seed)) * 2


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(2, 5), st.integers(0, 99))
def test_combinations_are_torchensembles(n, rows, classes, seed):
    scores = _scores(n, rows, classes, seed)
    probabilities = [own.softmax(1) for own in scores]
    torch.testing.assert_close(mean_probabilities(scores), operator.average(probabilities))
    torch.testing.assert_close(weighted_mean(scores), operator.average(list(scores)))
    assert torch.equal(majority(scores), operator.majority_vote(probabilities))  # ties included


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any), st.integers(0, 99))
def test_weights_are_members_given_several_times(times, seed):
    scores = _scores(len(times), seed=seed)
    repeated = scores.repeat_interleave(torch.tensor(times), dim=0)
    weights = normalized_weights(times, len(times))
    torch.testing.assert_close(mean_probabilities(scores, weights), mean_probabilities(repeated))
    torch.testing.assert_close(votes(scores, weights), votes(repeated))
    torch.testing.assert_close(log_mean_probabilities(scores, weights), mean_probabilities(repeated).log())
    for ours, theirs in zip(
        vars(classification_uncertainty(scores, weights)).values(),
        vars(classification_uncertainty(repeated)).values(),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_log_probabilities_do_not_underflow():
    logs = log_mean_probabilities(torch.tensor([[[0.0, 2000.0]], [[0.0, 1900.0]]]))
    assert torch.allclose(logs, torch.tensor([[-1900.0 - math.log(2), 0.0]]))


CLASSES = torch.randint(4, (5, 7), generator=torch.Generator().manual_seed(1))
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
OF_CLASSES = (
    *(nn.CrossEntropyLoss(**options) for options in ({}, {"label_smoothing": 0.2}, {"ignore_index": 2})),
    *(WEIGHTED, nn.CrossEntropyLoss(reduction="sum"), functional.cross_entropy, nn.MultiMarginLoss()),
)
OF_NUMBERS = nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(delta=0.3), nn.SmoothL1Loss(beta=0.5), nn.MSELoss(reduction="sum")


@pytest.mark.parametrize("times", [1, 16])  # 7 rows and 112, which are computed side by side
@cases(
    "criterion, targets",
    *((criterion, CLASSES) for criterion in OF_CLASSES),
    *((criterion, _scores(seed=1)) for criterion in OF_NUMBERS),
    (nn.CrossEntropyLoss(), _scores(seed=1).softmax(-1)),
    ids=str,
)
def test_losses_are_those_of_each_member_alone(criterion, targets, times):
    outputs, reduction = torch.cat([_scores()] * times, 1).requires_grad_(), getattr(criterion, "reduction", None)
    targets = torch.cat([targets] * times, 1)
    expected = torch.stack([criterion(own, target) for own, target in zip(outputs, targets, strict=True)])
    found = member_losses(criterion, outputs, targets)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(losses.sum(), outputs)[0] for losses in (found, expected)]
    torch.testing.assert_close(*gradients)
    assert getattr(criterion, "reduction", None) == reduction, "the user's object stays as it is"


@pytest.mark.parametrize("classes", [2, 3, 7, 10, 15, 17])
@pytest.mark.parametrize("rows", [1, 8, 16, 35, 64])
def test_rows_side_by_side_have_the_bits_of_rows_one_after_another(rows, classes):
    outputs = _scores(3, rows, classes).requires_grad_()
    targets = torch.randint(classes, (3, rows), generator=torch.Generator().manual_seed(1))
    losses = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(3, rows)
    found, expected = member_losses(nn.CrossEntropyLoss(), outputs, targets), losses.sum(1) / rows
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(value.sum(), outputs)[0] for value in (found, expected)]
    assert torch.equal(*gradients)
    assert gradients[0].is_contiguous(), "products with it take another path if it is transposed"


def test_the_loss_shows_the_mean_and_trains_the_sum():
    losses = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    loss = mean_with_gradient_of_sum(losses)
    loss.backward()
    assert loss.item() == 3.0
    assert losses.grad.tolist() == [1, 1, 1]


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(2, 5), st.integers(0, 99))
def test_entropies_by_their_definition(n, classes, seed):
    scores = _scores(n, 3, classes, seed)
    p = scores.double().softmax(-1)
    mean = p.mean(0)
    total = -(mean * mean.log()).sum(-1)
    within = -(p * p.log()).sum(-1).mean(0)
    found = classification_uncertainty(scores.double())
    torch.testing.assert_close(found.total, total)
    torch.testing.assert_close(found.aleatoric, within)
    torch.testing.assert_close(found.epistemic, (total - within).clamp(min=0), atol=1e-12, rtol=1e-6)
    assert (found.total <= math.log(classes) + 1e-9).all()
    assert found.mean.shape == (3, classes)


def test_certain_members_have_no_uncertainty_and_no_nan():
    found = classification_uncertainty(torch.tensor([[[1e4, 0.0]], [[1e4, 0.0]]]))
    assert [float(part) for part in (found.total, found.aleatoric, found.epistemic, found.disagreement)] == [0, 0, 0, 0]
    split = classification_uncertainty(torch.tensor([[[9.0, 0.0]], [[9.0, 0.0]], [[0.0, 9.0]], [[0.0, 9.0]]]))
    assert split.disagreement.item() == 0.5


def test_half_precision_is_computed_in_single():
    scores = _scores().bfloat16()
    torch.testing.assert_close(
        classification_uncertainty(scores).total, classification_uncertainty(scores.float()).total
    )


def test_variances_are_those_of_the_mixture():
    generator = torch.Generator().manual_seed(0)
    means, variances = torch.randn(3, 2, 1, generator=generator), torch.rand(3, 2, 1, generator=generator)
    weights = normalized_weights([1, 2, 3], 3)
    found = regression_uncertainty(means, variances, weights)
    drawn = torch.randn(400_000, 2, 1, generator=generator, dtype=torch.float64)
    member = torch.multinomial(weights, 400_000, replacement=True, generator=generator)
    samples = means[member] + drawn * variances[member].sqrt()
    torch.testing.assert_close(samples.var(0).float(), found.total, rtol=0.02, atol=0)
    torch.testing.assert_close(samples.mean(0).float(), found.mean, rtol=0, atol=0.01)


@pytest.mark.parametrize("weights", [[1, 2], [1, 2, -1], [0, 0, 0], [1, 2, math.nan], [1, math.inf, 1]])
def test_weights_that_cannot_be(weights):
    with pytest.raises(ValueError, match=r"weights must be .*, got \["):
        normalized_weights(weights, 3)


def test_seeds_of_different_purposes_differ():
    seeds = {purpose_seed(seed, *path) for seed in range(20) for path in [(0,), (1,), (0, 1), (1, 0), (0, 0, 1)]}
    assert len(seeds) == 100
    assert purpose_seed(3, 1) == purpose_seed(3, 1)
