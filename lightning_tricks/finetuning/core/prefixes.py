"""`add_prefixes`: give the attentions of a frozen model trained keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_tricks._shared.added_parameters import AddedParameters
from lightning_tricks._shared.checks import check_count
from lightning_tricks.finetuning.core import injection
from lightning_tricks.finetuning.core.bottleneck_adapters import BottleneckAdapter
from lightning_tricks.finetuning.core.class_extension import class_below, extend


@dataclass(frozen=True)
class PrefixSettings:
    """Arguments of `add_prefixes`, checked.

    Raises:
        TypeError: If one is of the wrong type.
        ValueError: If one is out of range, or a pattern is empty or not a regular expression.
    """

    length: int = 16
    target_modules: str | Sequence[str] = "attention"
    exclude: str | Sequence[str] = ()
    modules_to_save: str | Sequence[str] = injection.DEFAULT_MODULES_TO_SAVE

    def __post_init__(self) -> None:
        check_count("length", self.length)
        injection.check_selection(self)


def add_prefixes(
    model: nn.Module, settings: PrefixSettings | None = None, *, generator: torch.Generator | None = None
) -> injection.InjectionReport:
    """Freeze a model, and put trainable keys and values before those of each `nn.MultiheadAttention`, in place.

    Base weights keep their identity, names and values; new parameters are `<attention>.prefix.keys` and `.values`.
    Layers of `nn.TransformerEncoder` with a prefix leave torch's fused path in evaluation mode, which would not read
    it. Prefixes cannot be merged into the weights. Unlike LoRA and adapters, they change the output from the start.

    Args:
        model: The model; nothing is changed if an error is raised.
        settings: The attentions that get a prefix, and its length.
        generator: Draws the initial values; None for a new one with torch's seed.

    Returns:
        A report on the added parameters.

    Raises:
        ValueError: If a pattern matches nothing, there is no `nn.MultiheadAttention`, one has a custom forward pass, or
            the model has prefixes already.

    Examples:
        >>> layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        >>> model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 10))
        >>> print(add_prefixes(model, PrefixSettings(8, modules_to_save="1")))  # doctest: +NORMALIZE_WHITESPACE
        Prefixes (length 8) in 2 MultiheadAttention add 2,048 values; 2,698 of 69,642 values (3.87%) are trained, with
        all of 1.
    """
    return PrefixInjection.add(model, settings, generator)


class Prefix(AddedParameters):
    """Keys and values that an attention has before those of its input, for all samples.

    Args:
        like: A tensor with the dtype and device of the parameters.
        length: The number of keys and values.
        width: The width of each: that of all heads together.
        generator: Draws the initial values.

    Attributes:
        keys: Parameter (length, width), normal at the start with a standard deviation of 0.02.
        values: Parameter (length, width), likewise.
    """

    def __init__(self, like: Tensor, length: int, width: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.length = length
        self.keys = nn.Parameter(like.new_empty(length, width))
        self.values = nn.Parameter(like.new_empty(length, width))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the initial values."""
        for parameter in (self.keys, self.values):
            injection.draw_(parameter, lambda drawn: drawn.normal_(0, 0.02, generator=generator))

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (batch, length + sequence, width) for projected ones (batch, sequence, width)."""
        keys, values = (own.to(key.dtype).expand(len(key), -1, -1) for own in (self.keys, self.values))
        return torch.cat((keys, key), 1), torch.cat((values, value), 1)

    def extra_repr(self) -> str:
        """Return the settings, for the print of a model."""
        return f"length={self.length}"


class PrefixAttention(nn.MultiheadAttention):
    """A mixin for `nn.MultiheadAttention`, with a forward pass that attends to a prefix as well.

    Weights are read as the attributes that they are, so that LoRA can compute them.
    """

    prefix: Prefix

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `nn.MultiheadAttention` does for these arguments and masks, which the prefix is not subject to.

        The weights that are returned are those of the given keys: they sum up to 1 with those of the prefix.

        Raises:
            RuntimeError: As in `nn.MultiheadAttention`, if `is_causal` is given without `attn_mask`.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (part.unsqueeze(0) for part in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        query, key, value = self._projected(query, key, value)
        given = key.shape[1]
        key, value = self.prefix(*self._extended(key, value))
        first = self.prefix.length
        mask = self._mask(query, attn_mask, key_padding_mask, (first, key.shape[1] - first - given))
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (query, key, value))
        out, weights = self._attend(query, key, value, mask, need_weights=need_weights)
        out = F.linear(out.transpose(1, 2).flatten(-2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None:
            weights = weights[..., first:]
            weights = weights.mean(1) if average_attn_weights else weights
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _projected(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (batch, sequence, width)."""
        together = self.in_proj_weight  # None where keys or values have a width of their own
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if together is None else together.chunk(3)
        )
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(map(F.linear, inputs, weights, biases))

    def _extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append `bias_k` and `bias_v`, and the zeros of `add_zero_attn`."""
        if self.bias_k is not None and self.bias_v is not None:
            biases = (bias.to(key.dtype).expand(len(key), 1, -1) for bias in (self.bias_k, self.bias_v))
            key, value = (torch.cat((part, bias), 1) for part, bias in zip((key, value), biases, strict=True))
        if self.add_zero_attn:
            key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        return key, value

    def _mask(
        self, query: Tensor, attn_mask: Tensor | None, padding: Tensor | None, others: tuple[int, int]
    ) -> Tensor | None:
        """Return what is added to the scores (batch, heads, queries, keys), with zeros for keys before and after."""
        mask = None
        if attn_mask is not None:
            mask = _as_numbers(attn_mask, query.dtype)
            mask = mask.unflatten(0, (-1, self.num_heads)) if mask.dim() == 3 else mask[None, None]
        if padding is not None:
            of_keys = _as_numbers(padding, query.dtype)[:, None, None]
            mask = of_keys if mask is None else mask + of_keys
        return None if mask is None else F.pad(mask, others)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(query, key, value, mask, dropout), None
        scores = query / math.sqrt(query.shape[-1]) @ key.transpose(-2, -1)
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        return weights @ value, weights


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask whose True forbids to one that is added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


class PrefixInjection(injection.Injection):
    """Prefixes of attentions."""

    settings_type = PrefixSettings
    part = Prefix
    noun = "prefixes"
    otherwise = "in other attentions or of another length"
    may_be_the_model = True

    def choose_targets(self) -> dict[str, nn.Module]:
        """Return the attentions that get a prefix."""
        if self.settings.target_modules != "attention":
            patterns = self.settings.target_modules
        elif any(isinstance(part, nn.MultiheadAttention) for part in self.rest.values()):
            patterns = "*"
        else:
            raise ValueError(
                f'target_modules="attention": none of the {len(self.rest)} modules is an nn.MultiheadAttention, the '
                "only layer that takes prefixes: use Adapters(...) or LoRA(...)."
            )
        what = "nn.MultiheadAttention"
        targets = self.select(
            "target_modules", patterns, self.rest, lambda part: isinstance(part, nn.MultiheadAttention), what
        )
        injection.refuse_own_forward(targets)
        for name, module in targets.items():
            kind = class_below(module)
            if kind.forward is not nn.MultiheadAttention.forward:
                raise ValueError(
                    f"{name} is a {kind.__name__}, which has a forward pass of its own: exclude={name!r}, or use "
                    "Adapters(...)."
                )
            has_adapter = isinstance(getattr(module, "adapter", None), BottleneckAdapter)
            if has_adapter and not isinstance(module, PrefixAttention):
                raise ValueError(f"{name} has an adapter already: add prefixes before adapters.")
        return targets

    def put(self, generator: torch.Generator) -> None:
        """Add the prefixes."""
        for module in self.targets.values():
            attention: Any = module
            weight = next(parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1)
            prefix = Prefix(weight, self.settings.length, attention.embed_dim, generator)
            module.add_module("prefix", prefix.train(module.training))
            extend(module, PrefixAttention)
        injection.unfuse(self.model, self.targets.values())

    def planned(self) -> dict[int, int]:
        """Return the ids of the prefixes of the targets, and their length."""
        return {id(getattr(module, "prefix", None)): self.settings.length for module in self.targets.values()}

    def settings_of(self, part: Prefix) -> int:
        """Return the length of a prefix."""
        return part.length

    def report(self) -> injection.InjectionReport:
        """Return which prefixes the model has."""
        what = f"Prefixes (length {self.settings.length})"
        added = injection.parameters_of(injection.parts_of(self.model, Prefix))
        return injection.InjectionReport.of(self.model, what, self.targets, added, self.trained_whole())
