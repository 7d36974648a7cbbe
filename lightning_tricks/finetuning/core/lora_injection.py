"""`add_lora` and `merge`: put low-rank changes beside the weights of a model, and fold them into the weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_tricks._shared.added_parameters import AddedParameters, added_modules
from lightning_tricks._shared.checks import check_count, check_number
from lightning_tricks._shared.patterns import Pattern, strip_compile_prefix
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core.class_extension import check_restorable, class_below, extend, restore
from lightning_tricks.finetuning.core.injection import (
    DEFAULT_MODULES_TO_SAVE,
    freeze_base,
    generator_or_new,
    select_saved,
    trained_whole,
    without_excluded,
)
from lightning_tricks.finetuning.core.lora_layers import CHANGE, LoRA, changes_of, kind_for, transposed_linear
from lightning_tricks.finetuning.core.low_rank import LowRank
from lightning_tricks.finetuning.core.targets import (
    as_patterns,
    plain_names,
    refuse_compiled,
    select_modules,
    value_for,
)

_WEIGHT = re.compile(r"(^|_)weight(_|$)")


@dataclass(frozen=True)
class LoRAReport:
    """What `add_lora` added.

    Attributes:
        layers: Qualified name of each weight that was changed -> the class of its layer, and its rank.
        shared: Further names of these weights: those of tied ones, and of layers that are used in several places.
        saved: The names of the modules that are trained whole.
        added: The number of values in the low-rank matrices.
        trainable: The number of values that are trained, with those of `saved`.
        total: The number of values of the model.
    """

    layers: dict[str, tuple[str, int]]
    shared: tuple[str, ...]
    saved: tuple[str, ...]
    added: int
    trainable: int
    total: int

    def __str__(self) -> str:
        kinds = Counter(kind for kind, _ in self.layers.values())
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        text = (
            f"weights of {counted} are changed by {self.added:,} values; "
            f"{self.trainable:,} of {self.total:,} values ({self.trainable / self.total:.2%}) are trained"
        )
        if self.saved:
            text += f", with all of {list_names(self.saved)}"
        if self.shared:
            text += f"; the same weights, with the same change, are in {list_names(self.shared)}"
        return f"{text}."


@dataclass(frozen=True)
class LoRASettings:
    """The arguments of `add_lora`, checked.

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
        if not 0 <= check_number("dropout", self.dropout) < 1:
            raise ValueError(f"dropout must be a number >= 0 and < 1, got {self.dropout!r}.")
        for name in ("target_modules", "exclude", "modules_to_save"):
            as_patterns(name, getattr(self, name))
        for pattern, rank in (self.rank_pattern or {}).items():
            Pattern(pattern)
            check_count(f"rank_pattern[{pattern!r}]", rank)


