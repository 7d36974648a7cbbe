"""Boosted ensembles, whose scores are a sum of members; and soft gradient boosting, which trains all at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_number
from lightning_tricks.ensembles.arguments import CriterionChoice, OptimizerChoice, ScheduleChoice, passed_on
from lightning_tricks.ensembles.core.combination import (
    Criterion,
    Uncertainty,
    at_least_single,
    mean_with_gradient_of_sum,
)
from lightning_tricks.ensembles.core.factory import Estimator
from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.ensembles.prediction import ClassifierEnsemble, RegressorEnsemble


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


class BoostedMembers(Ensemble):
    """Members whose sum is the prediction: `shrinkage_rate` times the sum of their outputs."""

    predictor_without_variance = "a sum of members"
    uses_member_steps = False  # they are fitted to residuals

    def __init__(
        self,
        estimator: Estimator | None,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        *,
        shrinkage_rate: float = 1.0,
        use_reduction_sum: bool = False,
        optimizer: OptimizerChoice = None,
        lr_scheduler: ScheduleChoice = None,
        criterion: CriterionChoice = None,
        n_outputs: int | None = None,
        vectorize: bool | Literal["auto"] = "auto",
        seed: int | None = None,
    ) -> None:
        self.shrinkage_rate = check_number("shrinkage_rate", shrinkage_rate, above=0, at_most=1)
        self.use_reduction_sum = bool(use_reduction_sum)
        super().__init__(**passed_on(super().__init__, locals()))

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the scores of the ensemble as those of one member, (1, B, ...), of outputs (n, B, ...)."""
        return self.shrinkage_rate * outputs.sum(0, keepdim=True)

    def combine(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of the sum, or the sum itself."""
        return super().combine(self.scores(outputs))

    def prediction_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the criterion of the sum."""
        return super().prediction_loss(self.scores(outputs), target)

    def uncertainty(self, outputs: Tensor) -> Uncertainty:
        """Return the uncertainty of the sum, all of it as noise: the members are parts of one model."""
        return super().uncertainty(self.scores(outputs))

    def fit_to_residuals(self, outputs: Tensor, residuals: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each member, (n,): the mean of its values whose rows count, or their sum."""
        errors, counted = (outputs - residuals).square(), self.is_counted(targets)
        if counted is None:
            return errors.flatten(1).sum(1) if self.use_reduction_sum else errors.flatten(1).mean(1)
        sums = (errors.flatten(2) * counted.unsqueeze(-1)).flatten(1).sum(1)
        return sums if self.use_reduction_sum else sums / (counted.sum(1) * outputs.shape[-1]).clamp(min=1)

    def torchensemble_arguments(self) -> dict[str, Any]:
        """Return the arguments of torchensemble's class beside the number of members."""
        return {**super().torchensemble_arguments(), "shrinkage_rate": self.shrinkage_rate}


class SoftGradientBoostedMembers(BoostedMembers):
    """Members that are trained at once on shared batches, each fitted to the residual of those before it."""

    def member_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared errors to the residuals, through which no gradient flows to the members before."""
        sums = self.shrinkage_rate * exclusive_sums(at_least_single(outputs.detach()))
        residuals = negative_gradient(self.criterion, sums.flatten(0, 1), targets.flatten(0, 1))
        return mean_with_gradient_of_sum(self.fit_to_residuals(outputs, residuals.view_as(outputs), targets))

    def training_loss(self, inputs: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value to minimize, and the scores of the ensemble."""
        loss, outputs = super().training_loss(inputs, targets)
        return loss, self.scores(outputs.detach())


class SoftGradientBoostingClassifier(SoftGradientBoostedMembers, ClassifierEnsemble):
    """Train classifiers at once, each on the residual of the sum of the members before it, in each batch.

    Similar to `GradientBoostingClassifier`, in the time of one stage, as members of the same structure run at once.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes; a LightningModule counts as a plain
            module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        shrinkage_rate: Factor of each member's output, in (0, 1].
        use_reduction_sum: Whether the squared error is summed over a batch, as in torchensemble, so that steps grow
            with the batch size; by default it is averaged.
        optimizer: The optimizer, as for `VotingClassifier`; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of the sum (B, n_outputs) and targets; members fit its negative gradient. Cross-entropy by
            default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once: True, False or "auto".
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Feng et al., arXiv 2006.04059; torchensemble's class of this name.
    """


class SoftGradientBoostingRegressor(SoftGradientBoostedMembers, RegressorEnsemble):
    """Train regressors at once, each on the residual of the sum of the members before it, in each batch.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes; a LightningModule counts as a plain
            module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        shrinkage_rate: Factor of each member's output, in (0, 1].
        use_reduction_sum: Whether the squared error is summed over a batch instead of averaged.
        optimizer: The optimizer; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: The schedule; none by default.
        criterion: Loss of the sum and targets of the same shape; the mean squared error by default.
        n_outputs: Number of values predicted for each sample.
        vectorize: Whether members run at once.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Feng et al., arXiv 2006.04059; torchensemble's class of this name.
    """
