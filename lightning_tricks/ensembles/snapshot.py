"""Ensembles of copies of one model that is trained in cycles of the learning rate.

Snapshots are taken at the ends of cycles, and the copies of fast geometric ensembles in their middles.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._lightning_compat.flavor import MisconfigurationException, rank_zero_warn
from lightning_tricks._lightning_compat.trainer import is_fast_dev_run
from lightning_tricks._shared.checks import check_count, check_not_negative, check_number, check_optional_count
from lightning_tricks._shared.tensors import named_tensors
from lightning_tricks.ensembles.arguments import CriterionChoice, OptimizerChoice, passed_on
from lightning_tricks.ensembles.core.combination import snapshot_factor, triangle_factor
from lightning_tricks.ensembles.core.factory import Estimator
from lightning_tricks.ensembles.core.members import Members, SequentialMembers, refuse_lazy
from lightning_tricks.ensembles.core.stacked_members import as_members
from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.ensembles.prediction import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.lr_schedules.builders import steps_in_epochs, total_steps
from lightning_tricks.lr_schedules.core.schedules import FactorLR


class _ClampedCyclicLR(FactorLR):
    """Learning rates in cycles, kept within limits."""

    def __init__(self, optimizer: Optimizer, cycle: int, limits: tuple[float, float]) -> None:
        self.limits = limits
        super().__init__(optimizer, partial(snapshot_factor, cycle=cycle))

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at `last_epoch`."""
        low, high = self.limits
        return [min(max(rate, low), high) for rate in super().get_lr()]


class CapturedMembers(Ensemble):
    """One model, `working`, and copies of it that are captured in the course of a run.

    Before the first copy the model itself predicts. A family overrides `make_schedule` and `captures_due`.
    """

    trains_one_model = True
    taken: Tensor
    _num_captured: int

    def captures_due(self, step: int) -> int:
        """Return how many copies there should be after so many optimizer steps."""
        raise NotImplementedError

    @property
    def uses_member_optimizers(self) -> bool:
        """Whether the model's own `configure_optimizers` is used: never, as the cycles set its learning rate."""
        return False

    def set_scheduler(self, scheduler_name: str, **kwargs: Any) -> None:
        """Warn that the cycles are the schedule; nothing changes."""
        warnings.warn(
            f"{type(self).__name__} sets the learning rate in cycles: set_scheduler({scheduler_name!r}) has no effect.",
            stacklevel=2,
        )

    def set_members(self, members: Sequence[nn.Module]) -> None:
        """Keep the model as `working`, and a copy for each member as `estimators_`."""
        refuse_lazy(members)
        super().set_members(members)
        self.working: Members = SequentialMembers(members)
        copies = [copy.deepcopy(members[0]) for _ in range(self.n_estimators)]
        self.estimators_ = as_members(copies).requires_grad_(False)
        self.register_count("taken", "_num_captured")

    def trained_members(self) -> Members:
        """Return the members that a fit trains: the working model."""
        return self.working

    @property
    def n_members(self) -> int:
        """The number of members that predict: the copies captured so far."""
        return self._num_captured

    def predict_members(self, *x: Tensor) -> Tensor:
        """Return the outputs of each copy, (captured, B, ...); before the first one, those of the model."""
        if not self._num_captured:
            return self.working.forward_shared(*x)
        return self.estimators_.forward_shared(*x)[: self._num_captured]

    def on_train_start(self) -> None:
        """Start without copies in a new fit; a resumed fit first captures the copy that was due when it stopped."""
        if self.trainer.global_step == 0:
            self.set_count("taken", "_num_captured", 0)
        self._capture_if_due()

    def on_train_batch_end(self, *args: Any) -> None:
        """Capture a copy where one is due."""
        self._capture_if_due()

    @classmethod
    def from_members(cls, members: list[nn.Module], **options: Any) -> Any:
        """Return an ensemble of trained copies, the last of which is the working model."""
        made: Any = cls
        ensemble = made([members[-1]], len(members), **options)
        for index, member in enumerate(members):
            ensemble.estimators_.copy_member_(index, named_tensors(member))
        ensemble.set_count("taken", "_num_captured", len(members))
        return ensemble

    def _capture_if_due(self) -> None:
        step = self.trainer.global_step
        due = self.captures_due(step)
        if self._num_captured < due <= self.n_estimators and self.captures_due(step - 1) < due:
            self.estimators_.copy_member_(due - 1, self.working.member_tensors(0))
            self.set_count("taken", "_num_captured", due)


