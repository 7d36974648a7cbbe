"""The computation of a layer when a low-rank change is added to its weight.

A weight that is read is always the changed one, whoever reads it: the layer's own forward pass, a fused layer such as
that of `nn.TransformerEncoderLayer`, or a function that is given the weights of its submodules. Where the layer's own
forward pass is that of a class known here, it adds a side branch instead, which costs less.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_tricks._shared.added_parameters import AddedParameters
from lightning_tricks._shared.checks import check_count, check_fraction, check_number
from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import (
    base_state,
    convolution_of,
    convolves_as,
    not_compiled,
    registered_tensor,
    use_registered_weights,
)
from lightning_tricks._torch_compat.operators import reshaped_as_new
from lightning_tricks.finetuning.core.class_extension import class_below
from lightning_tricks.finetuning.core.injection import DEFAULT_MODULES_TO_SAVE, check_selection, draw_

CHANGE = "lora_"  # the name of the module with the change of `weight` is `lora_weight`
_WEIGHT = re.compile(r"(^|_)weight(_|$)")
_OTHER_WEIGHT = re.compile(r"weight|^W_q$")  # also GPTQ's `qweight` and HQQ's `W_q`


@dataclass(frozen=True)
class LoRASettings:
    """Arguments of `add_lora`, checked.

    Raises:
        TypeError: If one is of the wrong type.
        ValueError: If one is out of range, or a pattern is empty or not a regular expression.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: str | Sequence[str] = "linear"
    exclude: str | Sequence[str] = ()
    modules_to_save: str | Sequence[str] = DEFAULT_MODULES_TO_SAVE
    dropout: float = 0.0
    rank_pattern: Mapping[str, int] | None = None
    use_rslora: bool = False

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_number("alpha", self.alpha, above=0, at_most=1e9)
        check_fraction("dropout", self.dropout)
        check_selection(self)
        for pattern, rank in (self.rank_pattern or {}).items():
            Pattern(pattern)
            check_count(f"rank_pattern[{pattern!r}]", rank)