def add_lora(
    model: nn.Module, settings: LoRASettings | None = None, *, generator: torch.Generator | None = None
) -> LoRAReport:
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

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> print(add_lora(model, LoRASettings(rank=4, target_modules="0", modules_to_save="2")))
        weights of 1 Linear are changed by 512 values; 1,162 of 5,322 values (21.83%) are trained, with all of 2.
    """
    settings = settings or LoRASettings()
    if _low_ranks(model):
        raise ValueError(
            f"{type(model).__name__} has LoRA already, and a second one would reset it: merge(model) first, or build "
            "the model anew."
        )
    changes, saved = _plan(model, settings)
    generator = generator_or_new(generator)
    freeze_base(model, saved.values())
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
    return _report(model, changes, saved)


def lora_report(model: nn.Module, settings: LoRASettings) -> LoRAReport | None:
    """Return what `add_lora` added to a model with these settings; None if the model has no LoRA.

    Raises:
        ValueError: If it was added with other settings.
    """
    present = {id(part): (part.rank, part.alpha, part.use_rslora, part.dropout.p) for part in _low_ranks(model)}
    if not present:
        return None
    changes, saved = _plan(model, settings)
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
    return _report(model, changes, saved)


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Fold the low-rank changes of LoRA into the weights, in place: the model is a plain one again, with its old names.

    What is frozen stays frozen; `unfreeze_(model, "*")` unfreezes it.

    Args:
        model: A model with LoRA.

    Returns:
        The model.

    Raises:
        ValueError: If there is no LoRA, or a weight cannot be set: it is sharded, or a hook computes it. Nothing is
            changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> report = add_lora(model, LoRASettings(rank=4))
        >>> list(merge(model).state_dict())
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    layers: list[tuple[str, Any]] = [(name, part) for name, part in model.named_modules() if isinstance(part, LoRA)]
    if not layers:
        others = [name for name, _ in added_modules(model)]
        remark = f" What was added in {list_names(others)} cannot be folded into a weight." if others else ""
        raise ValueError(f"{type(model).__name__} has no LoRA to merge.{remark}")
    merged: dict[int, Tensor] = {}
    parametrized: list[tuple[nn.Module, str, Tensor]] = []
    for name, module in layers:
        check_restorable(module, LoRA)
        for weight in changes_of(module):
            registered = registered_tensor(module, weight)
            if registered is None:
                parametrized.append((module, weight, _merged_parametrization(name, module, weight)))
            elif id(registered) not in merged:
                merged[id(registered)] = _merged(name, module, weight)
    for _, module in layers:
        weights = changes_of(module)
        restore(module, LoRA)
        for weight in weights:
            delattr(module, CHANGE + weight)
            registered = registered_tensor(module, weight)
            if registered is not None:
                registered.copy_(merged[id(registered)])
    for module, weight, value in parametrized:
        setattr(module, weight, value)
    return model


@dataclass(frozen=True)
class _Change:
    """A weight that is to be changed, and all places where it is: names of modules, modules, names of the weight."""

    weight: Tensor = field(repr=False)
    rank: int
    places: list[tuple[str, nn.Module, str]]

    @property
    def label(self) -> str:
        return ".".join((self.places[0][0], self.places[0][2])).lstrip(".")


def _plan(model: nn.Module, settings: LoRASettings) -> tuple[list[_Change], dict[str, nn.Module]]:
    """Return the weights to change, each once, and the modules to train whole, without changing anything."""
    modules = plain_names(model)
    saved = select_saved(settings.modules_to_save, modules)
    targets = _targets(settings, modules, saved)
    refuse_compiled(model, targets, "LoRA")
    ranks = {Pattern(text): rank for text, rank in (settings.rank_pattern or {}).items()}
    select_modules("rank_pattern", list(ranks), targets, what="targets")
    owners = _owners_of_parameters(model)
    changes: dict[int, _Change] = {}
    for name, module in targets.items():
        for weight in weights_of(module):
            registered = registered_tensor(module, weight)
            if id(registered) in changes:
                continue
            tensor = getattr(module, weight) if registered is None else registered
            rank = value_for(ranks, name, settings.rank)
            _check_rank(rank, name, weight, tensor)
            places = [(name, module, weight)]
            places += [place for place in owners.get(id(registered), []) if place[1:] != (module, weight)]
            changes[id(tensor if registered is None else registered)] = _Change(tensor, rank, places)
    return list(changes.values()), saved


def _targets(
    settings: LoRASettings, modules: Mapping[str, nn.Module], saved: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    rest = without_excluded(settings.exclude, saved, modules)
    if settings.target_modules == "linear":
        linear = (nn.Linear, nn.MultiheadAttention, *filter(None, [transposed_linear()]))
        chosen = {name: part for name, part in rest.items() if isinstance(part, linear) and weights_of(part)}
        if not chosen:
            raise ValueError(f'target_modules="linear": none of the {len(rest)} modules is a linear layer.')
        return chosen
    patterns = as_patterns("target_modules", settings.target_modules)
    if not patterns:
        raise ValueError("target_modules must name at least one pattern, got none.")
    chosen = select_modules(
        "target_modules", patterns, rest, lambda part: bool(weights_of(part)), "layers with a matrix"
    )
    inside = {f"{name}.out_proj" for name, part in chosen.items() if isinstance(part, nn.MultiheadAttention)}
    return {name: part for name, part in rest.items() if name in chosen or name in inside}


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
        name for name, tensor in own.items() if tensor.ndim >= 2 and tensor.is_floating_point() and _WEIGHT.search(name)
    ]


def _owners_of_parameters(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in {"": model, **plain_names(model)}.items():
        for own, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(registered_tensor(module, own)), []).append((name, module, own))
    return owners


def _check_rank(rank: int, name: str, weight: str, tensor: Tensor) -> None:
    most = min(tensor.shape[0], tensor.shape[1:].numel())
    if rank > most:
        raise ValueError(
            f"rank={rank} exceeds the largest possible rank of {name}.{weight}, {most} (shape {tuple(tensor.shape)}): "
            f"give a smaller rank, rank_pattern={{{name!r}: {most}}}, exclude={name!r}, or modules_to_save={name!r} to "
            "train it whole."
        )


def _make_low_rank(change: _Change, settings: LoRASettings, generator: torch.Generator) -> LowRank:
    _, module, _ = change.places[0]
    conv1d = transposed_linear()
    is_lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    low_rank = LowRank(
        change.weight,
        change.rank,
        settings.alpha,
        settings.dropout,
        use_rslora=settings.use_rslora,
        is_transposed=is_lookup or (conv1d is not None and isinstance(module, conv1d)),
        is_lookup=is_lookup,
        generator=generator,
    )
    return low_rank.train(module.training)


def _report(model: nn.Module, changes: Sequence[_Change], saved: Mapping[str, nn.Module]) -> LoRAReport:
    parameters = list(model.parameters())
    return LoRAReport(
        {change.label: (_kind_of_layer(change.places[0][1]), change.rank) for change in changes},
        tuple(_further_names(model, changes)),
        trained_whole(saved),
        sum(parameter.numel() for part in _low_ranks(model) for parameter in part.parameters()),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(parameter.numel() for parameter in parameters),
    )


def _kind_of_layer(module: nn.Module) -> str:
    """Return the name of a layer's class, or of the public one of torch that it extends within torch."""
    classes = class_below(module).__mro__
    public = (cls for cls in classes if getattr(nn, cls.__name__, None) is cls)
    own = classes[0] if not classes[0].__module__.startswith("torch.nn") else next(public)
    return own.__name__


