"""Stacking: a meta-learner combines members, and is fitted to what they predict for rows that they have not seen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_tricks._lightning_compat.loaders import changing_train_loader
from lightning_tricks._lightning_compat.trainer import is_fast_dev_run
from lightning_tricks._shared.checks import check_choice, check_count
from lightning_tricks._shared.modes import eval_mode
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.ensembles.bases import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.ensembles.core.combination import Criterion, Uncertainty, classification_uncertainty
from lightning_tricks.ensembles.core.counts import register_count, set_count
from lightning_tricks.ensembles.core.factory import Estimator, class_name, imported_class
from lightning_tricks.ensembles.core.folds import check_cv
from lightning_tricks.ensembles.core.linear_final import (
    LinearFinal,
    check_linear_model,
    default_linear_model,
    fit_linear_model,
    is_of_sklearn,
)
from lightning_tricks.ensembles.core.members import Members, SequentialMembers
from lightning_tricks.ensembles.core.meta_features import (
    CLASSIFIER_METHODS,
    REGRESSOR_METHODS,
    append_inputs,
    classifier_features,
    member_columns,
)
from lightning_tricks.ensembles.core.seeds import HELD_OUT, INITIAL_WEIGHTS, purpose_seed
from lightning_tricks.ensembles.optimizers import CriterionChoice, OptimizerChoice, ScheduleChoice
from lightning_tricks.ensembles.stacking_run import StackingRun, max_epochs_of, plan_run, stage_of_epoch
from lightning_tricks.ensembles.staged import StagedEnsemble
from lightning_tricks.ensembles.training_data import unpack
from lightning_tricks.ensembles.voting import IndependentMembers

# Of ensembles in a fit; they are no attributes, so that no copy of an ensemble holds data
_RUNS: WeakKeyDictionary[nn.Module, StackingRun] = WeakKeyDictionary()
_Values = dict[str, Tensor]


class StackedGeneralization(StagedEnsemble, IndependentMembers):
    """Members and a meta-learner, `final_estimator_`, in stages: the folds, the refit, and the meta-learner's own.

    All members are trained in the stages of the folds and in the refit, each time from the weights that they were
    built with. A linear meta-learner is fitted when the refit begins.

    Attributes:
        final_estimator_: The meta-learner, a module; the state dict holds it.
        final_estimator: scikit-learn's model that fits it; None for a torch module and, until a fit, for the default.
    """

    is_classifier: bool
    _methods: tuple[str, ...]
    _has_final: bool | int  # whether the meta-learner predicts

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
        self.epochs_per_fold = None if epochs_per_fold is None else check_count("epochs_per_fold", epochs_per_fold)
        self.names, members = _split_names(estimators)
        self._stage_epochs: list[int] = []
        self._n_folds = 0
        super().__init__(
            members,
            n_estimators,
            estimator_args,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            criterion=criterion,
            n_outputs=n_outputs,
            vectorize=vectorize,
            shared_order=shared_order,
            seed=seed,
        )
        if isinstance(self.criterion, nn.GaussianNLLLoss):
            raise ValueError(
                "criterion=GaussianNLLLoss() needs a variance, which a meta-learner does not give: use VotingRegressor."
            )
        self._set_final_estimator(final_estimator)
        self._save_plain_choices(estimators, final_estimator)

    # --- the parts

    def _build_members(self, estimator: Estimator, arguments: Mapping[str, Any] | None) -> list[nn.Module]:
        try:
            return super()._build_members(estimator, arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(re.sub(r"\bestimator\b", "estimators", str(error))) from None

    def set_members(self, members: Sequence[nn.Module]) -> None:
        """Keep the members, and the weights that each stage begins with."""
        for index, member in enumerate(members):
            if any(nn.parameter.is_lazy(value) for value in member.parameters()):
                raise ValueError(f"estimators[{index}] has lazy layers, which have no shape yet: run it once before.")
        super().set_members(members)
        register_count(self, "final_count", "_has_final")
        trained = () if self.cv == "prefit" else range(len(self.estimators_))
        self._initial_members = [_copied(self.estimators_.member_tensors(index)) for index in trained]

    def _set_final_estimator(self, choice: Any) -> None:
        if isinstance(choice, str):
            choice = imported_class(choice)
        self.final_estimator: Any = None
        if choice is None or is_of_sklearn(choice):
            self.final_estimator = None if choice is None else check_linear_model(choice, self.is_classifier)
            self.final_estimator_: nn.Module = LinearFinal()
        else:
            self.final_estimator_ = self._built_final(choice)
        self._initial_final = _copied(self.final_estimator_.state_dict())

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
        if any(nn.parameter.is_lazy(value) for value in made.parameters()):
            raise ValueError("final_estimator has lazy layers, which have no shape yet: run it once before.")
        return made

    def _save_plain_choices(self, estimators: Any, final_estimator: Any) -> None:
        is_sklearn = is_of_sklearn(final_estimator)
        plain = {
            "estimators": class_name(estimators),
            "final_estimator": None if is_sklearn else class_name(final_estimator),
            "cv": self.cv if isinstance(self.cv, int | str) else None,
        }
        saved: list[Any] = [self.hparams, self._hparams_initial]
        for hparams in saved:
            hparams.pop("estimator", None)
            hparams.update(plain)

    @property
    def named_estimators_(self) -> dict[str, nn.Module]:
        """The members by the names that they were given with, or by their numbers."""
        return dict(zip(self.names or map(str, range(len(self.estimators_))), self.estimators_, strict=True))

    @property
    def trains_final_by_gradient(self) -> bool:
        """Whether the meta-learner is a module with a stage of its own, not a linear model of scikit-learn."""
        return not isinstance(self.final_estimator_, LinearFinal)

    @property
    def trains_all_members(self) -> bool:
        """Whether a stage trains all members or none of them: always."""
        return True

    # --- the stages

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return len(self._stage_epochs)

    def epochs_per_stage(self) -> int:
        """Return the length of the current stage in epochs."""
        return self._stage_epochs[self.stage] if self.stage < self.n_stages else 1

    def total_epochs(self) -> int:
        """Return the length of all stages in epochs."""
        return sum(self._stage_epochs)

    def stage_at(self, epoch: int) -> int:
        """Return the stage that an epoch belongs to."""
        return stage_of_epoch(self._stage_epochs, epoch)

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
    def n_members(self) -> int:
        """The number of members that predict: all."""
        return len(self.estimators_)

    @property
    def uses_member_optimizers(self) -> bool:
        """Whether members train with optimizers of their own `configure_optimizers`; the meta-learner never does."""
        return not self.trains_final and super().uses_member_optimizers

    def make_optimizer(self) -> Optimizer:
        """Make the optimizer of the stage; where none is trained by gradient, one of nothing."""
        if not self.n_stages:
            return SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
        return super().make_optimizer()

    def make_schedule(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Make the schedule of one stage."""
        return super().make_schedule(optimizer) if self.n_stages else None

    def train(self, mode: bool = True) -> StackedGeneralization:
        """Set the mode; what the current stage does not train stays in evaluation mode."""
        super().train(mode)
        if mode and self._is_fitting and not self.trains_final:
            self.final_estimator_.eval()
        return self

    # --- the fit

    def setup(self, stage: str) -> None:
        """Make the folds, and let the Trainer run for all stages."""
        if stage == "fit":
            run = plan_run(self)  # whose errors come before anything is changed
            if isinstance(self.final_estimator_, LinearFinal) and self.final_estimator is None:
                self.final_estimator = default_linear_model(self.is_classifier)
            self._stage_epochs, self._n_folds = run.epochs, len(run.folds)
        super().setup(stage)
        if stage != "fit":
            return
        _RUNS[self] = run
        self._installed.callback(_RUNS.pop, self, None)
        set_count(self, "final_count", "_has_final", 0)
        self.final_estimator_.train(self.training)
        self._installed.enter_context(
            changing_train_loader(self.trainer, self, self._stage_loader, self._loader_is_outdated)
        )
        if not is_fast_dev_run(self.trainer) and self.n_stages:
            self._installed.enter_context(max_epochs_of(self.trainer, self.total_epochs()))
        self._log_info(_describe(run, self.trains_final_by_gradient))

    def on_train_start(self) -> None:
        """Set the modes for the first stage, and begin it; end the run if nothing is trained by gradient."""
        super().on_train_start()
        if not self.n_stages:
            self.trainer.should_stop = True

    def on_stage_start(self) -> None:
        """Keep what the members predict for the fold that has ended, and begin the stage."""
        run = _RUNS[self]
        if 0 < self.stage <= self._n_folds:
            self._keep_predictions(run, self.stage - 1)
        if self.stage <= self._n_folds:
            for index, values in enumerate(self._initial_members):
                _copy_values_(self.estimators_.member_tensors(index), values)
        if isinstance(self.final_estimator_, LinearFinal):
            self.final_estimator_.reset()
            if self.stage == self._n_folds:
                self._fit_linear_final(run, self.final_estimator_)
        elif self.trains_final:
            self.final_estimator_.load_state_dict(self._initial_final)
            set_count(self, "final_count", "_has_final", 1)

    def on_train_end(self) -> None:
        """Warn if the run has ended before the meta-learner was there."""
        if not self._has_final and not is_fast_dev_run(self.trainer):
            rank_zero_warn(
                f"{type(self).__name__}: the run ended in stage {self.stage + 1} of {self.n_stages}, before the "
                "meta-learner was fitted: the ensemble predicts the mean of its members. Let the run go on."
            )

    def training_loader(self, loaders: Any) -> Any:
        """Return the loader of the stage that comes next."""
        return self._stage_loader()

    def _stage_loader(self) -> Any:
        run = _RUNS[self]
        # a resumed fit has the stage before the epoch, if its schedule asks for the data
        run.loader_stage = stage = max(run.next_stage(), self.stage)
        if not self._is_final(stage):
            return self.training_data.loader(self, run.loader_for_members(stage))
        if run.features is None:
            self._keep_predictions(run, stage)
        return self.training_data.loader(self, run.loader_for_final())

    def _loader_is_outdated(self) -> bool:
        run = _RUNS[self]
        return run.loader_stage != run.next_stage()

    @property
    def per_member_batches(self) -> bool:
        """Whether members see the samples in orders of their own; the meta-learner is one module."""
        return super().per_member_batches and not (self in _RUNS and self._is_final(_RUNS[self].loader_stage))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Train the members, or the meta-learner in its stage."""
        if not self.trains_final:
            return super().training_step(batch, batch_idx)
        features, target = batch
        outputs = self.shape_like(self.final_estimator_(features), target).unsqueeze(0)
        if "final" not in self._checked_stages:
            self._check_first_batch(outputs, target.unsqueeze(0), "final")
        loss = self.member_loss(outputs, target.unsqueeze(0))
        self._losses.update(loss, 1)
        return {"loss": loss, "preds": outputs[0].detach(), "target": target}

    @torch.no_grad()
    def _keep_predictions(self, run: StackingRun, stage: int) -> None:
        """Keep the features of the rows that the members were not trained on in a stage."""
        rows, seed = run.rows_of(stage), purpose_seed(self.seed, HELD_OUT, stage)
        features, targets = [], []
        precision = self.trainer.precision_plugin
        with eval_mode(self), isolated_rng(seed), precision.forward_context():
            for batch in run.loader_in_order(rows, seed):
                *inputs, target = unpack(precision.convert_input(self.trainer.strategy.batch_to_device(batch)))
                features.append(self.features(self.member_outputs(*inputs), inputs).cpu())
                targets.append(target.cpu())
        run.keep(rows, torch.cat(features), torch.cat(targets))

    def _fit_linear_final(self, run: StackingRun, final: LinearFinal) -> None:
        if run.features is None:
            self._keep_predictions(run, 0)
        features, targets = cast(Tensor, run.features), cast(Tensor, run.targets)
        n_outputs = self.n_outputs if self.is_classifier else None
        values = fit_linear_model(self.final_estimator, features, targets, n_outputs)
        final.set_values(*self.trainer.strategy.broadcast(values))
        set_count(self, "final_count", "_has_final", 1)

    # --- the checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the folds have given so far and, until the refit, the weights that each stage begins with."""
        super().on_save_checkpoint(checkpoint)
        if run := _RUNS.get(self):
            members = self._initial_members if self.stage < self._n_folds else []
            final = self._initial_final if self.trains_final_by_gradient and not self._has_final else {}
            checkpoint["stacking"] = {**run.state(), "members": members, "final": final}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the seed and, to resume, what the folds have given so far."""
        is_linear = "final_estimator_.coef" in checkpoint["state_dict"]
        if is_linear == self.trains_final_by_gradient:
            kind = "a linear model" if is_linear else "a torch.nn.Module"
            raise ValueError(f"The checkpoint's final_estimator is {kind}: give final_estimator= such a one.")
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
        self._initial_members = state["members"] or self._initial_members
        self._initial_final = state["final"] or self._initial_final

    def _is_stacked(self) -> bool:
        return not isinstance(self.estimators_, SequentialMembers)

    # --- the prediction

    def features(self, outputs: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return what the meta-learner sees of the members' outputs (n, B, C) and their inputs: (B, F)."""
        columns = self.member_features(outputs)
        return append_inputs(columns, inputs) if self.passthrough else columns

    def member_features(self, outputs: Tensor) -> Tensor:
        """Return the columns of the members' outputs (n, B, C), (B, n x columns)."""
        raise NotImplementedError

    def predict_members(self, *x: Tensor) -> Tensor:
        """Return the output of the meta-learner, (1, B, ...); before it is there, those of the members."""
        outputs = self.estimators_.forward_shared(*x)
        if not self._has_final:
            return outputs
        final: Tensor = self.final_estimator_(self.features(self.as_matrices(outputs), x))
        if final.numel() != outputs[0].numel():
            raise ValueError(
                f"final_estimator must return outputs {tuple(outputs.shape[1:])}, as the members do, got "
                f"{tuple(final.shape)}."
            )
        return final.view_as(outputs[0]).unsqueeze(0)

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
            return self._around_prediction(spread, self.as_matrices(self.predict_members(*inputs)))

    def _around_prediction(self, spread: Uncertainty, outputs: Tensor) -> Uncertainty:
        return replace(spread, mean=self.combine(outputs))

    # --- torchensemble, which has no stacking

    @classmethod
    def from_members(cls, members: list[nn.Module], **options: Any) -> Any:
        """Return an ensemble of trained members, whose meta-learner is to be fitted."""
        made: Any = cls
        return made(members, **{"cv": "prefit", **options})

    def to_torchensemble(self) -> Any:
        """Refuse: torchensemble has no such ensemble."""
        raise ValueError(f"torchensemble has no {type(self).__name__}: save a checkpoint.")


