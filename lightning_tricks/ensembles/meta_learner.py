"""The meta-learner of a stacking ensemble: what it is built of, what it sees of the members, and its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks._shared.modes import eval_mode
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.ensembles.core.combination import Uncertainty
from lightning_tricks.ensembles.core.counts import register_count, set_count
from lightning_tricks.ensembles.core.factory import imported_class
from lightning_tricks.ensembles.core.linear_final import (
    LinearFinal,
    check_linear_model,
    default_linear_model,
    fit_linear_model,
    is_of_sklearn,
)
from lightning_tricks.ensembles.core.members import refuse_lazy
from lightning_tricks.ensembles.core.meta_features import append_inputs
from lightning_tricks.ensembles.core.seeds import INITIAL_WEIGHTS, purpose_seed
from lightning_tricks.ensembles.ensemble import Ensemble


class MetaLearner(Ensemble):
    """The part of a stacking ensemble that predicts: members, and a meta-learner that sees their outputs.

    Attributes:
        final_estimator_: The meta-learner, a module; the state dict holds it.
        final_estimator: scikit-learn's model that fits it; None for a torch module and, until a fit, for the default.
        passthrough: Whether it sees the inputs, too.
    """

    is_classifier: bool
    passthrough: bool
    final_estimator: Any
    final_estimator_: nn.Module
    final_fitted: Tensor
    _final_is_fitted: int  # 1 if the meta-learner predicts, else 0

    # --- what it is

    def set_final_estimator(self, choice: Any) -> None:
        """Keep the meta-learner, and the weights that it begins with."""
        if isinstance(choice, str):
            choice = imported_class(choice)
        self.final_estimator = None
        if choice is None:
            self.final_estimator_ = LinearFinal()
        elif is_of_sklearn(choice):
            self.final_estimator = check_linear_model(choice, self.is_classifier)
            self.final_estimator_ = LinearFinal()
        else:
            self.final_estimator_ = self._built_final(choice)
        values = self.final_estimator_.state_dict().items() if self.trains_final_by_gradient else ()
        self._initial_final = {name: value.detach().cpu().clone() for name, value in values}
        register_count(self, "final_fitted", "_final_is_fitted")

    def _built_final(self, choice: Any) -> nn.Module:
        made = choice
        if not isinstance(choice, nn.Module) and callable(choice):
            with isolated_rng(purpose_seed(self.seed, INITIAL_WEIGHTS, self.n_estimators)):
                made = choice()
        if not isinstance(made, nn.Module):
            raise TypeError(
                "final_estimator must be a torch.nn.Module, a class or function without arguments that makes one, or a "
                f"linear model of scikit-learn, got {choice!r}."
            )
        refuse_lazy([made], "final_estimator")
        return made

    @property
    def trains_final_by_gradient(self) -> bool:
        """Whether the meta-learner is a module with a stage of its own, not a linear model of scikit-learn."""
        return not isinstance(self.final_estimator_, LinearFinal)

    # --- a fit

    def require_linear_model(self) -> None:
        """Choose scikit-learn's default where nothing else was chosen.

        Raises:
            ImportError: If scikit-learn is missing.
        """
        if not self.trains_final_by_gradient and self.final_estimator is None:
            self.final_estimator = default_linear_model(self.is_classifier)

    def reset_final(self) -> None:
        """Let the members predict again, until the meta-learner is fitted."""
        set_count(self, "final_fitted", "_final_is_fitted", 0)
        if isinstance(self.final_estimator_, LinearFinal):
            self.final_estimator_.reset()
        else:
            self.final_estimator_.load_state_dict(self._initial_final)

    def fit_linear_final(self, features: Tensor, targets: Tensor) -> None:
        """Fit the linear model to the features (N, F) and targets of all rows; the ranks take that of rank 0."""
        final: Any = self.final_estimator_
        n_outputs = self.n_outputs if self.is_classifier else None
        values = fit_linear_model(self.final_estimator, features, targets, n_outputs)
        final.set_values(*self.trainer.strategy.broadcast(values))
        self.use_final()

    def use_final(self) -> None:
        """Let the meta-learner predict from now on."""
        set_count(self, "final_fitted", "_final_is_fitted", 1)

    def check_final(self, features: Tensor, outputs: Tensor) -> None:
        """Check the meta-learner with a few rows, before anything is trained.

        Raises:
            MisconfigurationException: If a module does not take the features (B, F) or returns something else than the
                members' outputs, (B, ...).
        """
        made = f"{type(self.final_estimator_).__name__} as final_estimator"
        try:
            with eval_mode(self.final_estimator_), torch.no_grad():
                final = self._run_final(features)
        except RuntimeError as error:
            raise MisconfigurationException(
                f"{made} must take {features.shape[1]} features for each sample, and fails: {error}."
            ) from error
        if not isinstance(final, Tensor) or final.numel() != outputs.numel():
            got = tuple(final.shape) if isinstance(final, Tensor) else type(final).__name__
            raise MisconfigurationException(
                f"{made} must return outputs as the members do, {tuple(outputs.shape)} for {len(outputs)} samples, "
                f"got {got}."
            )

    # --- the prediction

    def features(self, outputs: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return what the meta-learner sees of the members' outputs (n, B, C) and their inputs: (B, F)."""
        columns = self.member_features(outputs)
        return append_inputs(columns, inputs) if self.passthrough else columns

    def member_features(self, outputs: Tensor) -> Tensor:
        """Return the columns of the members' outputs (n, B, C), (B, n x columns)."""
        raise NotImplementedError

    def predict_members(self, *x: Tensor) -> Tensor:
        """Return the output of the meta-learner, (1, B, ...); before it is fitted, those of the members."""
        outputs = self.estimators_.forward_shared(*x)
        if not self._final_is_fitted:
            return outputs
        final: Tensor = self._run_final(self.features(self.as_matrices(outputs), x))
        return final.view_as(outputs[0]).unsqueeze(0)

    def _run_final(self, features: Tensor) -> Any:
        """Run the meta-learner, a module in its own precision, such as half of it."""
        first = next(self.final_estimator_.parameters(), features)
        return self.final_estimator_(features.to(first.dtype))

    def member_outputs(self, *x: Tensor) -> Tensor:
        """Return the outputs of each member: (n_members, B, n_outputs), logits of classifiers."""
        return self.as_matrices(self.estimators_.forward_shared(*x))

    def forward(self, *x: Tensor) -> Tensor:
        """Return the prediction: class probabilities or regression outputs, (B, n_outputs)."""
        return self.combine(self.as_matrices(self.predict_members(*x)))

    def predict_uncertainty(self, *x: Tensor | np.ndarray[Any, Any]) -> Uncertainty:
        """Return the prediction of the meta-learner with the disagreement of the members.

        In classification the entropy of the prediction is split by the disagreement; in regression the parts are the
        variances of the members.
        """
        inputs = [self._as_input(value) for value in x]
        with eval_mode(self), torch.no_grad():
            spread = self.uncertainty(self.member_outputs(*inputs))
            return self.around_prediction(spread, self.as_matrices(self.predict_members(*inputs)))

    def around_prediction(self, spread: Uncertainty, outputs: Tensor) -> Uncertainty:
        """Return the uncertainty of members with the prediction of the outputs (1, B, C) as its mean."""
        return replace(spread, mean=self.combine(outputs))
