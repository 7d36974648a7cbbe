"""Voting and bagging: members that are trained independently; fusion: members that are trained as one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._lightning_compat.flavor import MisconfigurationException
from lightning_tricks._shared.checks import check_choice
from lightning_tricks._torch_compat.optimizers import takes_scale
from lightning_tricks.ensembles.arguments import CriterionChoice, OptimizerChoice, ScheduleChoice, passed_on
from lightning_tricks.ensembles.core.combination import Uncertainty, around_prediction, at_least_single, weighted_mean
from lightning_tricks.ensembles.core.factory import Estimator
from lightning_tricks.ensembles.core.members import Members
from lightning_tricks.ensembles.core.sampling import bootstrap_rows
from lightning_tricks.ensembles.core.stacked_members import StackedMembers
from lightning_tricks.ensembles.ensemble import Ensemble
from lightning_tricks.ensembles.member_shares import MemberShares
from lightning_tricks.ensembles.prediction import ClassifierEnsemble, RegressorEnsemble


class IndependentMembers(MemberShares):
    """Members that are trained as if each were alone.

    `Trainer(gradient_clip_val=...)` clips the norm of each member; under fp16 all of a rank skip a step in which
    the gradients of one are not finite.
    """

    def __init__(
        self,
        estimator: Estimator | None,
        n_estimators: int = 10,
        estimator_args: Mapping[str, Any] | None = None,
        *,
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
        self.voting_strategy = self.check_voting_strategy(voting_strategy)
        self.shared_order = bool(shared_order)
        self.members = check_choice("members", members, ("replicated", "sharded"))
        if members == "sharded":
            if vectorize is True:
                raise ValueError('vectorize=True needs members="replicated": sharded ones run one after another.')
            vectorize = False
        super().__init__(**passed_on(super().__init__, locals()))

    @property
    def per_member_batches(self) -> bool:
        """Whether members see the samples in orders of their own."""
        return not self.shared_order

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradient norm of each member to `gradient_clip_val`, as if it were trained alone."""
        if not gradient_clip_val or gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif takes_scale(optimizer) and getattr(self.trainer.precision_plugin, "scaler", None):
            raise MisconfigurationException(
                f"gradient_clip_val={gradient_clip_val} with fp16 needs an optimizer that is not fused: gradients of a "
                f"fused {type(optimizer).__name__} are unscaled in its step. Give the optimizer fused=False."
            )
        else:
            clip_norm_of_members_(self.trained_members(), gradient_clip_val)


@torch.no_grad()
def clip_norm_of_members_(members: Members, max_norm: float) -> Tensor:
    """Scale the gradients of each member in place so that their norm is at most `max_norm`.

    Returns:
        The norms before, (n,).
    """
    if not isinstance(members, StackedMembers):
        return torch.stack([torch.nn.utils.clip_grad_norm_(one.parameters(), max_norm) for one in members.children()])
    gradients = [parameter.grad for parameter in members.parameters() if parameter.grad is not None]
    of_tensors = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
    norms: Tensor = torch.linalg.vector_norm(of_tensors, dim=0)
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)).to(gradient.dtype))
    return norms


class VotingClassifier(IndependentMembers, ClassifierEnsemble):
    """Train classifiers independently and average their probabilities, or count their votes (deep ensembles).

    Args:
        estimator: The members: a class or factory; a module, which is copied with new initial weights, drawn by the
            `reset_parameters` of its layers (frozen parameters keep their values); a list of modules; or a list of
            weight files for `estimator_args["estimator"]`. If all are LightningModules, they train with their own
            `training_step`; of their other hooks, only `setup` is called.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: An `OptimizerSpec`, a function of the parameters of one member, a name in `torch.optim`, or such a
            name with a dict of options. By default, LightningModules use their own `configure_optimizers`, which must
            return one optimizer and no schedule; other members use Adam with a learning rate of 1e-3.
        lr_scheduler: A `ScheduleSpec`, a function of the optimizer, a torch scheduler's name, or a name with a dict.
        criterion: Loss of logits (B, n_outputs) and targets, the name of a loss in `torch.nn`, or such a name with a
            dict of options. Cross-entropy by default.
        voting_strategy: "soft" averages probabilities, "hard" counts votes (the first class wins a tie).
        weights: Weights of the members, >= 0; equal ones by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once: "auto" decides by their structure. The result does not change.
        shared_order: Whether members share the batches: needs less memory, and makes the ensemble less accurate.
        members: "replicated" trains all members on each rank; "sharded" trains a share of them on each rank of DDP.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Lakshminarayanan et al., arXiv 1612.01474; torchensemble's class of this name.

    Examples:
        >>> from torch import nn
        >>> ensemble = VotingClassifier(nn.Linear, 5, {"in_features": 4, "out_features": 3}, seed=0)
        >>> ensemble.predict(torch.rand(2, 4)).shape, ensemble.member_outputs(torch.rand(2, 4)).shape
        (torch.Size([2, 3]), torch.Size([5, 2, 3]))
    """


class VotingRegressor(IndependentMembers, RegressorEnsemble):
    """Train regressors independently and average their predictions (deep ensembles).

    With `criterion=nn.GaussianNLLLoss()`, members also predict the noise, in 2 x n_outputs columns: means, then
    log-variances.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: See `VotingClassifier`.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of outputs and targets of the same shape; the mean squared error by default.
        voting_strategy: Must be "soft": regressors have no votes to count.
        weights: Weights of the members, >= 0; equal ones by default.
        n_outputs: Number of values predicted for each sample.
        vectorize: Whether members run at once.
        shared_order: Whether members share the batches.
        members: "replicated" trains all members on each rank; "sharded" trains a share of them on each rank of DDP.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Lakshminarayanan et al., arXiv 1612.01474; torchensemble's class of this name.
    """


