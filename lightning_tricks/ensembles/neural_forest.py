"""Neural forests: voting of soft decision trees, which send samples left and right with learned probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_tricks._lightning_compat.flavor import MisconfigurationException
from lightning_tricks._lightning_compat.loaders import request_train_loaders
from lightning_tricks._shared.checks import check_count, check_not_negative, check_optional_count
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.tensors import named_tensors
from lightning_tricks.ensembles.arguments import CriterionChoice, OptimizerChoice, ScheduleChoice, passed_on
from lightning_tricks.ensembles.core.combination import at_least_single, mean_with_gradient_of_sum
from lightning_tricks.ensembles.core.factory import build_members
from lightning_tricks.ensembles.core.sampling import batch_of_first_sample
from lightning_tricks.ensembles.prediction import ClassifierEnsemble, RegressorEnsemble
from lightning_tricks.ensembles.training_data import unpack
from lightning_tricks.ensembles.voting import IndependentMembers


class SoftDecisionTree(nn.Module):
    """A tree whose inner nodes are logistic regressions, and whose output is the mean of its leaves by probability.

    Args:
        n_inputs: Number of values of a sample, >= 1.
        n_outputs: Number of outputs, >= 1.
        depth: Number of decisions from the root to a leaf, >= 1: 2 ** depth leaves.

    Attributes:
        gates: In training, the probabilities of the inner nodes in the last call, (B, 2 ** depth - 1), for the penalty.

    Source: Frosst and Hinton, arXiv 1711.09784; the weights have the names and shapes of torchensemble's trees.

    Examples:
        >>> SoftDecisionTree(4, 3, depth=2)(torch.rand(5, 4)).shape
        torch.Size([5, 3])
    """

    gates: Tensor | None

    def __init__(self, n_inputs: int, n_outputs: int, depth: int = 5) -> None:
        super().__init__()
        self.n_inputs, self.n_outputs = check_count("n_inputs", n_inputs), check_count("n_outputs", n_outputs)
        self.depth = check_count("depth", depth)
        # one more input, of ones, instead of a bias
        self.inner_nodes = nn.Sequential(nn.Linear(n_inputs + 1, 2**depth - 1, bias=False), nn.Sigmoid())
        self.leaf_nodes = nn.Linear(2**depth, n_outputs, bias=False)
        self.gates = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "gates": None}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, (B, n_outputs), of samples (B, ...) with `n_inputs` values each."""
        rows = x.flatten(1)
        gates = self.inner_nodes(torch.cat([torch.ones_like(rows[:, :1]), rows], 1))
        self.gates = gates if self.training and torch.is_grad_enabled() else None
        paths = torch.ones_like(gates[:, :1])
        for level in range(self.depth):
            paths = _next_paths(paths, _gates_of_level(gates, level))
        outputs: Tensor = self.leaf_nodes(paths)
        return outputs


def tree_sizes(weights: Mapping[str, Any], prefix: str = "") -> dict[str, int] | None:
    """Return the arguments of the `SoftDecisionTree` whose weights a state dict has, or None if it has none.

    Args:
        weights: Tensors by name.
        prefix: The prefix of the names of the tree.

    Examples:
        >>> tree_sizes(SoftDecisionTree(4, 3, depth=2).state_dict())
        {'n_inputs': 4, 'n_outputs': 3, 'depth': 2}
    """
    inner, leaves = (weights.get(f"{prefix}{name}.weight") for name in ("inner_nodes.0", "leaf_nodes"))
    if inner is None or leaves is None:
        return None
    depth = leaves.shape[1].bit_length() - 1
    return {"n_inputs": inner.shape[1] - 1, "n_outputs": leaves.shape[0], "depth": depth}


def balance_penalty(gates: Tensor, lamda: float) -> Tensor:
    """Return how far trees are from sending as many samples left as right at each inner node.

    Args:
        gates: Probabilities of the inner nodes, (n, B, 2 ** depth - 1), those of the root first.
        lamda: The weight of the root, >= 0; it halves with each level.

    Returns:
        Penalties, (n,): -lamda * 2**-level * (log p + log(1 - p)) / 2, summed over the nodes, of which p is the share
        of the samples that arrive there and go left.

    Source: Frosst and Hinton, arXiv 1711.09784, equation 5.

    Examples:
        >>> balance_penalty(torch.full((1, 8, 1), 0.5), lamda=1.0)
        tensor([0.6931])
    """
    gates = at_least_single(gates)
    paths = torch.ones_like(gates[..., :1])
    penalty = gates.new_zeros(len(gates))
    depth = (gates.shape[-1] + 1).bit_length() - 1
    tiny = torch.finfo(gates.dtype).eps
    for level in range(depth):
        left = _gates_of_level(gates, level)
        share = (paths * left).sum(1) / paths.sum(1).clamp(min=tiny)
        share = share.clamp(tiny, 1 - tiny)
        penalty = penalty - lamda * 2**-level / 2 * (share.log() + (-share).log1p()).sum(-1)
        paths = _next_paths(paths, left)
    return penalty


