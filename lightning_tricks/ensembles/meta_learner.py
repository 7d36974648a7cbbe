"""The meta-learner of a stacking ensemble: how it is built, its features and its prediction; linear meta-learners."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_tricks._lightning_compat.flavor import MisconfigurationException
from lightning_tricks._shared.modules import eval_mode
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.ensembles.core.combination import Uncertainty, at_least_single
from lightning_tricks.ensembles.core.factory import imported_class
from lightning_tricks.ensembles.core.members import refuse_lazy
from lightning_tricks.ensembles.core.sampling import INITIAL_WEIGHTS, purpose_seed
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

    # --- how it is built

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
        self.register_count("final_fitted", "_final_is_fitted")

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

    def choose_linear_model(self) -> None:
        """Choose scikit-learn's default if nothing else was chosen."""
        if not self.trains_final_by_gradient and self.final_estimator is None:
            from sklearn.linear_model import LogisticRegression, RidgeCV  # takes a second

            self.final_estimator = LogisticRegression() if self.is_classifier else RidgeCV()

    def reset_final(self) -> None:
        """Let the members predict again, until the meta-learner is fitted."""
        self.set_count("final_fitted", "_final_is_fitted", 0)
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
        self.set_count("final_fitted", "_final_is_fitted", 1)

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
        """Return the features (B, F) of the members' outputs (n, B, C) and, with `passthrough`, of their inputs."""
        columns = self.member_features(outputs)
        given = [x.unsqueeze(-1).flatten(1).to(columns.dtype) for x in inputs] if self.passthrough else []
        return torch.cat([columns, *given], 1)

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

    def predict_uncertainty(self, *x: Tensor | np.ndarray[Any, Any]) -> Uncertainty:
        """Return the prediction of the meta-learner with the disagreement of the members.

        In classification the entropy of the prediction is split by the disagreement; in regression the parts are the
        variances of the members.
        """
        inputs = [self._as_input(value) for value in x]
        with eval_mode(self), torch.no_grad():
            spread = self.uncertainty(self.member_outputs(*inputs))
            outputs = self.as_matrices(self.predict_members(*inputs))
            return self.calibrated_uncertainty(self.around_prediction(spread, outputs), outputs)

    def around_prediction(self, spread: Uncertainty, outputs: Tensor) -> Uncertainty:
        """Return the uncertainty of members with the prediction of the outputs (1, B, C) as its mean."""
        return replace(spread, mean=self.combine(outputs))


CLASSIFIERS = ("LogisticRegression", "LogisticRegressionCV")
REGRESSORS = (
    "ARDRegression", "BayesianRidge", "ElasticNet", "ElasticNetCV", "HuberRegressor", "Lars", "LarsCV", "Lasso",
    "LassoCV", "LassoLars", "LassoLarsCV", "LinearRegression", "OrthogonalMatchingPursuit", "QuantileRegressor",
    "Ridge", "RidgeCV", "SGDRegressor", "TheilSenRegressor",
)  # fmt: skip


def is_of_sklearn(estimator: Any) -> bool:
    """Whether an object or a class is scikit-learn's, without importing it."""
    kind = estimator if inspect.isclass(estimator) else type(estimator)
    return kind.__module__.partition(".")[0] == "sklearn"


def check_linear_model(estimator: Any, is_classifier: bool) -> Any:
    """Return a linear model of scikit-learn, not fitted, for a model or a class of it.

    Raises:
        ValueError: If its prediction is not a linear function, or the softmax of a linear function.
    """
    model: Any = estimator() if inspect.isclass(estimator) else estimator
    known = CLASSIFIERS if is_classifier else REGRESSORS
    if type(model).__name__ not in known or not type(model).__module__.startswith("sklearn.linear_model"):
        raise ValueError(
            f"final_estimator must be a torch.nn.Module or one of scikit-learn's {', '.join(known)}, got {model!r}."
        )
    if is_classifier and (model.solver == "liblinear" or getattr(model, "multi_class", "auto") not in _MULTINOMIAL):
        raise ValueError(
            f"final_estimator={model!r} fits one class against the rest, which is not a softmax: give solver='lbfgs', "
            "and leave multi_class out."
        )
    return model


_MULTINOMIAL = ("auto", "deprecated", "warn")


