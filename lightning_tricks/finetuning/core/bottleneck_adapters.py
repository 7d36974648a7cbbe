"""`add_adapters`: put bottleneck adapters behind, or beside, the layers of a frozen model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_tricks._shared.added_parameters import AddedParameters
from lightning_tricks._shared.checks import check_choice, check_count, check_fraction, check_number
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core import injection
from lightning_tricks.finetuning.core.class_extension import class_below, extend
from lightning_tricks.finetuning.core.lora_layers import is_linear, refuse_other_weights
from lightning_tricks.finetuning.core.transformer_blocks import find_blocks, reads_weights_of_its_parts, widths_of

NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
KINDS = {"houlsby": ("gelu", 1.0), "pfeiffer": ("relu", 1.0), "parallel": ("relu", 4.0)}  # as in the papers


@dataclass(frozen=True)
class AdapterSettings:
    """Arguments of `add_adapters`, checked.

    Raises:
        TypeError: If one is of the wrong type.
        ValueError: If one is out of range, or a pattern is empty or not a regular expression.
    """

    bottleneck: int = 64
    target_modules: str | Sequence[str] = "blocks"
    kind: str = "pfeiffer"
    nonlinearity: str | None = None
    scale: float | None = None
    exclude: str | Sequence[str] = ()
    modules_to_save: str | Sequence[str] = injection.DEFAULT_MODULES_TO_SAVE
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_count("bottleneck", self.bottleneck)
        check_choice("kind", self.kind, KINDS)
        if self.nonlinearity is not None:
            check_choice("nonlinearity", self.nonlinearity, NONLINEARITIES)
        if self.scale is not None:
            check_number("scale", self.scale, above=0, at_most=1e9)
        check_fraction("dropout", self.dropout)
        injection.check_selection(self)

    @property
    def shape(self) -> tuple[int, str, float, bool]:
        """The settings that all adapters share: bottleneck, nonlinearity, scale, and whether they are parallel."""
        nonlinearity, scale = KINDS[self.kind]
        scale = scale if self.scale is None else self.scale
        return self.bottleneck, self.nonlinearity or nonlinearity, scale, self.kind == "parallel"


def add_adapters(
    model: nn.Module, settings: AdapterSettings | None = None, *, generator: torch.Generator | None = None
) -> injection.InjectionReport:
    """Freeze a model, and put trainable bottleneck adapters behind, or beside, some of its layers, in place.

    At first the adapters add zero. Base weights keep their identity, names and values; new parameters are named
    `<layer>.adapter.*`. Layers of `nn.TransformerEncoder` with an adapter leave torch's fused path in evaluation mode,
    which would not call it. Adapters cannot be merged into the weights.

    Args:
        model: The model; nothing is changed if an error is raised.
        settings: The place and kind of the adapters.
        generator: Draws the initial values; None for a new one with torch's seed.

    Returns:
        A report on the added parameters.

    Raises:
        ValueError: If a pattern matches nothing, there is no known transformer block, a layer would bypass its
            adapter, or the model has adapters already.

    Examples:
        >>> layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        >>> model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 10))
        >>> print(add_adapters(model, AdapterSettings(8, modules_to_save="1")))  # doctest: +NORMALIZE_WHITESPACE
        Adapters (pfeiffer, bottleneck 8) in 2 Linear add 2,192 values; 2,842 of 69,786 values (4.07%) are trained, with
        all of 1.
    """
    return AdapterInjection.add(model, settings, generator)


class BottleneckAdapter(AddedParameters):
    """Two linear layers with a nonlinearity between them: `scale * (W_up f(W_down x + b_down) + b_up)`.

    Args:
        like: A tensor with the dtype and device of the parameters.
        widths: The widths of the input and of the output.
        settings: The width between the layers, the name of `f`, the scale and the dropout between the layers.
        generator: Draws the initial values.

    Attributes:
        down_weight: Parameter (bottleneck, inputs), uniform at the start as in `nn.Linear`.
        down_bias: Parameter (bottleneck,), zero at the start.
        up_weight: Parameter (outputs, bottleneck), zero at the start, so that the output is zero.
        up_bias: Parameter (outputs,), zero at the start.
    """

    def __init__(
        self, like: Tensor, widths: tuple[int, int], settings: AdapterSettings, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.shape = settings.shape
        (inputs, outputs), (bottleneck, self.nonlinearity, self.scale, _) = widths, self.shape
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()  # a quantized weight is not
        make = partial(torch.empty, dtype=dtype, device=like.device)
        self.down_weight = nn.Parameter(make(bottleneck, inputs))
        self.down_bias = nn.Parameter(make(bottleneck))
        self.up_weight = nn.Parameter(make(outputs, bottleneck))
        self.up_bias = nn.Parameter(make(outputs))
        self.dropout = nn.Dropout(settings.dropout)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the initial values, with which the output is zero."""
        bound = 1 / math.sqrt(self.down_weight.shape[1])
        injection.draw_(self.down_weight, lambda drawn: drawn.uniform_(-bound, bound, generator=generator))
        for parameter in (self.down_bias, self.up_weight, self.up_bias):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled output for an input (..., inputs)."""
        thin = self.dropout(NONLINEARITIES[self.nonlinearity](F.linear(x, self.down_weight, self.down_bias)))
        return self.scale * F.linear(thin, self.up_weight, self.up_bias)

    def extra_repr(self) -> str:
        """Return the settings, for the print of a model."""
        return f"bottleneck={len(self.down_weight)}, nonlinearity={self.nonlinearity!r}, scale={self.scale:g}"


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


class AdapterInjection(injection.Injection):
    """Bottleneck adapters of layers.

    Attributes:
        first: Name of a target -> the layer whose input its adapter gets, if that is not its own.
        widths: Name of a target -> the widths of the inputs and outputs of its adapter.
    """

    settings_type = AdapterSettings
    part = BottleneckAdapter
    noun = "adapters"
    otherwise = "in other layers or of another kind"

    def choose_targets(self) -> dict[str, nn.Module]:
        """Return the layers that get an adapter."""
        is_parallel = self.settings.kind == "parallel"
        self.first: dict[str, nn.Module] = {}
        if self.settings.target_modules == "blocks":
            targets, pairs = self._in_blocks()
            self.first = {last: self.modules[first] for last, first in pairs.items()} if is_parallel else {}
        else:
            targets = self._by_patterns()
        injection.refuse_own_forward(
            {**targets, **{f"the first layer before {last}": part for last, part in self.first.items()}}
        )
        self.widths: dict[str, tuple[int, int]] = {}
        for name, module in targets.items():
            (inputs, _), (_, outputs) = (widths_of(part) or (0, 0) for part in (self.first.get(name, module), module))
            self.widths[name] = (inputs if is_parallel else outputs, outputs)
        return targets

    def _in_blocks(self) -> tuple[dict[str, nn.Module], dict[str, str]]:
        others = {name: part for name, part in self.rest.items() if is_linear(part) and widths_of(part) is None}
        refuse_other_weights(others)
        attentions, feed_forwards = find_blocks(self.modules)
        if not feed_forwards:
            raise ValueError(
                f'target_modules="blocks": none of the {len(self.modules)} modules is a transformer block with an '
                "attention and a feed-forward network of known names: name the layers that get an adapter, "
                'such as "*.linear2".'
            )
        wanted = {*feed_forwards, *(attentions if self.settings.kind == "houlsby" else ())}
        targets = {name: module for name, module in self.rest.items() if name in wanted}
        if not targets:
            raise ValueError('target_modules="blocks": exclude and modules_to_save leave none of the blocks.')
        return targets, {last: first for last, first in feed_forwards.items() if last in targets}

    def _by_patterns(self) -> dict[str, nn.Module]:
        given = self.settings.target_modules
        matched = self.matching(given, self.rest)
        refuse_other_weights({name: part for name, part in matched.items() if widths_of(part) is None})
        targets = self.select(
            "target_modules", given, self.rest, lambda part: widths_of(part) is not None, "linear layers or attentions"
        )
        for around, names in self.names.items():
            read = [name for name, part in targets.items() if any(part is child for child in around.children())]
            if read and reads_weights_of_its_parts(around):
                raise ValueError(
                    f"target_modules: {read[0]} lies in a {class_below(around).__name__}, which reads its weight and "
                    f"never calls it, so an adapter would be ignored: give {names[0]!r}, whose output is the same."
                )
        return targets

    def put(self, generator: torch.Generator) -> None:
        """Add the adapters."""
        is_parallel = self.settings.kind == "parallel"
        for name, module in self.targets.items():
            like = next(module.parameters())
            adapter = BottleneckAdapter(like, self.widths[name], self.settings, generator)
            module.add_module("adapter", adapter.train(module.training))
            extend(module, ParallelAdapted if is_parallel else Adapted)
            if (first := self.first.get(name)) is not None:
                extend(first, HandsOver)
                first.handover = module.handover = Handover()  # type: ignore[assignment]
        injection.unfuse(self.model, self.targets.values())

    def planned(self) -> dict[int, Any]:
        """Return the ids of the adapters of the targets, and the settings that all share."""
        return {id(getattr(module, "adapter", None)): self.settings.shape for module in self.targets.values()}

    def settings_of(self, part: BottleneckAdapter) -> Any:
        """Return the settings that an adapter shares with the others."""
        return part.shape

    def report(self) -> injection.InjectionReport:
        """Return which adapters the model has."""
        bottleneck = self.settings.bottleneck
        wide = [name for name, widths in self.widths.items() if bottleneck > min(widths)]
        remark = f"The bottleneck is wider than {list_names(wide)}." if wide else ""
        what = f"Adapters ({self.settings.kind}, bottleneck {bottleneck})"
        added = injection.parameters_of(injection.parts_of(self.model, BottleneckAdapter))
        return injection.InjectionReport.of(self.model, what, self.targets, added, self.trained_whole(), remark)
