"""What the members of a boosted ensemble are fitted to."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_tricks.ensembles.core.combination import Criterion


def negative_gradient(criterion: Criterion, scores: Tensor, targets: Tensor) -> Tensor:
    """Return the negative gradient of each sample's loss with respect to its scores, the pseudo-residual.

    Args:
        criterion: Loss of a batch of scores and targets. For the squared error its half is taken, so that the result is
            the residual itself. A loss without an attribute `reduction` counts as a mean over samples.
        scores: Scores of the samples, (B, ...).
        targets: Targets of the samples, as the criterion takes them.

    Returns:
        The gradient, of the scores' shape; no gradient flows through it.

    Raises:
        ValueError: If the loss does not depend on the scores.

    Source: Friedman, Annals of Statistics 29, 2001.

    Examples:
        >>> negative_gradient(nn.CrossEntropyLoss(), torch.zeros(1, 2), torch.tensor([1])).tolist()
        [[-0.5, 0.5]]
    """
    scores = scores.detach()
    if type(criterion) is nn.MSELoss:
        return targets - scores
    if type(criterion) is nn.CrossEntropyLoss and _is_plain_cross_entropy(criterion, targets):
        counted = (targets != criterion.ignore_index).unsqueeze(-1)
        index, ones = targets.unsqueeze(-1) * counted, torch.ones_like(scores[..., :1])
        try:
            return (-scores.softmax(-1)).scatter_add_(-1, index, ones) * counted
        except RuntimeError as error:  # a class that does not exist, as the cross-entropy says it
            raise IndexError(str(error)) from None
    with torch.enable_grad():
        leaf = scores.requires_grad_()
        loss = _sum_over_samples(criterion, leaf, targets)
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    if gradient is None:
        raise ValueError(f"criterion={criterion!r} does not depend on the scores: nothing can be fitted to it.")
    return -gradient


def exclusive_sums(outputs: Tensor) -> Tensor:
    """Return for each member the sum of the outputs of those before it: (n, B, ...) of outputs (n, B, ...).

    Examples:
        >>> exclusive_sums(torch.tensor([[1.0], [2.0], [3.0]])).tolist()
        [[0.0], [1.0], [3.0]]
    """
    return torch.cat([torch.zeros_like(outputs[:1]), outputs[:-1]]).cumsum(0)


def _is_plain_cross_entropy(criterion: Any, targets: Tensor) -> bool:
    """Whether the gradient is that of class indices, all of which count alike."""
    of_indices = targets.ndim == 1 and not targets.is_floating_point()
    return of_indices and criterion.weight is None and not criterion.label_smoothing


def _sum_over_samples(criterion: Any, scores: Tensor, targets: Tensor) -> Tensor:
    if getattr(criterion, "reduction", None) in ("mean", "sum", "none"):
        summed = copy.copy(criterion)
        summed.reduction = "sum"
        return cast(Tensor, summed(scores, targets))
    return cast(Tensor, criterion(scores, targets).mean() * len(scores))
