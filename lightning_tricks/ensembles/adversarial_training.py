"""Adversarial training: voting whose members also learn from samples that were moved to where their loss is higher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_tricks._shared.checks import check_number
from lightning_tricks.ensembles.arguments import CriterionChoice, OptimizerChoice, ScheduleChoice, passed_on
from lightning_tricks.ensembles.core.factory import Estimator
from lightning_tricks.ensembles.prediction import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.ensembles.voting import IndependentMembers


class AdversarialMembers(IndependentMembers):
    """Independent members whose loss is that of the samples and of adversarial ones."""

    uses_member_steps = False  # their own `training_step` gives no gradient of the inputs

    def __init__(
        self,
        estimator: Estimator | None,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        *,
        epsilon: float = 0.01,
        feature_range: float | None = None,
        optimizer: OptimizerChoice = None,
        lr_scheduler: ScheduleChoice = None,
        criterion: CriterionChoice = None,
        voting_strategy: Literal["soft", "hard"] = "soft",
        weights: Sequence[float] | None = None,
        n_outputs: int | None = None,
        vectorize: bool | Literal["auto"] = "auto",
        shared_order: bool = False,
        members: Literal["replicated", "sharded"] = "replicated",
        seed: int | None = None,
    ) -> None:
        self.epsilon = check_number("epsilon", epsilon, above=0, at_most=1, note="a share of each feature's range")
        self.feature_range = None if feature_range is None else check_number("feature_range", feature_range, above=0)
        # of the features of each input so far, (2, ...): the negated lowest, and the highest value
        self._extremes: list[Tensor | None] = []
        super().__init__(**passed_on(super().__init__, locals()))

    def training_loss(self, inputs: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of the samples plus that of adversarial ones, and the outputs for the samples."""
        members = self.trained_members()
        steps = self._step_lengths(inputs)
        if not self.has_member_rows:  # each member has adversarial samples of its own
            inputs = [value.expand(len(members), *value.shape).flatten(0, 1) for value in inputs]
        leaves = [value.detach().requires_grad_() if value.is_floating_point() else value for value in inputs]
        outputs = members(*leaves)
        self.check_first_batch(outputs, targets, "train")
        loss = self.member_loss(outputs, targets)
        gradients = iter(self._input_gradients(loss, [leaf for leaf in leaves if leaf.requires_grad]))
        moved = [
            leaf if step is None else fast_gradient_sign(leaf, next(gradients), step)
            for leaf, step in zip(leaves, steps, strict=True)
        ]
        return loss + self.member_loss(call_without_statistics(members, *moved), targets), outputs

    def _step_lengths(self, inputs: Sequence[Tensor]) -> list[Tensor | float | None]:
        if not any(value.is_floating_point() for value in inputs):
            kinds = ", ".join(str(value.dtype) for value in inputs)
            raise TypeError(
                f"{type(self).__name__} moves inputs along their gradient, and whole numbers have none, got {kinds}: "
                "give floating-point inputs, or use Voting instead."
            )
        if self.feature_range is not None:
            fixed = self.epsilon * self.feature_range
            return [fixed if value.is_floating_point() else None for value in inputs]
        self._extremes = extended_extremes(self._extremes, inputs)
        if self.trainer.world_size > 1:
            self._extremes = [
                None if both is None else self.trainer.strategy.reduce(both, reduce_op="max") for both in self._extremes
            ]
        return [None if both is None else self.epsilon * both.sum(0) for both in self._extremes]

    def _input_gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of the inputs, of which the signs are used: scaled, so that none vanishes in fp16."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scaled = loss if scaler is None else scaler.scale(loss)
        gradients = torch.autograd.grad(scaled, leaves, retain_graph=True, allow_unused=True)
        return [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        ]

    # --- the fit

    def setup(self, stage: str) -> None:
        """Forget the ranges of an earlier fit; those of a checkpoint are loaded after this."""
        super().setup(stage)
        if stage == "fit":
            self._extremes = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the ranges of the features so far."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["ensemble"]["feature_extremes"] = self._extremes

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the ranges of the features, to resume."""
        super().on_load_checkpoint(checkpoint)
        self._extremes = list(checkpoint.get("ensemble", {}).get("feature_extremes", []))


class AdversarialTrainingClassifier(AdversarialMembers, ClassifierEnsemble):
    """Train classifiers independently on samples and adversarial samples, and average their probabilities.

    An adversarial sample is moved along the sign of the gradient of its member's loss, by `epsilon` times the range of
    each feature in the training data seen so far. Both losses have the same weight. A step runs the members twice;
    BatchNorm updates its statistics from the original samples only.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes; a LightningModule counts as a plain
            module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        epsilon: Length of the step as a share of each feature's range, in (0, 1].
        feature_range: The range of all features, > 0, such as 1.0 for pixels in [0, 1]; by default that of each one in
            the training data.
        optimizer: The optimizer, as for `VotingClassifier`; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of logits (B, n_outputs) and targets; cross-entropy by default.
        voting_strategy: "soft" averages probabilities, "hard" counts votes.
        weights: Weights of the members, >= 0; equal ones by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Whether members share the batches: needs less memory, and makes the ensemble less accurate.
        members: "replicated" trains all members on each rank; "sharded" trains a share of them on each rank of DDP.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind, or no input has floating-point values.
        ValueError: If a value is out of range or a name unknown.

    Source: Lakshminarayanan et al., arXiv 1612.01474; torchensemble's class of this name.
    """


class AdversarialTrainingRegressor(AdversarialMembers, RegressorEnsemble):
    """Train regressors independently on samples and adversarial samples, and average their predictions.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes; a LightningModule counts as a plain
            module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        epsilon: Length of the step as a share of each feature's range, in (0, 1].
        feature_range: The range of all features, > 0; by default that of each feature.
        optimizer: The optimizer, as for `VotingClassifier`; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: See `VotingRegressor`.
        voting_strategy: Must be "soft": regressors have no votes to count.
        weights: Weights of the members, >= 0; equal ones by default.
        n_outputs: Number of values predicted for each sample.
        vectorize: Whether members run at once.
        shared_order: Whether members share the batches.
        members: "replicated" trains all members on each rank; "sharded" trains a share of them on each rank of DDP.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind, or no input has floating-point values.
        ValueError: If a value is out of range or a name unknown.

    Source: Lakshminarayanan et al., arXiv 1612.01474; torchensemble's class of this name.
    """


def extended_extremes(known: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the lowest and highest value of each feature in all batches, on the device, without host reads.

    Args:
        known: The result for the batch before; empty for the first batch.
        inputs: The samples of a batch, (B, ...) each.

    Returns:
        For each input the negated lowest and the highest values, (2, ...), whose sum is the range; None for inputs of
        whole numbers, which have no range.

    Raises:
        ValueError: If the features of a sample are of another shape than before.
    """
    return [_extended(old, value.detach()) for old, value in zip(known or [None] * len(inputs), inputs, strict=True)]


