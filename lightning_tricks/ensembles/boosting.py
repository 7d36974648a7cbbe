"""What boosted ensembles share: their scores are a sum of members, each of which is fitted to a residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_number
from lightning_tricks.ensembles.bases import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.ensembles.core.boosting import virtual_ensemble
from lightning_tricks.ensembles.core.combination import (
    Criterion,
    Uncertainty,
    classification_uncertainty,
    regression_uncertainty,
)
from lightning_tricks.ensembles.core.factory import Estimator
from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.ensembles.optimizers import CriterionChoice, OptimizerChoice, ScheduleChoice


class BoostedMembers(Ensemble):
    """Members whose sum is the prediction: `shrinkage_rate` times the sum of their outputs."""

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
        super().__init__(
            estimator,
            n_estimators,
            estimator_args,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            criterion=criterion,
            n_outputs=n_outputs,
            vectorize=vectorize,
            seed=seed,
        )
        _check_criterion(self.criterion)

    @property
    def uses_member_steps(self) -> bool:
        """Whether members are trained by their own `training_step`: never, as they are fitted to residuals."""
        return False

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the scores of the ensemble, (B, ...), of the outputs of its members, (n, B, ...)."""
        return self.shrinkage_rate * outputs.sum(0)

    def fit_to_residuals(self, outputs: Tensor, residuals: Tensor) -> Tensor:
        """Return the squared error of each member, (n,): the mean of its values, or their sum."""
        errors = (outputs - residuals).square().flatten(1)
        return errors.sum(1) if self.use_reduction_sum else errors.mean(1)

    def set_criterion(self, criterion: Criterion) -> None:
        """Choose the loss, whose negative gradient the members are fitted to."""
        _check_criterion(criterion)
        super().set_criterion(criterion)


class BoostedClassifier(BoostedMembers, ClassifierEnsemble):
    """A boosted ensemble whose sum are logits."""

    def combine(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of the sum."""
        return self.scores(outputs).softmax(-1)

    def log_prediction(self, outputs: Tensor) -> Tensor:
        """Return the sum, which are logits."""
        return self.scores(outputs)

    def uncertainty(self, outputs: Tensor) -> Uncertainty:
        """Split the entropy of the prediction by how much the last stages have changed it."""
        virtual = classification_uncertainty(virtual_ensemble(outputs, self.shrinkage_rate))
        whole = classification_uncertainty(self.scores(outputs).unsqueeze(0))
        epistemic = torch.minimum(virtual.epistemic, whole.total)
        return replace(
            virtual, mean=whole.mean, total=whole.total, aleatoric=whole.total - epistemic, epistemic=epistemic
        )


class BoostedRegressor(BoostedMembers, RegressorEnsemble):
    """A boosted ensemble whose sum is the prediction."""

    def combine(self, outputs: Tensor) -> Tensor:
        """Return the sum."""
        return self.scores(outputs)

    def prediction_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the criterion of the sum."""
        return self.criterion(self.scores(outputs), target)

    def uncertainty(self, outputs: Tensor) -> Uncertainty:
        """Return the variance of what the last stages predict around the prediction."""
        return replace(
            regression_uncertainty(virtual_ensemble(outputs, self.shrinkage_rate)), mean=self.scores(outputs)
        )


def _check_criterion(criterion: Any) -> None:
    if isinstance(criterion, nn.GaussianNLLLoss):
        raise ValueError(
            "criterion=GaussianNLLLoss() needs a variance, which a sum of members does not give: use VotingRegressor."
        )
