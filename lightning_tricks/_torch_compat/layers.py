"""What convolutions and recurrent layers do with their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from lightning_tricks._torch_compat.guards import needs_private, set_private
from lightning_tricks._torch_compat.modules import registered_tensor


def convolution_of(module: Any) -> Any:
    """Return the function `(input, weight, bias)` of a convolution; there is no guard: compiled code runs this."""
    return module._conv_forward


@needs_private("LoRA of convolutions")
def convolves_as(cls: Any, conv: Any) -> bool:
    """Whether a subclass of a convolution has that function from it."""
    return bool(cls._conv_forward is conv._conv_forward)


Function = TypeVar("Function", bound=Callable[..., Any])


@needs_private("LoRA of recurrent layers")
def not_compiled(function: Function) -> Function:
    """Leave a function out of what torch compiles, as it does with recurrent layers; the compiler is not imported."""
    disable: Any = getattr(torch, "_disable_dynamo")  # noqa: B009  # torch does not export it to type checkers
    return cast(Function, disable(function))


@needs_private("LoRA of recurrent layers")
def use_registered_weights(rnn: Any) -> None:
    """Fill the list that a recurrent layer gives to torch's kernels with its parameters.

    The layer itself replaces them in its next forward pass if its class computes other weights.
    """
    set_private(rnn, _flat_weights=[registered_tensor(rnn, name) for name in rnn._flat_weights_names])


@needs_private("LoRA of recurrent layers")
def base_state(rnn: Any) -> dict[str, Any]:
    """Return the state of a recurrent layer for pickle and deepcopy, without the weak references to its weights."""
    return {name: value for name, value in vars(rnn).items() if name != "_flat_weight_refs"}