def _gates_of_level(gates: Tensor, level: int) -> Tensor:
    return gates[..., 2**level - 1 : 2 ** (level + 1) - 1]


def _next_paths(paths: Tensor, left: Tensor) -> Tensor:
    """Return the probabilities of the nodes one level deeper, the left child of each before its right one."""
    return torch.stack([paths * left, paths * (1 - left)], dim=-1).flatten(-2)


class ForestMembers(IndependentMembers):
    """Independent soft decision trees, whose size follows from the data where it is not given."""

    def __init__(
        self,
        n_estimators: int = 10,
        depth: int = 5,
        lamda: float = 1e-3,
        n_outputs: int | None = None,
        *,
        n_inputs: int | None = None,
        optimizer: OptimizerChoice = None,
        lr_scheduler: ScheduleChoice = None,
        criterion: CriterionChoice = None,
        voting_strategy: Literal["soft", "hard"] = "soft",
        weights: Sequence[float] | None = None,
        vectorize: bool | Literal["auto"] = "auto",
        shared_order: bool = False,
        members: Literal["replicated", "sharded"] = "replicated",
        seed: int | None = None,
    ) -> None:
        self.depth = check_count("depth", depth)
        self.lamda = check_not_negative("lamda", lamda)
        self.n_inputs = check_optional_count("n_inputs", n_inputs)
        sizes = {"n_inputs": n_inputs or 1, "n_outputs": n_outputs or 1, "depth": depth}
        super().__init__(SoftDecisionTree, estimator_args=sizes, **passed_on(super().__init__, locals()))
        self.register_load_state_dict_pre_hook(_take_size)  # type: ignore[no-untyped-call]

    def setup(self, stage: str) -> None:
        """Make the trees in the size that the training data has, where it was not given."""
        if stage == "fit" and not self.has_size:
            self._make_trees()
        super().setup(stage)

    def predict_members(self, *x: Tensor) -> Tensor:
        """Return the outputs of each tree for the same rows, (n, B, n_outputs).

        Raises:
            ValueError: If the size of the trees is not known yet.
        """
        if not self.has_size:
            raise ValueError(f"{type(self).__name__} does not know n_inputs and n_outputs before a fit: give both.")
        return super().predict_members(*x)

    def training_loss(self, inputs: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss with the penalty of unbalanced trees, and the outputs."""
        loss, outputs = super().training_loss(inputs, targets)
        members: Any = self.trained_members()
        trees: list[Any] = members.running_modules()
        gates = torch.cat([tree.gates for tree in trees]).unflatten(0, (len(members), -1))
        for tree in trees:
            tree.gates = None
        return loss + mean_with_gradient_of_sum(balance_penalty(gates, self.lamda)), outputs

    def default_n_outputs(self, dataset: Any, target: Tensor) -> int:
        """Return the number of outputs for a data set and the first target, (1, ...), of it."""
        raise NotImplementedError

    @classmethod
    def from_members(cls, members: list[nn.Module], **options: Any) -> Any:
        """Return a forest of trained trees."""
        made: Any = cls
        trees: Sequence[Any] = members
        sizes = {"n_inputs": trees[0].n_inputs, "n_outputs": trees[0].n_outputs, "depth": trees[0].depth}
        forest = made(len(trees), **{**options, **sizes})
        for index, tree in enumerate(trees):
            forest.estimators_.copy_member_(index, named_tensors(tree))
        return forest

    def torchensemble_arguments(self) -> dict[str, Any]:
        """Return the arguments of torchensemble's class beside the number of members."""
        return {"depth": self.depth, "lamda": self.lamda}

    def torchensemble_member(self, index: int) -> nn.Module:
        """Return a copy of a tree as torchensemble has it."""
        from torchensemble._base import BaseTree

        tree = BaseTree(self.n_inputs, self.n_outputs, self.depth, self.lamda)
        tree.load_state_dict(self.estimators_.member(index).state_dict())
        return cast(nn.Module, tree.eval())

    @classmethod
    def member_of_torchensemble(cls, member: Any) -> nn.Module:
        """Return a copy of torchensemble's tree."""
        tree = SoftDecisionTree(member.input_dim, member.output_dim, member.depth)
        tree.load_state_dict(member.state_dict())
        return tree

    @classmethod
    def options_of_torchensemble(cls, model: Any) -> dict[str, Any]:
        """Return the options of this class that a fitted object of torchensemble tells."""
        return {**super().options_of_torchensemble(model), "lamda": model.lamda}

    @classmethod
    def estimator_of_torchensemble(cls, weights: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Return the tree with such weights in a file, of which they tell all sizes."""
        sizes = tree_sizes(weights, "estimators_.0.")
        return None if sizes is None else (SoftDecisionTree, sizes)

    @property
    def has_size(self) -> bool:
        """Whether the size of the trees is known."""
        return None not in (self.n_inputs, self.hparams["n_outputs"])

    def _make_trees(self) -> None:
        loader = request_train_loaders(self.trainer)
        with isolated_rng():
            batch = batch_of_first_sample(loader)
        if batch is None:
            raise MisconfigurationException(
                f"{type(self).__name__} cannot see the size of a sample without reading the data: give n_inputs and "
                "n_outputs."
            )
        first, *_, target = unpack(batch)
        n_outputs = self.hparams["n_outputs"] or self.default_n_outputs(loader.dataset, target)
        self.set_size(self.n_inputs or first[0].numel(), n_outputs)

    def set_size(self, n_inputs: int, n_outputs: int) -> None:
        """Make the trees again for samples of `n_inputs` values, with `n_outputs` outputs."""
        self.n_inputs, self.n_outputs = n_inputs, n_outputs
        sizes = {"n_inputs": n_inputs, "n_outputs": n_outputs, "depth": self.depth}
        self.hparams.update(sizes, estimator_args=sizes)
        self.set_members(build_members(SoftDecisionTree, self.n_estimators, sizes, self.seed)[0])


def _take_size(forest: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Give a forest whose size is not known that of the trees in a state dict."""
    sizes = tree_sizes(state, f"{prefix}estimators_.0.")
    if not forest.has_size and sizes is not None:
        forest.set_size(sizes["n_inputs"], sizes["n_outputs"])


class NeuralForestClassifier(ForestMembers, ClassifierEnsemble):
    """Train soft decision trees independently and average their probabilities.

    At every inner node, a tree sends a sample left and right with learned probabilities. It has 2 ** `depth` leaves.
    Inputs are flattened.

    Args:
        n_estimators: Number of trees, >= 1.
        depth: Number of decisions from the root to a leaf, >= 1.
        lamda: Weight of the penalty on unbalanced trees, >= 0; it halves at each level. 0 switches it off.
        n_outputs: Number of classes; by default the length of the attribute `classes` of the training dataset.
        n_inputs: Number of values in a sample; by default taken from the first training sample.
        optimizer: The optimizer, as for `VotingClassifier`; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of logits (B, n_outputs) and targets; cross-entropy by default.
        voting_strategy: "soft" averages probabilities, "hard" counts votes.
        weights: Weights of the trees, >= 0; equal ones by default.
        vectorize: Whether trees run at once: True, False or "auto".
        shared_order: Whether trees share the batches.
        members: "replicated" trains all members on each rank; "sharded" trains a share of them on each rank of DDP.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if a size is neither given nor found in the data.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Frosst and Hinton, arXiv 1711.09784; torchensemble's class of this name.
    """

    def default_n_outputs(self, dataset: Any, target: Tensor) -> int:
        """Return the number of the data set's `classes`; labels that occur tell nothing of those that do not."""
        classes = getattr(dataset, "classes", None)
        if classes is None:
            raise MisconfigurationException(
                f"{type(self).__name__} needs n_outputs, the number of classes: {type(dataset).__name__} has no "
                "attribute classes."
            )
        return len(classes)


class NeuralForestRegressor(ForestMembers, RegressorEnsemble):
    """Train soft decision trees independently and average their predictions.

    Args:
        n_estimators: Number of trees, >= 1.
        depth: Number of decisions from the root to a leaf, >= 1.
        lamda: Weight of the penalty on unbalanced trees, >= 0; it halves at each level. 0 switches it off.
        n_outputs: Number of values predicted for each sample; by default taken from the first target.
        n_inputs: Number of values in a sample; by default taken from the first training sample.
        optimizer: The optimizer, as for `VotingClassifier`; Adam with a learning rate of 1e-3 by default.
        lr_scheduler: See `VotingClassifier`; none by default.
        criterion: Loss of outputs (B, n_outputs) and targets of the same shape; the mean squared error by default.
        voting_strategy: Must be "soft": regressors have no votes to count.
        weights: Weights of the trees, >= 0; equal ones by default.
        vectorize: Whether trees run at once.
        shared_order: Whether trees share the batches.
        members: "replicated" trains all members on each rank; "sharded" trains a share of them on each rank of DDP.
        seed: Seed of the initial weights and sample orders, >= 0; drawn from torch's generator by default.

    Raises:
        MisconfigurationException: When a fit starts, if a size is neither given nor found in the data.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or a name unknown.

    Source: Frosst and Hinton, arXiv 1711.09784; torchensemble's class of this name.
    """

    why_not_torchensemble = "torchensemble's class of this name predicts the softmax of one output, so 1.0"

    def default_n_outputs(self, dataset: Any, target: Tensor) -> int:
        """Return the number of values of a target."""
        return target[0].numel()
