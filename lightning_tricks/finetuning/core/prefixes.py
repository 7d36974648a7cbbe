"""`add_prefixes`: give the attentions of a frozen model trained keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_tricks._shared.checks import check_count
from lightning_tricks.finetuning.core.adapter_layers import BottleneckAdapter
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
from lightning_tricks.finetuning.core.prefix_attention import Prefix, PrefixAttention
from lightning_tricks.finetuning.core.targets import as_patterns, check_targets, plain_names, select_modules


@dataclass(frozen=True)
class PrefixSettings:
    """The arguments of `add_prefixes`, checked.

    Raises:
        TypeError: If one is of the wrong type.
        ValueError: If one is out of range, or a pattern is empty or not a regular expression.
    """

    length: int = 16
    target_modules: str | Sequence[str] = "attention"
    exclude: str | Sequence[str] = ()
    modules_to_save: str | Sequence[str] = DEFAULT_MODULES_TO_SAVE

    def __post_init__(self) -> None:
        check_count("length", self.length)
        for name in ("target_modules", "exclude", "modules_to_save"):
            as_patterns(name, getattr(self, name))


def add_prefixes(
    model: nn.Module, settings: PrefixSettings | None = None, *, generator: torch.Generator | None = None
) -> InjectionReport:
    """Freeze a model, and put trainable keys and values before those of each `nn.MultiheadAttention`, in place.

    Base weights keep their identity, names and values; the new ones are `<attention>.prefix.keys` and `.values`. Layers
    of `nn.TransformerEncoder` that have them leave torch's fused path in evaluation mode, which would not read them.
    Prefixes cannot be merged into the weights. Unlike LoRA and adapters, they change the output from the start.

    Args:
        model: The model; nothing is changed if an error is raised.
        settings: Which attentions have a prefix, and how long it is.
        generator: Draws the initial values; None for a new one, seeded as torch was.

    Returns:
        What was added.

    Raises:
        ValueError: If a pattern matches nothing, there is no `nn.MultiheadAttention`, or one has a forward pass of its
            own, the model has prefixes already or is compiled.

    Examples:
        >>> layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        >>> model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 10))
        >>> print(add_prefixes(model, PrefixSettings(8, modules_to_save="1")))  # doctest: +NORMALIZE_WHITESPACE
        Prefixes (length 8) in 2 MultiheadAttention add 2,048 values; 2,698 of 69,642 values (3.87%) are trained, with
        all of 1.
    """
    settings = settings or PrefixSettings()
    if parts_of(model, Prefix):
        raise ValueError(
            f"{type(model).__name__} has prefixes already, and second ones would reset them: build the model anew."
        )
    targets, saved = _plan(model, settings)
    generator = generator_or_new(generator)
    freeze_base(model, saved.values())
    for module in targets.values():
        weight = next(parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1)
        prefix = Prefix(weight, settings.length, module.embed_dim, generator)
        module.add_module("prefix", prefix.train(module.training))
        extend(module, PrefixAttention)
    unfuse(model, targets.values())
    return _report(model, settings, targets, saved)


def prefixes_report(model: nn.Module, settings: PrefixSettings) -> InjectionReport | None:
    """Return what `add_prefixes` added to a model with these settings; None if the model has no prefixes.

    Raises:
        ValueError: If it was added with other settings.
    """
    present: list[Any] = parts_of(model, Prefix)
    if not present:
        return None
    targets, saved = _plan(model, settings)
    planned = {id(getattr(module, "prefix", None)) for module in targets.values()}
    if {id(part) for part in present} != planned or {part.length for part in present} != {settings.length}:
        raise ValueError(
            f"{type(model).__name__} has prefixes already, in other attentions or of another length: build the model "
            "anew."
        )
    return _report(model, settings, targets, saved)


def _plan(model: nn.Module, settings: PrefixSettings) -> tuple[dict[str, nn.MultiheadAttention], dict[str, nn.Module]]:
    modules = {"": model, **plain_names(model)}  # the model may be an attention itself
    saved = select_saved(settings.modules_to_save, modules)
    rest = without_excluded(settings.exclude, saved, modules)
    if settings.target_modules == "attention":
        patterns = as_patterns("target_modules", "*")
        if not any(isinstance(part, nn.MultiheadAttention) for part in rest.values()):
            raise ValueError(
                f'target_modules="attention": none of the {len(rest)} modules is an nn.MultiheadAttention, which alone '
                "takes prefixes: use Adapters(...) or LoRA(...)."
            )
    else:
        patterns = as_patterns("target_modules", settings.target_modules)
        if not patterns:
            raise ValueError("target_modules must name at least one pattern, got none.")
    chosen = select_modules(
        "target_modules", patterns, rest, lambda part: isinstance(part, nn.MultiheadAttention), "nn.MultiheadAttention"
    )
    targets = {name: part for name, part in chosen.items() if isinstance(part, nn.MultiheadAttention)}
    for name, module in targets.items():
        _check_attention(name, module)
    check_targets(model, targets, "prefixes")
    return targets, saved


def _check_attention(name: str, module: nn.MultiheadAttention) -> None:
    kind = class_below(module)
    if kind.forward is not nn.MultiheadAttention.forward:
        raise ValueError(
            f"{name} is a {kind.__name__}, which has a forward pass of its own: exclude={name!r}, or use Adapters(...)."
        )
    if not isinstance(module, PrefixAttention) and isinstance(getattr(module, "adapter", None), BottleneckAdapter):
        raise ValueError(f"{name} has an adapter already: add prefixes before adapters.")


def _report(
    model: nn.Module,
    settings: PrefixSettings,
    targets: dict[str, nn.MultiheadAttention],
    saved: dict[str, nn.Module],
) -> InjectionReport:
    added = parameters_of(parts_of(model, Prefix))
    return make_report(model, f"Prefixes (length {settings.length})", targets, added, trained_whole(saved))
