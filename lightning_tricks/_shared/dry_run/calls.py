"""How a model is called with the inputs that somebody has: its `forward` or its `training_step`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from lightning_tricks._shared.dry_run.model_copy import bare
from lightning_tricks._shared.step_signatures import step_arguments, takes_dataloader_iter
from lightning_tricks._shared.tensors import tensors_in


@dataclass(frozen=True)
class Call:
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

    def mapped(self, function: Callable[[Any], Any]) -> Call:
        """Return the same call with other arguments."""
        return replace(self, args=function(self.args), kwargs=function(dict(self.kwargs)))

    def run(self, model: nn.Module) -> Any:
        """Call the model, or its `training_step`."""
        function = model if self.method == "forward" else model.training_step
        return function(*self.args, **self.kwargs)  # type: ignore[operator]

    def __str__(self) -> str:
        described = [_described(value) for value in self.args]
        described += [f"{name}={_described(value)}" for name, value in self.kwargs.items()]
        return f"{self.method}({', '.join(described)}), from {self.what}"


def call_of(model: nn.Module, inputs: Any, what: str = "inputs") -> Call:
    """Find out how `inputs` are meant for a model.

    Args:
        model: The module to be called.
        inputs: A tensor is the argument of `forward`, a tuple its positional arguments, a mapping its keyword
            arguments. A tuple or mapping that does not fit the signature, and a list, is a batch for the module's
            `training_step` or, where it has none, the only argument of `forward`.
        what: What to call the inputs in an error.
    """
    model = bare(model)
    if not _has_own(model, "forward") and _has_own(model, "training_step"):
        return step_of(model, inputs, what)
    if isinstance(inputs, tuple) and _binds(model.forward, inputs, {}):
        return Call("forward", tuple(inputs), {}, what)
    if isinstance(inputs, Mapping) and _binds(model.forward, (), inputs):
        return Call("forward", (), inputs, what)
    if isinstance(inputs, tuple | list | Mapping) and _has_own(model, "training_step"):
        return step_of(model, inputs, what)
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):  # let the module say what it misses
        return Call("forward", inputs, {}, what)
    return Call("forward", (inputs,), {}, what)


def find_call(model: nn.Module, inputs: Any = None, what: str = "inputs") -> Call | None:
    """Return the call of a model with `inputs`, or with its `example_input_array` as Lightning makes it.

    Args:
        model: The module to be called.
        inputs: See `call_of`; None for the `example_input_array`.
        what: What to call the inputs in an error.

    Returns:
        The call; None where there is neither.

    Raises:
        TypeError: If `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r} ({type(model).__name__}).")
    if inputs is not None:
        return call_of(model, inputs, what)
    example = getattr(bare(model), "example_input_array", None)
    if example is None:
        return None
    return call_of(model, tuple(example) if isinstance(example, list) else example, "example_input_array")


def step_of(model: nn.Module, batch: Any, what: str = "the batch", batch_idx: int = 0) -> Call:
    """Return the call of a module's `training_step` with a batch, as Lightning makes it.

    Raises:
        ValueError: If the step takes an iterator instead.
    """
    step: Any = bare(model).training_step
    if takes_dataloader_iter(step):
        raise ValueError(
            f"{type(bare(model)).__name__}.training_step takes `dataloader_iter`, from which nothing can be read "
            "without consuming it: give inputs."
        )
    return Call("training_step", step_arguments(step, batch, batch_idx), {}, what)


def _has_own(model: nn.Module, method: str) -> bool:
    """Whether a module has a method that torch's and Lightning's base classes don't give it."""
    if method in vars(model):
        return True
    owner = next((base for base in type(model).__mro__ if method in vars(base)), None)
    return owner is not None and owner.__name__ not in ("Module", "LightningModule")


def _binds(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # no signature, as some scripted modules
        return True
    return True


def _described(value: Any) -> str:
    shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value)]
    if len(shapes) == 1 and not isinstance(value, Mapping | list | tuple):
        return f"tensor {shapes[0]}"
    if shapes:
        return f"{type(value).__name__} of {', '.join(shapes[:4])}{', ...' * (len(shapes) > 4)}"
    return repr(value) if isinstance(value, int | float | str | type(None)) else type(value).__name__
