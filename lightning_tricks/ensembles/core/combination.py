"""Functions that combine the outputs of members, compute their losses and split their uncertainty.

Outputs of n members on B samples have the shape (n, B, C).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

Criterion = Callable[[Tensor, Tensor], Tensor]

# Floats that a processor computes at once, of which softmax over fewer classes leaves some unused
_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
_MEANS_OF_ROWS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


@dataclass(frozen=True)
class Uncertainty:
    """The uncertainty of an ensemble for each sample.

    In classification, `mean` contains probabilities, and the parts are entropies in nats, (B,). In regression, they are
    variances of each output, (B, C). `total` is `aleatoric` plus `epistemic`.

    Attributes:
        mean: The combined prediction, (B, C).
        total: Entropy of the mean; variance of the mixture of the members.
        aleatoric: Noise in the data as estimated by the members: the mean of their entropies, or of their predicted
            variances (0 if they predict none).
        epistemic: Disagreement of the members: the mutual information of prediction and member, or the variance of
            the members' means. High far from the training data.
        disagreement: Share of the members that do not vote for the most frequent class, (B,); in regression, the
            standard deviation of the members' means, (B, C).
    """

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    disagreement: Tensor


def log_mean_probabilities(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the logarithm of the members' mean probabilities, without underflow.

    Args:
        scores: Logits, (n, B, C).
        weights: Weights of the members, (n,), with the sum 1; None for equal ones.

    Returns:
        Log-probabilities, (B, C).
    """
    logs = scores.log_softmax(-1)
    if weights is None:
        return logs.logsumexp(0) - math.log(len(scores))
    return (logs + weights.log().view(-1, 1, 1)).logsumexp(0)


