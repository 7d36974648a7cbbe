"""Gradient boosting: members that are trained one after another, each on what the earlier ones get wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_tricks._lightning_compat.flavor import (
    LightningDataModule,
    MisconfigurationException,
    Trainer,
    is_overridden,
)
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._lightning_compat.trainer import datamodule_of
from lightning_tricks._shared.checks import check_optional_count
from lightning_tricks.ensembles.arguments import CriterionChoice, OptimizerChoice, ScheduleChoice, passed_on
from lightning_tricks.ensembles.boosting import BoostedMembers, negative_gradient
from lightning_tricks.ensembles.core.combination import at_least_single
from lightning_tricks.ensembles.core.factory import Estimator
from lightning_tricks.ensembles.core.members import own_inputs
from lightning_tricks.ensembles.core.sampling import MemberLoader
from lightning_tricks.ensembles.prediction import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.ensembles.stages import StagedEnsemble

_Data = tuple[tuple[Tensor, ...], Tensor | None]  # tensors, and the rows of a subset of them
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class CachedPredictions:
    """The summed outputs of the members of earlier stages for all rows of a data set of tensors in memory.

    They hold for a batch only if it consists of the very tensors that the loader gave: where a hook of the module or of
    its data module, or a callback, has put others in their place or has changed them, there are none.

    Attributes:
        of_batch: Those of the batch that is trained on, (B, ...), or None where they are not known.
    """

    def __init__(self) -> None:
        self.of_batch: Tensor | None = None
        self._sums: Tensor | None = None  # (rows, ...)
        self._n_members = 0  # whose outputs are in the sums
        self._given: list[tuple[Tensor, int]] = []
        self._data: _Data | None = None
        self._versions: list[int] = []  # of its tensors

    @contextmanager
    def watch_batches(self, trainer: Trainer) -> Iterator[None]:
        """Note the tensors of each training batch as the loader gave them, once they are on the device."""
        strategy = trainer.strategy
        to_device = strategy.batch_to_device

        def to_device_and_note(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = to_device(batch, *args, **kwargs)
            parts = batch if trainer.training and isinstance(batch, list | tuple) else ()
            self._given = [(part, part._version) for part in parts if isinstance(part, Tensor)]
            return batch

        with overriding(strategy, batch_to_device=to_device_and_note):
            yield

    def look_up(self, ensemble: Any, batch: Any, batch_idx: int) -> None:
        """Set `of_batch`.

        Args:
            ensemble: The `StagedEnsemble` in its fit.
            batch: The batch.
            batch_idx: Its index in the epoch.
        """
        given, self._given, self.of_batch = self._given, [], None
        loader = ensemble.trainer.train_dataloader
        if not isinstance(loader, MemberLoader) or not _consists_of(batch, given) or _has_batch_hooks(ensemble):
            return
        data, rows = loader.data, loader.indices_of(batch_idx)[0]
        if data is None or len(rows) != len(batch[-1]):
            return
        self._forget_unless_of(data)
        for index in range(self._n_members, ensemble.stage):
            outputs = _outputs_of_member(ensemble, index, *data, loader.batch_size)
            self._sums = outputs if self._sums is None else self._sums + outputs
            self._n_members += 1
        if self._sums is not None:
            self.of_batch = self._sums[rows.to(self._sums.device, non_blocking=True)]

    def _forget_unless_of(self, data: _Data) -> None:
        """Start again if an epoch has other data than the one before, or its values were changed."""
        versions = [tensor._version for tensor in data[0]]
        if versions != self._versions or (data is not self._data and not _is_same(data, self._data)):
            self._sums, self._n_members = None, 0
        self._data, self._versions = data, versions


@torch.no_grad()
def _outputs_of_member(
    ensemble: Any, index: int, tensors: tuple[Tensor, ...], subset: Tensor | None, batch_size: int
) -> Tensor:
    """Return the outputs of a member for all rows, in single precision at least."""
    member, precision = ensemble.estimators_.member(index), ensemble.trainer.precision_plugin
    parts = []
    for start in range(0, len(tensors[0] if subset is None else subset), batch_size):
        rows = slice(start, start + batch_size)
        inputs = [tensor[rows if subset is None else subset[rows]] for tensor in tensors[:-1]]
        inputs = [precision.convert_input(value.to(ensemble.device, non_blocking=True)) for value in inputs]
        with precision.forward_context():
            outputs = member(*own_inputs(inputs))
        parts.append(at_least_single(outputs))
    return torch.cat(parts)


def _is_same(data: _Data, other: _Data | None) -> bool:
    """Whether two epochs have the same tensors in memory, and the same rows of them."""
    if other is None or list(map(id, data[0])) != list(map(id, other[0])):
        return False
    rows, known = data[1], other[1]
    return rows is known if rows is None or known is None else torch.equal(rows, known)


def _consists_of(batch: Any, given: list[tuple[Tensor, int]]) -> bool:
    if not isinstance(batch, list | tuple) or not 0 < len(given) == len(batch):
        return False
    pairs = zip(batch, given, strict=True)
    return all(part is tensor and part._version == version for part, (tensor, version) in pairs)


def _has_batch_hooks(ensemble: Any) -> bool:
    datamodule = datamodule_of(ensemble.trainer)
    return any(
        is_overridden(hook, ensemble)
        or (datamodule is not None and is_overridden(hook, datamodule, LightningDataModule))
        for hook in _BATCH_HOOKS
    )


# Of ensembles in a fit; these are not attributes, so that neither a checkpoint nor a copy holds them
_CACHED: WeakKeyDictionary[nn.Module, CachedPredictions] = WeakKeyDictionary()


class GradientBoostedMembers(StagedEnsemble, BoostedMembers):
    """Members in stages, each fitted to the negative gradient of the loss at the sum of the earlier ones.

    Attributes:
        stage_losses: With early stopping, the validation loss after each stage, (n_estimators,); infinite for stages
            that were not trained.
    """

    epochs_per_estimator: int | None
    early_stopping_rounds: int | None
    stage_losses: Tensor
    kept_number: Tensor
    _n_kept: int  # members that predict when the run has ended; 0 before

    def __init__(
        self,
        estimator: Estimator | None,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        *,
        shrinkage_rate: float = 1.0,
        epochs_per_estimator: int | None = None,
        early_stopping_rounds: int | None = None,
        use_reduction_sum: bool = False,
        optimizer: OptimizerChoice = None,
        lr_scheduler: ScheduleChoice = None,
        criterion: CriterionChoice = None,
        n_outputs: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.epochs_per_estimator = check_optional_count("epochs_per_estimator", epochs_per_estimator)
        self.early_stopping_rounds = check_optional_count("early_stopping_rounds", early_stopping_rounds)
        super().__init__(**passed_on(super().__init__, locals()), vectorize=False)

    def set_members(self, members: Sequence[nn.Module]) -> None:
        """Keep the members, and register the losses of the stages for early stopping."""
        super().set_members(members)
        self.register_buffer("stage_losses", torch.full((len(members),), math.inf))
        self.register_count("kept_number", "_n_kept")

    @property
    def n_members(self) -> int:
        """The number of members that predict: those up to the current stage, or up to the best one after the run."""
        return self._n_kept or self.stage + 1

    def stage_epochs(self) -> list[int]:
        """Return `epochs_per_estimator` for each stage, or the run's epochs divided by the number of members.

        Raises:
            MisconfigurationException: If the run cannot be divided.
        """
        given = self.epochs_per_estimator
        return super().stage_epochs() if given is None else [given] * self.n_stages

    # --- a training step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Look up the scores of the earlier members."""
        super().on_train_batch_start(batch, batch_idx)
        if self.stage:
            _CACHED[self].look_up(self, batch, batch_idx)

    def training_loss(self, inputs: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared error of the member to the residual, and the scores of the ensemble with it."""
        outputs = self.training_outputs(inputs, targets)
        kept = _CACHED.get(self)
        sums = None if kept is None else kept.of_batch
        if sums is None:
            earlier = self.earlier_outputs(*inputs)
            sums = torch.zeros_like(outputs[0]) if earlier is None else at_least_single(earlier).sum(0)
        residuals = negative_gradient(self.criterion, self.shrinkage_rate * sums, targets[0])
        loss = self.fit_to_residuals(outputs, residuals.unsqueeze(0), targets).sum()
        return loss, self.shrinkage_rate * (sums + outputs.detach())

    # --- early stopping

    def setup(self, stage: str) -> None:
        """Begin with the first stage, and check that early stopping has a validation to go by."""
        if stage == "fit" and self.early_stopping_rounds is not None:
            self._check_validation()
        super().setup(stage)
        if stage == "fit":
            _CACHED[self] = kept = CachedPredictions()
            self._installed.callback(_CACHED.pop, self, None)
            self._installed.enter_context(kept.watch_batches(self.trainer))
            self.stage_losses.fill_(math.inf)
            self.set_count("kept_number", "_n_kept", 0)

    def on_stage_start(self) -> None:
        """Let the members of the stage predict, even if the run continues past its end (`min_epochs`)."""
        self.set_count("kept_number", "_n_kept", 0)

    def on_validation_epoch_end(self) -> None:
        """Keep the loss of the stage on the first loader, and decide at its end which members predict from then on."""
        is_checked = self._is_fitting and self.early_stopping_rounds is not None and not self.trainer.sanity_checking
        if not is_checked or not self._is_last_epoch_of_stage:
            return
        logged = self.trainer.callback_metrics
        loss = logged.get("val/loss", logged.get("val/loss/dataloader_idx_0"))
        if loss is None:
            return
        self.stage_losses[self.stage] = loss.nan_to_num(nan=math.inf)
        if self.trainer.is_last_batch:
            self._keep_best_stages()

    def on_train_epoch_end(self) -> None:
        """Log the mean of the steps' losses, and end the run if no further stage helps."""
        super().on_train_epoch_end()
        if self.early_stopping_rounds is not None and self._is_last_epoch_of_stage and self._keep_best_stages():
            self.trainer.should_stop = True

    def _keep_best_stages(self) -> bool:
        """Let the members up to the best stage predict, if this stage is the last one; return whether it is."""
        losses = self.stage_losses[: self.stage + 1].tolist()
        best = losses.index(min(losses))
        is_last = self.stage == self.n_stages - 1 or self.stage - best >= (self.early_stopping_rounds or 0)
        if is_last:
            self.set_count("kept_number", "_n_kept", best + 1)
        return is_last

    @property
    def _is_last_epoch_of_stage(self) -> bool:
        return (self.current_epoch + 1) % self.stage_epochs()[0] == 0

    def _check_validation(self) -> None:
        trainer, name = self.trainer, f"early_stopping_rounds={self.early_stopping_rounds}"
        if not trainer.enable_validation:
            raise MisconfigurationException(f"{name} needs validation data: give trainer.fit a validation loader.")
        every, length = trainer.check_val_every_n_epoch, self.stage_epochs()[0]
        if every is None or length % every:
            raise MisconfigurationException(
                f"{name} needs a validation at the end of each stage, so after every {length} epochs, and "
                f"check_val_every_n_epoch={every}."
            )


class GradientBoostingClassifier(GradientBoostedMembers, ClassifierEnsemble):
    """Train classifiers one after another, each on the residual of the sum of the earlier ones.

    Each member fits, by least squares, the negative gradient of the loss at the sum of the earlier members. The
    probabilities are computed from `shrinkage_rate` times the sum. A stage trains one member with a new
    optimizer and schedule; earlier members are frozen, and their outputs for data in memory are computed once.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes; a LightningModule counts as a plain
            module.
        n_estimators: Number of members and of stages, >= 1.
        estimator_args: Arguments of the class or factory.
        shrinkage_rate: Factor of each member's output, in (0, 1].
        epochs_per_estimator: Epochs of a stage, >= 1; by default `max_epochs` of the run divided by `n_estimators`.
        early_stopping_rounds: Number of stages without a lower validation loss, >= 1, after which the run ends. The
            ensemble keeps the members up to the best stage, even if the run ends before. None trains and keeps all
            stages.
        use_reduction_sum: Whether the squared error is summed over a batch, as in torchensemble, so that steps grow
            with the batch size; by default it is averaged.
        optimizer: The optimizer of each stage, as for `VotingClassifier`; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: The schedule of each stage, as for `VotingClassifier`; none by default.
        criterion: Loss of the sum (B, n_outputs) and targets; cross-entropy by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if the run does not divide into stages, or early stopping has no
            validation at the end of each stage. A run that is too short for all stages is a warning.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Friedman, Annals of Statistics 29, 2001; torchensemble's class of this name.
    """


class GradientBoostingRegressor(GradientBoostedMembers, RegressorEnsemble):
    """Train regressors one after another, each on the residual of the sum of the earlier ones.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes; a LightningModule counts as a plain
            module.
        n_estimators: Number of members and of stages, >= 1.
        estimator_args: Arguments of the class or factory.
        shrinkage_rate: Factor of each member's output, in (0, 1].
        epochs_per_estimator: Epochs of a stage, >= 1; by default `max_epochs` of the run divided by `n_estimators`.
        early_stopping_rounds: See `GradientBoostingClassifier`.
        use_reduction_sum: Whether the squared error is summed over a batch instead of averaged.
        optimizer: The optimizer of each stage; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: The schedule of each stage; none by default.
        criterion: Loss of the sum and targets of the same shape, whose negative gradient is fitted; the mean squared
            error by default, for which that is the residual.
        n_outputs: Number of values predicted for each sample.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if the run does not divide into stages, or early stopping has no
            validation at the end of each stage. A run that is too short for all stages is a warning.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Friedman, Annals of Statistics 29, 2001; torchensemble's class of this name.
    """
