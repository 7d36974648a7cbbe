"""What boosted ensembles share: their scores are a sum of members, each of which is fitted to a residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from lightning_tricks._shared.checks import check_number
from lightning_tricks.ensembles.core.combination import Uncertainty
from lightning_tricks.ensembles.core.factory import Estimator
from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.ensembles.optimizers import CriterionChoice, OptimizerChoice, ScheduleChoice


class BoostedMembers(Ensemble):
    """Members whose sum is the prediction: `shrinkage_rate` times the sum of their outputs."""

    predictor_without_variance = "a sum of members"

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

    @property
    def uses_member_steps(self) -> bool:
        """Whether members are trained by their own `training_step`: never, as they are fitted to residuals."""
        return False

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

    def fit_to_residuals(self, outputs: Tensor, residuals: Tensor) -> Tensor:
        """Return the squared error of each member, (n,): the mean of its values, or their sum."""
        errors = (outputs - residuals).square().flatten(1)
        return errors.sum(1) if self.use_reduction_sum else errors.mean(1)

    def torchensemble_arguments(self) -> dict[str, Any]:
        """Return the arguments of torchensemble's class beside the number of members."""
        return {**super().torchensemble_arguments(), "shrinkage_rate": self.shrinkage_rate}
