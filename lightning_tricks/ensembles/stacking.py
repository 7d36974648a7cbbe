"""Stacking: a meta-learner combines members, and is fitted to what they predict for rows that they have not seen."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_tricks.ensembles.bases import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.ensembles.core.combination import Uncertainty, classification_uncertainty
from lightning_tricks.ensembles.core.meta_features import (
    CLASSIFIER_METHODS,
    REGRESSOR_METHODS,
    classifier_features,
    member_columns,
)
from lightning_tricks.ensembles.stacking_base import StackedGeneralization


class StackingClassifier(StackedGeneralization, ClassifierEnsemble):
    """Train classifiers in folds, and a meta-learner on what they predict for samples that they were not trained on.

    The semantics are scikit-learn's. One `trainer.fit` trains the members in each fold, predicts the samples that the
    fold holds out, then trains the members once more on all samples (the refit), each time for the Trainer's
    `max_epochs` and from the same initial weights. So it lasts `max_epochs` times the number of folds plus one. A
    linear meta-learner is fitted before the refit, another one is trained after it. Until the meta-learner is there,
    validation evaluates the mean of the members; a run that ends before, such as by EarlyStopping, predicts this mean
    and warns. A checkpoint of a fold, such as the one that ModelCheckpoint finds the best, holds the members of that
    fold. The rows are those that the loader yields, in ascending order, which must be the same in each epoch; random
    augmentation also applies to the held-out ones. All targets are read when the fit starts.

    Args:
        estimators: The members, in any of the forms that `VotingClassifier` takes, or a list of (name, module) pairs.
        final_estimator: The meta-learner: scikit-learn's `LogisticRegression` (the default) or `LogisticRegressionCV`,
            which is kept as tensors so that a prediction needs no scikit-learn; or a module (or a class or function
            without arguments that makes one) of the features (B, F) that gives logits (B, n_outputs), which is trained
            with the optimizer and criterion of the members.
        cv: The folds: their number >= 2 (stratified and not shuffled); a list of (train, test) indices, whose test
            parts hold each row once; an object with `split(X, y)`, which gets row numbers as X; or "prefit" if the
            members are trained already, so that only the meta-learner is fitted, to their predictions for the training
            data, which should not be those that they were trained on.
        passthrough: Whether the meta-learner also sees the inputs, flattened, after the predictions.
        stack_method: What it sees of the members: "predict_proba" or "auto" for probabilities, without the first of two
            columns; "decision_function" for logits, or their difference for two classes; "predict" for class indices.
        n_estimators: Number of members, >= 1, of a class or factory.
        estimator_args: Arguments of the class or factory.
        epochs_per_fold: Epochs of each fold; those of the Trainer by default. The refit has those of the Trainer.
        optimizer: The optimizer of each stage, as for `VotingClassifier`.
        lr_scheduler: The schedule of each stage, as for `VotingClassifier`; none by default.
        criterion: Loss of logits (B, n_outputs) and targets; cross-entropy by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Whether members share the batches.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        ImportError: When a fit starts, if scikit-learn is needed and missing.
        MisconfigurationException: When a fit starts, if the data or the Trainer do not allow such folds.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Wolpert, Neural Networks 5, 1992; scikit-learn's class of this name.

    Examples:
        >>> from torch import nn
        >>> ensemble = StackingClassifier([nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))])
        >>> ensemble(torch.zeros(2, 4)).sum(1).allclose(torch.ones(2))  # the mean, as it is not fitted
        True
    """

    is_classifier = True
    _methods = CLASSIFIER_METHODS

    def member_features(self, outputs: Tensor) -> Tensor:
        """Return the probabilities, logits or classes of the members' logits (n, B, C), (B, n x columns)."""
        return classifier_features(outputs, self.stack_method)

    def around_prediction(self, spread: Uncertainty, outputs: Tensor) -> Uncertainty:
        """Split the entropy of the prediction by how much the members disagree."""
        whole = classification_uncertainty(outputs) if self._final_is_fitted else spread
        epistemic = torch.minimum(spread.epistemic, whole.total)
        return replace(
            spread, mean=whole.mean, total=whole.total, aleatoric=whole.total - epistemic, epistemic=epistemic
        )


class StackingRegressor(StackedGeneralization, RegressorEnsemble):
    """Train regressors in folds, and a meta-learner on what they predict for samples that they were not trained on.

    See `StackingClassifier`. Several targets at once are allowed, where the meta-learner allows them.

    Args:
        estimators: The members, in any of the forms that `VotingRegressor` takes, or a list of (name, module) pairs.
        final_estimator: The meta-learner: scikit-learn's `RidgeCV` (the default) or another linear regressor; or a
            module, or a class or function without arguments that makes one.
        cv: The folds: their number >= 2 (blocks of rows, not shuffled), or another form that `StackingClassifier`
            takes.
        passthrough: Whether the meta-learner also sees the inputs, flattened, after the predictions.
        stack_method: "auto" or "predict": it sees the members' predictions.
        n_estimators: Number of members, >= 1, of a class or factory.
        estimator_args: Arguments of the class or factory.
        epochs_per_fold: Epochs of each fold; those of the Trainer by default. The refit has those of the Trainer.
        optimizer: The optimizer of each stage, as for `VotingClassifier`.
        lr_scheduler: The schedule of each stage; none by default.
        criterion: Loss of outputs and targets of the same shape; the mean squared error by default.
        n_outputs: Number of values that are predicted for each sample.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Whether members share the batches.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        ImportError: When a fit starts, if scikit-learn is needed and missing.
        MisconfigurationException: When a fit starts, if the data or the Trainer do not allow such folds.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Breiman, Machine Learning 24, 1996; scikit-learn's class of this name.
    """

    is_classifier = False
    _methods = REGRESSOR_METHODS

    def member_features(self, outputs: Tensor) -> Tensor:
        """Return the predictions of the members (n, B, C), (B, n x C)."""
        return member_columns(outputs)
