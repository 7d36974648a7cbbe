"""Which weights of a model LoRA changes, and by which rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_tricks._shared.added_parameters import AddedParameters
from lightning_tricks._shared.checks import check_count, check_dropout, check_number
from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core.class_extension import class_below
from lightning_tricks.finetuning.core.injection import DEFAULT_MODULES_TO_SAVE, select_saved, without_excluded
from lightning_tricks.finetuning.core.lora_layers import is_transposed_linear
from lightning_tricks.finetuning.core.targets import (
    as_patterns,
    check_targets,
    matching,
    plain_names,
    select_modules,
    value_for,
)

_WEIGHT = re.compile(r"(^|_)weight(_|$)")
_QUANTIZED = re.compile(r"weight|^W_q$")  # also GPTQ's `qweight` and HQQ's `W_q`


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
        check_dropout("dropout", self.dropout)
        for name in ("target_modules", "exclude", "modules_to_save"):
            as_patterns(name, getattr(self, name))
        for pattern, rank in (self.rank_pattern or {}).items():
            Pattern(pattern)
            check_count(f"rank_pattern[{pattern!r}]", rank)


@dataclass(frozen=True)
class Change:
    """A weight that is to be changed, and all places where it is: names of modules, modules, names of the weight."""

    weight: Tensor = field(repr=False)
    rank: int
    places: list[tuple[str, nn.Module, str]]

    @property
    def largest_rank(self) -> int:
        """The largest rank that a change of the weight can have."""
        return min(self.weight.shape[0], self.weight.shape[1:].numel())


def plan_lora(model: nn.Module, settings: LoRASettings) -> tuple[list[Change], dict[str, nn.Module]]:
    """Return the weights to change, each once, and the modules to train whole, without changing anything."""
    modules = plain_names(model)
    saved = select_saved(settings.modules_to_save, modules)
    targets = _targets(settings, modules, saved)
    check_targets(model, targets, "LoRA")
    ranks = {Pattern(text): rank for text, rank in (settings.rank_pattern or {}).items()}
    select_modules("rank_pattern", list(ranks), targets, what="targets")
    places = {
        (name, weight): value_for(ranks, name, settings.rank)
        for name, module in targets.items()
        for weight in weights_of(module)
    }
    changes = changes_at({"": model, **modules}, places)
    misfits = [change for change in changes if change.rank > change.largest_rank]
    if misfits:
        others = [".".join(change.places[0][::2]) for change in misfits[1:]]
        more = f" So it does in {len(others)} more: {list_names(others)}." if others else ""
        raise ValueError(f"{_too_large(misfits[0])}{more}")
    return changes, saved


def changes_at(modules: Mapping[str, nn.Module], ranks: Mapping[tuple[str, str], int]) -> list[Change]:
    """Return the changes of some weights, each once, without changing anything.

    Args:
        modules: All modules by qualified name.
        ranks: Name of a module and of its weight -> the rank of the change.
    """
    owners = owners_of_parameters(modules)
    changes: dict[int, Change] = {}
    for (name, weight), rank in ranks.items():
        module = modules[name]
        registered = registered_tensor(module, weight)
        if id(registered) in changes:
            continue
        tensor = getattr(module, weight) if registered is None else registered
        places = [(name, module, weight)]
        places += [place for place in owners.get(id(registered), []) if place[1:] != (module, weight)]
        changes[id(tensor)] = Change(tensor, rank, places)
    return list(changes.values())


def _targets(
    settings: LoRASettings, modules: Mapping[str, nn.Module], saved: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    rest = without_excluded(settings.exclude, saved, modules)
    if settings.target_modules == "linear":
        refuse_other_weights({name: part for name, part in rest.items() if is_linear(part)})
        chosen = {
            name: part
            for name, part in rest.items()
            if (isinstance(part, nn.Linear | nn.MultiheadAttention) or is_transposed_linear(part)) and weights_of(part)
        }
        if not chosen:
            raise ValueError(f'target_modules="linear": none of the {len(rest)} modules is a linear layer.')
        return chosen
    patterns = as_patterns("target_modules", settings.target_modules)
    if not patterns:
        raise ValueError("target_modules must name at least one pattern, got none.")
    refuse_other_weights(matching(patterns, rest))
    chosen = select_modules(
        "target_modules", patterns, rest, lambda part: bool(weights_of(part)), "layers with a matrix"
    )
    inside = {f"{name}.out_proj" for name, part in chosen.items() if isinstance(part, nn.MultiheadAttention)}
    return {name: part for name, part in rest.items() if name in chosen or name in inside}


def refuse_other_weights(modules: Mapping[str, nn.Module]) -> None:
    """Refuse layers with quantized weights, or those of several members of an ensemble, among the chosen ones."""
    stacked = [name for name, part in modules.items() if hasattr(part, "n_members") and weights_of(part)]
    if stacked:
        raise ValueError(
            f"target_modules: {len(stacked)} layers hold the weights of all members of an ensemble, and cannot be "
            f"adapted: {list_names(stacked)}. Pass vectorize=False to the ensemble, or leave them out by exclude."
        )
    quantized = [name for name, part in modules.items() if is_quantized(part)]
    if quantized:
        raise ValueError(
            f"target_modules: the weights of {len(quantized)} layers are quantized, and cannot be adapted here: "
            f"{list_names(quantized)}. Use PeftAdapters, or leave them out by exclude."
        )


def is_linear(module: nn.Module) -> bool:
    """Whether a layer is a linear one, also in another form, as quantized ones are."""
    return isinstance(module, nn.Linear) or "linear" in class_below(module).__name__.lower()


def is_quantized(module: nn.Module) -> bool:
    """Whether a layer holds a weight in another form than a plain tensor of floating-point numbers."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    held = (tensor for name, tensor in own if _QUANTIZED.search(name) and not is_lazy(tensor) and tensor.ndim >= 2)
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


def owners_of_parameters(modules: Mapping[str, nn.Module]) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Return id of a parameter -> name of the module, module and name of the parameter, for each place where it is."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in modules.items():
        for own, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(registered_tensor(module, own)), []).append((name, module, own))
    return owners


def _too_large(change: Change) -> str:
    (name, _, weight), most = change.places[0], change.largest_rank
    return (
        f"rank={change.rank} exceeds the largest possible rank of {name}.{weight}, {most} (shape "
        f"{tuple(change.weight.shape)}): give a smaller rank, rank_pattern={{{name!r}: {most}}}, exclude={name!r}, or "
        f"modules_to_save={name!r} to train it whole."
    )
