"""A linear meta-learner, which scikit-learn fits and torch runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_tricks._shared.rng import isolated_rng

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
        ValueError: If its prediction is no linear function (or softmax of one).
    """
    model: Any = estimator() if inspect.isclass(estimator) else estimator
    known = CLASSIFIERS if is_classifier else REGRESSORS
    if type(model).__name__ not in known or not type(model).__module__.startswith("sklearn.linear_model"):
        raise ValueError(
            f"final_estimator must be a torch.nn.Module or one of scikit-learn's {', '.join(known)}, got {model!r}."
        )
    if is_classifier and (model.solver == "liblinear" or getattr(model, "multi_class", "auto") not in _MULTINOMIAL):
        raise ValueError(
            f"final_estimator={model!r} fits one class against the rest, which is no softmax: give solver='lbfgs', "
            "and leave multi_class out."
        )
    return model


_MULTINOMIAL = ("auto", "deprecated", "warn")


def default_linear_model(is_classifier: bool) -> Any:
    """Return scikit-learn's default meta-learner: LogisticRegression or RidgeCV.

    Raises:
        ImportError: If scikit-learn is missing.
    """
    try:
        from sklearn.linear_model import LogisticRegression, RidgeCV
    except ImportError as error:
        raise ImportError(
            "final_estimator=None is a linear model of scikit-learn, which is not installed: pip install scikit-learn, "
            "or give a torch.nn.Module."
        ) from error
    return LogisticRegression() if is_classifier else RidgeCV()


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
        model: What `check_linear_model` returned.
        features: (N, F).
        targets: Class indices (N,), or what is predicted, (N,) or (N, n_outputs).
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