def mean_probabilities(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the members' mean probabilities, (B, C), of logits (n, B, C): soft voting.

    Examples:
        >>> mean_probabilities(torch.tensor([[[0.0, 0.0]], [[0.0, torch.inf]]]).nan_to_num(posinf=100)).tolist()
        [[0.25, 0.75]]
    """
    return weighted_mean(scores.softmax(-1), weights)


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over members of values (n, ...)."""
    return values.mean(0) if weights is None else torch.tensordot(weights.to(values.dtype), values, dims=1)


def votes(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    """Count the members' votes as shares: (B, C) of logits (n, B, C).

    Examples:
        >>> votes(torch.tensor([[[0.0, 1.0]], [[0.0, 2.0]], [[3.0, 0.0]], [[0.0, 1.0]]])).tolist()
        [[0.25, 0.75]]
    """
    chosen = functional.one_hot(scores.argmax(-1), scores.shape[-1])
    return weighted_mean(chosen.to(scores.dtype), weights)


def majority(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return 1 for the class with most votes, the first of several, and 0 for others, (B, C): hard voting."""
    share = votes(scores, weights)
    return functional.one_hot(share.argmax(-1), share.shape[-1]).to(scores.dtype)


def member_losses(criterion: Criterion, outputs: Tensor, targets: Tensor) -> Tensor:
    """Measure each member's loss on its own rows.

    Args:
        criterion: Loss of a batch of outputs and targets.
        outputs: Outputs of the members, shape (n, B, ...).
        targets: Targets of the members, shape (n, B, ...).

    Returns:
        Losses, (n,), as the criterion gives them for each member alone.
    """
    kind, reduced = type(criterion), getattr(criterion, "reduction", "")
    if kind is nn.CrossEntropyLoss and reduced == "mean" and criterion.weight is None:  # type: ignore[attr-defined]
        ignored, smoothing = criterion.ignore_index, criterion.label_smoothing  # type: ignore[attr-defined]
        rows, flat = outputs.flatten(0, 1), targets.flatten(0, 1)
        few = targets.ndim == 2 == outputs.ndim - 1 and outputs.shape[2] < _LANES and not outputs.shape[1] % _LANES
        if few and outputs.is_cpu and len(outputs) > 1:
            # rows side by side have the same bits if none are left over; flat before, as gradients keep their layout so
            rows, flat = rows.view(outputs.shape).mT, targets
        losses = functional.cross_entropy(rows, flat, ignore_index=ignored, reduction="none", label_smoothing=smoothing)
        by_member: Tensor = losses.view(len(outputs), -1)
        if targets.is_floating_point():
            return by_member.mean(1)
        return by_member.sum(1) / targets.ne(ignored).view(len(outputs), -1).sum(1)
    if kind in _MEANS_OF_ROWS and reduced == "mean":
        single = dict(vars(criterion)) | {"reduction": "none"}
        unreduced = kind.__new__(kind)
        unreduced.__dict__.update(single)
        return cast(Tensor, unreduced(outputs, targets)).flatten(1).mean(1)
    return torch.stack([criterion(own, target) for own, target in zip(outputs, targets, strict=True)])


def mean_with_gradient_of_sum(losses: Tensor) -> Tensor:
    """Return a loss with the value of the members' mean and the gradients of their sum.

    Each member is trained as it would be alone, whatever their number, and the number that people see is a member's.
    """
    total = losses.sum()
    return total + (losses.mean() - total).detach()


def classification_uncertainty(scores: Tensor, weights: Tensor | None = None) -> Uncertainty:
    """Split the entropy of a classifier's members.

    Args:
        scores: Logits, (n, B, C).
        weights: Weights of the members, (n,), with the sum 1; None for equal ones.

    Source: Depeweg et al., arXiv 1710.07283.

    Examples:
        >>> sure = torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]])  # both members are, but not of the same class
        >>> uncertainty = classification_uncertainty(sure)
        >>> [round(float(part), 3) for part in (uncertainty.total, uncertainty.aleatoric, uncertainty.epistemic)]
        [0.693, 0.0, 0.693]
    """
    scores = at_least_single(scores)
    logs = scores.log_softmax(-1)
    combined = log_mean_probabilities(scores, weights)
    total = -(combined.exp() * combined).nan_to_num().sum(-1)
    aleatoric = weighted_mean(-(logs.exp() * logs).nan_to_num().sum(-1), weights)
    epistemic = (total - aleatoric).clamp(min=0)
    return Uncertainty(combined.exp(), total, aleatoric, epistemic, 1 - votes(scores, weights).amax(-1))


def around_prediction(spread: Uncertainty, probabilities: Tensor) -> Uncertainty:
    """Return the uncertainty of probabilities (B, C), of which the disagreement of members explains what it can.

    Args:
        spread: The uncertainty of the members, whose mean is another prediction.
        probabilities: The prediction.
    """
    total = torch.special.entr(probabilities).sum(-1)
    epistemic = torch.minimum(spread.epistemic, total)
    return replace(spread, mean=probabilities, total=total, aleatoric=total - epistemic, epistemic=epistemic)


def regression_uncertainty(
    means: Tensor, variances: Tensor | None = None, weights: Tensor | None = None
) -> Uncertainty:
    """Split the variance of the mixture of a regressor's members.

    Args:
        means: Predictions, (n, B, C).
        variances: Variances that the members predict, shape (n, B, C); None if they predict none.
        weights: Weights of the members, (n,), with the sum 1; None for equal ones.

    Source: Lakshminarayanan et al., arXiv 1612.01474.

    Examples:
        >>> regression_uncertainty(torch.tensor([[[1.0]], [[3.0]]])).epistemic.tolist()
        [[1.0]]
    """
    mean = weighted_mean(means, weights)
    epistemic = weighted_mean((means - mean).square(), weights)
    aleatoric = torch.zeros_like(mean) if variances is None else weighted_mean(variances, weights)
    return Uncertainty(mean, aleatoric + epistemic, aleatoric, epistemic, epistemic.sqrt())


def at_least_single(values: Tensor) -> Tensor:
    """Return values of half precision in single precision, and others as they are."""
    return values.float() if values.dtype.itemsize < 4 else values


def snapshot_factor(step: int, cycle: int) -> float:
    """Return the learning rate's factor in cycles of half a cosine, each from 1 towards 0.

    Args:
        step: Optimizer steps made.
        cycle: Steps of a cycle.

    Source: Huang et al., arXiv 1704.00109.

    Examples:
        >>> [round(snapshot_factor(step, cycle=4), 3) for step in range(6)]
        [1.0, 0.854, 0.5, 0.146, 1.0, 0.854]
    """
    return (math.cos(math.pi * (step % cycle) / cycle) + 1) / 2


def triangle_factor(step: int, cycle: int, high: float, low: float) -> float:
    """Return the learning rate's factor in cycles that fall in straight lines from `high` to `low` and rise again.

    Args:
        step: Optimizer steps made.
        cycle: Steps of a cycle, in the middle of which the factor is `low`.
        high: Factor at the start of a cycle.
        low: Factor in its middle.

    Source: Garipov et al., arXiv 1802.10026.

    Examples:
        >>> [triangle_factor(step, cycle=4, high=1.0, low=0.0) for step in range(5)]
        [1.0, 0.5, 0.0, 0.5, 1.0]
    """
    share = (step % cycle) / cycle
    towards_high = abs(1 - 2 * share)
    return high * towards_high + low * (1 - towards_high)


def normalized_weights(weights: Sequence[float] | None, n: int) -> Tensor | None:
    """Check the members' weights and give them the sum 1.

    Raises:
        ValueError: If there are not n, or one is negative or not finite, or all are 0.

    Examples:
        >>> normalized_weights([1, 3], 2).tolist()
        [0.25, 0.75]
    """
    if weights is None:
        return None
    given = torch.as_tensor(weights, dtype=torch.float32)
    if given.shape != (n,):
        raise ValueError(f"weights must be one number for each of the {n} members, got {weights!r}.")
    if not (given.isfinite().all() and (given >= 0).all() and given.sum() > 0):
        raise ValueError(f"weights must be finite, none below 0 and not all 0, got {weights!r}.")
    return given / given.sum()
