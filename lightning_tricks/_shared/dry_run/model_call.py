"""How a model is called with given inputs, and advice where the call failed because they are not tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_tricks._shared.dry_run.model_copy import unwrap_model
from lightning_tricks._shared.modules import step_arguments, takes_dataloader_iter
from lightning_tricks._shared.tensors import tensors_in


@dataclass(frozen=True)
class ModelCall:
    """One call of a model.

    Attributes:
        method: The method that is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        source: Where the arguments come from, for error messages.
    """

    method: Literal["forward", "training_step"]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    source: str = "inputs"

    def map_arguments(self, function: Callable[[Any], Any]) -> ModelCall:
        """Return the same call with `function` applied to the positional and to the keyword arguments."""
        return replace(self, args=function(self.args), kwargs=function(dict(self.kwargs)))

    def run(self, model: nn.Module) -> Any:
        """Call the model, or its `training_step`."""
        function = model if self.method == "forward" else model.training_step
        return function(*self.args, **self.kwargs)  # type: ignore[operator]

    def __str__(self) -> str:
        described = [_describe(value) for value in self.args]
        described += [f"{name}={_describe(value)}" for name, value in self.kwargs.items()]
        return f"{self.method}({', '.join(described)}), from {self.source}"


def interpret_inputs(model: nn.Module, inputs: Any, source: str = "inputs") -> ModelCall:
    """Determine which call of a model is meant by `inputs`.

    Args:
        model: The module to call.
        inputs: A tensor is the argument of `forward`, a tuple its positional arguments, a mapping its keyword
            arguments. A tuple or mapping that does not fit the signature, and any list, is a batch for the module's
            `training_step` or, if it has none, the only argument of `forward`.
        source: The name of the inputs in error messages.
    """
    model = unwrap_model(model)
    if not _overrides(model, "forward") and _overrides(model, "training_step"):
        return training_step_call(model, inputs, source)
    if isinstance(inputs, tuple) and _accepts(model.forward, inputs, {}):
        return ModelCall("forward", tuple(inputs), {}, source)
    if isinstance(inputs, Mapping) and _accepts(model.forward, (), inputs):
        return ModelCall("forward", (), inputs, source)
    if isinstance(inputs, tuple | list | Mapping) and _overrides(model, "training_step"):
        return training_step_call(model, inputs, source)
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):  # the model's own error names what is missing
        return ModelCall("forward", inputs, {}, source)
    return ModelCall("forward", (inputs,), {}, source)


def find_call(model: nn.Module, inputs: Any = None, source: str = "inputs") -> ModelCall | None:
    """Return the call of a model with `inputs` or with its `example_input_array`.

    Args:
        model: The module to call.
        inputs: See `interpret_inputs`; None for the `example_input_array`.
        source: The name of the inputs in error messages.

    Returns:
        The call, or None if there is neither.

    Raises:
        TypeError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r} ({type(model).__name__}).")
    if inputs is not None:
        return interpret_inputs(model, inputs, source)
    example = getattr(unwrap_model(model), "example_input_array", None)
    if example is None:
        return None
    return interpret_inputs(model, tuple(example) if isinstance(example, list) else example, "example_input_array")


def training_step_call(model: nn.Module, batch: Any, source: str = "the batch", batch_idx: int = 0) -> ModelCall:
    """Return the call of a module's `training_step` with a batch, as Lightning makes it.

    Raises:
        ValueError: If the step takes an iterator instead of a batch.
    """
    step: Any = unwrap_model(model).training_step
    if takes_dataloader_iter(step):
        raise ValueError(
            f"{type(unwrap_model(model)).__name__}.training_step takes `dataloader_iter`, which cannot be read without "
            "consuming it: give inputs."
        )
    return ModelCall("training_step", step_arguments(step, batch, batch_idx), {}, source)


def _overrides(model: nn.Module, method: str) -> bool:
    """Whether a module has a method other than that of `nn.Module` or `LightningModule`."""
    if method in vars(model):
        return True
    owner = next((base for base in type(model).__mro__ if method in vars(base)), None)
    return owner is not None and owner.__name__ not in ("Module", "LightningModule")


def _accepts(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # some scripted modules have no signature
        return True
    return True


def _describe(value: Any) -> str:
    shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value)]
    if len(shapes) == 1 and not isinstance(value, Mapping | list | tuple):
        return f"tensor {shapes[0]}"
    if shapes:
        return f"{type(value).__name__} of {', '.join(shapes[:4])}{', ...' if len(shapes) > 4 else ''}"
    return repr(value) if isinstance(value, int | float | str | type(None)) else type(value).__name__


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
    return f"{given!r} {verb}, but {type(model).__name__} takes tensors, such as {example_input_code(model)}."


def _advice_for_other_types(model: nn.Module, values: tuple[Any, ...], is_step: bool) -> str:
    inner = [part for value in values if isinstance(value, list | tuple) for part in value]
    for value in (*values, *inner):
        if type(value).__module__.partition(".")[0] == "numpy":
            dtype = ", dtype=torch.float32" if getattr(getattr(value, "dtype", None), "kind", "") == "f" else ""
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
