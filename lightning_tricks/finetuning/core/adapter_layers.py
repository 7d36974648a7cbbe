"""`BottleneckAdapter`, and what a layer does that has one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_tricks._shared.added_parameters import AddedParameters
from lightning_tricks.finetuning.core.injection import draw_

NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class BottleneckAdapter(AddedParameters):
    """Two linear layers with a nonlinearity between them: `scale * (W_up f(W_down x + b_down) + b_up)`.

    Args:
        like: A tensor with the dtype and device of the parameters.
        inputs: The width of the input.
        outputs: The width of the output.
        bottleneck: The width between the layers.
        nonlinearity: The name of `f`.
        scale: The scale of the output.
        dropout: The probability with which a value between the layers is set to zero in training.
        generator: Draws the initial values.

    Attributes:
        down_weight: Parameter (bottleneck, inputs), uniform at the start as in `nn.Linear`.
        down_bias: Parameter (bottleneck,), zero at the start.
        up_weight: Parameter (outputs, bottleneck), zero at the start, so that the output is zero.
        up_bias: Parameter (outputs,), zero at the start.
    """

    def __init__(
        self,
        like: Tensor,
        inputs: int,
        outputs: int,
        bottleneck: int,
        nonlinearity: str = "relu",
        scale: float = 1.0,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()  # a quantized weight is not
        make = partial(torch.empty, dtype=dtype, device=like.device)
        self.bottleneck, self.nonlinearity, self.scale = bottleneck, nonlinearity, scale
        self.down_weight = nn.Parameter(make(bottleneck, inputs))
        self.down_bias = nn.Parameter(make(bottleneck))
        self.up_weight = nn.Parameter(make(outputs, bottleneck))
        self.up_bias = nn.Parameter(make(outputs))
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the initial values, with which the output is zero."""
        bound = 1 / math.sqrt(self.down_weight.shape[1])
        draw_(self.down_weight, lambda drawn: drawn.uniform_(-bound, bound, generator=generator))
        for parameter in (self.down_bias, self.up_weight, self.up_bias):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled output for an input (..., inputs)."""
        thin = self.dropout(NONLINEARITIES[self.nonlinearity](F.linear(x, self.down_weight, self.down_bias)))
        return self.scale * F.linear(thin, self.up_weight, self.up_bias)

    def extra_repr(self) -> str:
        """Return the settings, for the print of a model."""
        return f"bottleneck={self.bottleneck}, nonlinearity={self.nonlinearity!r}, scale={self.scale:g}"


class Adapted:
    """A mixin for a module whose output, or the first of its outputs, goes through an adapter with a residual."""

    adapter: BottleneckAdapter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module plus that of the adapter for it."""
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        return _add(out, self.adapter(out[0] if isinstance(out, tuple) else out))


class Handover:
    """The input of a feed-forward network, from its first layer to its last."""

    value: Tensor | None = None

    def take(self) -> Tensor:
        """Return the input, and keep no reference to it."""
        value, self.value = self.value, None
        if value is None:
            raise RuntimeError("the last layer of a feed-forward network was called without the first.")
        return value


class HandsOver:
    """A mixin for the first layer of a feed-forward network."""

    handover: Handover

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the layer, and keep its input for the adapter."""
        self.handover.value = _input(args, kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class ParallelAdapted:
    """A mixin for a layer to whose output an adapter adds: one of its own input, or of another layer's."""

    adapter: BottleneckAdapter
    handover: Handover | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer plus that of the adapter."""
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        return _add(out, self.adapter(_input(args, kwargs) if self.handover is None else self.handover.take()))


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input that a layer was given: by position, or by the name that it has in an attention or a layer."""
    return args[0] if args else kwargs[next((name for name in ("query", "x") if name in kwargs), "input")]


def _add(out: Any, change: Tensor) -> Any:
    """Add to an output, or to the first of those of `nn.MultiheadAttention`."""
    return (out[0] + change, *out[1:]) if isinstance(out, tuple) else out + change
