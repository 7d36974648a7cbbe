"""Stacking: a meta-learner combines members, and is fitted to their predictions for rows that they have not seen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_tricks._lightning_compat.flavor import MisconfigurationException, rank_zero_warn
from lightning_tricks._lightning_compat.hyperparameters import remove_hyperparameter, replace_hyperparameter
from lightning_tricks._lightning_compat.loaders import changing_train_loader
from lightning_tricks._lightning_compat.trainer import is_fast_dev_run
from lightning_tricks._shared.checks import check_choice, check_optional_count
from lightning_tricks._shared.modules import eval_mode
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.ensembles import meta_learner
from lightning_tricks.ensembles.arguments import CriterionChoice, OptimizerChoice, ScheduleChoice, passed_on
from lightning_tricks.ensembles.core.combination import Uncertainty, around_prediction, at_least_single
from lightning_tricks.ensembles.core.factory import Estimator, class_name
from lightning_tricks.ensembles.core.folds import check_cv
from lightning_tricks.ensembles.core.members import Members, SequentialMembers, refuse_lazy
from lightning_tricks.ensembles.core.sampling import HELD_OUT, purpose_seed
from lightning_tricks.ensembles.prediction import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.ensembles.stacking_run import StackingRun, max_epochs_of, plan_run, subset_loader
from lightning_tricks.ensembles.stages import StagedEnsemble
from lightning_tricks.ensembles.training_data import unpack
from lightning_tricks.ensembles.voting import IndependentMembers

# Of ensembles in a fit; these are not attributes, so that no copy of an ensemble holds data
_RUNS: WeakKeyDictionary[nn.Module, StackingRun] = WeakKeyDictionary()


class StackedGeneralization(meta_learner.MetaLearner, StagedEnsemble, IndependentMembers):
    """Members and a meta-learner in stages: the folds, the refit, and the meta-learner's own if it has one.

    All members are trained in the stages of the folds and in the refit, each time from the weights that they were
    built with. A linear meta-learner is fitted when the refit begins.
    """

    predictor_without_variance = "a meta-learner"
    trains_all_members = True
    _methods: tuple[str, ...]

    def __init__(
        self,
        estimators: Estimator | None,
        final_estimator: Any = None,
        cv: Any = 5,
        passthrough: bool = False,
        stack_method: str = "auto",
        *,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        epochs_per_fold: int | None = None,
        optimizer: OptimizerChoice = None,
        lr_scheduler: ScheduleChoice = None,
        criterion: CriterionChoice = None,
        n_outputs: int | None = None,
        vectorize: bool | Literal["auto"] = "auto",
        shared_order: bool = False,
        seed: int | None = None,
    ) -> None:
        if estimators is None:
            raise ValueError(
                "estimators must be given, as they are not saved: load_from_checkpoint(path, estimators=[...])."
            )
        self.cv = check_cv(cv)
        self.passthrough = bool(passthrough)
        self.stack_method = check_choice("stack_method", stack_method, self._methods)
        self.epochs_per_fold = check_optional_count("epochs_per_fold", epochs_per_fold)
        self._names, given = _split_names(estimators)
        self._stage_epochs: list[int] = []  # of the last fit
        self._n_folds = 0
        super().__init__(given, **passed_on(super().__init__, locals()))
        self.set_final_estimator(final_estimator)
        self._save_plain_choices(estimators, final_estimator)

    # --- the members

    def _build_members(self, estimator: Estimator, arguments: Mapping[str, Any] | None) -> list[nn.Module]:
        try:
            return super()._build_members(estimator, arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(re.sub(r"\bestimator\b", "estimators", str(error))) from None

    def set_members(self, members: Sequence[nn.Module]) -> None:
        """Keep the members, and the weights that each stage begins with."""
        refuse_lazy(members, "estimators")
        super().set_members(members)
        trained = () if self.cv == "prefit" else range(len(self.estimators_))
        self._initial_members = [
            {name: value.detach().cpu().clone() for name, value in self.estimators_.member_tensors(index).items()}
            for index in trained
        ]

    def _save_plain_choices(self, estimators: Any, final_estimator: Any) -> None:
        plain = {
            "estimators": class_name(estimators),
            "final_estimator": None if meta_learner.is_of_sklearn(final_estimator) else class_name(final_estimator),
            "cv": self.cv if isinstance(self.cv, int | str) else None,
        }
        remove_hyperparameter(self, "estimator")
        for name, value in plain.items():
            replace_hyperparameter(self, name, value)

    @property
    def named_estimators_(self) -> dict[str, nn.Module]:
        """The members by the names that they were given with, or by their numbers."""
        names = self._names or map(str, range(len(self.estimators_)))
        return dict(zip(names, self.estimators_, strict=True))

    @property
    def n_members(self) -> int:
        """The number of members: all of them predict."""
        return len(self.estimators_)

    # --- the stages

    @property
    def n_stages(self) -> int:
        """The number of stages of the fit."""
        return len(self._stage_epochs)

    def stage_epochs(self) -> list[int]:
        """Return the length of each stage in epochs."""
        return self._stage_epochs

    def _is_final(self, stage: int) -> bool:
        return self.trains_final_by_gradient and stage == self.n_stages - 1

    @property
    def trains_final(self) -> bool:
        """Whether the current stage trains the meta-learner."""
        return self._is_final(self.stage)

    def trained_members(self) -> Members:  # type: ignore[override]
        """Return all members, or the meta-learner in its stage."""
        return SequentialMembers([self.final_estimator_]) if self.trains_final else self.estimators_

    @property
    def uses_member_optimizers(self) -> bool:
        """Whether members train with optimizers of their own `configure_optimizers`; the meta-learner never does."""
        return not self.trains_final and super().uses_member_optimizers

    def make_optimizer(self) -> Optimizer:
        """Make the optimizer of the stage; an empty one where nothing is trained by gradient."""
        return super().make_optimizer() if self.n_stages else SGD([nn.Parameter(torch.zeros(()))], lr=0.0)

    def make_schedule(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Make the schedule of one stage."""
        return super().make_schedule(optimizer) if self.n_stages else None

    def train(self, mode: bool = True) -> StackedGeneralization:
        """Set the mode; modules that the current stage does not train stay in evaluation mode."""
        super().train(mode)
        if mode and self._is_fitting and not self.trains_final:
            self.final_estimator_.eval()
        return self

    # --- the fit

    def setup(self, stage: str) -> None:
        """Make the folds, and let the Trainer run for all stages."""
        if stage != "fit":
            super().setup(stage)
            return
        run = plan_run(self)  # whose errors come before anything is changed
        self.choose_linear_model()
        self._stage_epochs, self._n_folds = run.epochs, len(run.folds)
        super().setup(stage)
        _RUNS[self] = run
        self._installed.callback(_RUNS.pop, self, None)
        self.reset_final()
        self.final_estimator_.train(self.training)
        loader = changing_train_loader(self.trainer, self, self._stage_loader, self._loader_is_outdated)
        self._installed.enter_context(loader)
        if self.n_stages and not is_fast_dev_run(self.trainer):
            self._installed.enter_context(max_epochs_of(self.trainer, sum(run.epochs)))
        self._log_info(run.description(self.trains_final_by_gradient))

    def on_train_start(self) -> None:
        """Begin the first stage, or end the run if nothing is trained by gradient."""
        super().on_train_start()
        if not self.n_stages:
            self.trainer.should_stop = True

    def on_stage_start(self) -> None:
        """Keep the predictions for the rows that the last fold held out, and begin the stage."""
        run, n_folds = _RUNS[self], self._n_folds
        if self.stage == 0 and self.trains_final_by_gradient:
            features, _, outputs = self._predict_rows(torch.arange(min(2, run.size)), 0)
            self.check_final(features.to(self.device), outputs)
        if 0 < self.stage <= n_folds:
            self._keep_predictions(self.stage - 1)
        if self.stage <= n_folds:
            for index, values in enumerate(self._initial_members):
                self.estimators_.copy_member_(index, values)
        if self.trains_final:
            self.use_final()
        elif self.stage == n_folds and not self.trains_final_by_gradient:
            if not n_folds:
                self._keep_predictions(0)
            self.fit_linear_final(cast(Tensor, run.features), cast(Tensor, run.targets))

    def on_train_end(self) -> None:
        """Warn if the run has ended before the meta-learner was there."""
        if not self._final_is_fitted and not is_fast_dev_run(self.trainer):
            rank_zero_warn(
                f"{type(self).__name__}: the run ended in stage {self.stage + 1} of {self.n_stages}, before the "
                "meta-learner was fitted: the ensemble predicts the mean of its members. Continue the run."
            )

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Train the members, or the meta-learner in its stage."""
        if not self.trains_final:
            return super().training_step(batch, batch_idx)
        features, target = batch
        outputs = self.shape_like(self.final_estimator_(features), target).unsqueeze(0)
        loss = self.member_loss(outputs, target.unsqueeze(0))
        self._losses.update(loss, 1)
        return {"loss": loss, "preds": outputs[0].detach(), "target": target}

    # --- the samples

    @property
    def per_member_batches(self) -> bool:
        """Whether members see the samples in orders of their own; the meta-learner is one module."""
        return super().per_member_batches and not (self in _RUNS and self._is_final(_RUNS[self].loader_stage))

    def _stage_loader(self) -> Any:
        run = _RUNS[self]
        # a schedule may ask for the data of a resumed fit when its stage is known and its epoch is not
        run.loader_stage = stage = max(run.next_stage(), self.stage)
        if not self._is_final(stage):
            return self.training_loader(run.loader_for_members(stage))
        if run.features is None:
            self._keep_predictions(stage)
        return self.training_loader(run.loader_for_final())

    def _loader_is_outdated(self) -> bool:
        run = _RUNS[self]
        return run.loader_stage != run.next_stage()

    def _keep_predictions(self, stage: int) -> None:
        """Keep the features of the rows that the members were not trained on in a stage."""
        run = _RUNS[self]
        rows = run.folds[stage][1] if run.folds else torch.arange(run.size)
        features, targets, _ = self._predict_rows(rows, stage)
        run.keep(rows, features, targets)

    @torch.no_grad()
    def _predict_rows(self, rows: Tensor, stage: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features, the targets and the members' mean output for some rows, on the CPU."""
        features, targets, means = [], [], []
        seed, precision = purpose_seed(self.seed, HELD_OUT, stage), self.trainer.precision_plugin
        with eval_mode(self), isolated_rng(seed), precision.forward_context():
            for batch in subset_loader(_RUNS[self].loader, rows, shuffle=False, seed=seed):
                *inputs, target = unpack(precision.convert_input(self.trainer.strategy.batch_to_device(batch)))
                outputs = self.member_outputs(*inputs)
                features.append(self.features(outputs, inputs).cpu())
                targets.append(target.cpu())
                means.append(outputs.mean(0).cpu())
        return torch.cat(features), torch.cat(targets), torch.cat(means)

    # --- the checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the predictions of the folds so far and, until the refit, the weights that each stage begins with."""
        super().on_save_checkpoint(checkpoint)
        state: dict[str, Any] = {"epochs": self._stage_epochs}
        if run := _RUNS.get(self):
            state.update(run.state(), members=self._initial_members if self.stage < self._n_folds else [])
        checkpoint["stacking"] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the seed and, to resume, the predictions of the folds so far."""
        is_linear = "final_estimator_.coef" in checkpoint["state_dict"]
        if is_linear == self.trains_final_by_gradient:
            kind = "a linear model" if is_linear else "a torch.nn.Module"
            raise ValueError(f"The checkpoint's final_estimator is {kind}: give final_estimator= one, too.")
        members = self.estimators_
        super().on_load_checkpoint(checkpoint)
        if not self._is_fitting:
            return
        if self.estimators_ is not members:
            raise MisconfigurationException(
                f"The checkpoint was made with members that {'did not run' if self._is_stacked() else 'ran'} one after "
                "another: resume with the vectorize= and the callbacks that it had."
            )
        state = checkpoint["stacking"]
        _RUNS[self].load_state(state)
        self._initial_members = state.get("members") or self._initial_members

    def _is_stacked(self) -> bool:
        return not isinstance(self.estimators_, SequentialMembers)

    # --- torchensemble, which has no stacking

    @classmethod
    def from_members(cls, members: list[nn.Module], **options: Any) -> Any:
        """Return an ensemble of trained members, whose meta-learner is to be fitted."""
        made: Any = cls
        return made(members, **{"cv": "prefit", **options})

    why_not_torchensemble = "torchensemble has no stacking, save a checkpoint instead"


def _split_names(estimators: Any) -> tuple[list[str], Any]:
    """Return the names and the members of (name, member) pairs; no names for another choice."""
    if not isinstance(estimators, list | tuple) or not any(isinstance(choice, tuple) for choice in estimators):
        return [], estimators
    for index, pair in enumerate(estimators):
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"estimators[{index}] must be a pair (name, module) like the others, got {pair!r}.")
    names = [name for name, _ in estimators]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"estimators: two members are called {name!r}.")
    return names, [member for _, member in estimators]


class StackingClassifier(StackedGeneralization, ClassifierEnsemble):
    """Train classifiers in folds, and a meta-learner on their out-of-fold predictions.

    The semantics are scikit-learn's. One `trainer.fit` trains the members in each fold, predicts the samples that the
    fold leaves out, then trains the members once more on all samples (the refit), each time for the Trainer's
    `max_epochs` and from the same initial weights. It therefore takes `max_epochs` times the number of folds plus one.
    A linear meta-learner is fitted before the refit, a module is trained after it. Until then, validation evaluates the
    mean of the members; a run that ends earlier, for example by EarlyStopping, predicts this mean and warns. A
    checkpoint that is saved in a fold contains the members of that fold. The folds use all rows of the dataset, so the
    loader must not have your own sampler. Random augmentation also applies to the rows left out. All targets are read
    when the fit starts.

    Args:
        estimators: The members, in any of the forms that `VotingClassifier` takes, or a list of (name, module) pairs.
        final_estimator: The meta-learner: scikit-learn's `LogisticRegression` (the default) or `LogisticRegressionCV`,
            which is kept as tensors so that a prediction needs no scikit-learn; or a module (or a class or function
            without arguments that makes one) of the features (B, F) that gives logits (B, n_outputs), which is trained
            with the optimizer and criterion of the members.
        cv: The folds: their number >= 2 (stratified and not shuffled); a list of (train, test) indices, whose test
            parts contain each row once; an object with `split(X, y)`, which gets row numbers as X; or "prefit" if the
            members are trained already: only the meta-learner is then fitted, to their predictions for the training
            data, which should be data that they were not trained on.
        passthrough: Whether the meta-learner also sees the inputs, flattened, after the predictions.
        stack_method: Its features: "predict_proba" or "auto" for probabilities (of two classes, only the second);
            "decision_function" for logits, or their difference for two classes; "predict" for class indices.
        n_estimators: Number of members, >= 1, of a class or factory.
        estimator_args: Arguments of the class or factory.
        epochs_per_fold: Epochs of each fold; by default `max_epochs` of the Trainer, which the refit always uses.
        optimizer: The optimizer of each stage, as for `VotingClassifier`.
        lr_scheduler: The schedule of each stage, as for `VotingClassifier`; none by default.
        criterion: Loss of logits (B, n_outputs) and targets; cross-entropy by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Whether members share the batches.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
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
    _methods = meta_learner.CLASSIFIER_METHODS

    def member_features(self, outputs: Tensor) -> Tensor:
        """Return the probabilities, logits or classes of the members' logits (n, B, C), (B, n x columns)."""
        return meta_learner.classifier_features(outputs, self.stack_method)

    def around_prediction(self, spread: Uncertainty, outputs: Tensor) -> Uncertainty:
        """Split the entropy of the prediction by how much the members disagree."""
        if not self._final_is_fitted:
            return spread
        return around_prediction(spread, at_least_single(outputs[0]).softmax(-1))


