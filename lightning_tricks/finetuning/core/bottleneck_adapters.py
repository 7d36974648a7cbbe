"""`add_adapters`: put bottleneck adapters behind, or beside, the layers of a frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_tricks._shared.checks import check_choice, check_count, check_dropout, check_number
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.adapter_layers import (
    NONLINEARITIES,
    Adapted,
    BottleneckAdapter,
    Handover,
    HandsOver,
    ParallelAdapted,
)
from lightning_tricks.finetuning.core.class_extension import class_below, extend
from lightning_tricks.finetuning.core.injection import (
    DEFAULT_MODULES_TO_SAVE,
    InjectionReport,
    freeze_base,
    generator_or_new,
    make_report,
    parameters_of,
    parts_of,
    select_saved,
    trained_whole,
    unfuse,
    without_excluded,
)
from lightning_tricks.finetuning.core.lora_plan import is_linear, refuse_other_weights
from lightning_tricks.finetuning.core.targets import (
    as_patterns,
    check_targets,
    matching,
    plain_names,
    select_modules,
)
from lightning_tricks.finetuning.core.transformer_blocks import find_blocks, reads_weights_of_its_parts, widths_of

KINDS = {"houlsby": ("gelu", 1.0), "pfeiffer": ("relu", 1.0), "parallel": ("relu", 4.0)}  # as in the papers


@dataclass(frozen=True)
class AdapterSettings:
    """The arguments of `add_adapters`, checked.

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
    modules_to_save: str | Sequence[str] = DEFAULT_MODULES_TO_SAVE
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_count("bottleneck", self.bottleneck)
        check_choice("kind", self.kind, KINDS)
        if self.nonlinearity is not None:
            check_choice("nonlinearity", self.nonlinearity, NONLINEARITIES)
        if self.scale is not None:
            check_number("scale", self.scale, above=0, at_most=1e9)
        check_dropout("dropout", self.dropout)
        for name in ("target_modules", "exclude", "modules_to_save"):
            as_patterns(name, getattr(self, name))

    @property
    def shape(self) -> tuple[int, str, float, bool]:
        """What all adapters have in common: bottleneck, nonlinearity, scale, and whether they are parallel."""
        nonlinearity, scale = KINDS[self.kind]
        scale = scale if self.scale is None else self.scale
        return self.bottleneck, self.nonlinearity or nonlinearity, scale, self.kind == "parallel"


def add_adapters(
    model: nn.Module, settings: AdapterSettings | None = None, *, generator: torch.Generator | None = None
) -> InjectionReport:
    """Freeze a model, and put trainable bottleneck adapters behind, or beside, some of its layers, in place.

    At first the adapters add zero. Base weights keep their identity, names and values; the new ones are named
    `<layer>.adapter.*`. Layers of `nn.TransformerEncoder` that have one leave torch's fused path in evaluation mode,
    which would not call them. Adapters cannot be merged into the weights.

    Args:
        model: The model; nothing is changed if an error is raised.
        settings: Where the adapters are put, and of which kind.
        generator: Draws the initial values; None for a new one, seeded as torch was.

    Returns:
        What was added.

    Raises:
        ValueError: If a pattern matches nothing, there is no known transformer block, a layer would bypass its
            adapter, or the model has adapters already or is compiled.

    Examples:
        >>> layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        >>> model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 10))
        >>> print(add_adapters(model, AdapterSettings(8, modules_to_save="1")))  # doctest: +NORMALIZE_WHITESPACE
        Adapters (pfeiffer, bottleneck 8) in 2 Linear add 2,192 values; 2,842 of 69,786 values (4.07%) are trained, with
        all of 1.
    """
    settings = settings or AdapterSettings()
    if parts_of(model, BottleneckAdapter):
        raise ValueError(
            f"{type(model).__name__} has adapters already, and second ones would reset them: build the model anew."
        )
    plan = _plan(model, settings)
    generator = generator_or_new(generator)
    freeze_base(model, plan.saved.values())
    bottleneck, nonlinearity, scale, is_parallel = settings.shape
    for name, module in plan.targets.items():
        first = plan.first.get(name)
        inputs, outputs = plan.widths[name]
        like = next(module.parameters())
        adapter = BottleneckAdapter(like, inputs, outputs, bottleneck, nonlinearity, scale, settings.dropout, generator)
        module.add_module("adapter", adapter.train(module.training))
        extend(module, ParallelAdapted if is_parallel else Adapted)
        if first is not None:
            extend(first, HandsOver)
            first.handover = module.handover = Handover()  # type: ignore[assignment]
    unfuse(model, plan.targets.values())
    return _report(model, settings, plan)


