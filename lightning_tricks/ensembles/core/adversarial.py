"""Adversarial samples by the fast gradient sign method, and the ranges of features that they go by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call


class FeatureRanges:
    """The lowest and highest value of each feature in all batches so far, on the device, without host reads."""

    def __init__(self) -> None:
        self.extremes: list[Tensor | None] = []  # (2, ...) for each input: the negated lowest, and the highest value

    def update(self, inputs: Sequence[Tensor]) -> None:
        """Take in the samples of a batch, (B, ...) each; inputs of whole numbers have no range.

        Raises:
            ValueError: If the features of a sample are of another shape than before.
        """
        known = self.extremes or [None] * len(inputs)
        self.extremes = [_extended(old, value.detach()) for old, value in zip(known, inputs, strict=True)]

    def ranges(self) -> list[Tensor | None]:
        """Return the range of each feature, (...), of each input; None for inputs of whole numbers."""
        return [None if both is None else both.sum(0) for both in self.extremes]


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
