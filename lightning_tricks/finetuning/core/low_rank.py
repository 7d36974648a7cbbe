"""`LowRank`: the trained part of LoRA, a product of two thin matrices that is added to a frozen weight."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import AddedParameters
from lightning_tricks.finetuning.core.injection import draw_


class LowRank(AddedParameters):
    """The change of one weight: `scaling * B @ A`, in the shape of the weight.

    Args:
        weight: The weight that is changed, of at least two dimensions; only its shape, dtype and device count.
        rank: The rank of the change.
        alpha: The scale, which is divided by the rank, or by its square root.
        dropout: The probability with which an input of a side branch is set to zero in training.
        use_rslora: Whether to divide by the square root of the rank (Kalajdzievski, 2023).
        is_transposed: Whether the weight's first dimension is that of the inputs, as in `nn.Embedding`.
        is_lookup: Whether the inputs are indices: then A is zero at the start, and B is not.
        generator: Draws the initial values.

    Attributes:
        A: Parameter (rank, inputs), uniform at the start as in `nn.Linear`.
        B: Parameter (outputs, rank), zero at the start.
        scale: Buffer with the scale, by which a state dict of another scale is refused.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
    """

    scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        *,
        use_rslora: bool = False,
        is_transposed: bool = False,
        is_lookup: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.is_transposed, self.is_lookup = is_transposed, is_lookup
        first, rest = weight.shape[0], weight.shape[1:].numel()
        outputs, inputs = (rest, first) if is_transposed else (first, rest)
        self.A = nn.Parameter(weight.new_empty(rank, inputs))
        self.B = nn.Parameter(weight.new_empty(outputs, rank))
        self.register_buffer("scale", torch.zeros((), device=weight.device))
        self.set_alpha(alpha, use_rslora)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters(generator)
        untyped: Any = self
        untyped.register_load_state_dict_pre_hook(_refuse_other_scale)

    def set_alpha(self, alpha: float, use_rslora: bool) -> None:
        """Set the scale."""
        self.alpha, self.use_rslora = alpha, use_rslora
        self.scaling = alpha / (math.sqrt(self.rank) if use_rslora else self.rank)
        self.scale.fill_(self.scaling)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the initial values, with which the change is zero."""
        with torch.no_grad():
            self.scale.fill_(self.scaling)  # on the meta device it had no value
            if self.is_lookup:
                self.A.zero_()
                draw_(self.B, lambda drawn: drawn.normal_(generator=generator))
            else:
                bound = 1 / math.sqrt(self.A.shape[1])
                draw_(self.A, lambda drawn: drawn.uniform_(-bound, bound, generator=generator))
                self.B.zero_()

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return matrices (first, rank) and (rank, rest), whose product is the change of the weight before scaling."""
        return (self.A.t(), self.B.t()) if self.is_transposed else (self.B, self.A)

    def change(self, shape: torch.Size, dtype: torch.dtype | None = None) -> Tensor:
        """Return what is added to a weight of this shape, computed in a dtype; None for that of the matrices."""
        left, right = self.factors()
        return (self.scaling * left.to(dtype) @ right.to(dtype)).view(shape)

    def extra_repr(self) -> str:
        """Return the settings, for the print of a model."""
        return f"rank={self.rank}, alpha={self.alpha:g}"


def _refuse_other_scale(
    module: LowRank,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    saved = state_dict.get(f"{prefix}scale")
    if saved is not None and not math.isclose(float(saved), module.scaling, rel_tol=0.01):  # bf16 has three digits
        error_msgs.append(
            f"{prefix.rstrip('.')} was trained with a scale of {float(saved):g} (alpha / rank, or alpha / sqrt(rank) "
            f"with use_rslora), and has one of {module.scaling:g} in the model: build it with the alpha of training."
        )
