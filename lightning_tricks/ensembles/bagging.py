"""Bagging: voting whose members are trained on bootstrap samples of the data set."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.ensembles.core.sample_orders import bootstrap_rows
from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.ensembles.voting import VotingClassifier, VotingRegressor


class BootstrappedMembers(Ensemble):
    """Members that are trained on bootstrap samples of the data set."""

    def member_rows(self, size: int) -> Sequence[Tensor]:
        """Return a bootstrap sample for each member."""
        return bootstrap_rows(size, self.n_estimators, self.seed)

    @property
    def per_member_batches(self) -> bool:
        """Whether members see the samples in orders of their own: always."""
        if self.hparams.get("shared_order"):
            raise MisconfigurationException(
                f"{type(self).__name__}(shared_order=True): members that share the batches have no samples of their "
                "own: leave it out, or use Voting instead."
            )
        return True

    def on_shared_batches(self, reason: str) -> None:
        """Refuse to train on shared batches."""
        raise MisconfigurationException(
            f"{type(self).__name__} needs a DataLoader whose dataset has a length, and {reason}: use Voting instead."
        )


class BaggingClassifier(BootstrappedMembers, VotingClassifier):
    """Train classifiers on bootstrap samples, drawn once for each member, and average their probabilities.

    A bootstrap sample is drawn from the rows that the loader's sampler yields; a sampler that draws with replacement,
    such as a `WeightedRandomSampler`, draws that of each member itself.

    Members differ more than those of `VotingClassifier` and each one is worse, as it sees 63 % of the samples: with
    networks, voting is the better default.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: The optimizer, as for `VotingClassifier`.
        lr_scheduler: The schedule, as for `VotingClassifier`; none by default.
        criterion: Loss of logits (B, n_outputs) and targets; cross-entropy by default.
        voting_strategy: "soft" averages probabilities, "hard" counts votes.
        weights: Weights of the members, >= 0; equal ones by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Must be False: members that share the batches have no samples of their own.
        seed: Seed of the initial weights, sample orders and bootstrap samples, >= 0; drawn from torch's generator by
            default.

    Raises:
        MisconfigurationException: When a fit starts, if members cannot have samples of their own.

    Source: Breiman, Machine Learning 24 (1996); torchensemble's class of this name.
    """


class BaggingRegressor(BootstrappedMembers, VotingRegressor):
    """Train regressors on bootstrap samples, drawn once for each member, and average their predictions.

    Args:
        estimator: The members, in any of the forms that `VotingRegressor` takes.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: The optimizer, as for `VotingClassifier`.
        lr_scheduler: The schedule, as for `VotingRegressor`; none by default.
        criterion: Loss of outputs and targets of the same shape; the mean squared error by default.
        weights: Weights of the members, >= 0; equal ones by default.
        n_outputs: Number of values that are predicted for each sample.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Must be False: members that share the batches have no samples of their own.
        seed: Seed of the initial weights, sample orders and bootstrap samples, >= 0; drawn from torch's generator by
            default.

    Raises:
        MisconfigurationException: When a fit starts, if members cannot have samples of their own.

    Source: Breiman, Machine Learning 24 (1996); torchensemble's class of this name.
    """
