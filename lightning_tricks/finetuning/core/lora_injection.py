"""`add_lora`: put low-rank changes beside the weights of a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.class_extension import extend
from lightning_tricks.finetuning.core.injection import (
    InjectionReport,
    freeze_base,
    generator_or_new,
    make_report,
    parameters_of,
    parts_of,
    trained_whole,
)
from lightning_tricks.finetuning.core.lora_layers import CHANGE, changes_of, has_transposed_weight, kind_for
from lightning_tricks.finetuning.core.lora_plan import Change, LoRASettings, plan_lora
from lightning_tricks.finetuning.core.low_rank import LowRank


def add_lora(
    model: nn.Module, settings: LoRASettings | None = None, *, generator: torch.Generator | None = None
) -> InjectionReport:
    """Freeze a model, and add a trainable low-rank change to the weights of some of its layers, in place.

    The weights themselves keep their identity, names and values, so that a checkpoint of the plain model has the names
    of this one, but for the new `<layer>.lora_<weight>.A` and `.B`. At first the changes are zero. A weight that
    several layers share has one change, in all of them. What is written into a weight that was read from its layer, as
    by `nn.init`, is lost: tie and initialize weights, and apply weight_norm or pruning, before this.

    Args:
        model: The model; nothing is changed if an error is raised.
        settings: What is changed, and how.
        generator: Draws the initial values; None for a new one, seeded as torch was.

    Returns:
        What was added.

    Raises:
        ValueError: If a pattern matches nothing, a rank exceeds a layer, the model has LoRA already or is compiled.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> print(add_lora(model, LoRASettings(rank=4, target_modules="0", modules_to_save="2")))
        Low-rank changes (rank 4) in 1 Linear add 512 values; 1,162 of 5,322 values (21.83%) are trained, with all of 2.
    """
    settings = settings or LoRASettings()
    if parts_of(model, LowRank):
        raise ValueError(
            f"{type(model).__name__} has LoRA already, and a second one would reset it: merge(model) first, or build "
            "the model anew."
        )
    changes, saved = plan_lora(model, settings)
    put_changes(model, changes, settings, saved.values(), generator)
    return describe_lora(model, trained_whole(saved))


def put_changes(
    model: nn.Module,
    changes: Iterable[Change],
    settings: LoRASettings,
    saved: Iterable[nn.Module] = (),
    generator: torch.Generator | None = None,
) -> None:
    """Freeze a model but for some modules, and put changes beside its weights."""
    generator = generator_or_new(generator)
    freeze_base(model, saved)
    changed: dict[nn.Module, list[str]] = {}
    for change in changes:
        low_rank = _make_low_rank(change, settings, generator)
        for place, (_, owner, weight) in enumerate(change.places):
            if place == 0:
                owner.add_module(CHANGE + weight, low_rank)
            else:  # the state dict has it once
                vars(owner)[CHANGE + weight] = low_rank
            changed.setdefault(owner, []).append(weight)
    for module, weights in changed.items():
        extend(module, kind_for(module), tuple(weights))


def lora_report(model: nn.Module, settings: LoRASettings) -> InjectionReport | None:
    """Return what `add_lora` added to a model with these settings; None if the model has no LoRA.

    Raises:
        ValueError: If it was added with other settings.
    """
    present = {id(part): (part.rank, part.alpha, part.use_rslora, part.dropout.p) for part in parts_of(model, LowRank)}
    if not present:
        return None
    changes, saved = plan_lora(model, settings)
    planned = {
        id(getattr(owner, CHANGE + weight, None)): (
            change.rank,
            settings.alpha,
            settings.use_rslora,
            settings.dropout,
        )
        for change in changes
        for _, owner, weight in change.places
    }
    if planned != present:
        raise ValueError(
            f"{type(model).__name__} has LoRA already, with other layers, ranks, scales or dropout: merge(model) "
            "first, or build the model anew."
        )
    return describe_lora(model, trained_whole(saved))


def describe_lora(model: nn.Module, saved: Iterable[str]) -> InjectionReport:
    """Return what LoRA changes in a model.

    Args:
        model: A model with LoRA.
        saved: The names of the modules that are trained whole.
    """
    layers: dict[LowRank, tuple[str, nn.Module]] = {}
    further = []
    places = [
        (f"{strip_compile_prefix(name)}.{weight}".lstrip("."), module, change, CHANGE + weight in vars(module))
        for name, module in model.named_modules(remove_duplicate=False)
        for weight, change in changes_of(module).items()
    ]
    for label, module, change, _ in sorted(places, key=lambda place: place[-1]):  # where it is registered comes first
        if layers.setdefault(change, (label, module))[0] != label:
            further.append(label)
    ranks = sorted({change.rank for change in layers})
    what = f"Low-rank changes (rank {' to '.join(dict.fromkeys(map(str, ranks[:1] + ranks[-1:])))})"
    remark = f"The same weights, with the same change, are in {list_names(further)}." if further else ""
    return make_report(model, what, dict(layers.values()), parameters_of(layers), saved, remark)


def _make_low_rank(change: Change, settings: LoRASettings, generator: torch.Generator) -> LowRank:
    _, module, _ = change.places[0]
    low_rank = LowRank(
        change.weight,
        change.rank,
        settings.alpha,
        settings.dropout,
        use_rslora=settings.use_rslora,
        is_transposed=has_transposed_weight(module),
        is_lookup=isinstance(module, nn.Embedding | nn.EmbeddingBag),
        generator=generator,
    )
    return low_rank.train(module.training)
