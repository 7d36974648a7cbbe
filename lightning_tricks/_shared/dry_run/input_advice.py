"""Advice for a call of a model that failed because its inputs are not tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_tricks._shared.dry_run.model_call import ModelCall
from lightning_tricks._shared.tensors import tensors_in


def input_advice(model: nn.Module, call: ModelCall, error: Exception) -> str:
    """Explain what is wrong with the inputs of a failed call and what to give instead.

    Args:
        model: The model that was called.
        call: The call that failed.
        error: The exception that it raised.

    Returns:
        The advice with the reason of the error, or an empty string if the inputs look right.
    """
    is_step = call.method == "training_step"
    values = call.args[:1] if is_step else (*call.args, *call.kwargs.values())
    if any(True for _ in tensors_in(values)):
        advice = "" if is_step or call.kwargs or not isinstance(error, TypeError) else _advice_for_batch(model, values)
    else:
        advice = _advice_for_shapes(model, values) or _advice_for_other_types(model, values, is_step)
    reason = str(error).strip().partition("\n")[0].rstrip(":.")
    return advice and f"{call.source}: {advice} ({type(error).__name__}: {reason})"


def example_input_code(model: nn.Module) -> str:
    """Return code that makes a tensor for the first layer of a model; for an image if that layer is unknown."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            sizes = (1, layer.in_channels, *[224] * len(layer.kernel_size))
            return f"torch.zeros({', '.join(map(str, sizes))})"
        if isinstance(layer, nn.Embedding):
            return "torch.zeros(1, 16, dtype=torch.long)"
        if isinstance(layer, nn.RNNBase):
            return f"torch.zeros(1, 16, {layer.input_size})"
        if isinstance(layer, nn.Linear):
            return f"torch.zeros(1, {layer.in_features})"
    return "torch.zeros(1, 3, 224, 224)"


def _advice_for_batch(model: nn.Module, values: tuple[Any, ...]) -> str:
    """Return advice for a batch given to a model that has no `training_step`."""
    parts = values if len(values) > 1 else values[0]
    if not isinstance(parts, list | tuple | Mapping):
        return ""
    kind, name = type(model).__name__, repr(next(iter(parts))) if isinstance(parts, Mapping) else "0"
    return (
        f"{kind}.forward does not take this {type(parts).__name__} of {len(parts)}, and it has no training_step "
        f"that could. Give the part of the batch that forward takes, such as batch[{name}]."
    )


def _advice_for_shapes(model: nn.Module, values: tuple[Any, ...]) -> str:
    shapes = _shapes_in(values)
    if not shapes:
        return ""
    given = values[0] if len(values) == 1 and not isinstance(values[0], int) else values
    verb = "is a shape" if len(shapes) == 1 else "are shapes"
    return f"{given!r} {verb}, but {type(model).__name__} takes tensors. Give {_tensor_code(model, shapes)}."


def _advice_for_other_types(model: nn.Module, values: tuple[Any, ...], is_step: bool) -> str:
    inner = [part for value in values if isinstance(value, list | tuple) for part in value]
    for value in (*values, *inner):
        if type(value).__module__.partition(".")[0] == "numpy":
            dtype = ", dtype=torch.float32" * (getattr(getattr(value, "dtype", None), "kind", "") == "f")
            return f"a numpy array is not a tensor. Give torch.as_tensor(array{dtype})."
        if isinstance(value, DataLoader | Dataset):
            loader = "loader" if isinstance(value, DataLoader) else "DataLoader(dataset)"
            part = "" if is_step or hasattr(model, "training_step") else ", or the part of it that forward takes"
            return f"a {type(value).__name__} is not a batch. Give a batch, next(iter({loader})){part}."
        if isinstance(value, str):
            return f"{value!r} is not a tensor. Give {example_input_code(model)}."
    return ""


def _shapes_in(values: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Return the shapes that were given in place of tensors; an empty list if the values are anything else."""
    if len(values) == 1 and isinstance(values[0], list | tuple | Mapping):
        inner = values[0]
        values = tuple(inner.values() if isinstance(inner, Mapping) else inner)
    if values and all(type(size) is int for size in values):
        return [values]
    shapes = [tuple(value) for value in values if isinstance(value, list | tuple)]
    all_are_shapes = len(shapes) == len(values) and all(type(size) is int for shape in shapes for size in shape)
    return shapes if all_are_shapes and all(shapes) else []


def _tensor_code(model: nn.Module, shapes: list[tuple[int, ...]]) -> str:
    """Return code that makes tensors of the given shapes for a model."""
    example = example_input_code(model)
    dtype = ", dtype=torch.long" if "dtype" in example else ""
    dims = example.count(",") + (0 if dtype else 1)
    # a shape with one dimension too few is that of a sample without its batch dimension
    sizes = [(1, *shape) if len(shape) == dims - 1 else shape for shape in shapes]
    made = [
        example if len(shape) < dims - 1 else f"torch.zeros({', '.join(map(str, shape))}{dtype})" for shape in sizes
    ]
    return made[0] if len(made) == 1 else f"({', '.join(made)})"
