"""Members that are trained one after another, stage by stage, such as those of boosting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._lightning_compat.ddp import rewrap_ddp
from lightning_tricks._lightning_compat.flavor import MisconfigurationException, rank_zero_warn
from lightning_tricks._lightning_compat.trainer import is_fast_dev_run
from lightning_tricks.ensembles.core.members import Members, SequentialMembers, refuse_lazy
from lightning_tricks.ensembles.core.stacked_members import as_sequential
from lightning_tricks.ensembles.ensemble import Ensemble


class StagedEnsemble(Ensemble):
    """Base of ensembles that are trained in stages, each of which trains other members.

    A stage begins with a new optimizer and a new schedule of the trained members. All other members are frozen: they
    are in evaluation mode and have no gradients and no optimizer, so that neither weight decay nor BatchNorm changes
    them. The stage is a part of the state dict, so that a run resumes in the middle of a stage. A new fit begins with
    stage 0.

    A family overrides, beside the methods of `Ensemble`:

    - `n_stages`: the number of stages, one for each member by default;
    - `stage_epochs()`: the length of each stage; by default the run's epochs divided by the number of stages;
    - `trained_members()`: the members that the current stage trains, one by default;
    - `trains_all_members`: whether a stage trains all members or none of them, which then may be stacked;
    - `on_stage_start()`: called when a stage has begun, with its optimizer made;
    - `predict_members(*x)` and `n_members`: by default the members up to the current stage predict;
    - `member_loss` or `training_loss`, which may call `earlier_outputs(*inputs)`.

    Further state of a stage, which must survive a resume, is registered as a buffer in `set_members`.

    Attributes:
        stage: The current stage, from 0.
    """

    trains_all_members = False
    stage: int
    stage_number: Tensor
    _trainable: list[bool] | None = None  # which parameters a fit trains, in their order; None outside of a fit

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return self.n_estimators

    def stage_epochs(self) -> list[int]:
        """Return the length of each stage in epochs; 1 in a run of fewer epochs than stages.

        Raises:
            MisconfigurationException: If the run cannot be divided into the stages.
        """
        epochs = self.trainer.max_epochs or 0
        if is_fast_dev_run(self.trainer) or 0 < epochs < self.n_stages:
            return [1] * self.n_stages
        if epochs <= 0 or epochs % self.n_stages:
            raise MisconfigurationException(
                f"{type(self).__name__} has {self.n_stages} stages of equal length, and max_epochs={epochs} is not a "
                f"multiple of that: set max_epochs to a multiple of {self.n_stages}."
            )
        return [epochs // self.n_stages] * self.n_stages

    def stage_at(self, epoch: int) -> int:
        """Return the stage that an epoch belongs to."""
        return stage_of_epoch(self.stage_epochs(), epoch)

    def on_stage_start(self) -> None:
        """React to the beginning of a stage; `self.stage` is the new one."""

    def set_members(self, members: Any) -> None:
        """Keep the members one after another where stages train some of them: a stack would train all."""
        refuse_lazy(members)
        super().set_members(members)
        if not self.trains_all_members:
            self.estimators_ = as_sequential(self.estimators_)
        self.register_count("stage_number", "stage")
        self.register_load_state_dict_post_hook(_freeze_after_load)  # type: ignore[no-untyped-call]

    def trained_members(self) -> SequentialMembers:
        """Return the member of the current stage."""
        return self._members([self.stage])

    def fit_members(self) -> Members:
        """Return the members of all stages."""
        members: Members = self.estimators_
        return members

    def predict_members(self, *x: Tensor) -> Tensor:
        """Return the outputs of the members up to the current stage, (n_members, B, ...)."""
        return self._members(range(self.n_members)).forward_shared(*x)

    @property
    def n_members(self) -> int:
        """The number of members that predict."""
        return self.stage + 1

    @torch.no_grad()
    def earlier_outputs(self, *x: Tensor) -> Tensor | None:
        """Return the outputs of the members of earlier stages, without gradients; None in the first stage."""
        return self._members(range(self.stage)).forward_shared(*x) if self.stage else None

    def schedule_epochs(self) -> int:
        """Return the length of the current stage, which has a schedule of its own."""
        return self.stage_epochs()[self.stage]

    @classmethod
    def from_members(cls, members: list[nn.Module], **options: Any) -> Any:
        """Return an ensemble of trained members, as after the last stage."""
        ensemble = super().from_members(members, **options)
        ensemble._set_stage(ensemble.n_stages - 1)
        return ensemble

    def train(self, mode: bool = True) -> StagedEnsemble:
        """Set the mode; the members that the current stage does not train stay in evaluation mode."""
        super().train(mode)
        if mode:
            trained = list(self.trained_members().children())
            for member in self.estimators_.children():
                if not any(member is other for other in trained):
                    member.eval()
        return self

    def setup(self, stage: str) -> None:
        """Begin with the first stage; a checkpoint to resume from is loaded after this."""
        if stage == "fit":
            self.stage_epochs()  # whose error comes before anything is changed
        super().setup(stage)
        if stage == "fit":
            self._installed.enter_context(self._frozen_members())
            self._set_stage(0)
            for member in self.estimators_.children():
                member.train(self.training)  # Lightning warns of modules in evaluation mode before `on_train_start`

    def on_train_start(self) -> None:
        """Set the modes of the members for the stage that is trained, and begin the first stage."""
        self.train()
        if self.trainer.global_step == 0:
            self._warn_of_a_short_run()
            self.on_stage_start()

    def _warn_of_a_short_run(self) -> None:
        epochs, needed = self.trainer.max_epochs, sum(self.stage_epochs())
        if epochs in (None, -1) or epochs >= needed or is_fast_dev_run(self.trainer):
            return
        rank_zero_warn(
            f"{type(self).__name__}: max_epochs={epochs} ends in stage {self.stage_at(epochs - 1) + 1} of "
            f"{self.n_stages}; members of later stages are not trained, and do not predict. Set max_epochs={needed} to "
            "train all of them."
        )

    def on_train_epoch_start(self) -> None:
        """Begin the stage of this epoch, with a new optimizer and schedule, if it is a new one."""
        stage = self.stage_at(self.current_epoch)
        if stage != self.stage:
            self._set_stage(stage)
            self.train()
            rewrap_ddp(self.trainer)
            self.trainer.strategy.setup_optimizers(self.trainer)
            self.on_stage_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin the stage if a fit resumes after the last batch of an epoch: Lightning then calls no epoch start."""
        if batch_idx == 0:
            self.on_train_epoch_start()
        super().on_train_batch_start(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        """Log the mean of the steps' losses, and end the run after the last stage, even if it was to be longer."""
        super().on_train_epoch_end()
        epochs = sum(self.stage_epochs())
        if self.current_epoch + 1 >= epochs and self.trainer.max_epochs != epochs:
            self.trainer.should_stop = True

    @property
    def _is_fitting(self) -> bool:
        return self._trainable is not None

    def freeze_other_members(self) -> None:
        """Let only the members of the current stage have gradients, in a fit."""
        if not self._is_fitting:
            return
        trained = {id(parameter) for parameter in self.trained_members().parameters()}
        for parameter, trainable in zip(self.parameters(), self._trainable or (), strict=True):
            parameter.requires_grad_(trainable and id(parameter) in trained)
            if not parameter.requires_grad:
                parameter.grad = None

    @contextmanager
    def _frozen_members(self) -> Iterator[None]:
        parameters = list(self.parameters())
        self._trainable = before = [parameter.requires_grad for parameter in parameters]
        try:
            yield
        finally:
            for parameter, trainable in zip(parameters, before, strict=True):
                parameter.requires_grad_(trainable)
            self._trainable = None

    def _set_stage(self, stage: int) -> None:
        self.set_count("stage_number", "stage", stage)
        self.freeze_other_members()

    def _members(self, indices: Any) -> SequentialMembers:
        members: Any = self.estimators_
        chosen: SequentialMembers = members.only(indices)
        return chosen


def stage_of_epoch(epochs: list[int], epoch: int) -> int:
    """Return the stage that an epoch belongs to, of stages with these lengths; the last one after their end.

    Examples:
        >>> [stage_of_epoch([2, 1], epoch) for epoch in range(4)]
        [0, 0, 1, 1]
    """
    for stage, length in enumerate(epochs[:-1]):
        if epoch < length:
            return stage
        epoch -= length
    return max(len(epochs) - 1, 0)


def _freeze_after_load(ensemble: Any, keys: Any) -> None:
    ensemble.freeze_other_members()
