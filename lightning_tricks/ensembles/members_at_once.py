"""Whether the members of an ensemble run at once: decided before a fit, on first batches, and by a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_tricks._lightning_compat.ddp import syncs_batchnorm
from lightning_tricks._lightning_compat.flavor import MisconfigurationException, ModelPruning
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks.ensembles.core.members import Members, SequentialMembers
from lightning_tricks.ensembles.core.stacked_layers import StackedBatchNorm
from lightning_tricks.ensembles.core.stacked_members import StackedMembers, as_members, as_sequential
from lightning_tricks.ensembles.prediction import CombinedPrediction
from lightning_tricks.ensembles.training_data import TrainingBatches, inputs_to_predict
from lightning_tricks.gradient_clipping.core.methods import AGC, METHODS, ClipMethod


class MembersAtOnce(TrainingBatches, CombinedPrediction):
    """The part of an `Ensemble` that decides whether its members run at once."""

    _ranks_agree = False  # on the result of the first comparison

    def trained_members(self) -> Members:
        """Return the members that training steps run and that the optimizer updates."""
        return self.estimators_

    # --- before a fit

    def unstack_where_needed(self) -> None:
        """Run stacked members one after another if something in this fit does not allow stacks."""
        members = self.estimators_
        if isinstance(members, StackedMembers) and (reason := members.adopt_frozen_parameters()):
            self.estimators_ = as_sequential(members, reason)
        if self._is_stacked() and (reason := _why_not_stack_beside(callbacks_of(self.trainer))):
            self.estimators_ = as_sequential(self.estimators_, reason)
        stacked = any(isinstance(layer, StackedBatchNorm) for layer in self.estimators_.modules())
        if stacked and syncs_batchnorm(self.trainer):
            self.estimators_ = as_sequential(self.estimators_, "sync_batchnorm=True replaces layers of torch.nn")

    def forget_comparisons(self) -> None:
        """Compare stacked members with a loop again, on the next batches."""
        self._ranks_agree = False
        if isinstance(self.estimators_, StackedMembers):
            self.estimators_.compared.clear()

    # --- on first batches

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """On the first batch of a fit, compare members that run at once with a loop; one rank decides for all."""
        members = self.trained_members()
        if self._ranks_agree or not isinstance(members, StackedMembers):
            return
        inputs, _ = self.split_batch(batch, len(members))
        self._compare_with_loop(members, inputs, shared=not self.has_member_rows)
        decide: Any = self.trainer.strategy.reduce_boolean_decision
        self._ranks_agree = decide(members.is_compared, all=True)
        if decide(bool(members.reason), all=False):
            members.reason = members.reason or "members of another rank mix rows"

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """On the first batch of an evaluation, compare members that run at once with a loop."""
        if isinstance(self.estimators_, StackedMembers) and not self.estimators_.is_compared:
            inputs = inputs_to_predict(batch)
            if all(isinstance(value, Tensor) for value in inputs):
                self._compare_with_loop(self.estimators_, inputs, shared=True)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_after_backward(self) -> None:
        """Let go of the tensors that members run one after another on."""
        if isinstance(self.estimators_, StackedMembers):
            self.estimators_.release()

    def _compare_with_loop(self, members: StackedMembers, inputs: Sequence[Tensor], shared: bool) -> None:
        known = members.reason
        with self.trainer.precision_plugin.forward_context():
            members.compare(*inputs, shared=shared)
        if members.reason != known:
            self._log_why_sequential(members)

    def on_dry_run(self) -> None:
        """Let a copy that is run to see its operators check and compare nothing, which would need data."""
        self._checked_stages = {"train", "val", "test"}
        for part in self.modules():
            if isinstance(part, StackedMembers):
                part.compared = {(trains, grad) for trains in (False, True) for grad in (False, True)}

    # --- in a checkpoint

    def how_members_run(self) -> dict[str, Any]:
        """Return how members run, for a checkpoint."""
        how: dict[str, Any] = {"stacked": self._is_stacked()}
        if isinstance(self.estimators_, StackedMembers):
            compared = [list(mode) for mode in sorted(self.estimators_.compared)]
            how.update(compared=compared, why_sequential=self.estimators_.reason)
        return how

    def run_members_as(self, how: Mapping[str, Any]) -> None:
        """Stack or unstack the parameters as the optimizer's state in a checkpoint needs them.

        The result of the comparison on the first batches is kept, so that the run continues as it began.

        Raises:
            MisconfigurationException: If the members cannot be stacked.
        """
        stacked = self._is_stacked()
        if how.get("stacked", stacked) != stacked:
            self._restack(stacked)
        if isinstance(self.estimators_, StackedMembers) and self.trainer.state.fn == "fit":
            self.estimators_.compared = {(train, grad) for train, grad in how.get("compared", [])}
            self.estimators_.reason = how.get("why_sequential", "")
            self._ranks_agree = (True, True) in self.estimators_.compared

    def _restack(self, stacked: bool) -> None:
        """Put stacked members one after another, or stack others.

        Raises:
            MisconfigurationException: If they cannot be stacked.
        """
        if stacked:
            self.estimators_ = as_sequential(self.estimators_, "members ran one after another in the checkpoint")
        else:
            self.estimators_ = as_members(list(self.estimators_), vectorize=True)
        if isinstance(self.estimators_, SequentialMembers) != stacked:
            raise MisconfigurationException(
                "The checkpoint's optimizer has stacked parameters, and these members cannot be stacked "
                f"({self.estimators_.reason}): resume with the members that it was saved with."
            )

    def _is_stacked(self) -> bool:
        return not isinstance(self.trained_members(), SequentialMembers)

    def _log_why_sequential(self, members: Members) -> None:
        if reason := members.reason:
            self._log_info(f"members run one after another: {reason}")


def _why_not_stack_beside(callbacks: Sequence[Any]) -> str:
    """Return why members cannot be stacked beside these callbacks, or nothing.

    Raises:
        MisconfigurationException: If one has found the stacked layers already, and takes them for those of one model.
    """
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"{type(callback).__name__} prunes whole tensors, which hold all members that run at once: give the "
                "ensemble vectorize=False."
            )
        for method in (getattr(callback, "method", None), *(getattr(callback, "groups", None) or {}).values()):
            if isinstance(method, ClipMethod) and type(method) not in _ELEMENTWISE_CLIPPING:
                return f"{type(method).__name__} clips the units of each layer by itself"
    return ""


_ELEMENTWISE_CLIPPING = {*METHODS.values()} - {AGC}
