"""Soft decision trees: each sample goes through all inner nodes, left and right with probabilities that are learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_count
from lightning_tricks.ensembles.core.combination import at_least_single


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