class StackingRegressor(StackedGeneralization, RegressorEnsemble):
    """Train regressors in folds, and a meta-learner on their out-of-fold predictions.

    See `StackingClassifier`. Multiple targets are allowed if the meta-learner allows them.

    Args:
        estimators: The members, in any of the forms that `VotingRegressor` takes, or a list of (name, module) pairs.
        final_estimator: The meta-learner: scikit-learn's `RidgeCV` (the default) or another linear regressor; or a
            module, or a class or function without arguments that makes one.
        cv: The folds: their number >= 2 (blocks of rows, not shuffled), or another form that `StackingClassifier`
            accepts.
        passthrough: Whether the meta-learner also sees the inputs, flattened, after the predictions.
        stack_method: "auto" or "predict": the features are the predictions of the members.
        n_estimators: Number of members, >= 1, of a class or factory.
        estimator_args: Arguments of the class or factory.
        epochs_per_fold: Epochs of each fold; by default `max_epochs` of the Trainer, which the refit always uses.
        optimizer: The optimizer of each stage, as for `VotingClassifier`.
        lr_scheduler: The schedule of each stage; none by default.
        criterion: Loss of outputs and targets of the same shape; the mean squared error by default.
        n_outputs: Number of values predicted for each sample.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Whether members share the batches.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if the data or the Trainer do not allow such folds.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Breiman, Machine Learning 24, 1996; scikit-learn's class of this name.
    """

    is_classifier = False
    _methods = meta_learner.REGRESSOR_METHODS

    def member_features(self, outputs: Tensor) -> Tensor:
        """Return the predictions of the members (n, B, C), (B, n x C)."""
        return meta_learner.member_columns(outputs)
