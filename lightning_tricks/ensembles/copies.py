"""Ensembles of one model that is trained in cycles of the learning rate, with copies of it as members."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_tricks.ensembles.core.members import Members, SequentialMembers, refuse_lazy, tensors_of
from lightning_tricks.ensembles.core.stacked_members import as_members
from lightning_tricks.ensembles.ensemble import Ensemble


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
            ensemble.estimators_.copy_member_(index, tensors_of(member))
        ensemble.set_count("taken", "_num_captured", len(members))
        return ensemble

    def _capture_if_due(self) -> None:
        step = self.trainer.global_step
        due = self.captures_due(step)
        if self._num_captured < due <= self.n_estimators and self.captures_due(step - 1) < due:
            self.estimators_.copy_member_(due - 1, self.working.member_tensors(0))
            self.set_count("taken", "_num_captured", due)