class BootstrappedMembers(Ensemble):
    """Members that are trained on bootstrap samples of the data set."""

    def member_rows(self, size: int) -> Sequence[Tensor]:
        """Return a bootstrap sample for each member."""
        return bootstrap_rows(size, self.n_estimators, self.seed)

    @property
    def per_member_batches(self) -> bool:
        """Whether members see the samples in orders of their own: always."""
        if self.hparams.get("shared_order"):
            raise MisconfigurationException(
                f"{type(self).__name__}(shared_order=True): members that share the batches have no separate "
                "samples: leave it out, or use Voting instead."
            )
        return True

    def on_shared_batches(self, reason: str) -> None:
        """Refuse to train on shared batches."""
        raise MisconfigurationException(
            f"{type(self).__name__} needs a dataset with a length in a DataLoader, and {reason}: use Voting instead."
        )


class BaggingClassifier(BootstrappedMembers, VotingClassifier):
    """Train classifiers on bootstrap samples, drawn once for each member, and average their probabilities.

    Bootstrap samples are drawn from the rows that the loader's sampler yields. A sampler that draws with replacement,
    such as a `WeightedRandomSampler`, draws the sample of each member itself.

    Members differ more than in `VotingClassifier`, but each is worse, as it sees 63 % of the samples: for networks,
    start with voting.

    Args:
        estimator: The members, in any of the forms that `VotingClassifier` takes.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: The optimizer, as for `VotingClassifier`.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of logits (B, n_outputs) and targets; cross-entropy by default.
        voting_strategy: "soft" averages probabilities, "hard" counts votes.
        weights: Weights of the members, >= 0; equal ones by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Must be False: each member needs its own bootstrap sample.
        members: "replicated" trains all members on each rank; "sharded" trains a share of them on each rank of DDP.
        seed: Seed of the initial weights, sample orders and bootstrap samples, >= 0; drawn from torch's generator by
            default.

    Raises:
        MisconfigurationException: When a fit starts, if members cannot have samples of their own.

    Source: Breiman, Machine Learning 24 (1996); torchensemble's class of this name.
    """


class BaggingRegressor(BootstrappedMembers, VotingRegressor):
    """Train regressors on bootstrap samples, drawn once for each member, and average their predictions.

    Args:
        estimator: The members, in any of the forms that `VotingRegressor` takes.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: The optimizer, as for `VotingClassifier`.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of outputs and targets of the same shape; the mean squared error by default.
        voting_strategy: Must be "soft": regressors have no votes to count.
        weights: Weights of the members, >= 0; equal ones by default.
        n_outputs: Number of values predicted for each sample.
        vectorize: Whether members run at once: True, False or "auto".
        shared_order: Must be False: each member needs its own bootstrap sample.
        members: "replicated" trains all members on each rank; "sharded" trains a share of them on each rank of DDP.
        seed: Seed of the initial weights, sample orders and bootstrap samples, >= 0; drawn from torch's generator by
            default.

    Raises:
        MisconfigurationException: When a fit starts, if members cannot have samples of their own.

    Source: Breiman, Machine Learning 24 (1996); torchensemble's class of this name.
    """


class FusedMembers(Ensemble):
    """Members whose mean is trained, as one model."""

    uses_member_steps = False  # their mean has one loss

    def member_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the criterion of the mean of the outputs (n, B, ...), whose rows are the same for all members."""
        return self.prediction_loss(outputs, targets[0])


class FusionClassifier(FusedMembers, ClassifierEnsemble):
    """Train classifiers together: both the loss and the prediction use their mean logits.

    Args:
        estimator: See `VotingClassifier`, as for the arguments that follow; a LightningModule counts as a plain module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: Adam with a learning rate of 1e-3 by default.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of the mean and the targets; cross-entropy by default.
        weights: Weights of the members in the mean, >= 0; equal ones by default.
        n_outputs: Number of classes; by default the number of the members' outputs.
        vectorize: Whether members run at once.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: torchensemble's class of this name.
    """

    def combine(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of the mean logits."""
        return weighted_mean(outputs, self.member_weights(outputs)).softmax(-1)

    def uncertainty(self, outputs: Tensor) -> Uncertainty:
        """Split the entropy of the prediction by how much the members disagree."""
        return around_prediction(super().uncertainty(outputs), self.combine(at_least_single(outputs)))

    def log_prediction(self, outputs: Tensor) -> Tensor:
        """Return the mean logits."""
        return weighted_mean(outputs, self.member_weights(outputs))


class FusionRegressor(FusedMembers, RegressorEnsemble):
    """Train regressors together: both the loss and the prediction use their mean.

    Args:
        estimator: See `VotingClassifier`, as for the arguments that follow; a LightningModule counts as a plain module.
        n_estimators: Number of members, >= 1.
        estimator_args: Arguments of the class or factory.
        optimizer: Adam with a learning rate of 1e-3 by default.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of the mean and the targets; the mean squared error by default.
        weights: Weights of the members in the mean, >= 0; equal ones by default.
        n_outputs: Number of values predicted for each sample.
        vectorize: Whether members run at once.
        seed: Seed of the initial weights and the sample order, >= 0; drawn from torch's generator by default.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: torchensemble's class of this name.
    """
