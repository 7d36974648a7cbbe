"""What convolutions do with a weight, for all their ways of padding."""

from __future__ import annotations

from typing import Any

from lightning_tricks._torch_compat.guards import needs_private


def convolution_of(module: Any) -> Any:
    """Return the function `(input, weight, bias)` of a convolution; there is no guard: compiled code runs this."""
    return module._conv_forward


@needs_private("LoRA of convolutions")
def convolves_as(cls: Any, conv: Any) -> bool:
    """Whether a subclass of a convolution has that function from it."""
    return bool(cls._conv_forward is conv._conv_forward)