def adapters_report(model: nn.Module, settings: AdapterSettings) -> InjectionReport | None:
    """Return what `add_adapters` added to a model with these settings; None if the model has no adapters.

    Raises:
        ValueError: If it was added with other settings.
    """
    present: list[Any] = parts_of(model, BottleneckAdapter)
    if not present:
        return None
    plan = _plan(model, settings)
    of_targets: list[Any] = [getattr(module, "adapter", None) for module in plan.targets.values()]
    is_parallel = any(isinstance(module, ParallelAdapted) for module in model.modules())
    shapes = {(part.bottleneck, part.nonlinearity, part.scale, is_parallel) for part in present}
    if set(map(id, present)) != set(map(id, of_targets)) or shapes != {settings.shape}:
        raise ValueError(
            f"{type(model).__name__} has adapters already, in other layers or of another kind: build the model anew."
        )
    return _report(model, settings, plan)


@dataclass(frozen=True)
class _Plan:
    """The modules that get an adapter, its widths, the other layers whose input it takes, and what is trained whole."""

    targets: dict[str, nn.Module]
    widths: dict[str, tuple[int, int]]
    first: dict[str, nn.Module]
    saved: dict[str, nn.Module] = field(repr=False)


def _plan(model: nn.Module, settings: AdapterSettings) -> _Plan:
    modules = plain_names(model)
    saved = select_saved(settings.modules_to_save, modules)
    rest = without_excluded(settings.exclude, saved, modules)
    first: dict[str, nn.Module] = {}
    if settings.target_modules == "blocks":
        targets, pairs = _in_blocks(settings.kind, modules, rest)
        first = {last: modules[name] for last, name in pairs.items()} if settings.kind == "parallel" else {}
    else:
        patterns = as_patterns("target_modules", settings.target_modules)
        if not patterns:
            raise ValueError("target_modules must name at least one pattern, got none.")
        refuse_other_weights({name: part for name, part in matching(patterns, rest).items() if widths_of(part) is None})
        targets = select_modules(
            "target_modules", patterns, rest, lambda part: widths_of(part) is not None, "linear layers or attentions"
        )
        _refuse_bypassed(targets, {"": model, **modules})
    check_targets(model, targets, "adapters")
    widths = {}
    for name, module in targets.items():
        (inputs, _), (_, outputs) = (widths_of(part) or (0, 0) for part in (first.get(name, module), module))
        widths[name] = (inputs if settings.kind == "parallel" else outputs, outputs)
    return _Plan(targets, widths, first, saved)


def _in_blocks(
    kind: str, modules: Mapping[str, nn.Module], rest: Mapping[str, nn.Module]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    refuse_other_weights({name: part for name, part in rest.items() if is_linear(part) and widths_of(part) is None})
    attentions, feed_forwards = find_blocks(modules)
    if not feed_forwards:
        raise ValueError(
            f'target_modules="blocks": none of the {len(modules)} modules is a transformer block with an attention and '
            'a feed-forward network of known names: name the layers whose output gets an adapter, such as "*.linear2".'
        )
    wanted = {*feed_forwards, *(attentions if kind == "houlsby" else ())}
    targets = {name: module for name, module in rest.items() if name in wanted}
    if not targets:
        raise ValueError('target_modules="blocks": exclude and modules_to_save leave none of the blocks.')
    return targets, {last: first for last, first in feed_forwards.items() if last in targets}


def _refuse_bypassed(targets: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]) -> None:
    for name in targets:
        parent = name.rpartition(".")[0]
        around = modules.get(parent)
        if around is not None and reads_weights_of_its_parts(around):
            raise ValueError(
                f"target_modules: {name} lies in a {class_below(around).__name__}, which reads its weight and never "
                f"calls it, so that an adapter would be ignored: give {parent!r}, whose output is the same."
            )


def _report(model: nn.Module, settings: AdapterSettings, plan: _Plan) -> InjectionReport:
    bottleneck, *_ = settings.shape
    wide = [name for name, widths in plan.widths.items() if bottleneck > min(widths)]
    remark = f"The bottleneck is wider than {list_names(wide)}." if wide else ""
    what = f"Adapters ({settings.kind}, bottleneck {bottleneck})"
    added = parameters_of(parts_of(model, BottleneckAdapter))
    return make_report(model, what, plan.targets, added, trained_whole(plan.saved), remark)