def _split_names(estimators: Any) -> tuple[list[str], Any]:
    """Return the names and the members of (name, member) pairs; no names for another choice."""
    if not isinstance(estimators, list | tuple) or not any(isinstance(one, tuple) for one in estimators):
        return [], estimators
    for index, pair in enumerate(estimators):
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"estimators[{index}] must be a pair (name, module) like the others, got {pair!r}.")
    names = [name for name, _ in estimators]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"estimators: two members are called {name!r}.")
    return names, [member for _, member in estimators]


def _copied(values: Mapping[str, Tensor]) -> _Values:
    return {name: value.detach().cpu().clone() for name, value in values.items()}


@torch.no_grad()
def _copy_values_(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _describe(run: StackingRun, has_final_stage: bool) -> str:
    """Return what a fit will do."""
    epochs, n_folds = run.epochs, len(run.folds)
    parts = [f"{n_folds} folds of {epochs[0]} epochs and a refit of {epochs[n_folds]} epochs"] if n_folds else []
    parts += [f"{epochs[-1]} epochs of the meta-learner"] if has_final_stage else []
    return f"{', then '.join(parts)}: {sum(epochs)} epochs in all" if parts else "only the meta-learner is fitted"


class StackingClassifier(StackedGeneralization, ClassifierEnsemble):
    """Train classifiers in folds, and a meta-learner on what they predict for samples that they were not trained on.

    The semantics are scikit-learn's. One `trainer.fit` trains the members in each fold, predicts the samples that the
    fold holds out, then trains the members once more on all samples (the refit), each time for the Trainer's
    `max_epochs` and from the same initial weights. So it lasts `max_epochs` times the number of folds plus one. A
    linear meta-learner is fitted before the refit, another one is trained after it. Until the meta-learner is there,
    validation evaluates the mean of the members; a run that ends before, such as by EarlyStopping, predicts this mean
    and warns. The data set must give the same samples in each epoch; random augmentation also applies to the held-out
    samples.

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
        optimizer: The optimizer of each stage, as for `VotingClassifier`; Adam with a learning rate of 1e-3 by default.
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

    Example:
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

    def _around_prediction(self, spread: Uncertainty, outputs: Tensor) -> Uncertainty:
        whole = classification_uncertainty(outputs) if self._has_final else spread
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
        optimizer: The optimizer of each stage; Adam with a learning rate of 1e-3 by default.
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

    def set_criterion(self, criterion: Criterion) -> None:
        """Choose the loss, as in torchensemble; not one that needs a variance."""
        if isinstance(criterion, nn.GaussianNLLLoss):
            raise ValueError("criterion=GaussianNLLLoss() needs a variance, which a meta-learner does not give.")
        super().set_criterion(criterion)