class LowRank(AddedParameters):
    """The change of one weight: `scaling * B @ A`, in the shape of the weight.

    Args:
        weight: The weight that is changed, of at least two dimensions; only its shape, dtype and device count.
        rank: The rank of the change.
        layer: The layer of the weight, whose type says what the dimensions of the weight are.
        settings: The scale, which is divided by the rank or by its square root (Kalajdzievski, 2023), and the dropout
            of the inputs of a side branch.
        generator: Draws the initial values.

    Attributes:
        A: Parameter (rank, inputs), uniform at the start as in `nn.Linear`.
        B: Parameter (outputs, rank), zero at the start.
        scale: Buffer with the scale, by which a state dict of another scale is refused.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
    """

    scale: Tensor

    def __init__(
        self, weight: Tensor, rank: int, layer: nn.Module, settings: LoRASettings, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.rank = rank
        self.is_transposed = has_transposed_weight(layer)  # its first dimension is that of the inputs
        self.is_lookup = isinstance(layer, nn.Embedding | nn.EmbeddingBag)  # then A is zero at the start, and B is not
        first, rest = weight.shape[0], weight.shape[1:].numel()
        outputs, inputs = (rest, first) if self.is_transposed else (first, rest)
        self.A = nn.Parameter(weight.new_empty(rank, inputs))
        self.B = nn.Parameter(weight.new_empty(outputs, rank))
        self.register_buffer("scale", torch.zeros((), device=weight.device))
        self.set_alpha(settings.alpha, settings.use_rslora)
        self.dropout = nn.Dropout(settings.dropout)
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
        """Return the change of a weight of this shape, computed in a dtype; None for that of the matrices."""
        left, right = self.factors()
        return (self.scaling * left.to(dtype) @ right.to(dtype)).view(shape)

    def extra_repr(self) -> str:
        """Return the settings, for the print of a model."""
        return f"rank={self.rank}, alpha={self.alpha:g}"


def _refuse_other_scale(module: LowRank, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    saved, error_messages = state_dict.get(f"{prefix}scale"), others[-1]
    if saved is not None and not math.isclose(float(saved), module.scaling, rel_tol=0.01):  # bf16 has three digits
        error_messages.append(
            f"{prefix.rstrip('.')} was trained with a scale of {float(saved):g} (alpha / rank, or alpha / sqrt(rank) "
            f"with use_rslora), and has one of {module.scaling:g} in the model: build it with the alpha of training."
        )


class LoRA:
    """A mixin for modules some of whose weights are changed: they are computed whenever they are read."""

    def base_weight(self, name: str) -> Tensor:
        """Return the weight without the change."""
        value: Any = registered_tensor(self, name)
        if value is None:
            value = vars(self)[name] if name in vars(self) else getattr(super(), name)  # set by a hook, or computed
        return value  # type: ignore[no-any-return]

    def compute_weight(self, name: str) -> Tensor:
        """Return the weight with the change."""
        base = self.base_weight(name)
        change: LowRank = getattr(self, CHANGE + name)
        if hasattr(base, "full_tensor") and hasattr(change.A, "full_tensor"):
            return base  # FSDP2 looks for its shards; the layer computes with whole tensors
        if change.training and change.dropout.p:
            _warn_of_dropout(type(self).__name__)
        return base + change.change(base.shape)


class _SideBranch(LoRA):
    """A layer whose own forward pass adds a side branch."""

    lora_weight: LowRank
    bias: Tensor | None


class LinearLoRA(_SideBranch):
    """`nn.Linear` with a side branch."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return `input @ weight.T + bias`."""
        change = self.lora_weight
        left, right = change.factors()
        base = F.linear(input, self.base_weight("weight"), self.bias)
        return _add_product(base, F.linear(change.dropout(input), right), left.t(), change.scaling)


class TransposedLinearLoRA(_SideBranch):
    """transformers' `Conv1D`, a linear layer with a weight (inputs, outputs), with a side branch."""

    nf: int

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight + bias`."""
        change = self.lora_weight
        left, right = change.factors()
        base = F.linear(x, self.base_weight("weight").t(), self.bias)
        return _add_product(base, change.dropout(x) @ left, right, change.scaling)


class EmbeddingLoRA(_SideBranch):
    """`nn.Embedding` with a side branch."""

    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the rows of the weight."""
        change = self.lora_weight
        left, right = change.factors()
        thin = F.embedding(input, left, self.padding_idx)
        # not in one kernel: under autocast that would round the rows of the base as well
        return F.embedding(input, self.base_weight("weight"), self.padding_idx) + change.scaling * (thin @ right)


class LookupLoRA(LoRA):
    """An embedding with changed weights, whose gradients cannot be sparse as those of a parameter."""

    @property
    def sparse(self) -> bool:
        """Return False, whatever the layer was made with."""
        return False


class ConvLoRA(_SideBranch):
    """A convolution without groups, with a side branch."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the convolution."""
        change, weight = self.lora_weight, self.base_weight("weight")
        left, right = change.factors()
        convolve = convolution_of(self)
        thin = convolve(change.dropout(input), right.view(-1, *weight.shape[1:]), None)
        out = convolve(input, weight, self.bias)
        ones = [1] * (weight.ndim - 2)
        pointwise: Any = (F.conv1d, F.conv2d, F.conv3d)[len(ones) - 1]
        return out + pointwise(thin, (change.scaling * left).view(*left.shape, *ones))  # type: ignore[no-any-return]


_ONE_THREAD = threading.RLock()  # the weights that a forward pass keeps in its layer are not for other threads


class _ComputedOnce(LoRA):
    """A layer that reads its weights several times in a forward pass."""

    _computed: dict[str, Tensor] | None = None

    def compute_weight(self, name: str) -> Tensor:
        if self._computed is None:
            return super().compute_weight(name)
        if name not in self._computed:
            self._computed[name] = super().compute_weight(name)
        return self._computed[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the layer, with each weight computed once."""
        if torch.compiler.is_compiling():  # the compiler sees by itself what is computed twice
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with _ONE_THREAD:
            self._computed = {}
            try:
                return super().forward(*args, **kwargs)  # type: ignore[misc]
            finally:
                del self._computed


class AttentionLoRA(_ComputedOnce):
    """`nn.MultiheadAttention` with changed weights."""


class RecurrentLoRA(_ComputedOnce):
    """An RNN, LSTM or GRU with changed weights."""

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, which puts the changed weights into the list that torch's kernels are given."""
        with _ONE_THREAD:
            try:
                return super().forward(*args, **kwargs)
            finally:
                use_registered_weights(self)  # the list would keep the graph of this pass

    def __getstate__(self) -> dict[str, Any]:
        return base_state(self)


def changes_of(module: nn.Module) -> dict[str, LowRank]:
    """Return name of a weight -> its change, for the changed weights of a module; a tied one need not be registered."""
    parts = {**dict(module.named_children()), **vars(module)}
    return {name.removeprefix(CHANGE): part for name, part in parts.items() if isinstance(part, LowRank)}


def kind_for(module: nn.Module) -> type[LoRA]:
    """Return the mixin for a module: a side branch where its forward pass is known, computed weights elsewhere."""
    forward = type(module).forward
    if isinstance(module, nn.RNNBase):
        return RecurrentLoRA
    if isinstance(module, nn.MultiheadAttention):
        return AttentionLoRA
    if registered_tensor(module, "weight") is None:  # weight_norm, pruning
        return LoRA
    if forward is nn.Linear.forward:
        return LinearLoRA
    if forward is nn.Embedding.forward:
        return EmbeddingLoRA if module.max_norm is None and not module.scale_grad_by_freq else LookupLoRA
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return LookupLoRA
    for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if forward is conv.forward and convolves_as(type(module), conv):
            return ConvLoRA if module.groups == 1 else LoRA
    conv1d = _transposed_linear()
    return TransposedLinearLoRA if conv1d is not None and forward is conv1d.forward else LoRA


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, a linear layer with a weight (inputs, outputs)."""
    conv1d = _transposed_linear()
    return conv1d is not None and isinstance(module, conv1d)


def has_transposed_weight(module: nn.Module) -> bool:
    """Whether the first dimension of a module's weight is that of its inputs."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or is_transposed_linear(module)


def _transposed_linear() -> Any:
    """Return transformers' `Conv1D`; None if transformers is not loaded, as then no model has one."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def _add_product(base: Tensor, thin: Tensor, right: Tensor, scaling: float) -> Tensor:
    """Return `base + scaling * thin @ right`, in one kernel."""
    if base.is_nested:
        return base + scaling * (thin @ right)
    if base.ndim == 2:
        return base.addmm(thin, right, alpha=scaling)
    flat = base.reshape(-1, base.shape[-1]).addmm(thin.reshape(-1, thin.shape[-1]), right, alpha=scaling)
    return reshaped_as_new(flat, base.shape)


def _warn_of_dropout(kind: str) -> None:
    warnings.warn(
        f"LoRA(dropout=...): the weight of a {kind} is read by another module or function. If that computes with it, "
        "this layer has no dropout, as LoRA's dropout does not reach the input.",
        stacklevel=4,
    )


def refuse_other_weights(modules: Mapping[str, nn.Module]) -> None:
    """Refuse layers with quantized or complex weights, or those of members of an ensemble, among the chosen ones."""
    for is_one, words, remedy in (
        (_is_stacked, "the weights of all members of an ensemble", "Pass vectorize=False to the ensemble"),
        (_is_complex, "complex weights", "Train them whole by modules_to_save"),
        (is_quantized, "quantized weights", "Use inject_adapter_in_model of peft"),
    ):
        found = [name for name, part in modules.items() if is_one(part)]
        if found:
            raise ValueError(
                f"target_modules: {len(found)} layers hold {words}, and cannot be adapted here: {list_names(found)}. "
                f"{remedy}, or leave them out by exclude."
            )


def _is_stacked(module: nn.Module) -> bool:
    return hasattr(module, "n_members") and bool(weights_of(module))


def _is_complex(module: nn.Module) -> bool:
    own = module.named_parameters(recurse=False)
    return any(tensor.is_complex() and tensor.ndim >= 2 for name, tensor in own if _OTHER_WEIGHT.search(name))


def is_linear(module: nn.Module) -> bool:
    """Whether a layer is a linear one, also in another form, as quantized ones are."""
    return isinstance(module, nn.Linear) or "linear" in class_below(module).__name__.lower()


def is_quantized(module: nn.Module) -> bool:
    """Whether a layer holds a weight in another form than a plain tensor of floating-point numbers."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    held = (tensor for name, tensor in own if _OTHER_WEIGHT.search(name) and not is_lazy(tensor) and tensor.ndim >= 2)
    return any(not _holds_numbers(tensor) for tensor in held) or callable(getattr(type(module), "weight", None))


def _holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds floating-point numbers with which torch computes; a shard does."""
    is_wrapper = hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "full_tensor")
    return tensor.is_floating_point() and tensor.itemsize > 1 and not is_wrapper


def weights_of(module: nn.Module) -> list[str]:
    """Return the names of a module's own matrices of floating-point numbers, also of those that it computes."""
    if isinstance(module, AddedParameters):
        return []
    own = {name: registered_tensor(module, name) for name, _ in module.named_parameters(recurse=False)}
    computed = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}  # by a hook
    if parametrize.is_parametrized(module):
        computed |= {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr]
    parts = tuple(f"{name}_" for name in computed)  # such as `weight_g` and `weight_v` of `weight`
    own = {name: value for name, value in own.items() if not parts or not name.startswith(parts)} | computed
    for name, tensor in own.items():
        if is_lazy(tensor):
            kind = type(module).__name__
            raise ValueError(f"{name} of a {kind} has no shape yet: run a batch through the model first.")
    return [
        name for name, tensor in own.items() if tensor.ndim >= 2 and _holds_numbers(tensor) and _WEIGHT.search(name)
    ]
