"""Bagging: voting whose members are trained on bootstrap samples of the data set."""

from __future__ import annotations

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.ensembles.voting import VotingClassifier, VotingRegressor


class BootstrappedMembers(Ensemble):
    """Members that are trained on bootstrap samples of the data set."""

    bootstrap = True

    @property
    def per_member_batches(self) -> bool:  # type: ignore[override]
        """Whether members see the samples in orders of their own: always."""
        if self.hparams.get("shared_order"):
            raise MisconfigurationException(
                f"{type(self).__name__}(shared_order=True): members that share the batches have no samples of their "
                "own: leave it out, or take Voting."
            )
        return True

    def _share_batches(self, reason: str) -> None:
        raise MisconfigurationException(
            f"{type(self).__name__} draws samples from a DataLoader of a data set with a length, and {reason}: take "
            "Voting."
        )


class BaggingClassifier(BootstrappedMembers, VotingClassifier):
    """Train classifiers on bootstrap samples, drawn once for each member, and average their probabilities.

    Members differ more than those of `VotingClassifier` and each one is worse, as it sees 63 % of the samples: with
    networks, voting is the better default.

    Args:
        estimator: See `VotingClassifier`, as for all arguments; `shared_order` must be False.
        n_estimators: See there.
        estimator_args: See there.
        optimizer: See there.
        lr_scheduler: See there.
        criterion: See there.
        voting_strategy: See there.
        weights: See there.
        n_outputs: See there.
        vectorize: See there.
        shared_order: See there.
        seed: See there; decides about the bootstrap samples, too.

    Raises:
        MisconfigurationException: In a fit, if members cannot have samples of their own.

    Source: Breiman, Machine Learning 24 (1996); torchensemble's class of this name.
    """


class BaggingRegressor(BootstrappedMembers, VotingRegressor):
    """Train regressors on bootstrap samples, drawn once for each member, and average their predictions.

    Args:
        estimator: See `VotingRegressor`, as for all arguments; `shared_order` must be False.
        n_estimators: See there.
        estimator_args: See there.
        optimizer: See there.
        lr_scheduler: See there.
        criterion: See there.
        weights: See there.
        n_outputs: See there.
        vectorize: See there.
        shared_order: See there.
        seed: See there; decides about the bootstrap samples, too.

    Raises:
        MisconfigurationException: In a fit, if members cannot have samples of their own.

    Source: Breiman, Machine Learning 24 (1996); torchensemble's class of this name.
    """
