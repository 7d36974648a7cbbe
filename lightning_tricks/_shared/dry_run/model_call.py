"""How a model is called with the inputs that somebody has: its `forward` or its `training_step`."""

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
        what: What the arguments were called where they came from.
    """

    method: Literal["forward", "training_step"]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    what: str = "inputs"

    def mapped(self, function: Callable[[Any], Any]) -> ModelCall:
        """Return the same call with other arguments."""
        return replace(self, args=function(self.args), kwargs=function(dict(self.kwargs)))

    def run(self, model: nn.Module) -> Any:
        """ModelCall the model, or its `training_step`."""
        function = model if self.method == "forward" else model.training_step
        return function(*self.args, **self.kwargs)  # type: ignore[operator]

    def __str__(self) -> str:
        described = [_describe(value) for value in self.args]
        described += [f"{name}={_describe(value)}" for name, value in self.kwargs.items()]
        return f"{self.method}({', '.join(described)}), from {self.what}"


def interpret_inputs(model: nn.Module, inputs: Any, what: str = "inputs") -> ModelCall:
    """Find out how `inputs` are meant for a model.

    Args:
        model: The module to be called.
        inputs: A tensor is the argument of `forward`, a tuple its positional arguments, a mapping its keyword
            arguments. A tuple or mapping that does not fit the signature, and a list, is a batch for the module's
            `training_step` or, where it has none, the only argument of `forward`.
        what: What to call the inputs in an error.
    """
    model = unwrap_model(model)
    if not _overrides(model, "forward") and _overrides(model, "training_step"):
        return training_step_call(model, inputs, what)
    if isinstance(inputs, tuple) and _accepts(model.forward, inputs, {}):
        return ModelCall("forward", tuple(inputs), {}, what)
    if isinstance(inputs, Mapping) and _accepts(model.forward, (), inputs):
        return ModelCall("forward", (), inputs, what)
    if isinstance(inputs, tuple | list | Mapping) and _overrides(model, "training_step"):
        return training_step_call(model, inputs, what)
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):  # let the module say what it misses
        return ModelCall("forward", inputs, {}, what)
    return ModelCall("forward", (inputs,), {}, what)


def find_call(model: nn.Module, inputs: Any = None, what: str = "inputs") -> ModelCall | None:
    """Return the call of a model with `inputs`, or with its `example_input_array` as Lightning makes it.

    Args:
        model: The module to be called.
        inputs: See `interpret_inputs`; None for the `example_input_array`.
        what: What to call the inputs in an error.

    Returns:
        The call; None where there is neither.

    Raises:
        TypeError: If `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r} ({type(model).__name__}).")
    if inputs is not None:
        return interpret_inputs(model, inputs, what)
    example = getattr(unwrap_model(model), "example_input_array", None)
    if example is None:
        return None
    return interpret_inputs(model, tuple(example) if isinstance(example, list) else example, "example_input_array")


def training_step_call(model: nn.Module, batch: Any, what: str = "the batch", batch_idx: int = 0) -> ModelCall:
    """Return the call of a module's `training_step` with a batch, as Lightning makes it.

    Raises:
        ValueError: If the step takes an iterator instead.
    """
    step: Any = unwrap_model(model).training_step
    if takes_dataloader_iter(step):
        raise ValueError(
            f"{type(unwrap_model(model)).__name__}.training_step takes `dataloader_iter`, from which nothing can be "
            "read without consuming it: give inputs."
        )
    return ModelCall("training_step", step_arguments(step, batch, batch_idx), {}, what)


def _overrides(model: nn.Module, method: str) -> bool:
    """Whether a module has a method that torch's and Lightning's base classes don't give it."""
    if method in vars(model):
        return True
    owner = next((base for base in type(model).__mro__ if method in vars(base)), None)
    return owner is not None and owner.__name__ not in ("Module", "LightningModule")


def _accepts(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # no signature, as some scripted modules
        return True
    return True


def _describe(value: Any) -> str:
    shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value)]
    if len(shapes) == 1 and not isinstance(value, Mapping | list | tuple):
        return f"tensor {shapes[0]}"
    if shapes:
        return f"{type(value).__name__} of {', '.join(shapes[:4])}{', ...' * (len(shapes) > 4)}"
    return repr(value) if isinstance(value, int | float | str | type(None)) else type(value).__name__