class LinearFinal(nn.Module):
    """A linear function of the features, of the size that it is given when it is fitted or loaded.

    Attributes:
        coef: (n_outputs, F); empty before.
        intercept: (n_outputs,); minus infinity for classes that the training data do not have.
    """

    coef: Tensor
    intercept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coef", torch.empty(0, 0))
        self.register_buffer("intercept", torch.empty(0))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits or predictions, (B, n_outputs), in the precision of the features (B, F)."""
        with torch.autocast(features.device.type, enabled=False):
            return functional.linear(features, self.coef.to(features.dtype), self.intercept.to(features.dtype))

    def set_values(self, coef: Tensor, intercept: Tensor) -> None:
        """Set the linear function, in place of another one of any size."""
        device = self.coef.device
        self.coef, self.intercept = coef.to(device), intercept.to(device)

    def reset(self) -> None:
        """Forget the linear function."""
        self.set_values(torch.empty(0, 0), torch.empty(0))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name in ("coef", "intercept"):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor):
                setattr(self, name, torch.empty_like(value, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *args)


def fit_linear_model(
    model: Any, features: Tensor, targets: Tensor, n_outputs: int | None = None
) -> tuple[Tensor, Tensor]:
    """Fit a copy of a linear model of scikit-learn, in double precision.

    Args:
        model: The result of `check_linear_model`.
        features: (N, F).
        targets: Class indices (N,), or values to predict, (N,) or (N, n_outputs).
        n_outputs: Number of classes, for a classifier.

    Returns:
        The coefficients (n_outputs, F) and intercepts (n_outputs,) of the logits or predictions, of the features' type.

    Examples:
        >>> from sklearn.linear_model import LinearRegression
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> [round(float(value), 4) for value in fit_linear_model(LinearRegression(), x, 2 * x + 1)]
        [2.0, 1.0]
    """
    from sklearn.base import clone

    fitted = clone(model)
    one_column = n_outputs is None and targets.ndim > 1 and targets.shape[1] == 1
    y = targets.cpu().squeeze(1) if one_column else targets.cpu()
    with isolated_rng():
        fitted.fit(features.double().cpu().numpy(), (y if n_outputs else y.double()).numpy())
    coef = torch.atleast_2d(torch.as_tensor(fitted.coef_, dtype=torch.float64))
    intercept = torch.as_tensor(fitted.intercept_, dtype=torch.float64).expand(len(coef))
    if n_outputs is not None:
        coef, intercept = _logits_of_classes(coef, intercept, torch.as_tensor(fitted.classes_).long(), n_outputs)
    return coef.to(features.dtype), intercept.to(features.dtype).clone()


def _logits_of_classes(coef: Tensor, intercept: Tensor, classes: Tensor, n_outputs: int) -> tuple[Tensor, Tensor]:
    """Return the rows of all classes; in a binary problem scikit-learn has that of the second one."""
    if len(coef) == 1:
        coef, intercept = functional.pad(coef, (0, 0, 1, 0)), functional.pad(intercept, (1, 0))
    all_coef = coef.new_zeros(n_outputs, coef.shape[1])
    all_intercepts = intercept.new_full((n_outputs,), -torch.inf)
    all_coef[classes], all_intercepts[classes] = coef, intercept
    return all_coef, all_intercepts


CLASSIFIER_METHODS = ("auto", "predict_proba", "decision_function", "predict")
REGRESSOR_METHODS = ("auto", "predict")


def classifier_features(logits: Tensor, method: str = "auto") -> Tensor:
    """Return the columns of a classifier's members.

    Args:
        logits: Outputs of the members, (n, B, C).
        method: "predict_proba" (and "auto") for probabilities, of which the first column is left out in binary
            problems; "decision_function" for logits, or their difference in binary problems; "predict" for the index
            of the most probable class.

    Returns:
        The columns of one member after another, (B, n x columns), in single precision at least.

    Source: scikit-learn's `StackingClassifier`.

    Examples:
        >>> classifier_features(torch.tensor([[[0.0, 0.0]], [[0.0, 50.0]]])).tolist()
        [[0.5, 1.0]]
    """
    logits = at_least_single(logits)
    is_binary = logits.shape[-1] == 2
    if method == "predict":
        columns = logits.argmax(-1, keepdim=True).to(logits.dtype)
    elif method == "decision_function":
        columns = logits[..., 1:] - logits[..., :1] if is_binary else logits
    else:
        columns = logits.softmax(-1)[..., 1:] if is_binary else logits.softmax(-1)
    return member_columns(columns)


def member_columns(columns: Tensor) -> Tensor:
    """Return the columns of members, (n, B, columns), beside each other: (B, n x columns).

    Examples:
        >>> member_columns(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """
    return at_least_single(columns).transpose(0, 1).flatten(1)
