"""`max_output_difference`: whether two models compute the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_tricks._shared.modules import eval_mode
from lightning_tricks._shared.tensors import tensors_in


@torch.no_grad()
def max_output_difference(model_a: nn.Module, model_b: nn.Module, inputs: Any) -> float:
    """Return the largest difference between two models' outputs, relative to the largest output of the first.

    Both models run in evaluation mode; afterwards, each module has its earlier mode.

    Args:
        model_a: The reference.
        model_b: The model to compare with it.
        inputs: A tensor, a tuple of positional arguments or a dict of keyword arguments.

    Returns:
        The relative difference: 0.0 for equal outputs, infinity if only the outputs of the reference are all zero, NaN
        if an output is NaN.

    Raises:
        ValueError: If the outputs are not tensors of equal shapes.

    Examples:
        >>> max_output_difference(torch.nn.Identity(), torch.nn.ReLU(), torch.tensor([-1.0, 2.0]))
        0.5
    """
    outputs = [_output(model, inputs) for model in (model_a, model_b)]
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in outputs]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise ValueError(f"the outputs must be tensors of equal shapes, got {shapes[0]} and {shapes[1]}.")
    pairs = [(_widened(a), _widened(b)) for a, b in zip(*outputs, strict=True)]
    difference = _largest(torch.where(a == b, 0.0, (a - b).abs()) for a, b in pairs)
    largest = _largest(a[a.isfinite()].abs() for a, _ in pairs)
    if not difference:
        return 0.0
    return difference / largest if largest else math.inf


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest element; NaN if one is, which `max` of Python would pass over."""
    values = torch.cat([tensor.flatten() for tensor in tensors])
    return float(values.max()) if values.numel() else 0.0


def _output(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    with eval_mode(model):
        if isinstance(inputs, Mapping):
            result = model(**inputs)
        else:
            result = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    return [tensor for tensor in tensors_in(result) if tensor.is_floating_point() or tensor.is_complex()]