def _further_names(model: nn.Module, changes: Sequence[_Change]) -> Iterator[str]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(strip_compile_prefix(name))
    for change in changes:
        for _, module, weight in change.places:
            for name in names[module]:
                if (label := f"{name}.{weight}".lstrip(".")) != change.label:
                    yield label


def _low_ranks(model: nn.Module) -> list[LowRank]:
    return [part for part in model.modules() if isinstance(part, LowRank)]


def _merged(name: str, module: Any, weight: str) -> Tensor:
    """Return a weight with its change, computed in at least fp32."""
    base: Tensor = module.base_weight(weight)
    if type(base) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{name}.{weight} is a {type(base).__name__}, of which this process has a part: merge the "
            "whole model, loaded from a checkpoint."
        )
    dtype = torch.promote_types(base.dtype, torch.float32)
    change: LowRank = changes_of(module)[weight]
    return base.to(dtype) + change.change(base.shape, dtype)


def _merged_parametrization(name: str, module: Any, weight: str) -> Tensor:
    """Return a weight that is computed from other tensors, with its change, if these can take it."""
    value: Tensor = module.compute_weight(weight)
    try:
        module.parametrizations[weight].right_inverse(value)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{name}.{weight} is computed from other tensors, as by spectral_norm or pruning, and these cannot take "
            "the change: make it a plain weight first, with torch's function that removes what computes it."
        ) from error
    return value
