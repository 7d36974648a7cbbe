"""How a model is called with given inputs: its `forward` or its `training_step`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from lightning_tricks._shared.dry_run.model_copy import unwrap_model
from lightning_tricks._shared.step_signatures import step_arguments, takes_dataloader_iter
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
        return f"{type(value).__name__} of {', '.join(shapes[:4])}{', ...' * (len(shapes) > 4)}"
    return repr(value) if isinstance(value, int | float | str | type(None)) else type(value).__name__
