"""Soft gradient boosting: members that are trained at once, each on what those before it get wrong."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_tricks.ensembles.bases import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.ensembles.boosting import BoostedMembers
from lightning_tricks.ensembles.core.boosting import exclusive_sums, negative_gradient
from lightning_tricks.ensembles.core.combination import at_least_single, mean_with_gradient_of_sum


class SoftGradientBoostedMembers(BoostedMembers):
    """Members that are trained at once on shared batches, each fitted to the residual of those before it."""

    def member_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared errors to the residuals, through which no gradient flows to the members before."""
        sums = self.shrinkage_rate * exclusive_sums(at_least_single(outputs.detach()))
        residuals = negative_gradient(self.criterion, sums.flatten(0, 1), targets.flatten(0, 1))
        return mean_with_gradient_of_sum(self.fit_to_residuals(outputs, residuals.view_as(outputs)))

    def training_loss(self, inputs: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is minimized, and the scores of the ensemble."""
        loss, outputs = super().training_loss(inputs, targets)
        return loss, self.scores(outputs.detach())


class SoftGradientBoostingClassifier(SoftGradientBoostedMembers, ClassifierEnsemble):
    """Train classifiers at once, each on what the sum of those before it gets wrong in this very batch.

    Like `GradientBoostingClassifier` in the time of one stage, as members of one structure run at once.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes; a LightningModule counts as a plain
            module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        shrinkage_rate: Factor of each member's output, in (0, 1].
        use_reduction_sum: Whether the squared error is summed over a batch, as by torchensemble, so that the size of a
            step grows with that of the batch; by default it is averaged.
        optimizer: The optimizer, as for `VotingClassifier`; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: The schedule, as for `VotingClassifier`; none by default.
        criterion: Loss of the sum (B, n_outputs) and targets, whose negative gradient the members are fitted to;
            cross-entropy by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once: True, False or "auto".
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Feng et al., arXiv 2006.04059; torchensemble's class of this name.
    """


class SoftGradientBoostingRegressor(SoftGradientBoostedMembers, RegressorEnsemble):
    """Train regressors at once, each on what the sum of those before it gets wrong in this very batch.

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
        n_outputs: Number of values that are predicted for each sample.
        vectorize: Whether members run at once.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Feng et al., arXiv 2006.04059; torchensemble's class of this name.
    """
