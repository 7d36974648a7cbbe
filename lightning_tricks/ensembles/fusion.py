"""Fusion: members that are trained together, as one model that averages them."""

from __future__ import annotations

from torch import Tensor

from lightning_tricks.ensembles.core.combination import Uncertainty, around_prediction, at_least_single, weighted_mean
from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.ensembles.prediction import ClassifierEnsemble, RegressorEnsemble


class FusedMembers(Ensemble):
    """Members whose mean is trained, as one model."""

    uses_member_steps = False  # their mean has one loss

    def member_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the criterion of the mean of the outputs (n, B, ...), whose rows are the same for all members."""
        return self.prediction_loss(outputs, targets[0])


class FusionClassifier(FusedMembers, ClassifierEnsemble):
    """Train classifiers together: the loss is that of their mean logits, and so is the prediction.

    Args:
        estimator: See `VotingClassifier`, as for the arguments that follow; a LightningModule counts as a plain module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: Adam with a learning rate of 1e-3 by default.
        lr_scheduler: The schedule, as of `VotingClassifier`; none by default.
        criterion: Loss of the mean and the targets; cross-entropy by default.
        weights: Weights of the members in the mean, >= 0; equal ones by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: torchensemble's class of this name.
    """

    def combine(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of the mean logits."""
        return weighted_mean(outputs, self.member_weights(outputs)).softmax(-1)

    def uncertainty(self, outputs: Tensor) -> Uncertainty:
        """Split the entropy of the prediction by how much the members disagree."""
        return around_prediction(super().uncertainty(outputs), self.combine(at_least_single(outputs)))

    def log_prediction(self, outputs: Tensor) -> Tensor:
        """Return the mean logits."""
        return weighted_mean(outputs, self.member_weights(outputs))


class FusionRegressor(FusedMembers, RegressorEnsemble):
    """Train regressors together: the loss is that of their mean, and so is the prediction.

    Args:
        estimator: See `VotingClassifier`, as for the arguments that follow; a LightningModule counts as a plain module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: Adam with a learning rate of 1e-3 by default.
        lr_scheduler: The schedule, as of `VotingClassifier`; none by default.
        criterion: Loss of the mean and the targets; the mean squared error by default.
        weights: Weights of the members in the mean, >= 0; equal ones by default.
        n_outputs: Number of values that are predicted for each sample.
        vectorize: Whether members run at once.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: torchensemble's class of this name.
    """
