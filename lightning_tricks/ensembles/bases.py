"""The bases of all classifiers and of all regressors, however their members are trained."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from lightning_tricks.ensembles.core.combination import (
    Criterion,
    Uncertainty,
    classification_uncertainty,
    log_mean_probabilities,
    majority,
    mean_probabilities,
    mean_with_gradient_of_sum,
    regression_uncertainty,
    weighted_mean,
)
from lightning_tricks.ensembles.ensemble import Ensemble


class ClassifierEnsemble(Ensemble):
    """Members give logits (B, n_outputs); the prediction is one of probabilities."""

    voting_strategy: str = "soft"

    def default_criterion(self) -> Criterion:
        """Return the cross-entropy."""
        return nn.CrossEntropyLoss()

    def combine(self, outputs: Tensor) -> Tensor:
        """Average the members' probabilities, or count their votes."""
        vote = majority if self.voting_strategy == "hard" else mean_probabilities
        return vote(outputs, self.member_weights(outputs))

    def log_prediction(self, outputs: Tensor) -> Tensor:
        """Return the logarithm of the combined probabilities; those of soft voting."""
        return log_mean_probabilities(outputs, self.member_weights(outputs))

    def prediction_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the criterion of the combined log-probabilities, which are logits like others."""
        return self.criterion(self.log_prediction(outputs), target)

    def uncertainty(self, outputs: Tensor) -> Uncertainty:
        """Split the entropy."""
        return classification_uncertainty(outputs, self.member_weights(outputs))

    def metrics(self, preds: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the accuracy, of class indices."""
        if target.is_floating_point():
            return {}
        return {"acc": (preds.argmax(-1) == target).float().mean()}

    def check_batch(self, outputs: Tensor, targets: Tensor, stage: str) -> None:
        """Refuse one output, and classes that there are not."""
        columns = self.as_matrices(outputs).shape[-1]
        if columns < 2:
            raise ValueError(
                f"members return {columns} output for each sample; a classifier needs one for each class, so two for a "
                "binary problem."
            )
        if targets.is_floating_point():
            return  # probabilities of the classes
        if targets.ndim != 2:
            raise ValueError(f"{stage}: targets must be class indices (B,), got {tuple(targets.shape[1:])}.")
        ignored = getattr(self.criterion, "ignore_index", None)
        wrong = targets[((targets < 0) | (targets >= columns)) & (targets != (columns if ignored is None else ignored))]
        if len(wrong):
            raise ValueError(
                f"{stage}: class {int(wrong[0])} is not one of the {columns} classes 0 to {columns - 1}, the outputs "
                "of the members."
            )


class RegressorEnsemble(Ensemble):
    """Members give numbers (B, n_outputs); the prediction is their mean.

    With `criterion=nn.GaussianNLLLoss()` they give 2 x n_outputs columns: means, then logarithms of variances.
    """

    def default_criterion(self) -> Criterion:
        """Return the mean squared error."""
        return nn.MSELoss()

    def combine(self, outputs: Tensor) -> Tensor:
        """Average the members' means."""
        return weighted_mean(self._means_and_variances(outputs)[0], self.member_weights(outputs))

    def prediction_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the criterion of the combined prediction."""
        if not self._predicts_variance:
            prediction = weighted_mean(outputs, self.member_weights(outputs))
            return self.criterion(prediction, target)
        mixture = self.uncertainty(self.as_matrices(outputs))
        return cast(Tensor, cast(nn.GaussianNLLLoss, self.criterion)(mixture.mean, target, mixture.total))

    def member_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the value to minimize, for the members' outputs (n, B, ...) and their targets (n, B, ...)."""
        if not self._predicts_variance:
            return super().member_loss(outputs, targets)
        criterion = cast(nn.GaussianNLLLoss, self.criterion)
        means, variances = self._means_and_variances(outputs)
        parts = zip(means, targets, cast(Tensor, variances), strict=True)
        return mean_with_gradient_of_sum(
            torch.stack([criterion(mean, target, variance) for mean, target, variance in parts])
        )

    def uncertainty(self, outputs: Tensor) -> Uncertainty:
        """Split the variance."""
        return regression_uncertainty(*self._means_and_variances(outputs), weights=self.member_weights(outputs))

    def check_batch(self, outputs: Tensor, targets: Tensor, stage: str) -> None:
        """Refuse targets that broadcasting would spread over outputs of another shape."""
        shape = outputs.shape[1:]
        if self._predicts_variance:
            if outputs.shape[-1] % 2:
                raise ValueError(
                    f"GaussianNLLLoss needs a mean and a log-variance each, members return {tuple(shape)}."
                )
            shape = torch.Size((*shape[:-1], shape[-1] // 2))
        if targets.shape[1:] != shape:
            given, made = tuple(targets.shape[1:]), tuple(shape)
            hint = " (y.unsqueeze(1), or members that return x.squeeze(1))" if len(given) != len(made) else ""
            raise ValueError(f"{stage}: targets of shape {given} do not fit members' outputs of shape {made}{hint}.")
        self.as_matrices(outputs)

    @property
    def _predicts_variance(self) -> bool:
        return isinstance(self.criterion, nn.GaussianNLLLoss)

    def _means_and_variances(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self._predicts_variance:
            return outputs, None
        means, logs = outputs.chunk(2, dim=-1)
        return means, logs.exp()

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of means, without that of the variances."""
        return outputs.shape[-1] // (2 if self._predicts_variance else 1)

    def shape_like(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the prediction in the shape of the target, where both have as many values."""
        return prediction.view_as(target) if prediction.numel() == target.numel() else prediction