def _extended(old: Tensor | None, samples: Tensor) -> Tensor | None:
    if not samples.is_floating_point():
        return None
    new = torch.stack([(-samples).amax(0), samples.amax(0)])
    if old is None:
        return new
    if old.shape != new.shape:
        raise ValueError(
            f"samples have features of shape {tuple(new.shape[1:])} and {tuple(old.shape[1:])}, so that a feature has "
            "no range: give feature_range, such as 1.0 for values in [0, 1]."
        )
    return torch.maximum(old.to(new), new)


def fast_gradient_sign(inputs: Tensor, gradient: Tensor, steps: Tensor | float) -> Tensor:
    """Return inputs (B, ...), each moved by a step in the direction in which the loss grows.

    Args:
        inputs: The samples.
        gradient: The gradient of the loss with respect to them, of the same shape; its scale does not matter.
        steps: Length of the step, of all features or of each, (...).

    Source: Goodfellow et al., arXiv 1412.6572.

    Examples:
        >>> fast_gradient_sign(torch.zeros(1, 2), torch.tensor([[-3.0, 0.1]]), torch.tensor([0.1, 0.2])).tolist()
        [[-0.10000000149011612, 0.20000000298023224]]
    """
    return inputs.detach() + steps * gradient.sign()


def call_without_statistics(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Call a module so that its buffers, such as the running statistics of BatchNorm, stay as they are."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    outputs: Tensor = functional_call(module, buffers, inputs)
    return outputs