class SnapshotMembers(CapturedMembers):
    """Copies of one model at the ends of cycles of its learning rate."""

    _cycle = 0  # its optimizer steps

    def __init__(
        self,
        estimator: Estimator | None,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        *,
        optimizer: OptimizerChoice = None,
        criterion: CriterionChoice = None,
        voting_strategy: Literal["soft", "hard"] = "soft",
        weights: Sequence[float] | None = None,
        n_outputs: int | None = None,
        lr_clip: tuple[float, float] | None = None,
        seed: int | None = None,
    ) -> None:
        self.voting_strategy = self.check_voting_strategy(voting_strategy)
        if lr_clip is not None:
            if len(lr_clip) != 2 or not lr_clip[0] < lr_clip[1]:
                raise ValueError(f"lr_clip must be (lowest, highest) learning rate, got {lr_clip!r}.")
            for limit in lr_clip:
                check_not_negative("lr_clip", limit)
        super().__init__(**passed_on(super().__init__, locals()), vectorize=False)

    def make_schedule(self, optimizer: Optimizer) -> dict[str, Any]:
        """Make the schedule: cycles of equal length over the run."""
        self._cycle = self._steps_per_cycle()
        limits = self.hparams["lr_clip"] or (-math.inf, math.inf)
        return {"scheduler": _ClampedCyclicLR(optimizer, self._cycle, limits), "interval": "step"}

    def captures_due(self, step: int) -> int:
        """Return the number of cycles that end within so many optimizer steps."""
        return step // self._cycle

    def _steps_per_cycle(self) -> int:
        n, trainer = self.n_estimators, self.trainer
        limit = "max_epochs and limit_train_batches=..., the number of batches of an epoch"
        steps = total_steps(trainer, remedy=f"give the Trainer max_steps, or {limit}")
        cycle = max(1, steps // n)
        if steps % n == 0 or is_fast_dev_run(trainer):
            return cycle
        by_epochs = trainer.max_steps == -1
        length = f"max_epochs={trainer.max_epochs} ({steps} steps)" if by_epochs else f"{steps} steps"
        problem = f"{type(self).__name__} has {n} cycles of equal length, and {length} is not a multiple of {n}"
        remedy = f"set {'max_epochs' if by_epochs else 'max_steps'} to a multiple of n_estimators={n}"
        # such a run only tries whether all works
        if steps < n or (by_epochs and (trainer.max_epochs or 0) < n):
            rank_zero_warn(f"{problem}; {min(n, steps)} cycles have {cycle} steps each. To train, {remedy}.")
            return cycle
        raise MisconfigurationException(f"{problem}: {remedy}.")


class SnapshotEnsembleClassifier(SnapshotMembers, ClassifierEnsemble):
    """Train one classifier in cycles of the learning rate, and average the probabilities of its copies at their ends.

    Training takes as long as for one model; the members differ less than in `VotingClassifier`. Each cycle lasts the
    steps of the run divided by `n_estimators`, and lowers the learning rate along half a cosine. Before the end of the
    first cycle, the model itself predicts.

    Args:
        estimator: The model: a class or factory, a module (of which a copy is trained), or a LightningModule, whose
            `training_step` is then the loss.
        n_estimators: Number of cycles, >= 1, and of snapshots.
        estimator_args: Arguments of the class or factory.
        optimizer: See `VotingClassifier`; its learning rate is the highest of a cycle.
        criterion: See `VotingClassifier`.
        voting_strategy: See `VotingClassifier`.
        weights: Weights of the snapshots, >= 0; equal ones by default.
        n_outputs: See `VotingClassifier`.
        lr_clip: Lowest and highest learning rate; None for 0 and that of the optimizer.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if the run does not divide into cycles or its length is unknown.
            Fewer epochs than cycles are a warning.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Huang et al., arXiv 1704.00109; torchensemble's class of this name.
    """


class SnapshotEnsembleRegressor(SnapshotMembers, RegressorEnsemble):
    """Train one regressor in cycles of the learning rate, and average the predictions of its copies at their ends.

    Args:
        estimator: The model, in any of the forms that `SnapshotEnsembleClassifier` takes.
        n_estimators: Number of cycles, >= 1, and of snapshots.
        estimator_args: Arguments of the class or factory.
        optimizer: Its learning rate is the highest of a cycle.
        criterion: See `VotingRegressor`.
        voting_strategy: Must be "soft": regressors have no votes to count.
        weights: Weights of the snapshots, >= 0; equal ones by default.
        n_outputs: Number of values predicted for each sample.
        lr_clip: Lowest and highest learning rate; None for 0 and that of the optimizer.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if the run does not divide into cycles or its length is unknown.
            Fewer epochs than cycles are a warning.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Huang et al., arXiv 1704.00109; torchensemble's class of this name.
    """


def base_then_cycles_factor(step: int, base_steps: int, cycle: int, high: float, low: float) -> float:
    """Return the learning rate's factor: 1 in the steps of the base model, and then that of the cycles.

    Examples:
        >>> [base_then_cycles_factor(step, 2, cycle=4, high=0.5, low=0.1) for step in range(5)]
        [1.0, 1.0, 0.5, 0.3, 0.1]
    """
    return triangle_factor(step - base_steps, cycle, high, low) if step >= base_steps else 1.0


class FastGeometricMembers(CapturedMembers):
    """Copies of one model from the middles of cycles, in which its learning rate is the lowest."""

    _base_steps = 0
    _cycle_steps = 1

    def __init__(
        self,
        estimator: Estimator | None,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        *,
        cycle: int = 4,
        lr_1: float | None = None,
        lr_2: float | None = None,
        base_epochs: int | None = None,
        optimizer: OptimizerChoice = None,
        criterion: CriterionChoice = None,
        voting_strategy: Literal["soft", "hard"] = "soft",
        weights: Sequence[float] | None = None,
        n_outputs: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.voting_strategy = self.check_voting_strategy(voting_strategy)
        self.cycle = check_count("cycle", cycle)
        self.base_epochs = check_optional_count("base_epochs", base_epochs, minimum=0)
        self.lr_1 = None if lr_1 is None else check_number("lr_1", lr_1, above=0)
        self.lr_2 = None if lr_2 is None else check_number("lr_2", lr_2, above=0)
        super().__init__(**passed_on(super().__init__, locals()), vectorize=False)

    def make_schedule(self, optimizer: Optimizer) -> dict[str, Any]:
        """Make the schedule: constant learning rates for the base model, and then cycles."""
        epochs = self._count_base_epochs()
        total_steps(self.trainer, remedy="give the Trainer limit_train_batches=..., the number of batches of an epoch")
        per_epoch = max(1, int(steps_in_epochs(self.trainer, 1)))
        self._base_steps, self._cycle_steps = epochs * per_epoch, self.cycle * per_epoch
        rate = float(optimizer.defaults["lr"])
        high = 0.5 if self.lr_1 is None else self.lr_1 / rate
        low = 0.005 if self.lr_2 is None else self.lr_2 / rate
        if low > high:
            raise ValueError(
                f"lr_2={low * rate:g} is the lowest learning rate of a cycle, and is above the highest, "
                f"lr_1={high * rate:g}."
            )
        cycles: dict[str, Any] = {"cycle": self._cycle_steps, "high": high, "low": low}
        factor = partial(base_then_cycles_factor, base_steps=self._base_steps, **cycles)
        return {"scheduler": FactorLR(optimizer, factor), "interval": "step"}

    def captures_due(self, step: int) -> int:
        """Return the number of cycles of which more than the first half lies within so many optimizer steps."""
        after_first = step - self._base_steps - (self._cycle_steps + 1) // 2
        return max(0, after_first // self._cycle_steps + 1)

    def on_train_start(self) -> None:
        """Continue as `CapturedMembers` does, and train no more if the run was stopped after the last copy."""
        super().on_train_start()
        self._stop_after_last_copy()

    def on_train_epoch_end(self) -> None:
        """Log the mean of the steps' losses, and end the run after the epoch of the last copy."""
        super().on_train_epoch_end()
        self._stop_after_last_copy()

    def _stop_after_last_copy(self) -> None:
        if self.n_members == self.n_estimators:
            self.trainer.should_stop = True

    def _count_base_epochs(self) -> int:
        """Return the epochs of the base model; a run that ends before the last copy is warned of.

        Raises:
            MisconfigurationException: If the run is longer than they and the cycles, or is not measured in epochs.
        """
        trainer, cycles = self.trainer, self.n_estimators * self.cycle
        if is_fast_dev_run(trainer):
            return 0
        epochs = trainer.max_epochs or 0
        base = max(epochs - cycles, 0) if self.base_epochs is None else self.base_epochs
        unused = epochs - base - cycles
        of_base = "" if self.base_epochs is None else f" for base_epochs={base} epochs"
        needed = f"{cycles} or more" if self.base_epochs is None else base + cycles
        problem = (
            f"{type(self).__name__} trains its base model{of_base}, and then {self.n_estimators} cycles of "
            f"{self.cycle} epochs, which does not match max_epochs={epochs} and max_steps={trainer.max_steps}"
        )
        if epochs <= 0 or unused > 0 or trainer.max_steps != -1:
            raise MisconfigurationException(f"{problem}: set max_epochs={needed}, and leave out max_steps.")
        if unused < -(self.cycle // 2):  # after the last copy half a cycle may be left out
            rank_zero_warn(
                f"{problem}; the run ends before the last copy is taken, and before the first copy the model itself "
                f"predicts. To take all of them, set max_epochs={needed}."
            )
        return base


class FastGeometricClassifier(FastGeometricMembers, ClassifierEnsemble):
    """Train one classifier, continue in short cycles of the learning rate, and average the copies from their middles.

    After the base model is trained, each cycle lowers the learning rate linearly and raises it again; a copy is taken
    at the lowest point. Optimizer and momentum continue throughout. To train the base model with its own schedule,
    train it before and pass it with `base_epochs=0`. Before the first copy, the model itself predicts. The run ends
    after the epoch of the last copy, half a cycle before `max_epochs`.

    Args:
        estimator: The model: a class or factory, a module (of which a copy is trained), a list of one pretrained module
            (with `base_epochs=0`), or a LightningModule, whose `training_step` is then the loss.
        n_estimators: Number of cycles, >= 1, and of copies.
        estimator_args: Arguments of the class or factory.
        cycle: Epochs of a cycle, >= 1, even or odd.
        lr_1: Highest learning rate of a cycle, > 0; by default half of the optimizer's, as in the paper. The learning
            rates of parameter groups keep their ratios.
        lr_2: Lowest learning rate of a cycle, > 0; by default 1/200 of the optimizer's.
        base_epochs: Epochs of the base model, >= 0; by default the epochs of the run minus the cycles.
        optimizer: See `VotingClassifier`.
        criterion: See `VotingClassifier`.
        voting_strategy: See `VotingClassifier`.
        weights: Weights of the copies, >= 0; equal ones by default.
        n_outputs: See `VotingClassifier`.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if the run is longer than the base model and the cycles, or has
            `max_steps`. A run that is too short is a warning.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Garipov et al., arXiv 1802.10026, whose authors average probabilities as well (torchensemble's class of this
        name averages logits).
    """

    why_not_torchensemble = "torchensemble takes the probabilities of the mean logits, not the mean of probabilities"


class FastGeometricRegressor(FastGeometricMembers, RegressorEnsemble):
    """Train one regressor, continue in short cycles of the learning rate, and average the copies from their middles.

    Args:
        estimator: The model, in any of the forms that `FastGeometricClassifier` takes.
        n_estimators: Number of cycles, >= 1, and of copies.
        estimator_args: Arguments of the class or factory.
        cycle: Epochs of a cycle, >= 1, even or odd.
        lr_1: Highest learning rate of a cycle, > 0; by default half of the optimizer's.
        lr_2: Lowest learning rate of a cycle, > 0; by default 1/200 of the optimizer's.
        base_epochs: Epochs of the base model, >= 0; by default the epochs of the run minus the cycles.
        optimizer: See `VotingClassifier`.
        criterion: See `VotingRegressor`.
        voting_strategy: Must be "soft": regressors have no votes to count.
        weights: Weights of the copies, >= 0; equal ones by default.
        n_outputs: Number of values predicted for each sample.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if the run is longer than the base model and the cycles, or has
            `max_steps`. A run that is too short is a warning.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Garipov et al., arXiv 1802.10026; torchensemble's class of this name.
    """
